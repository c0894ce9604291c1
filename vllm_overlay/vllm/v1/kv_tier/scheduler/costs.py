# SPDX-License-Identifier: Apache-2.0
"""Measured costs of loads and of compute, and what follows from them.

Seconds to load a block come from the calibration at start and from prefetches, seconds
to compute one from prefill steps. The duration of steps in which requests join with
little to compute is measured too.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm.logger import init_logger
from vllm.v1.kv_tier.plan import StepReport
from vllm.v1.kv_tier.tuning import SchedulingTuning

logger = init_logger(__name__)


@dataclass(eq=False)
class QueuedLoad:
    """Loads of one plan, in flight until `end`, as far as the scheduler knows."""

    kind: str
    """`load` or `load_ahead`, as in `StepReport.times`."""
    seq: int
    num_blocks: int
    end: float
    """Estimated time of the end, later the time at which it was reported."""


class LoadQueue:
    """Loads in flight from host to device, and when they will end.

    Loads of a kind run one after the other, and those of a step before loads ahead,
    whenever they were queued. Each is estimated to end its own duration after the one
    before. A reported end corrects the estimates of all later ones.

    Args:
        clock: Monotonic clock in seconds.

    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._loads: deque[QueuedLoad] = deque()
        self._ahead: deque[QueuedLoad] = deque()

    @property
    def free_for_steps_at(self) -> float:
        """When the next loads of a step could begin."""
        return _last_end(self._loads, self.clock())

    def queue(
        self, kind: str, seq: int, num_blocks: int, seconds: float, not_before: float
    ) -> QueuedLoad:
        """Queue loads of `num_blocks`.

        Args:
            kind: As in `QueuedLoad`.
            seq: Number of their plan.
            num_blocks: Number of blocks.
            seconds: Their estimated duration.
            not_before: Estimated end of what they wait for.

        """
        now = self.clock()
        for queue in (self._loads, self._ahead):
            if queue and queue[-1].end <= now:
                # Their end was not reported, but they must have ended.
                queue.clear()
        begin = max(self.free_for_steps_at, not_before)
        if kind == "load":
            for ahead in self._ahead:
                if ahead.end > now:
                    ahead.end += seconds
            queue = self._loads
        else:
            begin = max(begin, _last_end(self._ahead, now))
            queue = self._ahead
        load = QueuedLoad(kind, seq, num_blocks, begin + seconds)
        queue.append(load)
        return load

    def record_end(self, kind: str, seq: int, load_s: float) -> None:
        """Note the reported end of loads, and so of all earlier ones of `kind`.

        Args:
            kind: As in `QueuedLoad`.
            seq: Number of their plan.
            load_s: Seconds for each block of later loads.

        """
        now = self.clock()
        queue = self._loads if kind == "load" else self._ahead
        while queue and queue[0].seq <= seq:
            load = queue.popleft()
            load.end = min(load.end, now)
        end = now
        for load in (*self._loads, *self._ahead):
            end += load.num_blocks * load_s
            load.end = min(load.end, end)


def _last_end(queue: Sequence[QueuedLoad], now: float) -> float:
    return max(now, queue[-1].end) if queue else now


class Costs:
    """Costs of loads and compute, and decisions that depend on them.

    Args:
        load_s: Seconds to load one block, as measured at start; 0 if unknown.
        max_stall_s: How long a step with other requests may wait for loads. Infinite:
            every load is waited for in its step.
        layerwise: Whether layers wait for their own part of a step's loads, so that
            loads are free while earlier layers compute.
        tokens_per_block: Tokens whose KV takes one block.
        tuning: How fast costs follow measurements.

    """

    def __init__(
        self,
        load_s: float,
        max_stall_s: float,
        layerwise: bool = False,
        tokens_per_block: float = 1.0,
        tuning: SchedulingTuning | None = None,
    ) -> None:
        self.load_s = load_s
        self.prefill_s = 0.0
        """Seconds to compute one block; 0 until measured."""
        self.join_s: dict[int, float] = {}
        """Seconds of a step in which requests join with little to compute, by the bit
        length of its number of tokens."""
        self.max_stall_s = max_stall_s
        self.layerwise = layerwise
        self._tokens_per_block = tokens_per_block
        self._tuning = tuning or SchedulingTuning()
        self._calibrated_s = load_s
        self._link = LoadQueue(time.monotonic)

    @property
    def clock(self) -> Callable[[], float]:
        """Monotonic clock in seconds."""
        return self._link.clock

    @clock.setter
    def clock(self, clock: Callable[[], float]) -> None:
        self._link.clock = clock

    def queue(
        self, seq: int, num_blocks: int, num_stores: int, prefetch: bool
    ) -> QueuedLoad:
        """Note that loads are queued.

        Args:
            seq: Number of their plan.
            num_blocks: Number of blocks to load.
            num_stores: Stores that must read these blocks first. They take about as
                long, but use the other direction of the link.
            prefetch: Whether they are for a request of a later step.

        """
        return self._link.queue(
            "load_ahead" if prefetch else "load",
            seq,
            num_blocks,
            num_blocks * self.load_s,
            not_before=self.clock() + num_stores * self.load_s,
        )

    def end_of(self, num_blocks: int) -> float:
        """When loads of `num_blocks` would end, if this step queued them."""
        return self._link.free_for_steps_at + num_blocks * self.load_s

    def stalls(self, end: float, hidden_s: float = 0.0) -> bool:
        """Whether this step would wait too long for loads until `end`.

        Args:
            end: Estimated end of the loads.
            hidden_s: Seconds that the step takes anyway before it waits for the last of
                them.

        """
        return end - self.clock() - hidden_s > self.max_stall_s

    def hidden_s(self, num_tokens: int) -> float:
        """Seconds for which a step computes while its own loads arrive.

        Args:
            num_tokens: Tokens that the joining request computes in it.

        """
        # A step without prefill may be one CUDA graph.
        if not self.layerwise or num_tokens <= 1:
            return 0.0
        # Larger steps are not replayed as graphs, and launching them takes longer than
        # computing.
        sizes = [size for size in self.join_s if size <= num_tokens.bit_length()]
        join_s = self.join_s[max(sizes)] if sizes else 0.0
        return max(join_s, num_tokens / self._tokens_per_block * self.prefill_s)

    @property
    def compute_s(self) -> float:
        """Seconds to compute one block: measured, or assumed until then."""
        return self.prefill_s or self._tuning.assumed_prefill_s * self._tokens_per_block

    @property
    def least_join_s(self) -> float:
        """Least seconds of a step in which a request joins; 0 if unknown."""
        return min(self.join_s.values(), default=0.0)

    @property
    def recompute(self) -> bool:
        """Whether computing a block takes less time than loading it."""
        return 0 < self.prefill_s < self.load_s

    def take_report(self, report: StepReport) -> None:
        """Take in the ranks' measurements."""
        self._take_loads(report)
        prefill = report.prefill
        if prefill.num_tokens:
            cost = prefill.seconds / prefill.num_tokens * self._tokens_per_block
            weight = self._tuning.cost_weight
            if not self.prefill_s:
                weight = 1.0
            elif cost < self.prefill_s:
                weight = self._tuning.faster_prefill_weight
            self.prefill_s += weight * (cost - self.prefill_s)
        for size, cost in report.joins.items():
            known = self.join_s.get(size, cost)
            weight = self._tuning.slow_join_weight if cost > known else 1
            self.join_s[size] = known + weight * (cost - known)

    def _take_loads(self, report: StepReport) -> None:
        weight = self._tuning.cost_weight
        ended = [key for key in report.times if key[0] in ("load", "load_ahead")]
        times = [report.times[key] for key in ended if key[0] == "load_ahead"]
        times = [time for time in times if time.num_blocks]
        if times:
            num_blocks = sum(time.num_blocks for time in times)
            cost = sum(time.seconds for time in times) / num_blocks
            self.load_s += weight * (cost - self.load_s)
        elif self.recompute:
            # Without loads nothing is measured, so return slowly to the calibrated
            # rate.
            self.load_s += weight * (self._calibrated_s - self.load_s)
        for kind, seq in _last_of_each_kind(ended):
            self._link.record_end(kind, seq, self.load_s)


def _last_of_each_kind(keys: Iterable[tuple[str, int]]) -> Iterable[tuple[str, int]]:
    return {kind: seq for kind, seq in sorted(keys)}.items()


def clean_window(
    num_blocks: int, num_slots: int, load_s: float, tuning: SchedulingTuning
) -> int:
    """How many of the next victims should be clean when steps allocate few.

    Args:
        num_blocks: Number of device blocks.
        num_slots: Number of host slots.
        load_s: Seconds to load a block; 0 if unknown.
        tuning: Limits.

    """
    window = min(int(tuning.clean_part * num_blocks), num_slots // 4)
    return min(window, int(tuning.clean_s / load_s)) if load_s > 0 else window


class LoadBreaker:
    """Skips the host while loads from it keep failing.

    Each failed load makes every running request start over, so an engine whose loads
    always fail would never answer. After some failures in a row lookups use the device
    only, for a time that doubles with each further failure. The next successful load
    ends this.

    Args:
        tuning: Number of failures, and times.

    """

    def __init__(self, tuning: SchedulingTuning) -> None:
        self._tuning = tuning
        self._num_failed = 0
        self._retry_s = tuning.retry_loads_s
        self._open_until = 0.0

    def take_report(self, report: StepReport, now: float) -> None:
        """Take in which loads failed and which succeeded."""
        if report.failed_load_seq is not None:
            self._num_failed += 1
            if self._num_failed >= self._tuning.max_failed_loads:
                self._open(now)
        elif self._num_failed and any(
            kind in ("load", "load_ahead") and time.num_blocks
            for (kind, _), time in report.times.items()
        ):
            if self._num_failed >= self._tuning.max_failed_loads:
                logger.info("KV tier: loads from host memory succeed again.")
            self._num_failed = 0
            self._retry_s = self._tuning.retry_loads_s

    def _open(self, now: float) -> None:
        if now >= self._open_until:
            logger.error(
                "KV tier: %d loads from host memory failed in a row. Prefix hits come "
                "from the device alone for %d seconds; look for the errors of the "
                "workers above.",
                self._num_failed,
                self._retry_s,
            )
        self._open_until = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, self._tuning.max_retry_loads_s)

    def is_open(self, now: float) -> bool:
        """Whether lookups must skip the host."""
        return now < self._open_until
