# SPDX-License-Identifier: Apache-2.0
"""One secondary tier, as the scheduler sees it.

What it is known to have (`PresenceIndex`), and what is worth reading of it.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from statistics import median_high

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, get_group_id
from vllm.v1.kv_tier.layout import ReachableBlocks, SecondaryLayout, SecondaryTier
from vllm.v1.kv_tier.scheduler.costs import Costs
from vllm.v1.kv_tier.scheduler.secondary.jobs import object_keys
from vllm.v1.kv_tier.scheduler.slots import SlotTable
from vllm.v1.kv_tier.stats import SecondaryStats
from vllm.v1.kv_tier.tuning import SchedulingTuning

logger = init_logger(__name__)

Wanted = tuple[BlockHashWithGroupId, int]
"""A block that a request lacks: its key, and the prefix tokens up to its end. A plain
tuple, since Python's garbage collector stops tracking those after one look: thousands
of requests may wait, with hundreds of blocks each."""


@dataclass(frozen=True, eq=False)
class PoolView:
    """The block pool, as its secondary tiers see it."""

    layout: SecondaryLayout
    hash_size: int
    """Tokens of a block hash of a request."""
    table: SlotTable
    costs: Costs
    """Costs of loads and of compute, and the clock."""
    is_cached: Callable[[BlockHashWithGroupId], object]
    """Whether the device has a block."""
    tuning: SchedulingTuning
    can_jump: bool
    """Whether requests may compute while they are read for."""
    reachable: tuple[ReachableBlocks, ...] = ()
    slot_bytes: int = 0
    group_bytes: tuple[int, ...] = ()
    """These as in `KVTierLayout`."""

    def num_bytes(self, keys: Sequence[BlockHashWithGroupId]) -> int:
        """Bytes of the objects of these blocks, on all ranks together."""
        if not self.group_bytes:
            return len(keys) * self.slot_bytes
        return sum(self.group_bytes[get_group_id(key)] for key in keys)

    def is_there(self, key: BlockHashWithGroupId | None) -> bool:
        """Whether the device or the host has a block; False without a key."""
        return bool(key and (self.table.has(key) or self.is_cached(key)))


class PresenceIndex:
    """Keys that a tier is known to have, or had recently.

    Args:
        max_keys: Most keys that are remembered. The oldest are dropped.

    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._is_closed = False
        self.keys: OrderedDict[BlockHashWithGroupId, None] = OrderedDict()
        """Oldest first. Public, since testing a key must be cheap; change it with the
        methods."""
        self.listeners: list[Callable[[BlockHashWithGroupId], None]] = []
        """Called with each key that is known from now on, or no longer, or whose state
        is uncertain because a write of it failed."""

    def mark_present(self, key: BlockHashWithGroupId) -> None:
        """Record that the tier has `key`."""
        if self._is_closed:
            return
        if key in self.keys:
            self.keys.move_to_end(key)
            return
        self.keys[key] = None
        self.notify(key)
        if len(self.keys) > self._max_keys:
            self.notify(self.keys.popitem(last=False)[0])

    def mark_absent(self, key: BlockHashWithGroupId) -> None:
        """Record that the tier lacks `key`, or has it only in part."""
        self.keys.pop(key, None)
        self.notify(key)

    def notify(self, key: BlockHashWithGroupId) -> None:
        """Call the listeners."""
        for listener in self.listeners:
            listener(key)

    def close(self) -> None:
        """Forget everything, since the tier is not used any more."""
        self._is_closed = True
        self.keys.clear()


class Tier:
    """A secondary tier of this engine: how fast it is, and what makes it worth reading.

    The rule: nothing is begun that cannot arrive before computing would be there. A
    tier that breaks it is avoided for `remeasure_s`, and then tried with a few blocks.

    Args:
        index: Its index in the order in which tiers are asked.
        settings: How it was opened.
        pool: Has costs and limits.

    """

    def __init__(self, index: int, settings: SecondaryTier, pool: PoolView) -> None:
        self.index = index
        self.settings = settings
        self.stats = SecondaryStats()
        self.presence = PresenceIndex(pool.layout.max_known)
        self.num_hit = 0
        """Blocks from it that a request has hit, since the reader reset this."""
        self._pool = pool
        self._costs = pool.costs
        self._tuning = tuning = pool.tuning
        self._max_job = pool.layout.max_job
        # Then a slow tier is read, too: as much as computing leaves time for.
        self._can_meet = pool.can_jump
        # Seconds to fetch a block in the last jobs.
        self._fetched_s: deque[float] = deque(maxlen=tuning.num_fetches)
        self.fetch_s = 0.0
        """Their median, since single jobs may be slowed down by other disk access; 0 if
        unknown."""
        self._came_at = self._late_at = self._tried_at = -math.inf
        self._asked_at = self._told_at = -math.inf
        self.num_under_way = 0
        """Blocks that are being fetched, however late that ends."""
        # Sizes of their jobs, and since when the first of them is read.
        self._under_way: deque[int] = deque()
        self._head_since = 0.0
        # Number of outputs without the report of a job that should have ended.
        self._num_silent = 0

    # ---------------------------------------------------------- what is measured

    def begin_fetch(self, num_blocks: int) -> None:
        """Record that a job of `num_blocks` begins, after those before have ended."""
        if not self._under_way:
            self._head_since = self._costs.clock()
        self._under_way.append(num_blocks)
        self.num_under_way += num_blocks

    def record_fetch(self, done: Sequence[bool], seconds: float) -> None:
        """Record the results of a job."""
        now, num_come = self._costs.clock(), sum(done)
        self.stats.record_job("get", len(done), seconds)
        self.stats.loaded_blocks += num_come
        self.stats.missed_blocks += len(done) - num_come
        self.num_under_way -= self._under_way.popleft()
        self._head_since, self._num_silent = now, 0
        if num_come:
            if self._is_slow and now >= self._came_at + self._tuning.remeasure_s:
                self._fetched_s.clear()
            self._came_at, self._late_at = now, -math.inf
            self._fetched_s.append(seconds / num_come)
            self.fetch_s = median_high(self._fetched_s)
            if self._is_slow and self._costs.prefill_s and not self._can_meet:
                self._log_once(now)

    def record_output(self) -> None:
        """Record that the output of a step has come, with all reports until then."""
        self._num_silent = self._num_silent + 1 if self._is_behind else 0

    def record_late(self, since: float) -> None:
        """Record that a request, waiting since `since`, goes on without its blocks."""
        self.stats.late_requests += 1
        if self._came_at < since:
            # Otherwise it is busy, but delivers to others.
            self._late_at = self._costs.clock()
            self._log_once(self._late_at)

    def record_writes(
        self, keys: Sequence[BlockHashWithGroupId], done: Sequence[bool], seconds: float
    ) -> None:
        """Record which of `keys` a job has written."""
        stats, num_stored = self.stats, sum(done)
        stats.record_job("put", len(done), seconds)
        stats.stored_blocks += num_stored
        stats.refused_blocks += len(done) - num_stored
        # Requests that asked for these keys before got a negative answer.
        if stored := [*compress(keys, done)]:
            stats.stored_bytes += self._pool.num_bytes(stored)
            self.settings.lookup.mark_present(object_keys(stored))
        for key, is_written in zip(keys, done):
            if is_written:
                self.presence.mark_present(key)
            else:
                self.presence.notify(key)

    # ------------------------------------------------------------------ the rule

    def is_avoided(self, meets: bool) -> bool:
        """Whether nothing is begun: it does not deliver, or is slower than computing.

        Args:
            meets: The request computes meanwhile, and may gain by a slow tier, too.

        """
        last = self._late_at
        if self._is_slow and not meets:
            last = max(last, self._came_at)
        is_recent = self._costs.clock() < last + self._tuning.remeasure_s
        # Steps may take longer than jobs, and reports come with the next outputs.
        is_silent = self._num_silent >= self._tuning.settled_outputs
        return is_recent or (is_silent and self._is_behind)

    def begin_ask(self, num_blocks: int, meets: bool) -> bool:
        """Whether reading `num_blocks` may save more time than an answer takes.

        True from time to time in any case, since answers may have become faster.
        """
        now = self._costs.clock()
        is_gain = self._gain_s(num_blocks, meets) > self.settings.lookup.ask_s
        if self.is_avoided(meets) or not (
            is_gain or now >= self._asked_at + self._tuning.retry_store_s
        ):
            return False
        self._asked_at = now
        return True

    def most_to_wait_for(self, num_blocks: int) -> int:
        """How many of `num_blocks` more a request should wait for: those that come in
        time, if waiting is faster than computing."""
        if self.is_avoided(False) or self._gain_s(num_blocks, False) <= 0:
            return 0
        if not self.fetch_s:
            return num_blocks
        most = math.ceil(self.settings.deadline_s / self.fetch_s) - 1
        return most - self.num_under_way

    def most_to_meet(self, distance: float, is_first: bool) -> int:
        """How many of the last of `distance` blocks would arrive before a request has
        computed those before them.

        Args:
            distance: Blocks that it lacks.
            is_first: Nothing is read for it so far, so a jump costs it some more steps.

        """
        if self.is_avoided(True):
            return 0
        compute_s, num_before = self._costs.compute_s, self.num_under_way
        fetch_s = self.fetch_s or compute_s
        room_s = distance * compute_s - num_before * fetch_s
        most, now = int(room_s / (fetch_s + compute_s)), self._costs.clock()
        steps_s = self._tuning.meet_steps * self._costs.least_join_s
        if most < 1 or (is_first and most * compute_s < steps_s):
            # It may be faster by now.
            if num_before or now < self._tried_at + self._tuning.remeasure_s:
                return 0
            most = self._tuning.first_fetch
        self._tried_at = now
        return most

    @property
    def is_unknown(self) -> bool:
        """Whether a few blocks should tell if the others are worth waiting for."""
        return not self.fetch_s or self._is_slow

    @property
    def job_size(self) -> int:
        """Blocks of a job for which all threads of its store have work.

        At the end of a job threads wait for each other, which matters for short ones.
        """
        size = self._max_job
        if self.fetch_s:
            size = max(size, int(self._tuning.fetch_job_s / self.fetch_s))
        return min(size, self._tuning.max_ended)

    def _gain_s(self, num_blocks: int, meets: bool) -> float:
        """Seconds by which reading `num_blocks` may beat computing them."""
        if meets:
            return num_blocks * self._compute_s - self.fetch_s
        # What was slow, and is not avoided any more, is taken for unknown. A waiting
        # request joins a later step, which takes its time even if it computes little.
        fetch_s = 0.0 if self._is_slow else self.fetch_s
        each_s = self._compute_s - self._costs.load_s - fetch_s
        return num_blocks * each_s - self._costs.least_join_s

    @property
    def _compute_s(self) -> float:
        """Seconds to compute a block; infinite if they do not matter."""
        return math.inf if self.settings.fetches_always else self._costs.compute_s

    @property
    def _is_slow(self) -> bool:
        """Whether fetching a block took longer than computing it."""
        return self.fetch_s + self._costs.load_s > self._compute_s

    @property
    def _is_behind(self) -> bool:
        """Whether the first job takes longer than it should."""
        compute_s = self._compute_s
        if not self._under_way or math.isinf(compute_s):
            return False
        each_s = compute_s if self.fetch_s < compute_s else 2 * self.fetch_s
        limit_s = max(self._tuning.patience_s, self._under_way[0] * each_s)
        return self._costs.clock() > self._head_since + limit_s

    def _log_once(self, now: float) -> None:
        """Say why it is avoided, unless that was said a while ago."""
        if now < self._told_at + self._tuning.log_again_s:
            return
        self._told_at = now
        logger.warning(
            "KV tier: secondary tier %s is too slow: a block takes %.2f ms to the "
            "device, if it comes at all, and %.2f ms to compute. It is left alone, and "
            "tried again every %g seconds. docs/secondary-tiers.md says when it pays.",
            self.settings.name,
            (self.fetch_s + self._costs.load_s) * 1e3,
            self._costs.compute_s * 1e3,
            self._tuning.remeasure_s,
        )
