# SPDX-License-Identifier: Apache-2.0
"""Copies by torch, one call for each piece: slow to launch, but possible everywhere."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.v1.kv_tier.copying.engine import CopyEngine, Transfer, slot_offsets
from vllm.v1.kv_tier.memory.regions import Region

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
