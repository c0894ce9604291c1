# SPDX-License-Identifier: Apache-2.0
"""What moves blocks between device regions and host slots: the interface, and the
engine that runs everywhere, with one call of torch for each piece.

An engine turns pairs of block and slot into a `Transfer`, which queues the copies of
any range of regions. So addresses are computed once, and a step can wait for its loads
region by region.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.v1.kv_tier.memory.regions import Region

# Slots, and the regions in them, start at cache lines.
_ALIGN = 64


class CopyEngineUnavailable(RuntimeError):
    """This machine cannot run an engine. The message has the reason and the fix."""


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


def slot_bytes(regions: Sequence[Region]) -> int:
    """Bytes of host memory for one block of every region."""
    return sum(_aligned(region.block_bytes) for region in regions)


def slot_offsets(regions: Sequence[Region]) -> list[int]:
    """Where each region starts in a slot, in bytes."""
    sizes = [_aligned(region.block_bytes) for region in regions]
    return [sum(sizes[:i]) for i in range(len(sizes))]


def wait_for_copies(device: torch.device) -> None:
    """Wait for the work on the current stream, where the device has streams."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def address_table(regions: Sequence[Region], slots: torch.Tensor) -> NDArray[np.int64]:
    """Addresses and strides of each region, on the device and in host memory.

    Args:
        regions: Device memory.
        slots: `[num_slots, slot_bytes(regions)]` host memory.

    Returns:
        `[num_regions, 5]`: address of block 0, bytes from block to block, address in
        slot 0, bytes from slot to slot, bytes of a block.

    """
    rows = [
        (
            region.blocks.data_ptr(),
            region.blocks.stride(0),
            slots.data_ptr() + offset,
            slots.stride(0),
            region.block_bytes,
        )
        for region, offset in zip(regions, slot_offsets(regions), strict=True)
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 5)


class Transfer(ABC):
    """Copies of one list of pairs, in one direction."""

    @abstractmethod
    def copy(self, regions: range) -> None:
        """Queue the copies of these regions without waiting for them.

        They go to the current stream, which must be the one that was current when the
        transfer was made. May be called more than once.

        Args:
            regions: Consecutive indices into the engine's regions.

        Raises:
            RuntimeError: The device refused a copy. Others may be in flight.

        """


class CopyEngine(ABC):
    """Makes transfers.

    Args:
        regions: Device memory; each region has `[num_blocks, bytes]` rows.
        slots: `[num_slots, slot_bytes(regions)]`, uint8, host memory.

    """

    def __init__(self, regions: Sequence[Region], slots: torch.Tensor) -> None:
        self.regions = regions
        self.slots = slots

    def loads(
        self, slots: Sequence[int], blocks: Sequence[int], groups: Sequence[int] = ()
    ) -> Transfer:
        """Copies of host `slots[i]` to device `blocks[i]`.

        Args:
            slots: Host slots.
            blocks: Device blocks.
            groups: The KV cache group of each; empty: all bytes of each are copied.

        Raises:
            IndexError: A block or slot is out of range.
            RuntimeError: The device refused the copies.
            ValueError: `slots` and `blocks` differ in length.

        """
        pairs = self._pairs(blocks, slots)
        if groups:
            return self.transfer_groups(pairs, groups, to_device=True)
        return self.transfer(pairs, to_device=True)

    def stores(
        self, blocks: Sequence[int], slots: Sequence[int], groups: Sequence[int] = ()
    ) -> Transfer:
        """Copies of device `blocks[i]` to host `slots[i]`.

        Args:
            blocks: Device blocks.
            slots: Host slots.
            groups: As in `loads`.

        Raises:
            IndexError: A block or slot is out of range.
            RuntimeError: The device refused the copies.
            ValueError: `slots` and `blocks` differ in length.

        """
        pairs = self._pairs(blocks, slots)
        if groups:
            return self.transfer_groups(pairs, groups, to_device=False)
        return self.transfer(pairs, to_device=False)

    def launch_s(self, num_pieces: int) -> float:
        """CPU seconds to launch `num_pieces` pieces (blocks times regions)."""
        return 0.0

    @abstractmethod
    def transfer(self, pairs: NDArray[np.int64], to_device: bool) -> Transfer:
        """Copies in one direction. `pairs` is `[2, n]`: blocks, then slots."""

    def transfer_groups(
        self, pairs: NDArray[np.int64], groups: Sequence[int], to_device: bool
    ) -> Transfer:
        """As `transfer`, for blocks of these KV cache groups. Most engines copy all
        bytes of a block, whatever its group needs."""
        return self.transfer(pairs, to_device)

    def _pairs(self, blocks: Sequence[int], slots: Sequence[int]) -> NDArray[np.int64]:
        if len(blocks) != len(slots):
            raise ValueError(f"{len(blocks)} blocks, but {len(slots)} slots.")
        pairs = np.array((blocks, slots), dtype=np.int64)
        # An engine that works on addresses would write outside of its memory.
        if len(blocks) and self.regions:
            limits = self.regions[0].blocks.shape[0], self.slots.shape[0]
            if pairs.min() < 0 or (pairs.max(axis=1) >= limits).any():
                raise IndexError(f"Blocks or slots not below {limits}: {pairs}.")
        return pairs


# CPU time of a call, about.
_LAUNCH_S = 5e-6


class TorchCopyEngine(CopyEngine):
    """One `Tensor.copy_` for each block and region, on any device.

    The only engine for host memory that is not pinned. On devices without streams,
    copies have ended when a call returns.
    """

    def __init__(self, regions: Sequence[Region], slots: torch.Tensor) -> None:
        super().__init__(regions, slots)
        self.views = [
            (region.blocks, slots[:, start : start + region.block_bytes])
            for region, start in zip(regions, slot_offsets(regions), strict=True)
        ]

    def launch_s(self, num_pieces: int) -> float:
        return _LAUNCH_S * num_pieces

    def transfer(self, pairs: NDArray[np.int64], to_device: bool) -> Transfer:
        return _TorchTransfer(self.views, pairs, to_device)


class _TorchTransfer(Transfer):
    def __init__(
        self,
        views: list[tuple[torch.Tensor, torch.Tensor]],
        pairs: NDArray[np.int64],
        to_device: bool,
    ) -> None:
        self._views = views
        self._pairs: list[list[int]] = pairs.T.tolist()
        self._to_device = to_device

    def copy(self, regions: range) -> None:
        for region in regions:
            device, host = self._views[region]
            for block, slot in self._pairs:
                if self._to_device:
                    device[block].copy_(host[slot], non_blocking=True)
                else:
                    host[slot].copy_(device[block], non_blocking=True)


class BySizeCopyEngine(CopyEngine):
    """Uses one engine for small transfers and another for large ones.

    Args:
        few: Used for transfers of at most `max_pieces` pieces (blocks times regions).
        many: Used for larger transfers. Has the same regions and slots as `few`.
        max_pieces: Largest transfer that `few` handles, in pieces.

    """

    def __init__(self, few: CopyEngine, many: CopyEngine, max_pieces: int) -> None:
        super().__init__(few.regions, few.slots)
        self.few = few
        self.many = many
        self.max_pieces = max_pieces

    def launch_s(self, num_pieces: int) -> float:
        engine = self.few if num_pieces <= self.max_pieces else self.many
        return engine.launch_s(num_pieces)

    def transfer(self, pairs: NDArray[np.int64], to_device: bool) -> Transfer:
        pieces = pairs.shape[1] * len(self.regions)
        engine = self.few if pieces <= self.max_pieces else self.many
        return engine.transfer(pairs, to_device)


@dataclass(frozen=True)
class CopyEngines:
    """The copy engines of a rank, by use."""

    step_loads: CopyEngine
    """For loads that the current step waits for."""
    loads: CopyEngine
    """For loads that run while other requests compute."""
    stores: CopyEngine
    load_bytes_per_s: float
    """Of the slower of the two load engines, in bytes per second."""
