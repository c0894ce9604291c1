# SPDX-License-Identifier: Apache-2.0
"""Copies by the DMA engines of a CUDA device, many in one call of the driver.

They take nothing from compute, but CPU and device some time each (H200): a piece 0.45
and 0.55 us, a block of many regions in one strided copy 2 to 3 and 3 to 5 us. So pieces
reach the rate of the bus from about 32 KiB on, and blocks from about 256 KiB on.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.v1.kv_tier.copy_engine import (
    CopyEngine,
    CopyEngineUnavailable,
    Transfer,
    address_table,
)
from vllm.v1.kv_tier.cuda_driver import (
    ACCESS_ORDER_STREAM,
    OPERAND_IS_ADDRESS,
    STRIDED_COPY,
    CudaDriver,
)
from vllm.v1.kv_tier.regions import Region

# A call holds the driver's lock: whoever launches a kernel meanwhile waits for it.
# With 512 copies a call, launches took 0.4 ms instead of 7 us (H200).
_MAX_BATCH = 64
# These take the driver longer each.
_MAX_STRIDED_BATCH = 32

# CU_DEVICE_ATTRIBUTE_MAX_PITCH, the same on all devices: how far apart the rows of a
# copy may lie. The driver takes more, but splits such operations: 17 GB/s instead of
# 42 for ten times the CPU (H200). Layers may lie further apart at no cost.
_MAX_PITCH = (1 << 31) - 1


class BatchCopier(Protocol):
    """The part of `CudaDriver` that `DmaCopyEngine` uses."""

    def copy_batch(
        self, dst: int, src: int, sizes: int, count: int, stream: int
    ) -> None: ...


class StridedCopier(Protocol):
    """The part of `CudaDriver` that `BlockDmaCopyEngine` uses."""

    def copy_strided_batch(self, operations: int, count: int, stream: int) -> None: ...


def make_descriptors(
    table: NDArray[np.int64], pairs: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """What to copy, region by region.

    Args:
        table: Of `address_table`.
        pairs: `[2, n]`: blocks, then slots.

    Returns:
        Device addresses, host addresses and sizes in bytes, each of them
        `[num_regions, n]` and contiguous.

    """
    blocks, slots = pairs
    block_0, block_stride, slot_0, slot_stride, size = table.T[:, :, None]
    device = (block_0 + block_stride * blocks).astype(np.uint64)
    host = (slot_0 + slot_stride * slots).astype(np.uint64)
    sizes = np.ascontiguousarray(np.broadcast_to(size, device.shape), dtype=np.uint64)
    return device, host, sizes


class DmaCopyEngine(CopyEngine):
    """One `cuMemcpyBatchAsync` for every 64 pieces.

    Copies cannot be queued on the default stream.

    Args:
        regions: Device memory; one at least.
        slots: Pinned host memory.
        driver: What copies; None for the driver of this machine.

    Raises:
        CopyEngineUnavailable: The driver cannot do it.

    """

    def __init__(
        self,
        regions: Sequence[Region],
        slots: torch.Tensor,
        driver: BatchCopier | None = None,
    ) -> None:
        super().__init__(regions, slots)
        self._device = regions[0].blocks.device
        self._driver = driver or _batch_driver(self._device)
        self._table = address_table(regions, slots)

    def launch_s(self, num_pieces: int) -> float:
        return 0.5e-6 * num_pieces

    def transfer(self, pairs: NDArray[np.int64], to_device: bool) -> Transfer:
        device, host, sizes = make_descriptors(self._table, pairs)
        dst, src = (device, host) if to_device else (host, device)
        return _DmaTransfer(self._driver, dst, src, sizes, self._device)


def _batch_driver(device: torch.device) -> CudaDriver:
    driver = _driver(device)
    if not driver.has_batches():
        raise _too_old("cuMemcpyBatchAsync")
    return driver


def _driver(device: torch.device) -> CudaDriver:
    if torch.version.hip:
        raise CopyEngineUnavailable("Batched copies are for CUDA, and this is ROCm.")
    return CudaDriver(device)


def _too_old(function: str) -> CopyEngineUnavailable:
    return CopyEngineUnavailable(
        f"The driver has no {function}. Update it to 570 (CUDA 12.8) or later."
    )


def _current_stream(device: torch.device) -> int:
    """Handle of a stream. Tests have regions on a CPU, which has none."""
    if device.type != "cuda":
        return 0
    return torch.cuda.current_stream(device).cuda_stream


class _DmaTransfer(Transfer):
    def __init__(
        self,
        driver: BatchCopier,
        dst: NDArray[np.uint64],
        src: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
        device: torch.device,
    ) -> None:
        self._driver = driver
        # Held, since only their addresses are used.
        self._arrays = dst, src, sizes
        self._device = device

    def copy(self, regions: range) -> None:
        dst, src, sizes = self._arrays
        stream = _current_stream(self._device)
        pairs, item = dst.shape[1], dst.itemsize
        end = pairs * regions.stop
        for start in range(pairs * regions.start, end, _MAX_BATCH):
            self._driver.copy_batch(
                dst.ctypes.data + item * start,
                src.ctypes.data + item * start,
                sizes.ctypes.data + item * start,
                min(_MAX_BATCH, end - start),
                stream,
            )


def find_runs(regions: Sequence[Region], table: NDArray[np.int64]) -> list[range]:
    """Regions whose pieces of a block are rows or layers of one strided copy.

    Args:
        regions: Device memory.
        table: Of `address_table`.

    Returns:
        Ranges of indices that together are all regions, in their order. Regions of a
        range have the same storage, width and strides, and one distance from each to
        the next on the device, and one in host memory. Above `_MAX_PITCH`, that on the
        device is a multiple of the one from block to block.

    """
    distances = [_distance(regions, table, i) for i in range(len(regions) - 1)]
    runs, start = [], 0
    for i, distance in enumerate(distances):
        # The first two regions of a run say what its distance is.
        if distance is None or distance != distances[start]:
            runs.append(range(start, i + 1))
            start = i + 1
    return [*runs, range(start, len(regions))]


def _distance(
    regions: Sequence[Region], table: NDArray[np.int64], i: int
) -> tuple[int, int] | None:
    """Bytes from region `i` to the next: device, host. None if no copy has both."""
    a, b = (region.blocks.untyped_storage().data_ptr() for region in regions[i : i + 2])
    device, block_stride, host, slot_stride, size = np.diff(table[i : i + 2].T).T[0]
    alike = a == b and not (block_stride or slot_stride or size)
    stride, width = int(table[i, 1]), regions[i].block_bytes
    if alike and _has_operation(int(device), stride, width):
        return int(device), int(host)
    return None


def _has_operation(distance: int, block_stride: int, block_bytes: int) -> bool:
    """Whether pieces `distance` apart can be rows of one operation, or layers."""
    if distance <= _MAX_PITCH:
        return block_bytes <= distance
    # Layers lie whole rows apart: a row is what lies between one block and the next.
    return block_bytes <= block_stride <= _MAX_PITCH and distance % block_stride == 0


def make_operations(
    table: NDArray[np.int64],
    runs: Sequence[range],
    pairs: NDArray[np.int64],
    to_device: bool,
) -> NDArray[np.void]:
    """What to copy, run by run.

    Args:
        table: Of `address_table`.
        runs: Regions, each of them one of `find_runs` or a part of it; not empty.
        pairs: `[2, n]`: blocks, then slots.
        to_device: Whether slots are copied to blocks, or blocks to slots.

    Returns:
        `[num_runs, n]` of `STRIDED_COPY`, contiguous.

    """
    blocks, slots = pairs
    counts = np.array([[len(run)] for run in runs], dtype=np.int64).reshape(-1, 1)
    firsts, lasts = (
        table[np.array([run[i] for run in runs], dtype=np.intp)].T[:, :, None]
        for i in (0, -1)
    )
    block_0, block_stride, slot_0, slot_stride, width = firsts
    addresses = block_0 + block_stride * blocks, slot_0 + slot_stride * slots
    # A single row has no distance to a next one, but must fit all the same.
    distances = [
        np.maximum((last - first) // np.maximum(counts - 1, 1), width)
        for first, last in ((block_0, lasts[0]), (slot_0, lasts[2]))
    ]
    # Pieces too far apart to be rows of a layer are layers of a row.
    far = (distances[0] > _MAX_PITCH) & (counts > 1)
    pitches = np.where(far, block_stride, distances[0]), distances[1]
    operations = np.zeros((len(runs), pairs.shape[1]), STRIDED_COPY)
    sides = ("dst", "src") if to_device else ("src", "dst")
    for side, address, distance, pitch in zip(sides, addresses, distances, pitches):
        operand = operations[side]
        operand["type"] = OPERAND_IS_ADDRESS
        operand["address"] = address
        operand["pitch"] = pitch
        operand["rows"] = np.where(far, distance // pitch, counts)
    operations["width"] = width
    operations["height"] = np.where(far, 1, counts)
    operations["depth"] = np.where(far, counts, 1)
    operations["access_order"] = ACCESS_ORDER_STREAM
    return operations


class BlockDmaCopyEngine(CopyEngine):
    """One operation for a block, whatever its regions, 32 in a `cuMemcpy3DBatchAsync`.

    Copies cannot be queued on the default stream. Those of few regions at a time are
    slow: an operation costs the device as much for two rows as for ten.

    Args:
        regions: Device memory; one at least.
        slots: Pinned host memory, of which each slot is registered in one piece.
        driver: What copies; None for the driver of this machine.

    Raises:
        CopyEngineUnavailable: The driver cannot do it, or no neighbouring regions can
            be copied together.

    """

    def __init__(
        self,
        regions: Sequence[Region],
        slots: torch.Tensor,
        driver: StridedCopier | None = None,
    ) -> None:
        super().__init__(regions, slots)
        self._device = regions[0].blocks.device
        self._table = address_table(regions, slots)
        self._runs = find_runs(regions, self._table)
        if len(self._runs) == len(regions):
            raise CopyEngineUnavailable(
                "No neighbouring layers have blocks of one size at a constant distance "
                "in one allocation, or it is 2 GiB or more and no multiple of that "
                "between blocks. Copy by piece."
            )
        self._driver = driver or _strided_driver(self._device)

    def launch_s(self, num_pieces: int) -> float:
        return 2e-6 * num_pieces / len(self.regions) * len(self._runs)

    def transfer(self, pairs: NDArray[np.int64], to_device: bool) -> Transfer:
        return _BlockDmaTransfer(
            self._driver, self._table, self._runs, pairs, to_device, self._device
        )


def _strided_driver(device: torch.device) -> CudaDriver:
    driver = _driver(device)
    if not driver.has_strided_batches():
        raise _too_old("cuMemcpy3DBatchAsync")
    return driver


class _BlockDmaTransfer(Transfer):
    def __init__(
        self,
        driver: StridedCopier,
        table: NDArray[np.int64],
        runs: Sequence[range],
        pairs: NDArray[np.int64],
        to_device: bool,
        device: torch.device,
    ) -> None:
        self._driver = driver
        self._table = table
        self._runs = runs
        self._pairs = pairs
        self._to_device = to_device
        self._device = device

    def copy(self, regions: range) -> None:
        parts = [
            range(max(run.start, regions.start), min(run.stop, regions.stop))
            for run in self._runs
        ]
        # Read before a call returns, so that it need not outlive this one.
        operations = make_operations(
            self._table, [part for part in parts if part], self._pairs, self._to_device
        )
        stream = _current_stream(self._device)
        address, item = operations.ctypes.data, operations.itemsize
        for start in range(0, operations.size, _MAX_STRIDED_BATCH):
            self._driver.copy_strided_batch(
                address + item * start,
                min(_MAX_STRIDED_BATCH, operations.size - start),
                stream,
            )
