# SPDX-License-Identifier: Apache-2.0
"""Copies by the engine that suits their number."""

import numpy as np
from numpy.typing import NDArray

from vllm.v1.kv_tier.copying.engine import CopyEngine, Transfer


class BySizeCopyEngine(CopyEngine):
    """One engine for transfers of few pieces, another for those of many.

    Args:
        few: Serves transfers of at most `max_pieces` blocks times regions.
        many: Serves the others. It has the regions and slots of `few`.
        max_pieces: See `few`.

    """

    def __init__(self, few: CopyEngine, many: CopyEngine, max_pieces: int) -> None:
        super().__init__(few.regions, few.slots)
        self._few = few
        self._many = many
        self._max_pieces = max_pieces

    def launch_s(self, num_pieces: int) -> float:
        engine = self._few if num_pieces <= self._max_pieces else self._many
        return engine.launch_s(num_pieces)

    def transfer(self, pairs: NDArray[np.int64], to_device: bool) -> Transfer:
        pieces = pairs.shape[1] * len(self.regions)
        engine = self._few if pieces <= self._max_pieces else self._many
        return engine.transfer(pairs, to_device)
