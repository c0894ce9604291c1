# SPDX-License-Identifier: Apache-2.0
"""Memory and CPUs near a GPU."""

import ctypes
import os
import platform
from collections.abc import Set
from pathlib import Path

import torch

SYS = Path("/sys")
_NODES = "devices/system/node"

_MPOL_PREFERRED, _MPOL_INTERLEAVE = 1, 3
# glibc has no function for it, and libnuma is not everywhere.
_MBIND = {"x86_64": 237, "aarch64": 235}.get(platform.machine())
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long


def gpu_node(device: torch.device, sys: Path = SYS) -> int | None:
    """NUMA node of a GPU. None: there is only one, or the machine does not say.

    Args:
        device: The GPU.
        sys: Where the kernel tells of the machine.

    """
    nodes = {path.name for path in (sys / _NODES).glob("node[0-9]*")}
    if len(nodes) < 2:
        return None
    gpu = torch.cuda.get_device_properties(device)
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    try:
        node = int((sys / f"bus/pci/devices/{address}/numa_node").read_text())
    except OSError:
        return None
    return node if f"node{node}" in nodes else None


def usable_cpus(node: int | None, sys: Path = SYS) -> set[int]:
    """CPUs of `node` that this thread may run on, or all it may run on for None."""
    allowed = os.sched_getaffinity(0)
    if node is None:
        return allowed
    ranges = (sys / _NODES / f"node{node}/cpulist").read_text().strip()
    cpus: set[int] = set()
    # As in 0-15,32-47; a node without CPUs has an empty list.
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return allowed & cpus


def prefer_node(address: int, num_bytes: int, node: int) -> bool:
    """Take the pages of untouched memory from `node` as long as it has some.

    Args:
        address: Start, at a page.
        num_bytes: Size.
        node: NUMA node.

    Returns:
        Whether the system allows it; containers often do not.

    """
    return _bind(address, num_bytes, {node}, _MPOL_PREFERRED)


def spread(address: int, num_bytes: int, nodes: Set[int]) -> bool:
    """Take the pages of untouched memory from `nodes` in turns.

    Args:
        address: Start, at a page.
        num_bytes: Size.
        nodes: NUMA nodes; at least one.

    Returns:
        Whether the system allows it.

    """
    return _bind(address, num_bytes, nodes, _MPOL_INTERLEAVE)


def _bind(address: int, num_bytes: int, nodes: Set[int], policy: int) -> bool:
    if _MBIND is None:
        return False
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (max(nodes) // bits + 1))()
    for node in nodes:
        mask[node // bits] |= 1 << node % bits
    refused = _syscall(
        ctypes.c_long(_MBIND),
        ctypes.c_void_p(address),
        ctypes.c_ulong(num_bytes),
        ctypes.c_long(policy),
        mask,
        # The kernel counts one less than it is told.
        ctypes.c_ulong(len(mask) * bits + 1),
        ctypes.c_ulong(0),
    )
    return refused == 0
