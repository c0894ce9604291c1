# SPDX-License-Identifier: Apache-2.0
"""How much host memory this machine or container has and can give."""

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


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
