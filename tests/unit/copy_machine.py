# SPDX-License-Identifier: Apache-2.0
"""Device and host memory for copy engines, and what stands for a driver where there is
none.
"""

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import torch

from vllm.v1.kv_tier.copying.engine import (
    CopyEngine,
    Transfer,
    slot_bytes,
    slot_offsets,
)
from vllm.v1.kv_tier.memory.regions import Region

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NUM_BLOCKS, NUM_SLOTS = 12, 9
# (bytes, stride, offset): aligned to 16, 8, 4 and 1, neighbours alike, one with a
# tail that fills no chunk of the kernel, and more than two of a kind.
Rows = list[tuple[int, int, int]]
ROWS: Rows = [(4096, 4096, 0), (4096, 4096, 0), (72, 72, 0), (100, 112, 4), (33, 33, 1)]
ROWS += [(20016, 20032, 16), *3 * [(48, 64, 16)]]
# As limit of the pitch: too little for the last three as rows, enough as layers.
SMALL_PITCH = 64


class Operand(ctypes.Structure):
    """`CUmemcpy3DOperand` of cuda.h, where it is an address."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("ptr", ctypes.c_uint64),
        ("row_length", ctypes.c_size_t),
        ("layer_height", ctypes.c_size_t),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
    ]


class Operation(ctypes.Structure):
    """`CUDA_MEMCPY3D_BATCH_OP` of cuda.h."""

    _fields_ = [
        ("src", Operand),
        ("dst", Operand),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
        ("src_access_order", ctypes.c_int),
        ("flags", ctypes.c_uint),
    ]


class Memmove:
    """Copies at once what the driver would queue."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.max_depth = 0

    def copy_batch(
        self, dst: int, src: int, sizes: int, count: int, stream: int
    ) -> None:
        self.counts.append(count)
        of = ctypes.c_uint64 * count
        arrays = (of.from_address(address) for address in (dst, src, sizes))
        for to, from_, size in zip(*arrays):
            ctypes.memmove(to, from_, size)

    def copy_strided_batch(self, operations: int, count: int, stream: int) -> None:
        self.counts.append(count)
        for op in (Operation * count).from_address(operations):
            # What the driver would refuse, or read as something else.
            assert (op.src.type, op.dst.type, op.src_access_order) == (1, 1, 1)
            assert op.flags == 0
            assert op.width and op.height and op.depth
            for operand in (op.src, op.dst):
                assert op.width <= operand.row_length < 1 << 31
                assert op.height <= operand.layer_height
                assert (operand.location_type, operand.location_id) == (0, 0)
            self.max_depth = max(self.max_depth, op.depth)
            for layer, row in itertools.product(range(op.depth), range(op.height)):
                to, from_ = (
                    side.ptr + (layer * side.layer_height + row) * side.row_length
                    for side in (op.dst, op.src)
                )
                ctypes.memmove(to, from_, op.width)


def make_regions(
    device: torch.device, rows: Rows, num_blocks: int = NUM_BLOCKS
) -> list[Region]:
    """One after the other in one allocation, each from a cache line on."""
    ends = [offset + stride * num_blocks for _, stride, offset in rows]
    sizes = [-(-end // 64) * 64 for end in ends]
    memory = torch.randint(0, 256, (sum(sizes),), dtype=torch.uint8, device=device)
    return [
        Region(
            memory.as_strided((num_blocks, width), (stride, 1), sum(sizes[:i]) + offset)
        )
        for i, (width, stride, offset) in enumerate(rows)
    ]


class Machine:
    """Device and host memory, and an engine between them."""

    def __init__(
        self, device: torch.device, make: Callable[..., CopyEngine], rows: Rows = ROWS
    ) -> None:
        torch.manual_seed(0)
        self.regions = make_regions(device, rows)
        shape = NUM_SLOTS, slot_bytes(self.regions)
        self.slots = torch.randint(0, 256, shape, dtype=torch.uint8)
        if device.type == "cuda":
            self.slots = self.slots.pin_memory()
        self.make = make
        self.engine = make(self.regions, self.slots)

    def snapshot(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Every byte there is, also between the rows and around them."""
        blocks = self.regions[0].blocks
        memory = blocks.new_empty(0).set_(blocks.untyped_storage())
        return memory.cpu().clone(), self.slots.clone()

    def piece(self, region: int, block: int) -> tuple[slice, slice]:
        """Where it lies in the memory of `snapshot`, and where in a slot."""
        blocks = self.regions[region].blocks
        at = blocks.storage_offset() + block * blocks.stride(0)
        start = slot_offsets(self.regions)[region]
        width = blocks.shape[1]
        return slice(at, at + width), slice(start, start + width)

    def copy(self, transfer: Transfer, parts: list[range]) -> None:
        for part in parts:
            transfer.copy(part)


def assert_equal(found: Any, wanted: Any) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
