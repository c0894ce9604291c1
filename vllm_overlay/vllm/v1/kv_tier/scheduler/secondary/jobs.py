# SPDX-License-Identifier: Apache-2.0
"""What moves between slots and secondary tiers: under which names, how much at a time,
and until all ranks have reported it.

There are no fences here, since the time of a disk or network is unknown: a job has
ended when every rank has reported it, and a block counts only if all succeeded.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, get_group_id
from vllm.v1.kv_tier.plan import SecondaryJob, SecondaryResult, StepPlan
from vllm.v1.kv_tier.scheduler.slots import SlotTable

_MAX_KEY_BYTES = 64


def object_keys(keys: Sequence[bytes]) -> list[bytes]:
    """Keys of the objects for these blocks.

    In some releases a block's key concatenates many hashes, too long for a file name;
    it is hashed then.
    """
    if max(map(len, keys), default=0) <= _MAX_KEY_BYTES:
        return list(keys)
    return [
        hashlib.blake2b(key, digest_size=_MAX_KEY_BYTES).digest()
        if len(key) > _MAX_KEY_BYTES
        else key
        for key in keys
    ]


Ended = Callable[[Sequence[bool], float], None]
"""Called with the success of each slot on all ranks, and the seconds of the slowest
one."""


@dataclass
class _Job:
    done: list[bool]
    ended: Ended
    tier: int
    seconds: float = 0.0
    num_told: int = 0


class SecondaryJobs:
    """Numbers jobs, adds them to plans, and takes in their results.

    Args:
        table: Knows which copies used a slot last.
        num_ranks: Number of ranks that report each job.
        max_ended: Slots of jobs whose end a step takes in. The rest follows with the
            next steps, in order.
        names_groups: Whether ranks move of a slot what its KV cache group needs.

    """

    def __init__(
        self,
        table: SlotTable,
        num_ranks: int,
        max_ended: int,
        names_groups: bool = False,
    ) -> None:
        self._names_groups = names_groups
        self._table = table
        self._num_ranks = num_ranks
        self._max_ended = self._num_left = max_ended
        self.is_detached = False
        """The secondary tiers are no longer used: running jobs end, but their results
        are not used, and no jobs are added."""
        self.evicted_bytes: Counter[int] = Counter()
        """Bytes evicted by stores, by tier, since the reader cleared this."""
        self.num_ended = 0
        """Number of jobs that have ended on all ranks."""
        self._num_jobs = 0
        self._queue: list[SecondaryJob] = []
        self._jobs: dict[int, _Job] = {}
        # Numbers of those that are over on all ranks, and whose end comes later.
        self._ending: deque[int] = deque()

    def make(
        self,
        is_put: bool,
        tier: int,
        keys: Sequence[BlockHashWithGroupId],
        slots: list[int],
    ) -> SecondaryJob:
        """Make a job with its fences, for at least one block; as `SecondaryJob`."""
        self._num_jobs += 1
        stored, loaded = self._table.last_copies(slots)
        return SecondaryJob(
            self._num_jobs,
            is_put,
            object_keys(keys),
            slots,
            tier,
            after_stores=stored,
            # Loads may read slots that are being written to a store.
            after_loads=0 if is_put else loaded,
            groups=tuple(map(get_group_id, keys)) if self._names_groups else (),
        )

    def add(self, job: SecondaryJob, ended: Ended) -> None:
        """Add a job to the next plan. `ended` is called once, at its end."""
        self._queue.append(job)
        self._jobs[job.number] = _Job([True] * len(job.slots), ended, job.tier)

    def finish(self, plan: StepPlan) -> None:
        """Put the added jobs into `plan`."""
        if self._queue:
            plan.secondary, self._queue = self._queue, []

    def take_results(self, results: Sequence[SecondaryResult]) -> None:
        """Take in results that ranks have reported."""
        for result in results:
            job = self._jobs.get(result.number)
            if job is None:
                continue
            # The slot is pinned until the job ends, so it still has the content of the
            # job.
            for index in result.changed:
                if (slot := self._table.at(index)) is not None:
                    self._table.remove(slot)
            told = zip(job.done, result.done, strict=True)
            job.done = [a and b for a, b in told]
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
