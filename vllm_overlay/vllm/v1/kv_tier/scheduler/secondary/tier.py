# SPDX-License-Identifier: Apache-2.0
"""One secondary tier, as the scheduler sees it.

What it is known to have (`PresenceIndex`), what reads from it cost and whether it
answers in time (`ReadCostModel`).
"""

import math
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, islice
from statistics import median_high, median_low

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.kv_tier.layout import SecondaryLayout, SecondaryTier
from vllm.v1.kv_tier.scheduler.costs import Costs
from vllm.v1.kv_tier.scheduler.secondary.jobs import object_keys
from vllm.v1.kv_tier.stats import SecondaryStats
from vllm.v1.kv_tier.tuning import SchedulingTuning

logger = init_logger(__name__)

Wanted = tuple[BlockHashWithGroupId, int]
"""A block that a request lacks: its key, and the prefix tokens up to its end. A plain
tuple, since Python's garbage collector stops tracking those after one look: thousands
of requests may wait, with hundreds of blocks each."""


class Tier:
    """A secondary tier of this engine.

    Args:
        index: Its index in the order in which tiers are asked.
        settings: How it was opened.
        layout: Limits.
        costs: Costs of loads and of compute.
        tuning: When it is not used.

    """

    def __init__(
        self,
        index: int,
        settings: SecondaryTier,
        layout: SecondaryLayout,
        costs: Costs,
        tuning: SchedulingTuning,
    ) -> None:
        self.index = index
        self.settings = settings
        self.stats = SecondaryStats()
        self.presence = PresenceIndex(layout.max_known)
        self.reads = ReadCostModel(settings, costs, self.stats, tuning)
        self.num_filling = 0
        """Slots that are being filled from it."""
        self.num_hit = 0
        """Blocks from it that a request has hit, since the reader reset this."""

    def ask(self, wanted: Sequence[Wanted]) -> int:
        """Ask which of these it has. Returns the number of the question."""
        self.reads.record_question()
        return self.settings.lookup.ask(object_keys([key for key, _ in wanted]))

    def record_writes(
        self, keys: Sequence[BlockHashWithGroupId], done: Sequence[bool]
    ) -> None:
        """Record which of `keys` a job has written."""
        # Requests that asked for these keys before got a negative answer.
        if written := list(compress(keys, done)):
            self.settings.lookup.mark_present(object_keys(written))
        for key, is_written in zip(keys, done):
            if is_written:
                self.presence.mark_present(key)
            else:
                self.presence.notify(key)

    def take_answer(
        self, number: int, wanted: Sequence[Wanted], until: float
    ) -> "Answer | None":
        """The answer to a question; None if there is none yet.

        Args:
            number: Number of the question.
            wanted: As in `ask`.
            until: How long to wait for the answer, in seconds of `time.monotonic`.

        """
        answer = self.settings.lookup.take_answer(number, until)
        return None if answer is None else Answer(self.presence, wanted, answer)


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

    def record_missing(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Record that the tier answers that it does not have `keys`."""
        known = self.keys
        for key in keys:
            # A hot path: each new block of each prompt.
            if key in known:
                self.mark_absent(key)

    def notify(self, key: BlockHashWithGroupId) -> None:
        """Call the listeners."""
        for listener in self.listeners:
            listener(key)

    def close(self) -> None:
        """Forget everything, since the tier is not used any more."""
        self._is_closed = True
        self.keys.clear()


class Answer:
    """Which blocks a tier says it has. Steps take it in in parts.

    Args:
        presence: Keys that the tier is known to have.
        wanted: Blocks for which it was asked.
        is_there: Whether it has each of the first of them: a question may be answered
            in part, or not at all.

    """

    def __init__(
        self, presence: PresenceIndex, wanted: Sequence[Wanted], is_there: list[bool]
    ) -> None:
        self._presence = presence
        self._pairs = zip(wanted, is_there)
        self.num_left = min(len(wanted), len(is_there))
        """Blocks that were not taken in."""

    def take(self, num: int) -> tuple[int, list[Wanted]]:
        """Take in the answer for up to `num` more blocks.

        What is missing is recorded: a restarted server has lost everything.

        Returns:
            For how many, and those of them that the tier has.

        """
        num = min(num, self.num_left)
        self.num_left -= num
        pairs = list(islice(self._pairs, num))
        self._presence.record_missing(
            key for (key, _), is_there in pairs if not is_there
        )
        return num, [wanted for wanted, is_there in pairs if is_there]


class Arrivals:
    """Blocks that were read from tiers into slots, and that no request has hit yet.

    Args:
        max_keys: Most blocks that are remembered. Older ones have left the host.

    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._tier_of: dict[BlockHashWithGroupId, Tier] = {}

    def add(self, key: BlockHashWithGroupId, tier: Tier) -> None:
        """Record that `key` was read from `tier`."""
        self._tier_of[key] = tier
        if len(self._tier_of) > self._max_keys:
            del self._tier_of[next(iter(self._tier_of))]

    def record_hit(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Count those of `keys` that a request hits for the first time."""
        if self._tier_of:
            for key in keys:
                if (tier := self._tier_of.pop(key, None)) is not None:
                    tier.num_hit += 1

    def clear(self) -> None:
        """Forget all blocks."""
        self._tier_of.clear()


class ReadCostModel:
    """What reads from one secondary tier cost, and whether they are worth it.

    Args:
        tier: The tier.
        costs: Costs of loads and of compute.
        stats: Counts late requests.
        tuning: When a tier is not used.

    """

    def __init__(
        self,
        tier: SecondaryTier,
        costs: Costs,
        stats: SecondaryStats,
        tuning: SchedulingTuning,
    ) -> None:
        self._stats = stats
        self._tier = tier
        self._costs = costs
        self._tuning = tuning
        # Seconds to fetch a block in the last jobs, and their median, since single jobs
        # may be slowed down by other disk access. Cached, since it is used for each
        # block to fetch. 0 if unknown.
        self._fetched_s: deque[float] = deque(maxlen=tuning.num_fetches)
        self._fetch_s = 0.0
        self._waits = WaitTimes(tuning)
        self._measured_at = self._asked_at = -math.inf
        self._under_way: deque[int] = deque()
        self._head_since = 0.0
        # Number of outputs without the report of a job that should have ended.
        self._num_silent = 0
        self._num_late = 0
        self._last_came = -math.inf
        self._closed_until = 0.0
        self._was_dear = False
        self.meets = False
        """Whether requests compute while it is read, so that a slow tier is read, too:
        as much as computing leaves time for."""
        self._told_at = -math.inf

    def is_used(self, now: float) -> bool:
        """Whether the tier is read from."""
        return self.is_open(now) and self.is_worth_it

    def is_closed(self, now: float) -> bool:
        """Whether the tier is read from for no request."""
        return not (self.is_open(now) if self.meets else self.is_used(now))

    def is_open(self, now: float) -> bool:
        """Whether it is used. After it was too slow, it is not for a while."""
        return now >= self._closed_until

    def is_worth_meeting(self, num_blocks: int) -> bool:
        """Whether a request that computes `num_blocks` meanwhile may gain by an answer.

        Returns True from time to time in any case, as `is_worth_asking`.
        """
        if not self._prefill_s:
            return True
        retry_at = self._asked_at + self._tuning.retry_store_s
        is_gain = num_blocks * self._prefill_s > self._tier.lookup.ask_s + self._fetch_s
        return is_gain or self._costs.clock() >= retry_at

    def is_worth_asking(self, num_blocks: int, is_idle: bool) -> bool:
        """Whether fetching `num_blocks` would save more time than an answer takes.

        Returns True from time to time in any case, since answers may have become
        faster.

        Args:
            num_blocks: Blocks that a request lacks.
            is_idle: As in `gain_s`.

        """
        if not self._prefill_s:
            return True
        retry_at = self._asked_at + self._tuning.retry_store_s
        is_gain = self.gain_s(num_blocks, is_idle) > self._tier.lookup.ask_s
        return is_gain or self._costs.clock() >= retry_at

    def gain_s(self, num_blocks: int, is_idle: bool) -> float:
        """Estimated seconds by which fetching `num_blocks` beats computing them.

        Args:
            num_blocks: Blocks that a request lacks.
            is_idle: The engine runs nothing else, so the time of a wait is lost.
                Otherwise other requests use it.

        """
        if not self._prefill_s:
            return math.inf
        each = self._prefill_s - self._costs.load_s
        if not self.is_known:
            return num_blocks * each
        # A waiting request joins a later step, which takes its time even if it computes
        # little.
        gain_s = num_blocks * (each - self._fetch_s) - self._costs.least_join_s
        if is_idle:
            gain_s -= self._waits.beyond_s(num_blocks, self._costs.clock())
        return gain_s

    def record_question(self) -> None:
        """Record that the tier is asked."""
        self._asked_at = self._costs.clock()

    @property
    def fetch_s(self) -> float:
        """Seconds to fetch a block, as measured last; 0 if unknown."""
        return self._fetch_s

    @property
    def is_known(self) -> bool:
        """Whether the time for a block is known.

        If it is too long, it is forgotten after a while.
        """
        retry_at = self._measured_at + self._tuning.remeasure_s
        return self._fetch_s > 0 and not (
            self._is_dear and self._costs.clock() >= retry_at
        )

    def job_size(self, num_blocks: int) -> int:
        """Blocks of a job, at least `num_blocks`.

        At the end of a job threads wait for each other, which matters for short ones.
        """
        if not self.is_known:
            return num_blocks
        return max(num_blocks, int(self._tuning.fetch_job_s / self._fetch_s))

    def begin_fetch(self, num_blocks: int) -> None:
        """Record that a job of `num_blocks` begins, after those before have ended."""
        if not self._under_way:
            self._head_since = self._costs.clock()
        self._under_way.append(num_blocks)

    def record_output(self) -> None:
        """Record that the output of a step has come, with all reports until then."""
        self._num_silent = self._num_silent + 1 if self._is_behind else 0

    @property
    def is_overdue(self) -> bool:
        """Whether a job takes longer than computing its blocks.

        Steps may take longer than either, and the report comes with one of the next
        outputs.
        """
        return self._is_behind and self._num_silent >= self._tuning.settled_outputs

    @property
    def _is_behind(self) -> bool:
        prefill_s = self._prefill_s
        if not self._under_way or not prefill_s:
            return False
        limit_s = max(self._tuning.patience_s, self._under_way[0] * prefill_s)
        return self._costs.clock() > self._head_since + limit_s

    @property
    def is_worth_it(self) -> bool:
        """Whether fetching a block is faster than computing it, as far as is known."""
        return not (self._is_dear and self.is_known)

    @property
    def _is_dear(self) -> bool:
        return 0 < self._prefill_s < self._fetch_s + self._costs.load_s

    @property
    def _prefill_s(self) -> float:
        """Seconds to compute a block; 0 if it does not matter."""
        return 0.0 if self._tier.fetches_always else self._costs.compute_s

    def record_fetch(self, done: Sequence[bool], seconds: float) -> None:
        """Record the results of a job."""
        now, num_come = self._costs.clock(), sum(done)
        self._stats.record_job("get", len(done), seconds)
        self._stats.loaded_blocks += num_come
        self._stats.missed_blocks += len(done) - num_come
        self._under_way.popleft()
        self._head_since = now
        if num_come:
            self._num_late, self._last_came = 0, now
            if not self.is_known:
                self._fetched_s.clear()
            self._fetched_s.append(seconds / num_come)
            self._fetch_s = median_high(self._fetched_s)
            self._measured_at = now
            self._tell_if_dear(now)

    def _tell_if_dear(self, now: float) -> None:
        """Log once that it is slower than computing, if that was measured."""
        was_dear = self._was_dear
        self._was_dear = self._is_dear and self._costs.prefill_s > 0
        may_tell = now >= self._told_at + self._tuning.tell_again_s and not self.meets
        if self._was_dear and not was_dear and may_tell:
            self._told_at = now
            logger.warning(
                "KV tier: secondary tier %s takes %.2f ms to bring a block to the "
                "device, which takes %.2f ms to compute. It is not read from, and is "
                "measured again every %d seconds. docs/secondary-tiers.md says when it "
                "pays.",
                self._tier.name,
                (self._fetch_s + self._costs.load_s) * 1e3,
                self._prefill_s * 1e3,
                self._tuning.remeasure_s,
            )

    def record_wait(self, seconds: float, num_blocks: int) -> None:
        """Record how long a request waited for `num_blocks`, alone in the engine."""
        beyond_s = seconds - num_blocks * self._fetch_s
        self._waits.add(num_blocks, beyond_s, self._costs.clock())

    def num_in_time(self, num_before: int) -> int:
        """How many more blocks can be fetched in time, after `num_before` others.

        In time means faster than computing, and within the deadline.
        """
        if self.is_overdue or not self.is_worth_it:
            return 0
        if not self.is_known:
            return sys.maxsize
        return max(0, math.ceil(self._tier.deadline_s / self._fetch_s) - 1 - num_before)

    def record_late(self, since: float, now: float) -> None:
        """Record that a request, waiting since `since`, goes on without its blocks."""
        self._stats.late_requests += 1
        if self._last_came >= since or not self.is_open(now):
            # It is busy, but delivers to others. Or it is not used any more, and the
            # request had asked before.
            return
        self._num_late += 1
        if self._num_late < self._tuning.max_late_fetches:
            return
        self._num_late = 0
        self._closed_until = now + self._tuning.retry_store_s
        logger.error(
            "KV tier: secondary tier %s is too slow: %d requests in a row went on "
            "without it, after at most %g ms. It is not used for %d seconds. Check its "
            "disk or server, or raise deadline_ms in secondary_tiers.",
            self._tier.name,
            self._tuning.max_late_fetches,
            self._tier.deadline_s * 1e3,
            self._tuning.retry_store_s,
        )


class WaitTimes:
    """Time that requests wait in addition to reading: for reports and further planning.

    It depends on the length of the prefix, since long ones are looked up several times.
    So it is kept by the bit length of the number of blocks.

    Args:
        tuning: Number of waits that count, and for how long.

    """

    def __init__(self, tuning: SchedulingTuning) -> None:
        self._tuning = tuning
        # End time and seconds of each.
        self._waits: dict[int, deque[tuple[float, float]]] = {}

    def add(self, num_blocks: int, seconds: float, now: float) -> None:
        """Record that a request for `num_blocks` waited `seconds` beyond reading."""
        last = deque[tuple[float, float]](maxlen=self._tuning.num_fetches)
        waits = self._waits.setdefault(num_blocks.bit_length(), last)
        waits.append((now, max(0.0, seconds)))

    def beyond_s(self, num_blocks: int, now: float) -> float:
        """Expected additional seconds for `num_blocks`; 0 if unknown or outdated.

        A single measurement is not enough, since it may have been disturbed.
        """
        waits = self._waits.get(num_blocks.bit_length())
        if waits is None or len(waits) < 2:
            return 0.0
        last, _ = waits[-1]
        if now >= last + self._tuning.retry_store_s:
            return 0.0
        return median_low(seconds for _, seconds in waits)
