# SPDX-License-Identifier: Apache-2.0
"""What a machine or container can give, read from cgroup files."""

from pathlib import Path

import psutil
import pytest

from vllm.v1.kv_tier.memory.limits import (
    HostMemory,
    available_host_bytes,
    check_hosts,
    host_memory,
    total_host_bytes,
)

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


# ------------------------------------------------------------- ranks and machines


def on(name: str, gib: float, available: float = 10, boot: str = "") -> tuple:
    """A rank that takes some GiB of the memory of a machine with 16."""
    memory = HostMemory(name, boot, 16 * GiB, int(available * GiB))
    return memory, int(gib * GiB)


def test_a_rank_tells_of_the_machine_it_is_on(cgroup: Path) -> None:
    here = host_memory()
    assert (here.total, here.available) == (64 * GiB, 32 * GiB)
    assert here.name and here == host_memory()


@pytest.mark.compat("refused at start", "a size that the machine does not have")
def test_ranks_of_one_machine_count_together() -> None:
    check_hosts(10 * GiB, [on("a", 5), on("a", 5)])
    with pytest.raises(ValueError) as error:
        check_hosts(11 * GiB, [on("a", 5), on("a", 6)])
    assert str(error.value).startswith(
        "--kv-offloading-size 11 does not fit: 10.0 GiB of host memory are available "
        "(of 16.0 GiB). Lower it, free memory, or set --kv-offloading-config"
    )


@pytest.mark.compat("refused at start", "a size that one of several machines lacks")
def test_ranks_of_several_machines() -> None:
    # More than any of them has, and yet it fits.
    check_hosts(18 * GiB, [on("a", 5), on("a", 4), on("b", 9)])
    with pytest.raises(ValueError) as error:
        check_hosts(18 * GiB, [on("a", 9), on("b", 5, 8), on("b", 4, 8)])
    assert (
        "--kv-offloading-size 18 does not fit: 2 of the 3 ranks run on b and take "
        "9 GiB of it there, but 8.0 GiB of host memory are available"
    ) in str(error.value)


def test_machines_of_the_same_name_are_told_apart() -> None:
    check_hosts(18 * GiB, [on("node", 9, boot="x"), on("node", 9, boot="y")])
    with pytest.raises(ValueError, match="does not fit"):
        check_hosts(18 * GiB, [on("node", 9, boot="x"), on("node", 9, boot="x")])
