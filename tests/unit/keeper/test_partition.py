# SPDX-License-Identifier: Apache-2.0
"""The index of a partition, its pins and its lock."""

import os
import signal
import time
from collections.abc import Sequence
from statistics import median

import numpy as np
import pytest
from numpy.typing import NDArray

from vllm.v1.kv_tier.keeper.lock import RobustLock
from vllm.v1.kv_tier.keeper.partition import (
    Claim,
    Partition,
    Slots,
    mix,
    partition_bytes,
    rows_of,
)

from .crowd import IDENTITY, KEYS, NUM_SLOTS, ROWS, Shared, key, play, start


@pytest.fixture
def partition() -> Partition:
    return Shared().partition


def pin(partition: Partition, keys: Sequence[bytes], reader: int = 1) -> list[int]:
    rows = rows_of(keys)
    found, slots = partition.find(rows)
    pinned = partition.pin(rows[found], slots, reader, IDENTITY)
    assert pinned is not None
    return slots[pinned].tolist()


def test_published_slot_is_found_until_it_is_claimed(partition: Partition) -> None:
    assert partition.publish([3, 5], KEYS[:2], [16, None])
    found, slots = partition.find(ROWS[:4])
    assert (found.tolist(), slots.tolist()) == ([0, 1], [3, 5])
    pinned = partition.pin(ROWS[:2], slots, 1, IDENTITY)
    assert pinned is not None and pinned.all()
    assert partition.claim([3]) == [Claim.PINNED]
    assert partition.unpin([3, 5], 1)
    assert partition.claim([3]) == [Claim.FREE]
    assert partition.find(ROWS[:4])[1].tolist() == [5]


def test_pin_of_one_reader_outlives_that_of_another(partition: Partition) -> None:
    assert partition.publish([3], KEYS[:1], [None])
    for reader in (0, 9, 15):
        assert pin(partition, KEYS[:1], reader) == [3]
    assert partition.unpin([3], 0) and partition.clear_reader(9)
    assert partition.unpinned([3]) == []
    assert partition.clear_reader(15)
    assert partition.unpinned([3]) == [3]


def test_withdrawn_slot_is_not_found_but_stays_pinned(partition: Partition) -> None:
    assert partition.publish([3], KEYS[:1], [None])
    stale = partition.find(ROWS[:1])
    assert pin(partition, KEYS[:1]) == [3]
    assert partition.withdraw(3) is Claim.PINNED
    assert pin(partition, KEYS[:1]) == []
    # A look from before, too.
    pinned = partition.pin(ROWS[:1], stale[1], 2, IDENTITY)
    assert pinned is not None and not pinned.any()


def test_slot_with_another_key_is_not_pinned(partition: Partition) -> None:
    assert partition.publish([3], KEYS[:1], [None])
    _, slots = partition.find(ROWS[:1])
    assert partition.claim([3]) == [Claim.FREE]
    assert partition.publish([3], KEYS[1:2], [None])
    pinned = partition.pin(ROWS[:1], slots, 1, IDENTITY)
    assert pinned is not None and not pinned.any()


def test_content_of_another_identity_is_not_pinned(partition: Partition) -> None:
    assert partition.publish([3], KEYS[:1], [None])
    pinned = partition.pin(ROWS[:1], np.array([3]), 1, b"j" * 32)
    assert pinned is not None and not pinned.any()


def test_partition_is_given_away_only_when_nobody_reads_it(
    partition: Partition,
) -> None:
    assert partition.publish([3], KEYS[:1], [None])
    assert pin(partition, KEYS[:1]) == [3]
    assert not partition.assign(b"j" * 32, 10)
    assert pin(partition, KEYS[:1], reader=2) == []
    assert partition.unpin([3], 1)
    assert partition.assign(b"j" * 32, 10)
    assert (partition.identity, partition.num_slots) == (b"j" * 32, 10)


def test_successor_finds_what_was_published(partition: Partition) -> None:
    assert partition.publish([3, 5, 7], KEYS[:3], [16, None, 48])
    assert partition.claim([5]) == [Claim.FREE]
    found = partition.take_over(0, NUM_SLOTS)
    assert found is not None
    assert sorted(zip(*found)) == [(3, KEYS[0], 16), (7, KEYS[2], 48)]


def test_owner_claims_several_slots_at_once(partition: Partition) -> None:
    assert partition.publish([3, 5, 7], KEYS[:3], [None] * 3)
    for number, slot in ((1, 5), (2, 7)):
        rows = ROWS[number : number + 1]
        assert partition.pin(rows, np.array([slot]), 1, partition.identity) is not None
    assert partition.unpin([7], 1)
    wanted = [Claim.FREE, Claim.PINNED, Claim.FREE, Claim.FREE]
    assert partition.claim([3, 5, 7, 9]) == wanted
    # What is free is not found any more, and only that.
    assert partition.find(ROWS[:3])[1].tolist() == [5]


def test_owner_sees_each_use_once_and_ends_of_prefixes_first(
    partition: Partition,
) -> None:
    assert partition.publish([3, 5, 7, 9], KEYS[:4], [16, 48, 32, 64])
    assert partition.take_uses(0, NUM_SLOTS, 9) == []
    assert sorted(pin(partition, KEYS[:3])) == [3, 5, 7]
    assert partition.take_uses(4, NUM_SLOTS, 9) == [5, 7]
    assert partition.take_uses(0, NUM_SLOTS, 9) == [3]
    assert sorted(pin(partition, KEYS[:4], reader=2)) == [3, 5, 7, 9]
    # The rest is for a later call.
    assert partition.take_uses(0, NUM_SLOTS, 3) == [5, 7, 3]
    assert partition.take_uses(0, NUM_SLOTS, 3) == [9]
    # A use of what was there before does not count.
    assert pin(partition, KEYS[:1], reader=2) == [3]
    assert partition.unpin([3], 1) and partition.unpin([3], 2)
    assert partition.claim([3]) == [Claim.FREE]
    assert partition.publish([3], KEYS[4:5], [16])
    assert partition.take_uses(0, NUM_SLOTS, 9) == []


def test_successor_with_less_room_drops_ends_of_prefixes(partition: Partition) -> None:
    tokens = [32, 16, 48, 64, None]
    assert partition.publish([3, 5, 7, 8, 9], KEYS[:5], tokens)
    found = partition.take_over(NUM_SLOTS - 3, NUM_SLOTS)
    assert found is not None
    # The end comes first, which the successor evicts first.
    assert found.slots == [3, 5, 9]
    assert found.num_tokens == [32, 16, None]
    assert partition.find(ROWS[:5])[1].tolist() == [3, 5, 9]
    assert [partition.is_published(slot) for slot in (7, 8)] == [False, False]


def test_successor_drops_what_lies_in_the_first_slots(partition: Partition) -> None:
    tokens = [32, 16, 48, 64, None]
    assert partition.publish([0, 2, 3, 4, 9], KEYS[:5], tokens)
    found = partition.take_over(2, 5)
    assert found is not None
    # One of the first five was empty already. Of the others the end of a prefix goes,
    # though there are later slots with such ends.
    assert found.slots == [3, 0, 2, 9]
    assert partition.published(0, NUM_SLOTS) == [0, 2, 3, 9]
    assert partition.published(1, 9) == [2, 3]


def test_full_bucket_leaves_slots_unpublished() -> None:
    class OneBucket(Partition):
        def _hashed(self, rows, mixed=None):  # type: ignore[no-untyped-def]
            buckets, tags = super()._hashed(rows, mixed)
            return buckets * 0, tags

    partition = OneBucket(Shared().partition_memory, NUM_SLOTS)
    partition.open()
    assert partition.publish(list(range(12)), KEYS[:12], [None] * 12)
    are = [partition.is_published(slot) for slot in range(12)]
    assert are == [True] * 8 + [False] * 4
    assert partition.find(ROWS[:12])[1].tolist() == list(range(8))


def test_lock_of_a_stopped_process_is_not_waited_for() -> None:
    shared = Shared()
    assert shared.partition.publish([3], KEYS[:1], [None])
    holds = os.pipe()

    def hold() -> None:
        shared.partition.lock.acquire()
        os.write(holds[1], b"x")
        time.sleep(60)

    pid = start(hold)
    os.read(holds[0], 1)
    begun = time.perf_counter()
    assert shared.partition.claim([3]) == [Claim.BUSY]
    assert shared.partition.withdraw(3) is Claim.BUSY
    assert not shared.partition.publish([4], KEYS[1:2], [None])
    assert shared.partition.pin(ROWS[:1], np.array([3]), 1, IDENTITY) is None
    assert time.perf_counter() - begun < 0.5
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert shared.partition.claim([3]) == [Claim.FREE]
    assert shared.partition.lock.num_recovered == 1


def test_step_waits_once_for_a_stopped_process(
    partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    other = RobustLock(partition.lock._memory)
    assert other.acquire()
    assert not partition.lock.acquire(0.001)
    assert waits
    waits.clear()
    assert not any(partition.lock.acquire(0.001) for _ in range(3))
    assert not waits
    other.release()
    assert partition.lock.acquire(0.001)
    partition.lock.release()


# --------------------------------------------------------------- killed processes


def as_it_is(shared: Shared) -> Partition:
    return Partition(shared.partition_memory, NUM_SLOTS)


class _IgnoresPins(Partition):
    """Reuses slots that are being read."""

    def _are_pinned(self, slots: Slots) -> NDArray[np.bool_]:
        return np.zeros(len(slots), np.bool_)


class _PinsUnseen(Partition):
    """Trusts its look without the lock."""

    def pin(self, rows, slots, reader, identity):  # type: ignore[no-untyped-def]
        time.sleep(0)
        self._pins[slots, reader] = 1
        return np.ones(len(slots), np.bool_)


class _UnpinsAtOnce(Partition):
    """Ends the pin before the copy has ended."""

    def pin(self, rows, slots, reader, identity):  # type: ignore[no-untyped-def]
        pinned = super().pin(rows, slots, reader, identity)
        if pinned is not None:
            while not self.unpin(slots.tolist(), reader):
                pass
        return pinned


class _LeavesEntries(Partition):
    """Removes what an entry says before the entry, and an heir believes entries."""

    def _withdraw(self, slots: Slots) -> None:
        self._places[slots] = 0


BUGS = [_IgnoresPins, _PinsUnseen, _UnpinsAtOnce, _LeavesEntries]


def test_killed_processes_leave_a_valid_index() -> None:
    num_kills = int(os.environ.get("KV_TIER_KILLS", "200"))
    shared = play(as_it_is, num_kills, seed=1)
    wrong, right, stored, inherited = shared.counts[:4].tolist()
    assert wrong == 0
    assert right > 1000 and stored > 1000 and inherited > 100
    # Nothing is pinned for good.
    assert shared.partition.clear_reader(1) and shared.partition.clear_reader(2)
    assert shared.partition.unpinned(range(NUM_SLOTS)) == list(range(NUM_SLOTS))


@pytest.mark.parametrize("bug", BUGS)
def test_killed_processes_find_planted_bug(bug: type[Partition]) -> None:
    def make(shared: Shared) -> Partition:
        return bug(shared.partition_memory, NUM_SLOTS)

    for seed in range(10):
        if play(make, num_kills=30, seed=seed).counts[0]:
            return
    pytest.fail("No read was wrong.")


# ----------------------------------------------------------------------- its cost


def filled(num_slots: int) -> Partition:
    memory = np.zeros(partition_bytes(num_slots), np.uint8)
    partition = Partition(memory, num_slots)
    partition.lock.create()
    assert partition.assign(IDENTITY, num_slots)
    keys = [key(n) for n in range(num_slots)]
    for first in range(0, num_slots, 4096):
        slots = list(range(first, min(first + 4096, num_slots)))
        assert partition.publish(
            slots, keys[first : slots[-1] + 1], [None] * len(slots)
        )
    return partition


def test_all_slots_find_a_place() -> None:
    """A block without one ends each prefix that it is in."""
    # Of a power of two, whose buckets have the most.
    num_slots = 1 << 17
    partition = filled(num_slots)
    assert len(partition.published(0, num_slots)) == num_slots


def test_missing_keys_of_seven_neighbours_cost_little() -> None:
    partitions = [filled(20_000) for _ in range(7)]
    keys = [key(1_000_000 + n) for n in range(1000)]
    times = []
    for _ in range(31):
        begun = time.perf_counter()
        rows = rows_of(keys)
        mixed = mix(rows)
        for partition in partitions:
            partition.open()
            assert not len(partition.find(rows, mixed)[0])
        times.append(time.perf_counter() - begun)
    print(f"1,000 missing keys of 7 neighbours: {median(times) * 1e6:.0f} us")
    # Half a millisecond on a machine that does nothing else.
    assert median(times) < 2e-3
