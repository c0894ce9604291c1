# SPDX-License-Identifier: Apache-2.0
"""Whether prompts that were computed or loaded ahead of a request came to be of use."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_tier.stats import KVTierStats
from vllm.v1.request import Request


class Prewarms:
    """Follows the blocks of prompts with the hint `prewarm`, until others need them.

    A block is counted once more when it is of use, since another request hits it, on
    the device or on the host; or when it is late: another request computes it before
    the prewarm has ended. Blocks of the first group of layers stand for all.

    Args:
        num_keys: Blocks that are followed, those that were asked for last.
        stats: Counts them.

    """

    def __init__(self, num_keys: int, stats: KVTierStats) -> None:
        self._num_keys = num_keys
        self._stats = stats
        self.pending: OrderedDict[Hashable, Request] = OrderedDict()
        """Blocks that nobody has needed yet. Public, since asking whether there are
        some must cost nothing."""

    def ask(self, request: Request) -> None:
        """`request` does nothing but prewarm its prompt."""
        pending = self.pending
        for block_hash in request.block_hashes:
            key = make_block_hash_with_group_id(block_hash, 0)
            pending.pop(key, None)
            pending[key] = request
        self._stats.prewarmed_blocks += len(request.block_hashes)
        while len(pending) > self._num_keys:
            pending.popitem(last=False)

    def hit(self, request: Request, keys: Iterable[Hashable]) -> None:
        """`request` is admitted with the blocks of `keys`."""
        for key in self.pending.keys() & keys:
            if self.pending[key] is not request:
                del self.pending[key]
                self._stats.prewarmed_used_blocks += 1

    def computed(self, request: Request, keys: Iterable[Hashable]) -> None:
        """`request` computes the blocks of `keys`."""
        for key in self.pending.keys() & keys:
            if (prewarm := self.pending[key]) is not request:
                del self.pending[key]
                # Else they were evicted meanwhile.
                self._stats.prewarmed_late_blocks += not prewarm.is_finished()
