# SPDX-License-Identifier: Apache-2.0
"""The tiers below the host, as what blocks are fetched from: what it costs, and whether
it answers in time."""

import math
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median_high, median_low
from typing import NamedTuple, Protocol

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.kv_tier.scheduling.below import SecondaryTier, object_keys
from vllm.v1.kv_tier.scheduling.costs import Costs
from vllm.v1.kv_tier.scheduling.tuning import SchedulingTuning
from vllm.v1.kv_tier.stats import SecondaryStats
from vllm.v1.request import Request

logger = init_logger(__name__)


class Wanted(NamedTuple):
    """A block that a request lacks."""

    key: BlockHashWithGroupId
    num_tokens: int
    """Prefix tokens that it covers."""


class Learns(Protocol):
    """Learns what the tiers below turn out to have."""

    def was_found(
        self,
        request: Request,
        keys: Sequence[BlockHashWithGroupId],
        num_tokens: int,
        tier: int,
    ) -> None:
        """A tier says, and does not promise, that it has `keys`, of the first
        `num_tokens` tokens of a request."""

    def were_missing(self, keys: Iterable[BlockHashWithGroupId], tier: int) -> None:
        """A tier says that it does not have `keys`."""

    def is_below(self, key: BlockHashWithGroupId, tier: int) -> None:
        """A tier has `key`."""

    def came(self, key: BlockHashWithGroupId, tier: int) -> None:
        """`key` came from a tier into a slot."""

    def is_gone(self, key: BlockHashWithGroupId, tier: int) -> None:
        """A tier does not have `key`, or not whole."""


class Source:
    """One tier below.

    Args:
        index: Its place in the order in which tiers are asked.
        tier: As it was opened.
        costs: Of loads and of computing.
        stats: Counts what is late.
        tuning: When a tier is left alone.

    """

    def __init__(
        self,
        index: int,
        tier: SecondaryTier,
        costs: Costs,
        stats: SecondaryStats,
        tuning: SchedulingTuning,
    ) -> None:
        self.index = index
        self.deadline_s = tier.deadline_s
        """How long a request waits for it: half of it for an answer at most."""
        self._stats = stats
        self._tier = tier
        self._costs = costs
        self._tuning = tuning
        # Seconds to fetch a block, of the last jobs, and their median: one that met
        # something else on the disk says nothing of the next. Each block that is to be
        # fetched asks for it. 0: unknown.
        self._fetched_s: deque[float] = deque(maxlen=tuning.num_fetches)
        self._fetch_s = 0.0
        self._waits = Waits(tuning)
        self._measured_at = self._asked_at = -math.inf
        self._under_way: deque[int] = deque()
        self._head_since = 0.0
        # Outputs that did not tell of a job which should have ended.
        self._num_silent = 0
        self._num_late = 0
        self._last_came = -math.inf
        self._closed_until = 0.0
        self._was_dear = False
        self._told_at = -math.inf

    def is_open(self, now: float) -> bool:
        """Whether it is asked. It is left alone for a while where it was too slow."""
        return now >= self._closed_until

    def is_worth_asking(self, num_blocks: int, is_idle: bool) -> bool:
        """Whether so many blocks, if they are there, come sooner than they are computed
        by more than an answer takes. Seldom it is asked all the same: answers may have
        become faster.

        Args:
            num_blocks: That a request lacks.
            is_idle: As of `gain_s`.

        """
        if not self._prefill_s:
            return True
        retry_at = self._asked_at + self._tuning.retry_store_s
        is_gain = self.gain_s(num_blocks, is_idle) > self._tier.asker.ask_s
        return is_gain or self._costs.clock() >= retry_at

    def gain_s(self, num_blocks: int, is_idle: bool) -> float:
        """Seconds by which so many blocks come sooner than they are computed, as far as
        is known.

        Args:
            num_blocks: That a request lacks.
            is_idle: The engine runs nothing else: nobody uses the time of a wait. Where
                others run, they do, and requests wait for one another anyway.

        """
        if not self._prefill_s:
            return math.inf
        each = self._prefill_s - self._costs.load_s
        if not self.is_known:
            return num_blocks * each
        # A request that waits joins a later step, which takes its time although hardly
        # anything is left to compute.
        gain_s = num_blocks * (each - self._fetch_s) - self._costs.least_join_s
        if is_idle:
            gain_s -= self._waits.beyond_s(num_blocks, self._costs.clock())
        return gain_s

    def ask(self, wanted: Sequence[Wanted]) -> int:
        """Ask which of these are there. Returns the number of the question."""
        self._asked_at = self._costs.clock()
        return self._tier.asker.ask(object_keys([each.key for each in wanted]))

    def take_answer(self, number: int, until: float) -> list[bool] | None:
        """For each block of a question whether it is there; None: no answer yet,
        although it was waited for until then (`time.monotonic`)."""
        return self._tier.asker.take_answer(number, until)

    @property
    def is_known(self) -> bool:
        """Whether it was measured what a block costs. One that costs too much is
        measured anew after a while."""
        retry_at = self._measured_at + self._tuning.remeasure_s
        return self._fetch_s > 0 and not (
            self._is_dear and self._costs.clock() >= retry_at
        )

    def job_size(self, num_blocks: int) -> int:
        """Blocks of a job, so many at least. At the end of a job threads wait for one
        another, which takes a part of the time of a short one."""
        if not self.is_known:
            return num_blocks
        return max(num_blocks, int(self._tuning.fetch_job_s / self._fetch_s))

    def begins(self, num_blocks: int) -> None:
        """A job begins that fetches so many blocks, when those before have ended."""
        if not self._under_way:
            self._head_since = self._costs.clock()
        self._under_way.append(num_blocks)

    def heard(self) -> None:
        """The output of a step has come, with all that ranks told until it ended."""
        self._num_silent = self._num_silent + 1 if self._is_behind else 0

    @property
    def is_overdue(self) -> bool:
        """Whether a job takes longer than to compute its blocks. Steps may take longer
        than either, and it is told of with one of the next."""
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
        """Whether a block comes sooner than it is computed, as far as is known."""
        return not (self._is_dear and self.is_known)

    @property
    def _is_dear(self) -> bool:
        return 0 < self._prefill_s < self._fetch_s + self._costs.load_s

    @property
    def _prefill_s(self) -> float:
        """Seconds to compute a block; 0: of no interest."""
        return 0.0 if self._tier.fetches_always else self._costs.compute_s

    def came(self, done: Sequence[bool], seconds: float) -> None:
        """Blocks were fetched, or not, in so many seconds together."""
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
        """Say why it brings nothing from now on. What computing takes was measured."""
        was_dear = self._was_dear
        self._was_dear = self._is_dear and self._costs.prefill_s > 0
        may_tell = now >= self._told_at + self._tuning.tell_again_s
        if self._was_dear and not was_dear and may_tell:
            self._told_at = now
            logger.warning(
                "KV tier: the tier below (%s) takes %.2f ms to bring a block to the "
                "device, which takes %.2f to compute: it is left alone, and measured "
                "again every %d seconds. See docs/secondary-tiers.md for when it pays.",
                self._tier.name,
                (self._fetch_s + self._costs.load_s) * 1e3,
                self._prefill_s * 1e3,
                self._tuning.remeasure_s,
            )

    def was_waited_for(self, seconds: float, num_blocks: int) -> None:
        """A request had so many blocks after so many seconds, while the engine ran
        nothing else and fetched nothing for others."""
        beyond_s = seconds - num_blocks * self._fetch_s
        self._waits.add(num_blocks, beyond_s, self._costs.clock())

    def num_in_time(self, num_before: int) -> int:
        """How many blocks come sooner than they are computed, and within the deadline,
        as far as is known, behind so many others."""
        if self.is_overdue or not self.is_worth_it:
            return 0
        if not self.is_known:
            return sys.maxsize
        return max(0, math.ceil(self.deadline_s / self._fetch_s) - 1 - num_before)

    def is_late(self, since: float, now: float) -> None:
        """A request that has waited since then goes on without what has not come."""
        self._stats.late_requests += 1
        if self._last_came >= since or not self.is_open(now):
            # It brings others what they wait for: it is busy, and not dead. Or it is
            # left alone already, and these had asked before.
            return
        self._num_late += 1
        if self._num_late < self._tuning.max_late_fetches:
            return
        self._num_late = 0
        self._closed_until = now + self._tuning.retry_store_s
        logger.error(
            "KV tier: the tier below (%s) is too slow: %d requests in a row went on "
            "without it, after %g ms at most. It is not asked for %d seconds. Look "
            "after its disk or server, or raise deadline_ms in secondary_tiers.",
            self._tier.name,
            self._tuning.max_late_fetches,
            self.deadline_s * 1e3,
            self._tuning.retry_store_s,
        )


class Waits:
    """What requests wait for a tier below beyond the reading: steps hear of the end of
    jobs, and plan what is next.

    It is not the same for short prefixes and long ones, which are looked at more often,
    so it is kept by the bit length of their number of blocks.

    Args:
        tuning: How many waits say something, and for how long.

    """

    def __init__(self, tuning: SchedulingTuning) -> None:
        self._tuning = tuning
        # When each was over, and its seconds.
        self._waits: dict[int, deque[tuple[float, float]]] = {}

    def add(self, num_blocks: int, seconds: float, now: float) -> None:
        """A request that lacked so many blocks waited so many seconds beyond."""
        last = deque[tuple[float, float]](maxlen=self._tuning.num_fetches)
        waits = self._waits.setdefault(num_blocks.bit_length(), last)
        waits.append((now, max(0.0, seconds)))

    def beyond_s(self, num_blocks: int, now: float) -> float:
        """Seconds that a request waits beyond which lacks so many; 0: unknown, or not
        measured for long. A single one may have met something else."""
        waits = self._waits.get(num_blocks.bit_length())
        if waits is None or len(waits) < 2:
            return 0.0
        last, _ = waits[-1]
        if now >= last + self._tuning.retry_store_s:
            return 0.0
        return median_low(seconds for _, seconds in waits)
