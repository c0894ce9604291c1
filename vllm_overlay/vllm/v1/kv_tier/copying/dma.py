# SPDX-License-Identifier: Apache-2.0
"""Copies by the DMA engines of a CUDA device: piece by piece, or all layers of a block
in one of them.

They use no multiprocessors. A piece takes 0.45 us of CPU and 0.55 us of the device
(H200), so pieces reach the rate of the bus from about 32 KiB on.

They use no multiprocessors. A strided copy of one block in many regions takes 2 to 3 us
of CPU and 3 to 5 us of the device (H200), so blocks reach the rate of the bus from
about 256 KiB on.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.v1.kv_tier.copying.cuda_driver import (
    ACCESS_ORDER_STREAM,
    OPERAND_IS_ADDRESS,
    STRIDED_COPY,
    CudaDriver,
    current_stream,
    load_driver,
    too_old,
)
from vllm.v1.kv_tier.copying.engine import (
    CopyEngine,
    CopyEngineUnavailable,
    Transfer,
    address_table,
)
from vllm.v1.kv_tier.memory.regions import Region

# A call holds the driver's lock, and a thread that launches a kernel meanwhile waits.
# With 512 copies a call, launches took 0.4 ms instead of 7 us (H200).
_MAX_BATCH = 64


class BatchCopier(Protocol):
    """The part of `CudaDriver` that `DmaCopyEngine` uses."""

    def copy_batch(
        self, dst: int, src: int, sizes: int, count: int, stream: int
    ) -> None: ...


def make_descriptors(
    table: NDArray[np.int64], pairs: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """Build the copies of `pairs`, region by region.

    Args:
        table: From `address_table`.
        pairs: `[2, n]`: blocks, then slots.

    Returns:
        Device addresses, host addresses and sizes in bytes, each `[num_regions, n]` and
        contiguous.

    """
    blocks, slots = pairs
    block_0, block_stride, slot_0, slot_stride, size = table.T[:, :, None]
    device = (block_0 + block_stride * blocks).astype(np.uint64)
    host = (slot_0 + slot_stride * slots).astype(np.uint64)
    sizes = np.ascontiguousarray(np.broadcast_to(size, device.shape), dtype=np.uint64)
    return device, host, sizes


class DmaCopyEngine(CopyEngine):
    """Copies up to 64 pieces with one `cuMemcpyBatchAsync`.

    Copies cannot be queued on the default stream.

    Args:
        regions: Device memory; at least one.
        slots: Pinned host memory.
        driver: Queues the copies; None for the driver of this machine.
        max_batch: Most pieces in one call.

    Raises:
        CopyEngineUnavailable: The driver lacks the function.

    """

    def __init__(
        self,
        regions: Sequence[Region],
        slots: torch.Tensor,
        driver: BatchCopier | None = None,
        max_batch: int = _MAX_BATCH,
    ) -> None:
        super().__init__(regions, slots)
        self._device = regions[0].blocks.device
        self._driver = driver or _batch_driver(self._device)
        self._table = address_table(regions, slots)
        self._max_batch = max_batch

    def launch_s(self, num_pieces: int) -> float:
        return 0.5e-6 * num_pieces

    def transfer(self, pairs: NDArray[np.int64], to_device: bool) -> Transfer:
        device, host, sizes = make_descriptors(self._table, pairs)
        dst, src = (device, host) if to_device else (host, device)
        return _DmaTransfer(
            self._driver, dst, src, sizes, self._device, self._max_batch
        )


def _batch_driver(device: torch.device) -> CudaDriver:
    driver = load_driver(device)
    if not driver.has_batches():
        raise too_old("cuMemcpyBatchAsync")
    return driver


class _DmaTransfer(Transfer):
    def __init__(
        self,
        driver: BatchCopier,
        dst: NDArray[np.uint64],
        src: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
        device: torch.device,
        max_batch: int,
    ) -> None:
        self._driver = driver
        self._max_batch = max_batch
        # Keeps the arrays alive: only their addresses are passed on.
        self._arrays = dst, src, sizes
        self._device = device

    def copy(self, regions: range) -> None:
        dst, src, sizes = self._arrays
        stream = current_stream(self._device)
        pairs, item = dst.shape[1], dst.itemsize
        end = pairs * regions.stop
        for start in range(pairs * regions.start, end, self._max_batch):
            self._driver.copy_batch(
                dst.ctypes.data + item * start,
                src.ctypes.data + item * start,
                sizes.ctypes.data + item * start,
                min(self._max_batch, end - start),
                stream,
            )


# A call holds the driver's lock, and strided copies hold it longer than pieces do.
_MAX_STRIDED_BATCH = 32

# CU_DEVICE_ATTRIBUTE_MAX_PITCH, the same on all devices: the largest distance between
# rows. The driver accepts more, but splits such operations: 17 GB/s instead of 42 at
# ten times the CPU time (H200). Layers may lie further apart at no cost.
MAX_PITCH = (1 << 31) - 1


class StridedCopier(Protocol):
    """The part of `CudaDriver` that `BlockDmaCopyEngine` uses."""

    def copy_strided_batch(self, operations: int, count: int, stream: int) -> None: ...


def find_runs(
    regions: Sequence[Region],
    table: NDArray[np.int64],
    max_pitch: int = MAX_PITCH,
) -> list[range]:
    """Group regions whose pieces of a block fit one strided copy.

    Args:
        regions: Device memory.
        table: From `address_table`.
        max_pitch: Largest distance between rows, in bytes.

    Returns:
        Consecutive ranges of indices that cover all regions. Regions of a range share
        storage, width and strides, and lie at one constant distance on the device and
        one in host memory. A device distance above `max_pitch` is a multiple of the
        distance between blocks.

    """
    distances = [
        _distance(regions, table, i, max_pitch) for i in range(len(regions) - 1)
    ]
    runs, start = [], 0
    for i, distance in enumerate(distances):
        # The first two regions of a run set its distance.
        if distance is None or distance != distances[start]:
            runs.append(range(start, i + 1))
            start = i + 1
    return [*runs, range(start, len(regions))]


def _distance(
    regions: Sequence[Region], table: NDArray[np.int64], i: int, max_pitch: int
) -> tuple[int, int] | None:
    """Bytes from region `i` to the next: (device, host). None if no copy takes both."""
    a, b = (region.blocks.untyped_storage().data_ptr() for region in regions[i : i + 2])
    device, block_stride, host, slot_stride, size = np.diff(table[i : i + 2].T).T[0]
    alike = a == b and not (block_stride or slot_stride or size)
    stride, width = int(table[i, 1]), regions[i].block_bytes
    if alike and _has_operation(int(device), stride, width, max_pitch):
        return int(device), int(host)
    return None


def _has_operation(
    distance: int, block_stride: int, block_bytes: int, max_pitch: int
) -> bool:
    """Whether pieces `distance` apart can be rows or layers of one operation."""
    if distance <= max_pitch:
        return block_bytes <= distance
    # Layers lie a whole number of rows apart. The rows are the blocks.
    return block_bytes <= block_stride <= max_pitch and distance % block_stride == 0


def make_operations(
    table: NDArray[np.int64],
    runs: Sequence[range],
    pairs: NDArray[np.int64],
    to_device: bool,
    max_pitch: int = MAX_PITCH,
) -> NDArray[np.void]:
    """Build the strided copies of `pairs`, run by run.

    Args:
        table: From `address_table`.
        runs: Not empty; each is a range of `find_runs` or a part of one.
        pairs: `[2, n]`: blocks, then slots.
        to_device: Whether to copy slots to blocks, or blocks to slots.
        max_pitch: As in `find_runs`.

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
    # A single row has no next one, but its pitch must still be at least its width.
    distances = [
        np.maximum((last - first) // np.maximum(counts - 1, 1), width)
        for first, last in ((block_0, lasts[0]), (slot_0, lasts[2]))
    ]
    # Pieces that are too far apart to be rows become layers of one row each.
    far = (distances[0] > max_pitch) & (counts > 1)
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
    """Copies a block with one operation for each run of regions.

    One `cuMemcpy3DBatchAsync` takes up to 32 operations. Copies cannot be queued on the
    default stream. Copying a few regions at a time is slow: an operation costs the
    device as much for two rows as for ten.

    Args:
        regions: Device memory; at least one.
        slots: Pinned host memory; no slot crosses from one registration to the next.
        driver: Queues the copies; None for the driver of this machine.
        max_pitch: Largest distance between rows, in bytes.

    Raises:
        CopyEngineUnavailable: The driver lacks the function, or no neighbouring regions
            can be copied together.

    """

    def __init__(
        self,
        regions: Sequence[Region],
        slots: torch.Tensor,
        driver: StridedCopier | None = None,
        max_pitch: int = MAX_PITCH,
    ) -> None:
        super().__init__(regions, slots)
        self._device = regions[0].blocks.device
        self._table = address_table(regions, slots)
        self._max_pitch = max_pitch
        self._runs = find_runs(regions, self._table, max_pitch)
        if len(self._runs) == len(regions):
            raise CopyEngineUnavailable(
                "No neighbouring layers have blocks of equal size at a constant "
                "distance in one allocation, or the distance is 2 GiB or more and not "
                "a multiple of that between blocks. Copy by piece."
            )
        self._driver = driver or _strided_driver(self._device)

    def launch_s(self, num_pieces: int) -> float:
        return 2e-6 * num_pieces / len(self.regions) * len(self._runs)

    def transfer(self, pairs: NDArray[np.int64], to_device: bool) -> Transfer:
        make = partial(
            make_operations,
            pairs=pairs,
            to_device=to_device,
            max_pitch=self._max_pitch,
        )
        return _BlockDmaTransfer(
            self._driver, self._table, self._runs, make, self._device
        )


def _strided_driver(device: torch.device) -> CudaDriver:
    driver = load_driver(device)
    if not driver.has_strided_batches():
        raise too_old("cuMemcpy3DBatchAsync")
    return driver


class _BlockDmaTransfer(Transfer):
    def __init__(
        self,
        driver: StridedCopier,
        table: NDArray[np.int64],
        runs: Sequence[range],
        make: Callable[[NDArray[np.int64], list[range]], NDArray[np.void]],
        device: torch.device,
    ) -> None:
        self._driver = driver
        self._table = table
        self._runs = runs
        self._make = make
        self._device = device

    def copy(self, regions: range) -> None:
        parts = [
            range(max(run.start, regions.start), min(run.stop, regions.stop))
            for run in self._runs
        ]
        # The driver reads the operations before a call returns.
        operations = self._make(self._table, [part for part in parts if part])
        stream = current_stream(self._device)
        address, item = operations.ctypes.data, operations.itemsize
        for start in range(0, operations.size, _MAX_STRIDED_BATCH):
            self._driver.copy_strided_batch(
                address + item * start,
                min(_MAX_STRIDED_BATCH, operations.size - start),
                stream,
            )
