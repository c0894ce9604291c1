# SPDX-License-Identifier: Apache-2.0
"""Slots of an engine in a pool, against a neighbour that reads and one that is busy."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.unit.keeper.crowd import IDENTITY, KEYS, NUM_SLOTS, Shared
from tests.unit.keeper.test_partition import filled
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.kv_tier.eviction.policies import make_policy
from vllm.v1.kv_tier.keeper.client import Membership
from vllm.v1.kv_tier.keeper.partition import Claim, Partition, rows_of
from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.scheduler.shared_slots import Copy, SharedSlotTable
from vllm.v1.kv_tier.tuning import SchedulingTuning

READER = 1
TUNING = SchedulingTuning()


@pytest.fixture
def partition() -> Partition:
    return Shared().partition


def table_of(
    partition: Partition,
    num_open: int | None = None,
    num_first: int | None = None,
    tuning: SchedulingTuning = TUNING,
) -> SharedSlotTable:
    num_slots = partition.num_slots
    member = Membership.take([partition], 0, IDENTITY, num_slots, num_first)
    return SharedSlotTable(make_policy("lru", num_slots), member, tuning, num_open)


def fill(table: SharedSlotTable, first: int, num: int, seq: int) -> list[int]:
    """Store blocks in a plan, which ends and is published."""
    keys = [BlockHashWithGroupId(KEYS[i]) for i in range(first, first + num)]
    slots = [table.insert((key,), 16, seq) for key in keys]
    stored = [slot for slot in slots if slot is not None]
    table.record_stores(StepPlan(seq, clean_slots=stored), is_idle=False)
    table.unpin_all()
    table.record_ended([seq])
    table.share(settled=seq)
    return stored


def pin(partition: Partition, number: int) -> list[int]:
    rows = rows_of([KEYS[number]])
    _, slots = partition.find(rows)
    partition.pin(np.repeat(rows, len(slots), 0), slots, READER, IDENTITY)
    return slots.tolist()


def test_nothing_is_found_before_it_is_complete(partition: Partition) -> None:
    table = table_of(partition)
    slot = table.insert((BlockHashWithGroupId(KEYS[0]),), 16, 1)
    assert slot is not None
    plan = StepPlan(1, store_slots=[slot])
    assert not table.record_stores(plan, is_idle=False)
    # It waits for others, but not longer than there are any.
    assert table.record_stores(StepPlan(2), is_idle=True)
    table.unpin_all()
    table.share(settled=1)
    assert pin(partition, 0) == []
    table.record_ended([1])
    table.share(settled=0)
    assert pin(partition, 0) == []
    table.share(settled=1)
    assert pin(partition, 0) == [slot]
    assert not table.is_sharing


def test_what_came_from_a_secondary_tier_is_found(partition: Partition) -> None:
    table, key = table_of(partition), BlockHashWithGroupId(KEYS[0])
    (index,) = table.reserve(1)
    table.share(settled=1)
    assert pin(partition, 0) == []
    table.fill(index, key, 16)
    assert table.is_sharing
    table.share(settled=1)
    assert pin(partition, 0) == [index]
    assert not table.is_sharing


def test_what_was_stored_over_it_is_not_found_with_it(partition: Partition) -> None:
    table, key = table_of(partition), BlockHashWithGroupId(KEYS[0])
    (index,) = table.reserve(1)
    table.fill(index, key, 16)
    slot = table.get(key)
    assert slot is not None
    table.remove(slot)
    # The same block in the same slot, whose store has not ended.
    assert table.insert((key,), 16, 1) == index
    table.record_stores(StepPlan(1, store_slots=[index]), is_idle=False)
    table.share(settled=1)
    assert pin(partition, 0) == []
    table.record_ended([1])
    table.share(settled=1)
    assert pin(partition, 0) == [index]


def test_report_comes_after_many_stores_or_many_plans(partition: Partition) -> None:
    table = table_of(partition, tuning=replace(TUNING, stores_per_report=6))
    few, many = StepPlan(1, store_slots=[0]), StepPlan(2, clean_slots=[1, 2, 3, 4, 5])
    assert not table.record_stores(few, is_idle=False)
    assert table.record_stores(many, is_idle=False)
    # Also if only the first one of them stores something.
    for each in ({"store_slots": [1]}, {}):
        plans = [StepPlan(6, store_slots=[0])]
        plans += [StepPlan(seq, **each) for seq in range(7, 22)]
        table = table_of(partition)
        are_due = [table.record_stores(plan, is_idle=False) for plan in plans]
        assert are_due == [False] * 15 + [True]
        assert not table.record_stores(StepPlan(22), is_idle=True)


def test_stores_of_a_report_are_published_together(partition: Partition) -> None:
    table = table_of(partition, tuning=replace(TUNING, stores_per_report=3))
    for seq in (1, 2, 3, 4):
        slot = table.insert((BlockHashWithGroupId(KEYS[seq]),), 16, seq)
        assert slot is not None
        table.record_stores(StepPlan(seq, store_slots=[slot]), is_idle=False)
    table.record_ended([4])
    published = []
    for settled in (1, 2, 3, 4):
        table.share(settled)
        published.append(len(partition.published(0, NUM_SLOTS)))
    # Many do not wait for the others.
    assert published == [0, 0, 3, 4]


CLAIMS_4 = replace(TUNING, claim_part=4 / NUM_SLOTS)


def test_next_victims_are_withdrawn_together(
    partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of(partition, tuning=CLAIMS_4)
    slots = fill(table, 0, NUM_SLOTS, seq=1)
    claimed: list[Sequence[int]] = []
    claim = partition.claim

    def watched(slots: Sequence[int]) -> list[Claim]:
        claimed.append(slots)
        return claim(slots)

    monkeypatch.setattr(partition, "claim", watched)
    stored = [*fill(table, 30, 1, seq=2), *fill(table, 31, 3, seq=3)]
    assert stored == slots[:4] and claimed == [slots[:4]]
    assert [pin(partition, n) for n in (3, 4)] == [[], [slots[4]]]
    # What is read by now is no victim.
    assert fill(table, 34, 1, seq=4) == [slots[5]]


def test_next_victim_that_is_used_is_published_again(partition: Partition) -> None:
    table = table_of(partition, tuning=CLAIMS_4)
    slots = fill(table, 0, NUM_SLOTS, seq=1)
    fill(table, 30, 1, seq=2)
    assert pin(partition, 1) == []
    used = table.get(BlockHashWithGroupId(KEYS[1]))
    assert used is not None
    table.pin([used])
    table.unpin_all()
    assert table.is_sharing
    table.share(settled=2)
    assert pin(partition, 1) == [slots[1]]
    assert fill(table, 31, 2, seq=3) == slots[2:4]


def test_next_victim_that_is_not_complete_is_published_later(
    partition: Partition,
) -> None:
    table = table_of(partition, tuning=CLAIMS_4)
    keys = [BlockHashWithGroupId(each) for each in KEYS]
    slots = table.insert_all(keys[:NUM_SLOTS], [16] * NUM_SLOTS, 1)
    table.record_stores(StepPlan(1, store_slots=slots), is_idle=False)
    table.unpin_all()
    # Three more are the next ones, of which the second is used.
    assert table.insert((keys[30],), 16, 2) == slots[0]
    table.unpin_all()
    used = table.get(keys[2])
    assert used is not None
    table.pin([used])
    table.unpin_all()
    table.share(settled=1)
    assert partition.published(0, NUM_SLOTS) == []
    table.record_ended([1])
    table.share(settled=1)
    assert pin(partition, 2) == [slots[2]]
    assert [pin(partition, n) for n in (0, 1, 3)] == [[], [], []]


def test_blocks_that_neighbours_have_used_are_evicted_later(
    partition: Partition,
) -> None:
    table = table_of(partition)
    slots = fill(table, 0, NUM_SLOTS, seq=1)
    for number in (0, 1):
        partition.unpin(pin(partition, number), READER)
    assert fill(table, 30, 2, seq=2) == slots[2:4]
    assert fill(table, 32, 16, seq=3) == slots[4:20]


def test_next_victim_that_a_neighbour_has_used_is_published_again(
    partition: Partition,
) -> None:
    table = table_of(partition, tuning=CLAIMS_4)
    slots = fill(table, 0, NUM_SLOTS, seq=1)
    keys = [BlockHashWithGroupId(each) for each in KEYS]
    assert table.insert((keys[30],), 16, 2) == slots[0]
    # After this step has looked at uses, and before it withdraws the next four.
    partition.unpin(pin(partition, 5), READER)
    assert [table.insert((key,), 16, 2) for key in keys[31:35]] == slots[1:5]
    table.unpin_all()
    table.share(settled=1)
    assert pin(partition, 5) == []
    assert fill(table, 35, 2, seq=3) == slots[6:8]
    assert pin(partition, 5) == [slots[5]]


def test_second_copy_of_a_block_is_not_published_and_evicted_first(
    partition: Partition,
) -> None:
    table, other = table_of(partition), Shared().partition
    keys = [BlockHashWithGroupId(each) for each in KEYS[:NUM_SLOTS]]
    copy = Copy(keys[2], other, 7)
    slots = table.insert_all(keys, [16] * NUM_SLOTS, 1)
    table.record_stores(StepPlan(1, store_slots=slots), is_idle=False)
    table.unpin_all()
    table.record_ended([1])
    asked = []

    def find_copies(keys: Sequence[BlockHashWithGroupId]) -> list[Copy]:
        asked.append([*keys])
        return [copy]

    assert table.share(1, find_copies) == [copy]
    assert asked == [keys]
    assert [pin(partition, n) for n in (1, 2, 3)] == [[slots[1]], [], [slots[3]]]
    # Its own engine finds it until then.
    assert table.has(keys[2])
    assert fill(table, 30, 1, seq=2) == [slots[2]]


def test_slot_that_is_read_is_passed_over(partition: Partition) -> None:
    table = table_of(partition)
    fill(table, 0, NUM_SLOTS, seq=1)
    read = pin(partition, 0)
    # The oldest is read: the next ones go.
    assert not {*read} & {*fill(table, NUM_SLOTS, 5, seq=2)}
    slot = table.get(BlockHashWithGroupId(KEYS[0]))
    assert slot is not None
    # Void while it is read: it is not found any more, and its memory is kept.
    table.remove(slot)
    assert pin(partition, 0) == []
    assert not {*read} & {*fill(table, NUM_SLOTS + 5, 15, seq=3)}
    partition.unpin(read, READER)
    table.share(settled=3)
    assert fill(table, NUM_SLOTS + 20, 1, seq=4) == read


@pytest.mark.parametrize("is_cleared", [False, True])
def test_slot_that_is_read_is_not_reused_after_the_engine_has_left(
    partition: Partition, is_cleared: bool
) -> None:
    table = table_of(partition)
    fill(table, 0, NUM_SLOTS, seq=1)
    read = pin(partition, 0)
    table.leave()
    if is_cleared:
        for slot in table.filled_slots():
            table.remove(slot)
    stored = fill(table, NUM_SLOTS, NUM_SLOTS, seq=2)
    assert len(stored) == NUM_SLOTS - 1 and not {*read} & {*stored}
    partition.unpin(read, READER)
    table.share(settled=2)
    assert fill(table, 2 * NUM_SLOTS - 1, 1, seq=3) == read


def test_planted_bug_that_forgets_readers_of_an_engine_that_leaves_is_seen(
    partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    withdraw_all = partition.withdraw_all
    monkeypatch.setattr(partition, "withdraw_all", lambda: withdraw_all() and [])
    table = table_of(partition)
    fill(table, 0, NUM_SLOTS, seq=1)
    read = pin(partition, 0)
    table.leave()
    assert {*read} <= {*fill(table, NUM_SLOTS, NUM_SLOTS, seq=2)}


def test_busy_neighbour_costs_a_store_but_no_time(partition: Partition) -> None:
    table = table_of(partition)
    fill(table, 0, NUM_SLOTS, seq=1)
    neighbour = partition.lock
    assert neighbour.acquire()
    assert table.insert((BlockHashWithGroupId(KEYS[30]),), 16, 2) is None
    slot = table.get(BlockHashWithGroupId(KEYS[3]))
    assert slot is not None
    table.remove(slot)
    neighbour.release()
    assert pin(partition, 3) == [slot.index]
    table.unpin_all()
    partition.unpin([slot.index], READER)
    # It is withdrawn late, and free then.
    table.share(settled=2)
    assert pin(partition, 3) == []
    assert fill(table, 30, 1, seq=2) == [slot.index]


def test_successor_has_one_copy_of_a_block(partition: Partition) -> None:
    assert partition.publish([3, 5], [KEYS[0], KEYS[0]], [16, 16])
    table = table_of(partition)
    assert len(table) == 1
    kept = table.get(BlockHashWithGroupId(KEYS[0]))
    assert kept is not None
    # The other one is not reused as long as it can be found.
    used = fill(table, 1, NUM_SLOTS - 2, seq=1)
    assert not {3, 5} & {*used}
    table.share(settled=1)
    assert pin(partition, 0) == [kept.index]
    assert {*fill(table, 40, 1, seq=2)} == {3, 5} - {kept.index}


LEFT = [1, 4, 5, 9]
"""Slots of the first keys, which an earlier engine has left."""


@pytest.fixture
def opening(partition: Partition) -> SharedSlotTable:
    """Three slots are open."""
    assert partition.publish(LEFT, KEYS[:4], [64, 32, 48, 16])
    return table_of(partition, num_open=3, num_first=3)


def found(table: SharedSlotTable) -> list[int]:
    """Numbers of the keys that the engine finds."""
    keys = map(BlockHashWithGroupId, KEYS)
    return [number for number, key in enumerate(keys) if table.has(key)]


def test_block_is_adopted_when_its_slot_is_opened(
    partition: Partition, opening: SharedSlotTable
) -> None:
    table = opening
    assert found(table) == [0] and table.num_slots == 3
    # Neighbours find it all the time.
    assert partition.find(rows_of(KEYS[:4]))[1].tolist() == LEFT
    table.open(8)
    assert found(table) == [0, 1, 2] and table.num_slots == 8
    assert sorted(fill(table, 10, 5, seq=1)) == [0, 2, 3, 6, 7]
    # Of those that were opened together, the end of a prefix goes first.
    assert fill(table, 20, 3, seq=2) == [1, 5, 4]
    table.open(NUM_SLOTS)
    assert 3 in found(table) and partition.is_published(9)


def test_slots_that_are_not_open_are_not_filled(opening: SharedSlotTable) -> None:
    # The one that was adopted is the next victim.
    assert fill(opening, 10, 8, seq=1) == [0, 2, 1]
    opening.open(NUM_SLOTS)
    stored = fill(opening, 20, NUM_SLOTS - 6, seq=2)
    assert sorted(stored) == [*{*range(3, NUM_SLOTS)} - {*LEFT}]


def test_block_that_is_stored_before_its_slot_is_open_is_there_once(
    partition: Partition, opening: SharedSlotTable
) -> None:
    assert fill(opening, 1, 1, seq=1) == [0]
    opening.open(NUM_SLOTS)
    assert found(opening) == [0, 1, 2, 3]
    # The other one is free as soon as it cannot be found any more.
    assert 4 not in opening._free and partition.is_published(4)
    opening.share(settled=1)
    assert 4 in opening._free and not partition.is_published(4)
    assert pin(partition, 1) == [0]


@pytest.mark.parametrize("is_busy", [False, True])
def test_engine_that_has_left_adopts_nothing(
    partition: Partition, opening: SharedSlotTable, is_busy: bool
) -> None:
    assert pin(partition, 2) == [5]
    if is_busy:
        assert partition.lock.acquire()
    opening.leave()
    opening.open(NUM_SLOTS)
    if is_busy:
        # Not yet withdrawn, so nothing is stored there.
        assert not {*LEFT} & {*opening._free}
        partition.lock.release()
    opening.share(settled=1)
    opening.share(settled=1)
    assert found(opening) == [0] and partition.published(0, NUM_SLOTS) == []
    assert {*LEFT} & {*opening._free} == {4, 9}
    partition.unpin([5], READER)
    opening.share(settled=1)
    assert 5 in opening._free


def test_slot_that_is_read_is_not_free_when_it_is_opened(partition: Partition) -> None:
    assert partition.publish([4], KEYS[:1], [16])
    assert pin(partition, 0) == [4]
    assert partition.withdraw(4) is Claim.PINNED
    table = table_of(partition, num_open=3, num_first=3)
    table.open(NUM_SLOTS)
    assert 4 not in table._free
    partition.unpin([4], READER)
    table.share(settled=1)
    assert 4 in table._free


def test_step_adopts_no_more_than_512_blocks() -> None:
    partition = filled(2000)
    table = table_of(partition, num_open=100, num_first=100)
    sizes = [table.num_slots]
    while table.num_slots < 2000:
        table.open(2000)
        sizes.append(table.num_slots)
    assert sizes == [100, 612, 1124, 1636, 2000]
    assert len(table) == len(partition.published(0, 2000)) > 1900


def test_engine_that_leaves_withdraws_everything(partition: Partition) -> None:
    table = table_of(partition)
    fill(table, 0, 5, seq=1)
    table.leave()
    assert [pin(partition, number) for number in range(5)] == [[]] * 5
    fill(table, 5, 5, seq=2)
    assert pin(partition, 6) == []
    assert table.get(BlockHashWithGroupId(KEYS[0])) is not None


def test_victims_behind_a_busy_partition_keep_their_turn(
    partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were not used, so they are the next ones still."""
    table = table_of(partition)
    slots = fill(table, 0, NUM_SLOTS, seq=1)
    new = [BlockHashWithGroupId(KEYS[NUM_SLOTS + i]) for i in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(partition, "claim", lambda s: [Claim.BUSY] * len(s))
        assert table.insert_all(new, [16] * 4, 2) == []
    assert table.insert_all(new, [16] * 4, 2) == slots[:4]
    table.unpin_all()
    assert len(table) == NUM_SLOTS
