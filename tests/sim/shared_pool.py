# SPDX-License-Identifier: Apache-2.0
"""Several engines whose host slots are partitions of one pool."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import numpy as np
from numpy.typing import NDArray

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.kv_tier.keeper.client import Membership
from vllm.v1.kv_tier.keeper.lock import LOCK_BYTES, RobustLock
from vllm.v1.kv_tier.keeper.partition import Partition, Rows, Slots, partition_bytes
from vllm.v1.kv_tier.pool import SharedBlockPool
from vllm.v1.kv_tier.scheduler.shared_slots import SharedSlotTable
from vllm.v1.kv_tier.worker.host_tier import HostTier
from vllm.v1.kv_tier.worker.slots import FILLED, RankSlots

from .content import EMPTY, GARBAGE, Violation
from .engine import Engine
from .invariants import Prefixes
from .ranks import Ranks
from .scheduler import Setup
from .scripts import Action, Steps
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


class Ring(list[list[int]]):
    """Slots of the whole pool as the ranks of an engine number them.

    Args:
        slots: Those of each partition.
        member: The engine's part.

    """

    def __init__(self, slots: list[list[list[int]]], member: Membership) -> None:
        super().__init__()
        self._slots, self._member = slots, member

    def _at(self, index: int) -> tuple[list[list[int]], int]:
        distance, slot = divmod(index, self._member.stride)
        if not (0 <= distance < len(self._slots) and slot < self._member.num_slots):
            raise Violation("slots", f"slot {index} is in no partition")
        return self._slots[(self._member.number + distance) % len(self._slots)], slot

    def __len__(self) -> int:
        return self._member.end

    def __getitem__(self, index: int) -> list[int]:  # type: ignore[override]
        slots, slot = self._at(index)
        return slots[slot]

    def __setitem__(self, index: int, block: list[int]) -> None:  # type: ignore[override]
        slots, slot = self._at(index)
        slots[slot] = block

    def __iter__(self) -> Iterator[list[int]]:
        """With garbage between partitions."""
        stride = self._member.stride
        for distance in range(len(self._slots)):
            slots = self._slots[(self._member.number + distance) % len(self._slots)]
            yield from slots
            begin, end = distance * stride + len(slots), (distance + 1) * stride
            for _ in range(begin, min(end, len(self))):
                yield [GARBAGE]


class Machine:
    """Engines of one identity, and the memory that outlives them.

    Args:
        setup: Of every engine. Where `opens` is set, each draws its own.
        num_engines: Number of partitions.
        make: The class of partitions.
        busy: How often a lock is busy.
        rng: Draws when.

    """

    make_engine: type[Engine] = Engine

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
            assert partition.assign(IDENTITY, num_slots)
            self.partitions.append(partition)
        empty = [EMPTY] * setup.layout.block_size
        self.memory = [
            [[empty] * num_slots for _ in range(num_engines)]
            for _ in range(setup.num_ranks)
        ]
        """By rank, the slots of each partition."""
        self._rng = rng
        self._stride = num_slots + rng.choice([0, 1, 5])
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
        opens = None if setup.opens is None else self._rng.randrange(1 << 16)
        member = Membership.take(
            self.partitions,
            number,
            IDENTITY,
            self._stride,
            num_first=None if opens is None else 1,
        )
        self.events["adopted"] += len(member.adopted.slots)
        engine = self.make_engine(replace(setup, member=member, opens=opens))
        engine._invariants.know(self._prefixes)
        first, *others = [
            engine._worker,
            *(
                Worker(setup.layout, setup.num_blocks, setup.num_slots, engine._roots)
                for _ in range(setup.num_ranks - 1)
            ),
        ]
        for worker, memory in zip((first, *others), self.memory):
            worker.host = Ring(memory, member)
            for slot in member.empty:
                # Copy engines were tested there.
                worker.host[slot] = [GARBAGE] * setup.layout.block_size
            old, states = worker._tier, np.full(member.end, FILLED, np.uint8)
            slots = RankSlots(member.end, states=states)
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
        engine = self.engines[number]
        num_open, void_plan = _table_of(engine).num_slots, engine._pool.void_plan
        action.run(engine)
        self._check_index(number)
        fails = isinstance(action, Steps) and action.fail is not None
        if engine._pool.void_plan == void_plan and not fails:
            # Else the host may have dropped what a failed load or step has left on the
            # device, under the same key.
            self._check_adopted(engine, num_open)

    def _check_index(self, number: int) -> None:
        """Each published slot has one entry, so that one is left to be withdrawn."""
        partition = self.partitions[number]
        places = partition._places[partition._places > 0] - 1
        entries = np.flatnonzero(partition._entries)
        if sorted(places.tolist()) != entries.tolist():
            raise Violation("index", f"entries {entries} of places {places}")

    def _check_adopted(self, engine: Engine, num_before: int) -> None:
        """What an earlier engine has left is found as soon as its slot is open.

        Args:
            engine: It has taken a step at the most.
            num_before: Slots that were open before.

        """
        table, member = _table_of(engine), engine.setup.member
        assert member is not None
        opened = range(num_before, table.num_slots)
        for slot, key in zip(member.adopted.slots, member.adopted.keys):
            if slot in opened and not table.has_left:
                self.events["adopted later"] += 1
                if not table.has(BlockHashWithGroupId(key)):
                    raise Violation("adopted", f"slot {slot} of {member.number}")

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
            for rank in engine._worker.all_ranks:
                for stores in rank._stores:
                    step = stores.step
                    for _, slot in step.cleans if stores.is_clean else step.stores:
                        rank.host[slot] = [GARBAGE] * len(rank.host[slot])
        if engine.below is not None:
            host = engine._worker.host
            for slot in engine.below.slots_being_filled:
                host[slot] = [GARBAGE] * len(host[slot])
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
        counts["opening"] = engine.opening is not None
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
            opening = engine.opening
            num_open = pool.host.num_own if opening is None else min(opening.open)
            if pool.host.num_slots != min(num_open, pool.host.num_own):
                raise Violation("open", f"{pool.host.num_slots} slots of {num_open}")
        for partition in self.partitions:
            slots = range(partition.num_slots)
            if partition.unpinned(slots) != list(slots):
                raise Violation("pins", "pins are left")


def _table_of(engine: Engine) -> SharedSlotTable:
    pool = engine._pool
    assert isinstance(pool, SharedBlockPool)
    return pool.host


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
