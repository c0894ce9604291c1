# SPDX-License-Identifier: Apache-2.0
"""The tiers below of a simulated engine: as late and as lossy as they are drawn."""

from collections.abc import Callable, Sequence
from random import Random

from vllm.v1.kv_tier.plan import SecondaryJob, SecondaryResult, StepPlan
from vllm.v1.kv_tier.rank.report import ReportDraft

from .content import GARBAGE


class Clock:
    """Counts the steps of a rank."""

    now = 0


class Objects:
    """Objects by key, in place of a store and of those who ask it.

    Args:
        rng: Its luck.
        clock: Of the rank.
        max_delay: Steps that an answer takes at most.

    """

    ask_s = 0.0

    def __init__(self, rng: Random, clock: Clock, max_delay: int) -> None:
        self.objects: dict[bytes, list[int]] = {}
        self._rng = rng
        self._clock = clock
        self._max_delay = max_delay
        self._num_asked = 0
        self._questions: dict[int, tuple[int, list[bytes]]] = {}

    def later(self) -> int:
        return self._clock.now + self._rng.randint(0, self._max_delay)

    def ask(self, keys: Sequence[bytes]) -> int:
        self._num_asked += 1
        self._questions[self._num_asked] = self.later(), list(keys)
        return self._num_asked

    def take_answer(self, number: int, until: float = 0.0) -> list[bool] | None:
        due, keys = self._questions[number]
        if due > self._clock.now:
            return None
        answer = [key in self.objects for key in self._questions.pop(number)[1]]
        # What was there a moment ago need not be any more.
        for key in keys:
            if key in self.objects and self._rng.random() < 0.1:
                del self.objects[key]
        return answer

    def has(self, keys: Sequence[bytes]) -> None:
        """Nothing is remembered of earlier answers."""


class Below:
    """Stores, in place of real ones, and the threads of ranks.

    The first rank is that whose memory is simulated. Where there are more, they hold
    the same, and have objects in common, which one of them writes, as with
    `share_replicas`: the others say at once that they have written. All move at their
    own pace, and the memory of those that are not simulated is taken for equal.

    Args:
        seed: Of its luck.
        max_delay: Steps that an answer or a job takes at most.
        num_ranks: That tell of each job.

    """

    tells_early = False
    """A planted bug: the end of a job is told although it still writes."""

    def __init__(self, seed: int, max_delay: int, num_ranks: int = 1) -> None:
        self.num_put = self.num_got = 0
        self.num_ranks = num_ranks
        self._rng = Random(seed)
        self._writer = seed % num_ranks
        self._clock = Clock()
        self.tiers = [
            Objects(self._rng, self._clock, max_delay) for _ in range(1 + seed % 2)
        ]
        # When each is due, and on which rank.
        self._jobs: list[tuple[int, int, SecondaryJob]] = []
        self._told: set[tuple[int, int]] = set()
        self._is_filled: Callable[[int], bool] = lambda slot: True

    def begin_step(
        self,
        plan: StepPlan,
        have_ended: Callable[[int, int], bool],
        is_filled: Callable[[int], bool],
    ) -> None:
        """As `SecondaryIO.begin_step`; `run` does the rest."""
        self._clock.now += 1
        self._is_filled = is_filled
        self._jobs += [
            (self.tiers[job.tier].later(), rank, job)
            for job in plan.secondary
            for rank in range(self.num_ranks)
        ]

    def launches(self, is_launching: bool) -> None:
        """As `SecondaryIO.launches`. When anything is written is drawn."""

    def run(
        self,
        host: list[list[int]],
        have_ended: Callable[[int, int], bool],
        report: ReportDraft,
    ) -> None:
        """Carry out the jobs whose time has come."""
        waiting, self._jobs = self._jobs, []
        for due, rank, job in waiting:
            may_begin = have_ended(job.after_stores, job.after_loads)
            is_told = (rank, job.number) in self._told
            if due <= self._clock.now and may_begin:
                move = self._put if job.is_put else self._get
                objects = self.tiers[job.tier].objects
                done = [
                    move(objects, key, slot, host, rank)
                    for key, slot in zip(job.keys, job.slots)
                ]
                if not is_told:
                    report.secondary_ended(SecondaryResult(job.number, done, 1.0))
                continue
            self._jobs.append((due, rank, job))
            if self.tells_early and may_begin and not is_told:
                self._told.add((rank, job.number))
                done = [False] * len(job.slots)
                report.secondary_ended(SecondaryResult(job.number, done, 1.0))

    def _put(
        self,
        objects: dict[bytes, list[int]],
        key: bytes,
        slot: int,
        host: list[list[int]],
        rank: int,
    ) -> bool:
        if rank != self._writer:
            return self._is_filled(slot)
        if not self._is_filled(slot) or self._rng.random() < 0.1:
            return False
        objects[key] = host[slot].copy()
        self.num_put += 1
        return True

    def _get(
        self,
        objects: dict[bytes, list[int]],
        key: bytes,
        slot: int,
        host: list[list[int]],
        rank: int,
    ) -> bool:
        found = None if self._rng.random() < 0.1 else objects.get(key)
        if rank == 0:
            host[slot] = [GARBAGE] * len(host[slot]) if found is None else found.copy()
            self.num_got += found is not None
        return found is not None
