# SPDX-License-Identifier: Apache-2.0
"""How much host memory this machine or container has and has available."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_GiB = 1 << 30

KEPT_FREE = 1 / 50
"""Part of the memory that an engine with `shrink_after_s` leaves free for others: of
the machine's, or of a GPU's."""


@dataclass(frozen=True)
class HostMemory:
    """Memory of a process's machine or container, in bytes."""

    name: str
    boot: str
    """Boot id, which distinguishes machines of the same name."""
    total: int
    available: int


def host_memory() -> HostMemory:
    """Memory of this process's machine or container."""
    boot = _read(_BOOT.parent, _BOOT.name)
    return HostMemory(platform.node(), boot, total_host_bytes(), available_host_bytes())


def check_fits(
    size_bytes: int, needed: int, available: int, total: int, who: str = ""
) -> None:
    """Refuse a size that the machine cannot provide now.

    Args:
        size_bytes: The configured size.
        needed: Bytes to take from this machine.
        available: Bytes that the machine has available.
        total: Bytes that it has in all.
        who: Start of a sentence on who takes `needed`, where that is not the whole
            size.

    Raises:
        ValueError: `needed` is more than `available`.

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
    """Refuse a size if any machine cannot provide the share of its ranks.

    Args:
        size_bytes: The configured size, for all ranks together.
        ranks: For each rank, the memory of its machine, and the bytes it takes.

    Raises:
        ValueError: A machine has less available. With several machines, the message
            names it.

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
    """Memory that can be allocated now without swapping, in bytes."""
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
    # Page cache counts as used, but is dropped for an allocation.
    stat = dict(
        line.split()
        for line in _read(cgroup, "memory.stat", "memory/memory.stat").splitlines()
    )
    cache = sum(int(stat.get(name, 0)) for name in ("active_file", "inactive_file"))
    return max(0, in_use - cache)


def _read(cgroup: Path, *names: str) -> str:
    """Text of the first of these files that exists (cgroup v2, then v1)."""
    for name in names:
        try:
            return (cgroup / name).read_text().strip()
        except OSError:
            continue
    return ""
