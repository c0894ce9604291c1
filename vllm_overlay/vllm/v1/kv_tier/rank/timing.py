# SPDX-License-Identifier: Apache-2.0
"""Measures how long steps take, and how long they wait for their loads."""

import time
from typing import TYPE_CHECKING

import torch

from vllm.v1.kv_tier.plan import PrefillTime, StepPlan
from vllm.v1.kv_tier.rank.copy_thread import Done
from vllm.v1.kv_tier.rank.tuning import RankTuning

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


def num_prefill_tokens(
    plan: StepPlan, scheduler_output: "SchedulerOutput", tuning: RankTuning
) -> int:
    """Tokens of a step that is mostly prefill and waits for no load, else 0."""
    num_tokens = scheduler_output.total_num_scheduled_tokens
    num_requests = len(scheduler_output.num_scheduled_tokens)
    least = max(tuning.prefill_tokens, num_requests * tuning.prefill_tokens_each)
    waits = plan.load_slots or plan.compute_after_loads
    return num_tokens if num_tokens >= least and not waits else 0


class JoinTimer:
    """Times the launch of steps in which requests join with little to compute.

    Such a step takes at least that long, and can hide loads for that time.

    Args:
        tuning: Limit of what counts as little.

    """

    def __init__(self, tuning: RankTuning) -> None:
        self._tuning = tuning
        self._begun: tuple[int, float] | None = None

    def begin(self, scheduler_output: "SchedulerOutput") -> None:
        """Start timing, after a step's copies and before its forward pass."""
        num_tokens = scheduler_output.total_num_scheduled_tokens
        num_requests = len(scheduler_output.num_scheduled_tokens)
        if num_requests < num_tokens < self._tuning.prefill_tokens:
            self._begun = num_tokens.bit_length(), time.perf_counter()

    def end(self) -> tuple[int, float] | None:
        """Stop timing: the forward pass is queued.

        Returns:
            The bit length of the step's number of tokens, and the seconds since
            `begin`; None if this step is not timed.

        """
        if self._begun is None:
            return None
        (size, begun), self._begun = self._begun, None
        return size, time.perf_counter() - begun


class PrefillTimer:
    """Times forward passes on the device, one at a time."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._begun, self._ended = Done(), Done()
        self._is_open = False

    def next_step(self, num_tokens: int) -> PrefillTime:
        """Start a step. Returns the time of one that ended since the last call.

        Args:
            num_tokens: Tokens of the step, or 0 not to time it.

        """
        time_taken = PrefillTime(0, 0.0)
        if self._num_tokens and self._ended.has_come():
            milliseconds = self._begun.event.elapsed_time(self._ended.event)
            time_taken = PrefillTime(self._num_tokens, milliseconds / 1e3)
            self._num_tokens = 0
        if num_tokens and not self._num_tokens:
            self._num_tokens = num_tokens
            self._begun, self._ended = Done(), Done()
            self._begun.record(torch.cuda.current_stream())
            self._is_open = True
        return time_taken

    def end_step(self) -> None:
        if self._is_open:
            self._is_open = False
            self._ended.record(torch.cuda.current_stream())


class LoadWait:
    """A wait of the compute stream for loads, and how long it took."""

    def __init__(self, done: Done) -> None:
        self._done = done
        self._begun: torch.cuda.Event | None = None

    def wait(self, stream: torch.cuda.Stream) -> None:
        self._begun = torch.cuda.Event(enable_timing=True)
        self._begun.record(stream)
        self._done.wait(stream)

    def has_ended(self) -> bool:
        return self._begun is None or (self._done.has_come() and self._begun.query())

    @property
    def seconds(self) -> float:
        """Seconds of the wait, 0 if the loads had ended before. It must have ended."""
        if self._begun is None:
            return 0.0
        return max(0.0, self._begun.elapsed_time(self._done.event) / 1e3)
