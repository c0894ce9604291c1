# SPDX-License-Identifier: Apache-2.0
"""Blocks that are loaded ahead, for requests of later steps."""

from collections.abc import Callable, Iterable, Sequence

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_tier.scheduling.costs import Costs, QueuedLoad
from vllm.v1.kv_tier.scheduling.tuning import SchedulingTuning


class _Prefetch:
    """The prefetches of one plan."""

    def __init__(self, load: QueuedLoad) -> None:
        self.last_load = load
        self.block_ids: list[int] = []
        self.num_unclaimed = 0

    @property
    def end(self) -> float:
        return self.last_load.end


class Prefetches:
    """Which blocks are prefetched, until when, and which wait for their request.

    Meanwhile they are free and hashed in the free queue. So nothing leaks if the
    request is aborted, and other requests that hit them share them.

    Args:
        costs: Has the clock.
        tuning: How long blocks are kept.

    """

    def __init__(self, costs: Costs, tuning: SchedulingTuning) -> None:
        self._costs = costs
        self._claim_within_s = tuning.claim_within_s
        self._by_plan: dict[int, _Prefetch] = {}
        # Those with blocks that may still wait for their request.
        self._awaited: dict[int, _Prefetch] = {}
        self.unclaimed: dict[int, _Prefetch] = {}
        """Prefetched blocks that no request has taken yet, by id. Public, since testing
        a block must be cheap; change it with `claim`."""

    def __bool__(self) -> bool:
        return bool(self._by_plan)

    def add(self, load: QueuedLoad, blocks: Sequence[KVCacheBlock]) -> None:
        """Record that `load` fills `blocks`."""
        prefetch = self._by_plan.get(load.seq)
        if prefetch is None:
            prefetch = self._by_plan[load.seq] = _Prefetch(load)
        self._awaited[load.seq] = prefetch
        prefetch.last_load = load
        prefetch.num_unclaimed += len(blocks)
        for block in blocks:
            prefetch.block_ids.append(block.block_id)
            self.unclaimed[block.block_id] = prefetch

    def end_of(self, seq: int) -> float:
        """When the prefetches of plan `seq` will end, or ended."""
        prefetch = self._by_plan.get(seq)
        return prefetch.end if prefetch is not None else 0.0

    def claim(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Record that `blocks` are allocated or hit."""
        unclaimed = self.unclaimed
        if not unclaimed:
            return
        for block in blocks:
            if (prefetch := unclaimed.pop(block.block_id, None)) is not None:
                prefetch.num_unclaimed -= 1

    def is_unclaimed(self, block: KVCacheBlock) -> bool:
        """Whether `block` was prefetched, and no request has taken it yet."""
        return block.block_id in self.unclaimed

    def kept(self) -> Callable[[KVCacheBlock], bool] | None:
        """A test whether a block is being kept for its request; None if no block is.

        Valid for the current time.
        """
        if not (kept := self._kept()):
            return None
        # One lookup, since it is called for every block of a long prefix.
        get = self.unclaimed.get
        return lambda block: get(block.block_id) in kept

    def num_kept(self, without: Iterable[KVCacheBlock] = ()) -> int:
        """Number of blocks that are kept for their requests.

        Args:
            without: Blocks that do not count.

        """
        if not (kept := self._kept()):
            return 0
        get = self.unclaimed.get
        num_without = sum(get(block.block_id) in kept for block in without)
        return sum(prefetch.num_unclaimed for prefetch in kept) - num_without

    def _kept(self) -> set[_Prefetch]:
        """Prefetches with blocks that are kept for their requests."""
        limit, awaited = self._kept_after, self._awaited
        over = [
            s for s, p in awaited.items() if not (p.num_unclaimed and p.end > limit)
        ]
        # Called for each allocation, and clients may abort any number of requests.
        for seq in over:
            del awaited[seq]
        return {*awaited.values()}

    def last_unused(self) -> int:
        """The last plan whose prefetches ended long enough ago; 0 if there is none.

        Requests that have not taken them were aborted.
        """
        limit = self._kept_after
        return max((s for s, p in self._by_plan.items() if p.end <= limit), default=0)

    @property
    def _kept_after(self) -> float:
        """Loads that ended earlier are not kept for their requests any more."""
        return self._costs.clock() - self._claim_within_s

    def forget(self, fence: int) -> None:
        """Forget prefetches of plans up to `fence`, which forward passes now follow.

        Those that are kept for a request stay.
        """
        limit = self._kept_after
        over = [
            seq
            for seq, prefetch in self._by_plan.items()
            if seq <= fence and not (prefetch.num_unclaimed and prefetch.end > limit)
        ]
        for seq in over:
            prefetch = self._by_plan.pop(seq)
            self._awaited.pop(seq, None)
            for block_id in prefetch.block_ids:
                if self.unclaimed.get(block_id) is prefetch:
                    del self.unclaimed[block_id]
