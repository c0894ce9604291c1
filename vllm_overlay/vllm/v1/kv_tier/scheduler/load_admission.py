# SPDX-License-Identifier: Apache-2.0
"""Prefetched blocks, which requests wait for loads, and whether one has to.

A request that is alone in its step is admitted with its loads. One that joins others
would make them wait, so loads that its own step cannot hide are prefetched first, and
it stays in the queue until they are about to end.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from weakref import WeakKeyDictionary

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_tier.scheduler.costs import Costs, QueuedLoad
from vllm.v1.kv_tier.scheduler.plan_builder import StepPlanBuilder
from vllm.v1.kv_tier.tuning import SchedulingTuning
from vllm.v1.request import Request


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


class Admit(Enum):
    """The decision on a request with a prefix hit."""

    NOW = auto()
    """It joins the step, which loads its missing blocks."""
    LATER = auto()
    """Some of its missing blocks are prefetched, and it waits."""
    WITHOUT_ROOM = auto()
    """It waits for free blocks, like upstream's requests."""


@dataclass(frozen=True)
class Decision:
    admit: Admit
    num_prefetch: int = 0
    """How many of its missing blocks to prefetch now."""
    is_part: bool = False
    """Whether later plans prefetch more of them."""


@dataclass(frozen=True)
class Wait:
    """A request that waits for loads."""

    until: float = 0.0
    latest: float = 0.0
    """Time of the next decision at the latest, whatever other steps load meanwhile."""
    num_waits: int = 0
    """How often it has begun to wait."""
    num_blocks: int = 0
    """Blocks that its own step will load, besides those prefetched."""
    hidden_s: float = 0.0
    """Seconds of these loads that its step will hide."""
    prefetched_by: int = 0
    """Last plan that prefetches for it."""
    is_part: bool = False
    """Whether the next plan must prefetch more before this one's loads have ended, to
    keep the link busy."""


class LoadAdmission:
    """Decides which requests wait for loads, and remembers them.

    Args:
        costs: Costs of loads.
        prefetches: Blocks that are being prefetched.
        builder: The plan that is being built.
        tuning: Limits of waiting.
        num_spare: Device blocks that prefetches leave to running requests.

    """

    def __init__(
        self,
        costs: Costs,
        prefetches: Prefetches,
        builder: StepPlanBuilder,
        tuning: SchedulingTuning,
        num_spare: int,
    ) -> None:
        self._costs = costs
        self._prefetches = prefetches
        self._builder = builder
        self._tuning = tuning
        self.num_spare = num_spare
        # Weak, since the tier is not notified of aborted requests.
        self._waits: WeakKeyDictionary[Request, Wait] = WeakKeyDictionary()

    def decide(
        self,
        request: Request,
        hits: Sequence[KVCacheBlock],
        num_targets: int,
        num_new_tokens: int,
        num_free: int,
        among_others: bool,
    ) -> Decision:
        """Decide whether `request` joins the step.

        Args:
            request: The request of the hit.
            hits: Its blocks on the device, including those that prefetches are still
                filling (`last_prefetch`).
            num_targets: Blocks that only the host has, without a load in flight. 0 also
                if all of them are prefetched and the request waits for that.
            num_new_tokens: Tokens that the step would compute for it.
            num_free: Device blocks that loads could take now.
            among_others: Whether the step has other requests, which would wait too.

        """
        now = Decision(Admit.NOW)
        if num_targets > num_free:
            # This step has freed too many of the free blocks, and still uses them.
            now = Decision(Admit.WITHOUT_ROOM)
        if not among_others:
            return now
        hidden_s = self._costs.hidden_s(num_new_tokens)
        last = self.last_prefetch(hits)
        wait = self._waits.get(request, Wait())
        # Requests that went first may have taken its blocks, so the number of waits is
        # limited.
        num_parts = (len(hits) + num_targets) // self._tuning.max_prefetch
        if wait.num_waits >= self._tuning.max_waits + num_parts or not self._stalls(
            last, num_targets, hidden_s
        ):
            return now
        num_kept = self._prefetches.num_kept(hits) + self.num_waited_for(request)
        room = num_free - num_kept
        if num_targets > room:
            # The free blocks are kept for others.
            self._waits[request] = Wait(num_waits=wait.num_waits)
            return Decision(Admit.WITHOUT_ROOM)
        num_prefetch = self._num_prefetch(num_targets, hidden_s)
        # Leave blocks for running requests. The rest is loaded in the request's own
        # step.
        num_prefetch = min(num_prefetch, max(0, room - self.num_spare))
        if not num_prefetch and not self._waits_for_link(last):
            return now
        if num_prefetch > self._tuning.max_prefetch:
            return Decision(Admit.LATER, self._tuning.max_prefetch, is_part=True)
        return Decision(Admit.LATER, num_prefetch)

    def begin_wait(
        self,
        request: Request,
        hits: Sequence[KVCacheBlock],
        num_left: int,
        num_new_tokens: int,
        prefetched_by: int,
        is_part: bool = False,
    ) -> None:
        """Record that `request` waits, and that its prefetches are queued.

        Args:
            request: As in `decide`.
            hits: Its blocks on the device.
            num_left: Blocks that its own step loads, or that later plans prefetch.
            num_new_tokens: As in `decide`.
            prefetched_by: The plan that prefetches for it, or 0.
            is_part: As in `Decision`.

        """
        hidden_s = self._costs.hidden_s(num_new_tokens)
        wait = Wait(
            num_waits=self._waits.get(request, Wait()).num_waits + 1,
            num_blocks=num_left,
            hidden_s=hidden_s,
            prefetched_by=prefetched_by or self.last_prefetch(hits),
            is_part=is_part,
        )
        end = self._end(wait)
        latest = end + max(0.0, end - self._costs.clock())
        self._waits[request] = replace(wait, until=end, latest=latest)

    def end_wait(self, request: Request) -> None:
        """Record that `request` joins the step."""
        self._waits.pop(request, None)

    def is_loading(self, request: Request) -> bool:
        """Whether `request` waits for loads in flight."""
        wait = self._waits.get(request) if self._waits else None
        if wait is None:
            return False
        return self._costs.stalls(min(wait.latest, self._end(wait)))

    def num_waited_for(self, without: Request | None = None) -> int:
        """Blocks that waiting requests, except `without`, will load when they join."""
        if not self._waits:
            return 0
        # Some may have been aborted since.
        limit = self._costs.clock() - self._tuning.claim_within_s
        return sum(
            wait.num_blocks
            for request, wait in self._waits.items()
            if wait.until > limit and request is not without
        )

    def last_prefetch(self, hits: Sequence[KVCacheBlock]) -> int:
        """Latest plan, not known to have ended, that prefetches one of `hits`."""
        if not self._prefetches:
            return 0
        last = max(map(self._builder.prefetched_by, hits), default=0)
        return last if last > self._builder.prefetch_fence else 0

    def _end(self, wait: Wait) -> float:
        end = self._prefetches.end_of(wait.prefetched_by)
        if wait.is_part:
            return end - self._tuning.max_prefetch * self._costs.load_s / 2
        if wait.num_blocks:
            # Loads of steps go before loads ahead. If no step loads, waiting longer
            # does not make its own loads shorter.
            own = self._costs.end_of(wait.num_blocks) - wait.hidden_s
            end = max(end, min(own, self._costs.end_of(0)))
        return end

    def _waits_for_link(self, last: int) -> bool:
        """Whether a request without further prefetches gains by waiting."""
        return self._stalls(last, 0, 0.0) or self._costs.stalls(self._costs.end_of(0))

    def _stalls(self, last: int, num_targets: int, hidden_s: float) -> bool:
        # A step waits for prefetches at its start, and those of the current plan have
        # not begun.
        costs = self._costs
        if last and (
            last == self._builder.seq or costs.stalls(self._prefetches.end_of(last))
        ):
            return True
        return num_targets > 0 and costs.stalls(costs.end_of(num_targets), hidden_s)

    def _num_prefetch(self, num_targets: int, hidden_s: float) -> int:
        """How many of a request's missing blocks must be prefetched."""
        load_s = self._costs.load_s
        num_hidden = int(hidden_s / load_s) if load_s else 0
        if num_targets <= num_hidden:
            return 0
        return min(
            num_targets, max(num_targets - num_hidden, self._tuning.min_prefetch)
        )
