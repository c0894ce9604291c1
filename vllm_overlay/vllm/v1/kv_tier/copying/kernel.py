# SPDX-License-Identifier: Apache-2.0
"""Copies by a Triton kernel that reads and writes pinned host memory.

One launch copies any number of pieces, near the rate of the bus from 8 KiB on, but it
takes multiprocessors from compute while it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.triton_utils import HAS_TRITON, tl, triton
from vllm.v1.kv_tier.copying.cuda_driver import CudaDriver
from vllm.v1.kv_tier.copying.engine import (
    CopyEngine,
    CopyEngineUnavailable,
    Transfer,
    address_table,
)
from vllm.v1.kv_tier.memory.regions import Region

# Bytes that a program copies at a time; each thread makes 16-byte accesses.
_MAX_CHUNK = 16 << 10
# Bytes in flight: twice the rate of the bus times its latency. More programs take
# multiprocessors from compute and gain nothing (H200).
_IN_FLIGHT = 256 << 10
_MIN_PROGRAMS, _MAX_PROGRAMS = 8, 32
_MAX_WARPS = 8


# No number is specialized: a load of another length must not trigger a compilation.
@triton.jit(do_not_specialize=["first_region", "num_regions", "num_pairs"])
def _copy_rows(
    table,  # [regions, 5], int64, from `address_table`
    pairs,  # [2, num_pairs], int64
    first_region,
    num_regions,
    num_pairs,
    WORD: tl.constexpr,  # type of the elements that are copied
    WORDS: tl.constexpr,  # elements of a block
    CHUNK: tl.constexpr,  # elements at a time
    ALIGN: tl.constexpr,  # bytes
    TO_DEVICE: tl.constexpr,
):
    chunks: tl.constexpr = (WORDS + CHUNK - 1) // CHUNK
    for item in range(
        tl.program_id(0), num_regions * num_pairs * chunks, tl.num_programs(0)
    ):
        piece = item // chunks
        pair = piece % num_pairs
        row = table + (first_region + piece // num_pairs) * 5
        block = tl.load(pairs + pair)
        slot = tl.load(pairs + num_pairs + pair)
        on_device = tl.load(row) + block * tl.load(row + 1)
        on_host = tl.load(row + 2) + slot * tl.load(row + 3)
        device = tl.multiple_of(on_device.to(tl.pointer_type(WORD)), ALIGN)
        host = tl.multiple_of(on_host.to(tl.pointer_type(WORD)), ALIGN)
        at = (item % chunks) * CHUNK + tl.arange(0, CHUNK)
        mask = at < WORDS
        if TO_DEVICE:
            tl.store(device + at, tl.load(host + at, mask=mask), mask=mask)
        else:
            tl.store(host + at, tl.load(device + at, mask=mask), mask=mask)


@dataclass(frozen=True)
class Shape:
    """How the pieces of a region are copied."""

    block_bytes: int
    align: int
    """Largest power of two, at most 16, that divides all addresses and sizes."""
    in_flight: int = _IN_FLIGHT
    """Bytes in flight."""

    @property
    def word_bytes(self) -> int:
        return min(self.align, 8)

    @property
    def chunk_bytes(self) -> int:
        words = self.block_bytes // self.word_bytes
        return min(_MAX_CHUNK, self.word_bytes << (words - 1).bit_length())

    @property
    def programs(self) -> int:
        return min(
            max(self.in_flight // self.chunk_bytes, _MIN_PROGRAMS), _MAX_PROGRAMS
        )

    @cached_property
    def constants(self) -> dict[str, Any]:
        words = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
        warps = self.chunk_bytes // (32 * 16)
        return {
            "WORD": words[self.word_bytes],
            "WORDS": self.block_bytes // self.word_bytes,
            "CHUNK": self.chunk_bytes // self.word_bytes,
            "ALIGN": self.align,
            "num_warps": min(max(warps, 1), _MAX_WARPS),
        }


class KernelCopyEngine(CopyEngine):
    """Copies neighbouring regions of equal width with one kernel launch.

    Args:
        regions: Device memory; at least one.
        slots: Pinned host memory.

    Raises:
        CopyEngineUnavailable: Triton is missing, or the device cannot address the
            memory of the slots.

    """

    def __init__(self, regions: Sequence[Region], slots: torch.Tensor) -> None:
        super().__init__(regions, slots)
        device = regions[0].blocks.device
        if not HAS_TRITON:
            raise CopyEngineUnavailable("Triton is not installed. Install it.")
        if device.type == "cuda":
            _check_addressable(slots, device)
        table = address_table(regions, slots)
        self._table = torch.from_numpy(table).to(device)
        aligns = np.gcd(np.gcd.reduce(table, axis=1), 16).tolist()
        self._shapes = [
            Shape(region.block_bytes, align)
            for region, align in zip(regions, aligns, strict=True)
        ]

    def transfer(self, pairs: NDArray[np.int64], to_device: bool) -> Transfer:
        device = self._table.device
        # Torch does not reuse pinned memory before the copy from it has run.
        staged = torch.from_numpy(pairs)
        if device.type == "cuda":
            staged = staged.pin_memory()
        on_device = staged.to(device, non_blocking=True)
        return _KernelTransfer(self._shapes, self._table, on_device, to_device)


def _check_addressable(slots: torch.Tensor, device: torch.device) -> None:
    if torch.version.hip:
        raise CopyEngineUnavailable("The kernel has not been tested on ROCm.")
    driver = CudaDriver(device)
    try:
        same = all(
            driver.device_address(address) == address
            for address in (slots.data_ptr(), slots.data_ptr() + slots.numel() - 1)
        )
    except RuntimeError as e:
        raise CopyEngineUnavailable(f"The device cannot read host memory: {e}") from e
    if not same:
        raise CopyEngineUnavailable("The device maps host memory to other addresses.")


class _KernelTransfer(Transfer):
    def __init__(
        self,
        shapes: list[Shape],
        table: torch.Tensor,
        pairs: torch.Tensor,
        to_device: bool,
    ) -> None:
        self._shapes = shapes
        self._table = table
        self._pairs = pairs
        self._to_device = to_device

    def copy(self, regions: range) -> None:
        num_pairs = self._pairs.shape[1]
        if not num_pairs:
            return
        start = regions.start
        while start < regions.stop:
            shape = self._shapes[start]
            end = start + 1
            while end < regions.stop and self._shapes[end] == shape:
                end += 1
            _copy_rows[(shape.programs,)](
                self._table,
                self._pairs,
                start,
                end - start,
                num_pairs,
                TO_DEVICE=self._to_device,
                **shape.constants,
            )
            start = end
