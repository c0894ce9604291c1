# SPDX-License-Identifier: Apache-2.0
"""Prompts that are computed or loaded ahead of a request.

Decides when they must wait for others, and counts whether they were useful.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from weakref import WeakKeyDictionary, ref

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_tier.scheduling.owners import Portions
from vllm.v1.kv_tier.stats import KVTierStats
from vllm.v1.request import Request

PAUSE_S = 0.25
"""Seconds for which prewarms wait after a request lacked device blocks."""
PATIENCE_S = 10.0
"""Longest wait of a prewarm, since a client may wait for its answer."""


class Prewarms:
    """Follows the blocks of prompts with the hint `prewarm`, until they are used.

    A prewarm takes no device blocks while requests lack some: it would delay requests
    that can run, and its blocks would be evicted before they are used.

    Blocks are counted when another request hits them, on the device or host, or when
    another request computes them before the prewarm has ended (late). Blocks of the
    first group of layers stand for all.

    Args:
        num_keys: Most blocks that are followed; the latest stay.
        stats: Counts them.
        clock: Time in seconds.

    """

    def __init__(
        self, num_keys: int, stats: KVTierStats, clock: Callable[[], float]
    ) -> None:
        self._num_keys = num_keys
        self._stats = stats
        self._clock = clock
        self._lacked = float("-inf")
        # Since when prewarms wait.
        self._held: WeakKeyDictionary[Request, float] = WeakKeyDictionary()
        # Weak references, so that finished requests are not kept alive.
        self.pending: OrderedDict[Hashable, ref[Request]] = OrderedDict()
        """Blocks that were not used yet. Public, since testing whether there are any
        must be cheap."""

    def others_lack_blocks(self) -> None:
        """Note that a request cannot run, since the device lacks free blocks."""
        self._lacked = self._clock()

    def must_wait(self, request: Request) -> bool:
        """Whether `request`, a prewarm, must leave free blocks to others."""
        now = self._clock()
        if now - self._lacked >= PAUSE_S:
            return False
        return now - self._held.setdefault(request, now) < PATIENCE_S

    def ask(self, request: Request) -> Portions:
        """Register `request`, which only prewarms its prompt.

        Returns:
            Its blocks, for `follow`.

        """
        self._stats.prewarmed_blocks += len(request.block_hashes)
        return Portions(tuple(request.block_hashes))

    def follow(self, prewarm: "ref[Request]", hashes: Iterable[Hashable]) -> None:
        """Follow blocks of `prewarm` until other requests need them."""
        pending = self.pending
        for block_hash in hashes:
            key = make_block_hash_with_group_id(block_hash, 0)  # type: ignore[arg-type]
            pending.pop(key, None)
            pending[key] = prewarm
        while len(pending) > self._num_keys:
            pending.popitem(last=False)

    def forget(self) -> None:
        """Nothing that was computed or loaded can be of use any more. Requests that
        still wait compute it anew."""
        for key, follows in list(self.pending.items()):
            if (prewarm := follows()) is None or prewarm.is_finished():
                del self.pending[key]

    def hit(self, request: Request, keys: Iterable[Hashable]) -> None:
        """Record that `request` is admitted with the blocks of `keys`."""
        for key in self.pending.keys() & keys:
            if self.pending[key]() is not request:
                del self.pending[key]
                self._stats.prewarmed_used_blocks += 1

    def computed(self, request: Request, keys: Iterable[Hashable]) -> None:
        """Record that `request` computes the blocks of `keys`."""
        for key in self.pending.keys() & keys:
            if (prewarm := self.pending[key]()) is not request:
                del self.pending[key]
                # Otherwise they were evicted meanwhile.
                is_late = prewarm is not None and not prewarm.is_finished()
                self._stats.prewarmed_late_blocks += is_late
