# SPDX-License-Identifier: Apache-2.0
"""Moves blocks between device regions and host slots."""

from collections.abc import Sequence

import torch

from vllm.v1.kv_tier.regions import Region

# Slots and the regions in them start at cache lines.
_ALIGN = 64


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


def slot_bytes(regions: Sequence[Region]) -> int:
    """Bytes of host memory for one block of every region."""
    return sum(_aligned(region.block_bytes) for region in regions)


class TorchCopyEngine:
    """One `Tensor.copy_` for each block and region, on any device.

    Copies are queued on the current stream, and done on return where there are
    no streams.

    Args:
        regions: Device memory; every region has `[num_blocks, bytes]` rows.
        slots: `[num_slots, slot_bytes(regions)]` host memory.

    """

    def __init__(self, regions: Sequence[Region], slots: torch.Tensor) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        start = 0
        for region in regions:
            size = region.block_bytes
            self._pairs.append((region.blocks, slots[:, start : start + size]))
            start += _aligned(size)

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy device `blocks[i]` to host `slots[i]`."""
        for device, host in self._pairs:
            for block, slot in zip(blocks, slots, strict=True):
                host[slot].copy_(device[block], non_blocking=True)

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy host `slots[i]` to device `blocks[i]`."""
        for device, host in self._pairs:
            for slot, block in zip(slots, blocks, strict=True):
                device[block].copy_(host[slot], non_blocking=True)
