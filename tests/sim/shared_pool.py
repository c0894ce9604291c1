# SPDX-License-Identifier: Apache-2.0
"""Several engines whose host slots are partitions of one pool."""

from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
from numpy.typing import NDArray

from vllm.v1.kv_tier.keeper.client import Membership
from vllm.v1.kv_tier.keeper.lock import LOCK_BYTES, RobustLock
from vllm.v1.kv_tier.keeper.partition import Partition, Rows, Slots, partition_bytes
from vllm.v1.kv_tier.pool import SharedBlockPool
from vllm.v1.kv_tier.worker.host_tier import HostTier
from vllm.v1.kv_tier.worker.slots import FILLED, RankSlots

from .content import EMPTY, GARBAGE, Violation
from .engine import Engine
from .invariants import Prefixes
from .ranks import Ranks
from .scheduler import Setup
from .scripts import Action
from .secondary import Objects
from .worker import Worker

IDENTITY = b"i" * 32


class BusyLock(RobustLock):
    """Now and then another process has it."""

    busy = 0.0
    """How often."""

    def __init__(self, memory: NDArray[np.uint8], rng: Random) -> None:
        super().__init__(memory)
        self._rng = rng

    def acquire(self, spin_s: float = 0.0) -> bool:
        return self._rng.random() >= self.busy and super().acquire(spin_s)


class OldLooks(Partition):
    """Looks without the lock find where blocks were at the look before, as if their
    owner had done all that it did since between this look and its pin."""

    def __init__(self, memory: NDArray[np.uint8], capacity: int) -> None:
        super().__init__(memory, capacity)
        self._old: dict[bytes, int] = {}

    def find(
        self, rows: Rows, mixed: NDArray[np.uint64] | None = None
    ) -> tuple[NDArray[np.int64], Slots]:
        now = {int(i): int(slot) for i, slot in zip(*super().find(rows, mixed))}
        seen = {}
        for i, row in enumerate(rows):
            old = self._old.get(row.tobytes(), now.get(i))
            if old is not None:
                seen[i] = old
            if i in now:
                self._old[row.tobytes()] = now[i]
        places, slots = list(seen), list(seen.values())
        return np.array(places, np.int64), np.array(slots, np.int64)


class Machine:
    """Engines of one identity, and the memory that outlives them.

    Args:
        setup: Of every engine.
        num_engines: Number of partitions.
        make: The class of partitions.
        busy: How often a lock is busy.
        rng: Draws when.

    """

    def __init__(
        self,
        setup: Setup,
        num_engines: int,
        make: type[Partition],
        busy: float,
        rng: Random,
    ) -> None:
        self.setup = setup
        self.events: Counter[str] = Counter()
        num_slots = setup.num_slots
        size = partition_bytes(num_slots)
        self.partitions = []
        self._busy, self._locks = busy, list[BusyLock]()
        for i in range(num_engines):
            # Allocated with room to align it.
            memory = np.zeros(size + 64, np.uint8)
            start = -memory.ctypes.data % 64
            partition = make(memory[start : start + size], num_slots)
            partition.lock = BusyLock(memory[start : start + LOCK_BYTES], rng)
            self._locks.append(partition.lock)
            partition.lock.create()
            assert partition.assign(IDENTITY, i * num_slots, num_slots)
            self.partitions.append(partition)
        empty = [EMPTY] * setup.layout.block_size
        self.memory = [
            [empty] * (num_engines * num_slots) for _ in range(setup.num_ranks)
        ]
        """By rank, the slots of the whole pool."""
        self._rng = rng
        # Engines that were killed and some of whose ranks still run.
        self._dying: dict[int, bool] = {}
        self._haste = rng.choice([0.3, 0.03])
        self._prefixes: Prefixes = {}
        # Below the pool, once: all engines have the same objects.
        self._stores: list[Objects] = []
        self.engines = [self._start(i) for i in range(num_engines)]
        self._be_busy(busy)

    def _be_busy(self, busy: float) -> None:
        for lock in self._locks:
            lock.busy = busy

    def _start(self, number: int) -> Engine:
        setup = self.setup
        member = Membership.take(self.partitions, number, IDENTITY)
        self.events["adopted"] += len(member.adopted.slots)
        engine = Engine(replace(setup, member=member))
        engine._invariants.know(self._prefixes)
        first, *others = [
            engine._worker,
            *(
                Worker(setup.layout, setup.num_blocks, setup.num_slots, engine._roots)
                for _ in range(setup.num_ranks - 1)
            ),
        ]
        for worker, memory in zip((first, *others), self.memory):
            worker.host = memory
            old, states = worker._tier, np.full(len(memory), FILLED, np.uint8)
            slots = RankSlots(len(memory), states=states)
            worker._tier = HostTier([], old.engines, old._order, slots)
        engine._worker._attach([engine._worker.host])
        if engine.below is not None:
            for mine, store in zip(engine.below.tiers, self._stores):
                mine.objects = store.objects
            self._stores = engine.below.tiers
        if others:
            engine._worker = Ranks(first, others, self._rng)
        return engine

    def act(self, number: int, action: Action) -> None:
        """One engine takes part of a script."""
        for each in self._dying:
            self._run_left(self.engines[each])
        if number in self._dying:
            self._replace(number)
        action.run(self.engines[number])

    def _run_left(self, engine: Engine) -> None:
        """Copies of a dead engine whose ranks still run."""
        for rank in engine._worker.all_ranks:
            if self._rng.random() < self._haste:
                rank._run_ready()

    def kill(self, number: int, keeps_stores: bool) -> None:
        """An engine dies. Its ranks end later, and then another takes its place.

        Args:
            number: Of its partition.
            keeps_stores: What the stores of its ranks were about to write at their end
                is not half written.

        """
        for each in list(self._dying):
            self._replace(each)
        self.events.update(self.counts(self.engines[number]))
        self._dying[number] = keeps_stores

    def _replace(self, number: int) -> None:
        """The ranks of a dead engine end, and another one takes its place."""
        engine = self.engines[number]
        self._be_busy(0)
        if not self._dying.pop(number):
            for rank, memory in zip(engine._worker.all_ranks, self.memory):
                for stores in rank._stores:
                    step = stores.step
                    for _, slot in step.cleans if stores.is_clean else step.stores:
                        memory[slot] = [GARBAGE] * len(memory[slot])
        if engine.below is not None:
            for slot in engine.below.slots_being_filled:
                self.memory[0][slot] = [GARBAGE] * len(self.memory[0][slot])
        for partition in self.partitions:
            assert partition.clear_reader(number)
        own = self.partitions[number]
        slots = list(range(own.num_slots))
        while own.unpinned(slots) != slots:
            # An heir to so few slots waits until neighbours have read them.
            for each in self.engines:
                if each is not engine:
                    each.step(rush=True)
        self.engines[number] = self._start(number)
        self._be_busy(self._busy)

    @staticmethod
    def counts(engine: Engine) -> Counter[str]:
        pool = engine._pool
        assert isinstance(pool, SharedBlockPool)
        counts = Counter(engine.events)
        counts["from neighbours"] = pool._stats.neighbour_blocks
        counts["read"] = len(pool.host._read)
        if engine.below is not None:
            counts["fetched"] = engine.below.num_got
            counts["written"] = engine.below.num_put
        return counts

    def drain(self) -> None:
        """All requests end, and nothing is left."""
        for number in list(self._dying):
            self._replace(number)
        self._be_busy(0)
        for engine in self.engines:
            counts = self.counts(engine)
            engine.drain()
            self.events.update(counts)
        for engine in self.engines:
            # The last reads of others have ended by now.
            engine.settle()
        for engine in self.engines:
            engine.settle()
            pool = engine._pool
            assert isinstance(pool, SharedBlockPool)
            if pool.has_more or pool.host._read:
                raise Violation("pins", "there is more to do at the end")
        for partition in self.partitions:
            slots = range(partition.num_slots)
            if partition.unpinned(slots) != list(slots):
                raise Violation("pins", "pins are left")


def play(machine: Machine, actions: list[tuple[int, Action | bool]]) -> Counter[str]:
    """Let engines act by turns; in place of an action, one is killed."""
    for number, action in actions:
        if isinstance(action, bool):
            machine.kill(number, action)
        else:
            machine.act(number, action)
    machine.drain()
    return machine.events


def turns(
    rng: Random, scripts: list[list[Action]], num_kills: int
) -> list[tuple[int, Action | bool]]:
    """The actions of all engines in a random order, and deaths among them."""
    left = [list(script) for script in scripts]
    order: list[tuple[int, Action | bool]] = []
    while any(left):
        number = rng.choice([i for i, script in enumerate(left) if script])
        for _ in range(min(rng.choice([1, 1, 2, 8, 24]), len(left[number]))):
            order.append((number, left[number].pop(0)))
    for _ in range(num_kills):
        place = rng.randint(0, len(order))
        order.insert(place, (rng.randrange(len(scripts)), rng.random() < 0.5))
    return order
