# SPDX-License-Identifier: Apache-2.0
"""The tiers below of a simulated engine: as late and as lossy as they are drawn."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.kv_tier.layout import Answer
from vllm.v1.kv_tier.plan import SecondaryJob, SecondaryResult, StepPlan
from vllm.v1.kv_tier.stores.base import BlockStore
from vllm.v1.kv_tier.worker.report import StepReportBuilder
from vllm.v1.kv_tier.worker.secondary import SlotMover
from vllm.v1.kv_tier.worker.slots import RankSlots

from .content import GARBAGE, Violation


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
        self.objects: dict[bytes, list[list[int]]] = {}
        self._rng = rng
        self._clock = clock
        self._max_delay = max_delay

    def later(self) -> int:
        return self._clock.now + self._rng.randint(0, self._max_delay)

    def ask(self, keys: Sequence[bytes]) -> Answer:
        due, keys = self.later(), list(keys)

        def answer(until: float) -> list[bool] | None:
            if due > self._clock.now:
                return None
            answer = [key in self.objects for key in keys]
            # What was there a moment ago need not be any more.
            for key in keys:
                if key in self.objects and self._rng.random() < 0.1:
                    del self.objects[key]
            return answer

        return answer

    def mark_present(self, keys: Sequence[bytes]) -> None:
        """Nothing is remembered of earlier answers."""


Memory = Sequence[list[list[int]]]
"""Slots, once for each layer of a worker."""


class Store(BlockStore):
    """The store of the first rank. A row is the number of a slot.

    Args:
        objects: It puts and gets.
        below: Whose luck it has.

    """

    def __init__(self, objects: "Objects", below: "Below") -> None:
        self._objects = objects
        self._below = below

    def put(self, keys: Sequence[bytes], rows: Sequence[Any]) -> list[bool]:
        if self._below.writer:
            return [True] * len(keys)
        return [self._below.put(self._objects, *each) for each in zip(keys, rows)]

    def get(self, keys: Sequence[bytes], rows: Sequence[Any]) -> list[bool]:
        if self._below.has_bad_luck(50):
            raise RuntimeError("simulated")
        return [self._below.get(self._objects, *each) for each in zip(keys, rows)]

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        raise NotImplementedError

    def delete(self, keys: Sequence[bytes]) -> None:
        if not self._below.writer:
            for key in keys:
                self._objects.objects.pop(key, None)

    def close(self) -> None:
        pass


class Below:
    """Stores, in place of real ones, and the threads of ranks. What moves bytes on the
    first rank, and what its slots hold, is real.

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
    """A planted bug: a job is over for slots and scheduler, and still writes."""

    def __init__(self, seed: int, max_delay: int, num_ranks: int = 1) -> None:
        self.num_put = self.num_got = self.num_changed = 0
        self.num_ranks = num_ranks
        self._rng = Random(seed)
        self.writer = seed % num_ranks
        self._clock = Clock()
        self.tiers = [
            Objects(self._rng, self._clock, max_delay) for _ in range(1 + seed % 2)
        ]
        # When each is due, and on which rank.
        self._jobs: list[tuple[int, int, SecondaryJob]] = []
        self._told: set[tuple[int, int]] = set()
        # Of the first rank, what its slots were when the job began.
        self._begun: dict[int, list[int]] = {}
        self._memory: Memory = []

    def attach(self, memory: Memory, slots: RankSlots) -> None:
        """The rank has this memory, and these slots."""
        self._memory, self._slots = memory, slots
        stores = [Store(objects, self) for objects in self.tiers]
        self._mover = SlotMover(stores, lambda slot, _: slot, slots)  # type: ignore

    @property
    def slots_in_use(self) -> set[int]:
        """Of jobs that are not over on all ranks."""
        return {slot for _, _, job in self._jobs for slot in job.slots}

    @property
    def slots_being_filled(self) -> set[int]:
        """Of jobs that read, and are not over."""
        gets = (job for _, _, job in self._jobs if not job.is_put)
        return {slot for job in gets for slot in job.slots}

    def has_bad_luck(self, one_in: int) -> bool:
        return self._rng.randrange(one_in) == 0

    def begin_step(
        self, plan: StepPlan, have_ended: Callable[[int, int], bool]
    ) -> None:
        """As `SecondaryIO.begin_step`; `run` does the rest."""
        self._clock.now += 1
        self._jobs += [
            (self.tiers[job.tier].later(), rank, job)
            for job in plan.secondary
            for rank in range(self.num_ranks)
        ]

    def set_launching(self, is_launching: bool) -> None:
        """As `SecondaryIO.set_launching`. When anything is written is drawn."""

    def run(
        self, have_ended: Callable[[int, int], bool], report: StepReportBuilder
    ) -> None:
        """Carry out the jobs whose time has come."""
        waiting, self._jobs = self._jobs, []
        for due, rank, job in waiting:
            may_begin = have_ended(job.after_stores, job.after_loads)
            if may_begin and rank == 0 and job.number not in self._begun:
                self._begun[job.number] = self._mover.begin(job)
            is_told = (rank, job.number) in self._told
            if due <= self._clock.now and may_begin:
                result = self._move(rank, job)
                if not is_told:
                    report.record_job(result)
                continue
            self._jobs.append((due, rank, job))
            if self.tells_early and may_begin and not is_told:
                self._told.add((rank, job.number))
                if rank == 0 and job.is_put:
                    self._slots.end_put(job.slots)
                elif rank == 0:
                    self._slots.end_fetch(job.slots, [])
                done = [False] * len(job.slots)
                report.record_job(SecondaryResult(job.number, done, 1.0))

    def _move(self, rank: int, job: SecondaryJob) -> SecondaryResult:
        for key, group in zip(job.keys, job.groups):
            # Longer keys were hashed.
            if len(key) < 64 and get_group_id(key) != group:  # type: ignore[arg-type]
                raise Violation("plan", f"a block of another group than {group} moves")
        if rank == 0:
            done, changed = self._mover.move(job, self._begun.pop(job.number))
            self.num_changed += len(changed)
            return SecondaryResult(job.number, done, 1.0, changed=changed)
        objects = self.tiers[job.tier]
        if not job.is_put:
            done = [self._finds(objects, key) is not None for key in job.keys]
            return SecondaryResult(job.number, done, 1.0)
        filled = self._slots.begin_put(job.slots)
        self._slots.end_put(job.slots)
        done = [i in filled for i in range(len(job.slots))]
        if rank == self.writer:
            done = [
                is_filled and self.put(objects, key, slot)
                for is_filled, key, slot in zip(done, job.keys, job.slots)
            ]
        return SecondaryResult(job.number, done, 1.0)

    def put(self, objects: Objects, key: bytes, slot: int) -> bool:
        """The rank that writes does, if it is lucky."""
        if self.has_bad_luck(10):
            return False
        objects.objects[key] = [layer[slot].copy() for layer in self._memory]
        self.num_put += 1
        return True

    def get(self, objects: Objects, key: bytes, slot: int) -> bool:
        """The first rank reads, if it is lucky."""
        found = self._finds(objects, key)
        for i, layer in enumerate(self._memory):
            garbage = [GARBAGE] * len(layer[slot])
            layer[slot] = garbage if found is None else found[i].copy()
        self.num_got += found is not None
        return found is not None

    def _finds(self, objects: Objects, key: bytes) -> list[list[int]] | None:
        return None if self.has_bad_luck(10) else objects.objects.get(key)
