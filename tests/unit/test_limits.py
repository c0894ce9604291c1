# SPDX-License-Identifier: Apache-2.0
"""What a machine or container can give, read from cgroup files."""

from pathlib import Path

import psutil
import pytest

from vllm.v1.kv_tier.memory.limits import available_host_bytes, total_host_bytes

GiB = 1 << 30

V2_STAT = f"anon 5\nactive_file {1 * GiB}\ninactive_file {2 * GiB}\nslab 3\n"


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cgroup folder on a machine with 64 GiB, 32 of them available."""

    class Memory:
        total, available = 64 * GiB, 32 * GiB

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def in_gib(cgroup: Path) -> tuple[float, float]:
    total, available = total_host_bytes(cgroup), available_host_bytes(cgroup)
    return total / GiB, available / GiB


def test_the_machine_counts_without_a_cgroup(cgroup: Path) -> None:
    assert in_gib(cgroup) == (64, 32)


def test_the_machine_counts_in_an_unlimited_cgroup(cgroup: Path) -> None:
    write(cgroup, memory__max="max\n", memory__current=f"{5 * GiB}\n")
    assert in_gib(cgroup) == (64, 32)


def test_a_limit_and_what_is_in_use_count(cgroup: Path) -> None:
    write(
        cgroup,
        memory__max=f"{20 * GiB}\n",
        memory__current=f"{9 * GiB}\n",
        memory__stat=V2_STAT,
    )
    # 9 GiB in use, 3 of them page cache that gives way.
    assert in_gib(cgroup) == (20, 14)


def test_the_smaller_of_machine_and_cgroup_counts(cgroup: Path) -> None:
    write(cgroup, memory__max=f"{100 * GiB}\n", memory__current=f"{9 * GiB}\n")
    assert in_gib(cgroup) == (64, 32)


def test_more_cache_than_use_is_no_gain(cgroup: Path) -> None:
    write(
        cgroup,
        memory__max=f"{20 * GiB}\n",
        memory__current=f"{1 * GiB}\n",
        memory__stat=V2_STAT,
    )
    assert in_gib(cgroup) == (20, 20)


def test_version_1_of_cgroups(cgroup: Path) -> None:
    write(
        cgroup / "memory",
        memory__limit_in_bytes=f"{20 * GiB}\n",
        memory__usage_in_bytes=f"{9 * GiB}\n",
        memory__stat=V2_STAT,
    )
    assert in_gib(cgroup) == (20, 14)


def test_no_limit_in_version_1_is_a_huge_number(cgroup: Path) -> None:
    write(cgroup / "memory", memory__limit_in_bytes="9223372036854771712\n")
    assert in_gib(cgroup) == (64, 32)
