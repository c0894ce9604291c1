# SPDX-License-Identifier: Apache-2.0
"""Prompts that are computed or loaded ahead of a request: when they must wait for
others, and whether they came to be of use."""

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
"""Seconds after which a prewarm that waits is a request like others: somebody may wait
for its answer."""


class Prewarms:
    """Follows the blocks of prompts with the hint `prewarm`, until others need them.

    A prewarm takes no device blocks while requests lack some: it would hold up those
    that can run, and what it loads would be evicted before it is of use.

    A block is counted once more when it is of use, since another request hits it, on
    the device or on the host; or when it is late: another request computes it before
    the prewarm has ended. Blocks of the first group of layers stand for all.

    Args:
        num_keys: Blocks that are followed, those that were asked for last.
        stats: Counts them.
        clock: Seconds.

    """

    def __init__(
        self, num_keys: int, stats: KVTierStats, clock: Callable[[], float]
    ) -> None:
        self._num_keys = num_keys
        self._stats = stats
        self._clock = clock
        self._lacked = float("-inf")
        # Since when they wait.
        self._held: WeakKeyDictionary[Request, float] = WeakKeyDictionary()
        # No requests: what has ended must not be kept for its blocks.
        self.pending: OrderedDict[Hashable, ref[Request]] = OrderedDict()
        """Blocks that nobody has needed yet. Public, since asking whether there are
        some must cost nothing."""

    def others_lack_blocks(self) -> None:
        """A request cannot run now, since the device lacks free blocks."""
        self._lacked = self._clock()

    def must_wait(self, request: Request) -> bool:
        """Whether `request`, a prewarm, is to leave free blocks to others."""
        now = self._clock()
        if now - self._lacked >= PAUSE_S:
            return False
        return now - self._held.setdefault(request, now) < PATIENCE_S

    def ask(self, request: Request) -> Portions:
        """`request` does nothing but prewarm its prompt.

        Returns:
            Its blocks, for `follow`.

        """
        self._stats.prewarmed_blocks += len(request.block_hashes)
        return Portions(tuple(request.block_hashes))

    def follow(self, prewarm: "ref[Request]", hashes: Iterable[Hashable]) -> None:
        """Follow blocks of `prewarm` until others need them."""
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
        """`request` is admitted with the blocks of `keys`."""
        for key in self.pending.keys() & keys:
            if self.pending[key]() is not request:
                del self.pending[key]
                self._stats.prewarmed_used_blocks += 1

    def computed(self, request: Request, keys: Iterable[Hashable]) -> None:
        """`request` computes the blocks of `keys`."""
        for key in self.pending.keys() & keys:
            if (prewarm := self.pending[key]()) is not request:
                del self.pending[key]
                # Else they were evicted meanwhile.
                is_late = prewarm is not None and not prewarm.is_finished()
                self._stats.prewarmed_late_blocks += is_late
