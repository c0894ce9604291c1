# SPDX-License-Identifier: Apache-2.0
"""Jobs of the tier below that have not ended on all ranks.

Acknowledgements take the place of fences here, since nobody knows how long a disk or a
network takes: a job is over when every rank has told of it, and a block counts only if
it went well on all of them.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.kv_tier.plan import SecondaryJob, SecondaryResult, StepPlan
from vllm.v1.kv_tier.scheduling.below import object_keys
from vllm.v1.kv_tier.scheduling.slots import SlotTable

Ended = Callable[[Sequence[bool], float], None]
"""Takes for each slot of a job whether it went well on all ranks, and the seconds that
the slowest one took."""


@dataclass
class _Job:
    done: list[bool]
    ended: Ended
    tier: int
    seconds: float = 0.0
    num_told: int = 0


class Jobs:
    """Numbers jobs, puts them into plans, and hears of their ends.

    Args:
        table: Knows which copies used a slot last.
        num_ranks: That tell of each job.
        max_ended: Slots of jobs whose end a step takes in. The rest follows with the
            next steps, in order.

    """

    def __init__(self, table: SlotTable, num_ranks: int, max_ended: int) -> None:
        self._table = table
        self._num_ranks = num_ranks
        self._max_ended = self._num_left = max_ended
        self.is_detached = False
        """The tier below is left alone: its jobs end, and nobody adds one or uses what
        one brought."""
        self.evicted_bytes: Counter[int] = Counter()
        """That stores have told of since whoever reports it cleared this, by tier."""
        self.num_ended = 0
        """Jobs that are over on all ranks."""
        self._num_jobs = 0
        self._queue: list[SecondaryJob] = []
        self._jobs: dict[int, _Job] = {}
        # Numbers of those that are over on all ranks, and whose end comes later.
        self._ending: deque[int] = deque()

    def add(
        self,
        is_put: bool,
        tier: int,
        keys: Sequence[BlockHashWithGroupId],
        slots: list[int],
        ended: Ended,
    ) -> int:
        """Let the next plan begin a job.

        Args:
            is_put: From slots to the store. Else from the store to slots.
            tier: Which of the tiers below.
            keys: At least one.
            slots: As many.
            ended: Is called once.

        Returns:
            Its number.

        """
        job = self.make(is_put, tier, keys, slots)
        self._queue.append(job)
        self._jobs[job.number] = _Job([True] * len(slots), ended, tier)
        return job.number

    def make(
        self,
        is_put: bool,
        tier: int,
        keys: Sequence[BlockHashWithGroupId],
        slots: list[int],
    ) -> SecondaryJob:
        """A job of which nobody will hear, with its fences; see `add`."""
        self._num_jobs += 1
        stored, loaded = self._table.last_copies(slots)
        return SecondaryJob(
            self._num_jobs,
            is_put,
            object_keys(keys),
            slots,
            tier,
            after_stores=stored,
            # Loads may read what is being written below.
            after_loads=0 if is_put else loaded,
        )

    def finish(self, plan: StepPlan) -> None:
        """Put what was added into `plan`."""
        if self._queue:
            plan.secondary, self._queue = self._queue, []

    def take(self, results: Sequence[SecondaryResult]) -> None:
        """Ranks have told of jobs."""
        for result in results:
            job = self._jobs.get(result.number)
            if job is None:
                continue
            # Held until the job has ended: what is there is what it was to write.
            for index in result.changed:
                if (slot := self._table.at(index)) is not None:
                    self._table.remove(slot)
            if job.num_told:
                told = zip(job.done, result.done, strict=True)
                job.done = [a and b for a, b in told]
            else:
                assert len(result.done) == len(job.done)
                job.done = list(result.done)
            self.evicted_bytes[job.tier] += result.evicted_bytes
            job.seconds = max(job.seconds, result.seconds)
            job.num_told += 1
            if job.num_told == self._num_ranks:
                self._ending.append(result.number)
        self._end_some()

    def begin_step(self) -> None:
        """Take in the ends that earlier steps have left."""
        self._num_left = self._max_ended
        self._end_some()

    def _end_some(self) -> None:
        while self._ending and self._num_left > 0:
            job = self._jobs.pop(self._ending.popleft())
            self._num_left -= len(job.done)
            self.num_ended += 1
            job.ended(job.done, job.seconds)

    @property
    def has_ending(self) -> bool:
        """Whether the next step takes in more ends."""
        return bool(self._ending)

    def is_under_way(self, number: int) -> bool:
        """Whether this one has not ended."""
        return number in self._jobs
