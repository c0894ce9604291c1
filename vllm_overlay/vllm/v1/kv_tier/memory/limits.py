# SPDX-License-Identifier: Apache-2.0
"""How much host memory this machine or container has and can give."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_GiB = 1 << 30

KEPT_FREE = 1 / 50
"""Part of a memory that engines which give memory back leave free for others: of the
machine's, or of a GPU's."""


@dataclass(frozen=True)
class HostMemory:
    """Memory of the machine or container that a process runs on, in bytes."""

    name: str
    boot: str
    """Tells apart machines of the same name."""
    total: int
    available: int


def host_memory() -> HostMemory:
    """That of this process."""
    boot = _read(_BOOT.parent, _BOOT.name)
    return HostMemory(platform.node(), boot, total_host_bytes(), available_host_bytes())


def check_fits(
    size_bytes: int, needed: int, available: int, total: int, who: str = ""
) -> None:
    """Refuse a size that a machine cannot give now.

    Args:
        size_bytes: As set.
        needed: What is to be taken from this machine, in bytes.
        available: What it can give.
        total: What it has.
        who: Begins a sentence about who takes `needed`, where that is not the size.

    Raises:
        ValueError: It does not fit.

    """
    if needed <= available:
        return
    raise ValueError(
        f"--kv-offloading-size {size_bytes / _GiB:g} does not fit: {who}"
        f"{available / _GiB:.1f} GiB of host memory are available "
        f"(of {total / _GiB:.1f} GiB). Lower it, free memory, or set "
        '--kv-offloading-config \'{"debug": {"check_memory": false}}\' where memory '
        "grows on demand."
    )


def check_hosts(size_bytes: int, ranks: Sequence[tuple[HostMemory, int]]) -> None:
    """Refuse a size of which some machine cannot give what its ranks take.

    Args:
        size_bytes: As set, for all ranks together.
        ranks: Memory where each rank runs, and what it takes of that, in bytes.

    Raises:
        ValueError: Less is available. The message names the machine if there are
            several.

    """
    hosts: dict[tuple[str, str], list[tuple[HostMemory, int]]] = {}
    for memory, needed in ranks:
        hosts.setdefault((memory.name, memory.boot), []).append((memory, needed))
    for (name, _), here in hosts.items():
        needed = sum(num_bytes for _, num_bytes in here)
        who = ""
        if len(hosts) > 1:
            who = (
                f"{len(here)} of the {len(ranks)} ranks run on {name} and take "
                f"{needed / _GiB:g} GiB of it there, but "
            )
        available = min(memory.available for memory, _ in here)
        check_fits(size_bytes, needed, available, here[0][0].total, who)


def total_host_bytes(cgroup: Path = CGROUP) -> int:
    """Memory of this machine or container, in bytes."""
    total = psutil.virtual_memory().total
    limit = _cgroup_limit(cgroup)
    return total if limit is None else min(total, limit)


def available_host_bytes(cgroup: Path = CGROUP) -> int:
    """Memory that can be taken now without swapping, in bytes."""
    available = psutil.virtual_memory().available
    limit = _cgroup_limit(cgroup)
    return (
        available if limit is None else min(available, limit - _cgroup_in_use(cgroup))
    )


def _cgroup_limit(cgroup: Path) -> int | None:
    text = _read(cgroup, "memory.max", "memory/memory.limit_in_bytes")
    return int(text) if text.isdigit() else None


def _cgroup_in_use(cgroup: Path) -> int:
    in_use = int(_read(cgroup, "memory.current", "memory/memory.usage_in_bytes") or 0)
    # Page cache counts as use, but gives way to an allocation.
    stat = dict(
        line.split()
        for line in _read(cgroup, "memory.stat", "memory/memory.stat").splitlines()
    )
    cache = sum(int(stat.get(name, 0)) for name in ("active_file", "inactive_file"))
    return max(0, in_use - cache)


def _read(cgroup: Path, *names: str) -> str:
    """Text of the first of these cgroup files that exists (v2, then v1)."""
    for name in names:
        try:
            return (cgroup / name).read_text().strip()
        except OSError:
            continue
    return ""
