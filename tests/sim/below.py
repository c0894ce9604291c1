# SPDX-License-Identifier: Apache-2.0
"""The tier below of a simulated engine: as late and as lossy as it is drawn."""

from collections.abc import Callable, Sequence
from random import Random

from vllm.v1.kv_tier.plan import SecondaryJob, SecondaryResult, StepPlan
from vllm.v1.kv_tier.rank.report import ReportDraft

from .content import GARBAGE


class Below:
    """Objects by key, in place of a store, of those who ask it and of a rank's threads.

    Args:
        seed: Of its luck.
        max_delay: Steps that an answer or a job takes at most.

    """

    def __init__(self, seed: int, max_delay: int) -> None:
        self.objects: dict[bytes, list[int]] = {}
        self.num_put = self.num_got = 0
        self._rng = Random(seed)
        self._max_delay = max_delay
        self._now = 0
        self._num_asked = 0
        self._questions: dict[int, tuple[int, list[bytes]]] = {}
        self._jobs: list[tuple[int, SecondaryJob]] = []
        self._is_filled: Callable[[int], bool] = lambda slot: True

    def _later(self) -> int:
        return self._now + self._rng.randint(0, self._max_delay)

    # ------------------------------------------------------------- the scheduler

    def ask(self, keys: Sequence[bytes]) -> int:
        self._num_asked += 1
        self._questions[self._num_asked] = self._later(), list(keys)
        return self._num_asked

    def take_answer(self, number: int) -> list[bool] | None:
        due, keys = self._questions[number]
        if due > self._now:
            return None
        answer = [key in self.objects for key in self._questions.pop(number)[1]]
        # What was there a moment ago need not be any more.
        for key in keys:
            if key in self.objects and self._rng.random() < 0.1:
                del self.objects[key]
        return answer

    # ------------------------------------------------------------------ the rank

    def begin_step(
        self,
        plan: StepPlan,
        have_ended: Callable[[int, int], bool],
        is_filled: Callable[[int], bool],
    ) -> None:
        """As `SecondaryIO.begin_step`; `run` does the rest."""
        self._now += 1
        self._is_filled = is_filled
        self._jobs += [(self._later(), job) for job in plan.secondary]

    def run(
        self,
        host: list[list[int]],
        have_ended: Callable[[int, int], bool],
        report: ReportDraft,
    ) -> None:
        """Carry out the jobs whose time has come."""
        waiting, self._jobs = self._jobs, []
        for due, job in waiting:
            if due <= self._now and have_ended(job.after_stores, job.after_loads):
                move = self._put if job.is_put else self._get
                done = [move(k, s, host) for k, s in zip(job.keys, job.slots)]
                report.secondary_ended(SecondaryResult(job.number, done, 1.0))
            else:
                self._jobs.append((due, job))

    def _put(self, key: bytes, slot: int, host: list[list[int]]) -> bool:
        if not self._is_filled(slot) or self._rng.random() < 0.1:
            return False
        self.objects[key] = host[slot].copy()
        self.num_put += 1
        return True

    def _get(self, key: bytes, slot: int, host: list[list[int]]) -> bool:
        found = self.objects.get(key)
        if found is None or self._rng.random() < 0.1:
            host[slot] = [GARBAGE] * len(host[slot])
            return False
        host[slot] = found.copy()
        self.num_got += 1
        return True
