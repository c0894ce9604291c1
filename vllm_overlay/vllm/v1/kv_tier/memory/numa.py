# SPDX-License-Identifier: Apache-2.0
"""Places memory and threads on the NUMA node of a GPU."""

import ctypes
import os
import platform
from collections.abc import Set
from pathlib import Path

import torch

SYS = Path("/sys")
_NODES = "devices/system/node"

_MPOL_PREFERRED, _MPOL_INTERLEAVE = 1, 3
# glibc has no wrapper for mbind, and libnuma may be missing.
_MBIND = {"x86_64": 237, "aarch64": 235}.get(platform.machine())
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long


def gpu_node(device: torch.device, sys: Path = SYS) -> int | None:
    """NUMA node of a GPU; None if there is only one, or it is unknown.

    Args:
        device: The GPU.
        sys: Mount point of sysfs.

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
    """CPUs of `node` that this thread may run on; for None, all that it may run on."""
    allowed = os.sched_getaffinity(0)
    if node is None:
        return allowed
    ranges = (sys / _NODES / f"node{node}/cpulist").read_text().strip()
    cpus: set[int] = set()
    # For example 0-15,32-47. A node without CPUs has an empty list.
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return allowed & cpus


def prefer_node(address: int, num_bytes: int, node: int) -> bool:
    """Place the pages of untouched memory on `node` as long as it has free ones.

    Args:
        address: Start, at a page.
        num_bytes: Size.
        node: NUMA node.

    Returns:
        Whether the system allows it. Containers often do not.

    """
    return _bind(address, num_bytes, {node}, _MPOL_PREFERRED)


def spread(address: int, num_bytes: int, nodes: Set[int]) -> bool:
    """Interleave the pages of untouched memory over `nodes`.

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
        # The kernel uses one bit less than this number.
        ctypes.c_ulong(len(mask) * bits + 1),
        ctypes.c_ulong(0),
    )
    return refused == 0
