# SPDX-License-Identifier: Apache-2.0
"""Where a GPU is, read from sysfs files, and memory placed there."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm.v1.kv_tier.memory.numa import gpu_node, prefer_node, usable_cpus
from vllm.v1.kv_tier.memory.pages import anonymous, touch

GPU = torch.device("cuda", 3)
NODES = Path("/sys/devices/system/node")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /sys of two nodes; GPU 3 is at 0001:ab:0c.0, node 1."""
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xAB, pci_device_id=12)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {GPU: properties}.get)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2, 40)))
    write(tmp_path, "devices/system/node/node0/cpulist", "0-15,32-47\n")
    write(tmp_path, "devices/system/node/node1/cpulist", "16-31,48\n")
    write(tmp_path, "devices/system/node/online", "0-1\n")
    write(tmp_path, "bus/pci/devices/0001:ab:0c.0/numa_node", "1\n")
    return tmp_path


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_gpu_has_a_node(machine: Path) -> None:
    assert gpu_node(GPU, machine) == 1


def test_a_node_that_is_unknown_or_the_only_one_does_not_count(machine: Path) -> None:
    numa_node = machine / "bus/pci/devices/0001:ab:0c.0/numa_node"
    for text in ("-1\n", "2\n"):
        numa_node.write_text(text)
        assert gpu_node(GPU, machine) is None
    numa_node.unlink()
    assert gpu_node(GPU, machine) is None
    numa_node.write_text("0\n")
    assert gpu_node(GPU, machine) == 0
    (machine / "devices/system/node/node1").rename(machine / "gone")
    assert gpu_node(GPU, machine) is None


def test_cpus_of_a_node_that_may_be_used(machine: Path) -> None:
    assert usable_cpus(0, machine) == {*range(2, 16), *range(32, 40)}
    assert usable_cpus(1, machine) == set(range(16, 32))
    assert usable_cpus(None, machine) == set(range(2, 40))


def test_a_node_of_memory_only_has_no_cpus(machine: Path) -> None:
    write(machine, "devices/system/node/node1/cpulist", "\n")
    assert usable_cpus(1, machine) == set()


@pytest.mark.skipif(not NODES.exists(), reason="a kernel without NUMA")
def test_memory_is_preferred_from_a_node() -> None:
    node = min(int(path.name[4:]) for path in NODES.glob("node[0-9]*"))
    memory = anonymous(8 << 20)
    if not prefer_node(memory.data_ptr(), memory.numel(), node):
        pytest.skip("mbind is forbidden here")
    touch(memory.data_ptr(), memory.numel())
    line = next(
        line
        for line in Path("/proc/self/numa_maps").read_text().splitlines()
        if int(line.split()[0], 16) == memory.data_ptr()
    )
    assert line.split()[1] == f"prefer:{node}"
    assert f" N{node}=" in line


@pytest.mark.skipif(not NODES.exists(), reason="a kernel without NUMA")
def test_a_node_that_cannot_be_had_is_no_error() -> None:
    memory = anonymous(8 << 20)
    assert not prefer_node(memory.data_ptr(), memory.numel(), 1023)
