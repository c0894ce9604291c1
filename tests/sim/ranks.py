# SPDX-License-Identifier: Apache-2.0
"""Several ranks of one engine, whose copies run at times of their own."""

from random import Random

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_tier.worker.report import StepReportAggregator

from .step import Step
from .worker import Worker


class Ranks(Worker):
    """The first rank, which takes the others with it. Each has memory of its own, and
    a copy may fail on one of them.

    Args:
        first: The rank that becomes the first one. Not used afterwards.
        others: The other ranks.
        rng: Draws which ranks hurry, and which fail.

    """

    def __init__(self, first: Worker, others: list[Worker], rng: Random) -> None:
        vars(self).update(vars(first))
        self._others, self._rng = others, rng
        self._aggregator = StepReportAggregator()

    @property
    def all_ranks(self) -> list[Worker]:
        for other in self._others:
            for step, follower in zip(self._steps, other._steps, strict=True):
                follower.is_void = step.is_void
        return [self, *self._others]

    def submit(
        self, output: SchedulerOutput, epoch: int, rush: bool, fail: str | None
    ) -> Step:
        failing = self._rng.randrange(1 + len(self._others))
        # All ranks compute the same.
        fails = [
            fail if fail == "compute" or rank == failing else None
            for rank in range(1 + len(self._others))
        ]
        step = super().submit(output, epoch, rush, fails[0])
        followers = [
            other.submit(output, epoch, self._rng.random() < 0.5, fails_here)
            for other, fails_here in zip(self._others, fails[1:])
        ]
        results = [step.result, *(each.result for each in followers)]
        merged = self._aggregator.aggregate(results)
        assert merged is not None
        step.result = merged
        return step

    def run_next(self) -> Step:
        _, *others = self.all_ranks
        step = super().run_next()
        for other in others:
            step.spoiled |= other.run_next().spoiled
        return step

    def garbage(self) -> set[int]:
        return set.union(super().garbage(), *(each.garbage() for each in self._others))

    def _copy(self) -> Worker:
        new = super()._copy()
        assert isinstance(new, Ranks)
        # Each is settled by itself.
        new._others = []
        return new
