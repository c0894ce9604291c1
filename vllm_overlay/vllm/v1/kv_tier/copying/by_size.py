# SPDX-License-Identifier: Apache-2.0
"""A copy engine that picks one of two others by the size of a transfer."""

import numpy as np
from numpy.typing import NDArray

from vllm.v1.kv_tier.copying.engine import CopyEngine, Transfer


class BySizeCopyEngine(CopyEngine):
    """Uses one engine for small transfers and another for large ones.

    Args:
        few: Used for transfers of at most `max_pieces` pieces (blocks times regions).
        many: Used for larger transfers. Has the same regions and slots as `few`.
        max_pieces: Largest transfer that `few` handles, in pieces.

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
