# SPDX-License-Identifier: Apache-2.0
"""What an engine finds of its neighbours, how much a step looks for, and its pins."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.keeper.crowd import IDENTITY, KEYS, NUM_SLOTS, Shared, key
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.kv_tier.eviction.policies import make_policy
from vllm.v1.kv_tier.keeper.client import Membership
from vllm.v1.kv_tier.keeper.partition import Claim, Partition
from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.scheduler.neighbours import Neighbours, SharedHostWriter
from vllm.v1.kv_tier.scheduler.secondary.lookup import PromptLookup
from vllm.v1.kv_tier.scheduler.shared_slots import SharedSlotTable
from vllm.v1.kv_tier.tuning import SchedulingTuning

ALL = list(range(NUM_SLOTS))


@pytest.fixture
def partition() -> Partition:
    """Of the neighbour."""
    partition = Shared().partition
    assert partition.assign(IDENTITY, NUM_SLOTS)
    return partition


def neighbours_of(partition: Partition, max_looks: int = 8192) -> Neighbours:
    partitions = [Shared().partition, partition]
    member = Membership.take(partitions, 0, IDENTITY, NUM_SLOTS)
    table = SharedSlotTable(make_policy("lru", NUM_SLOTS), member, SchedulingTuning())
    lookup = PromptLookup([16], 16, table, lambda key: None)
    return Neighbours(member, lookup, max_looks)


def prompt(keys: list[bytes]) -> Any:
    return SimpleNamespace(block_hashes=[key[:32] for key in keys])


def found(neighbours: Neighbours) -> list[int]:
    """Numbers of the keys that the step has found."""
    numbers = {BlockHashWithGroupId(key): i for i, key in enumerate(KEYS)}
    return sorted(numbers[key] for key in neighbours.found)


def test_block_that_is_there_twice_is_pinned_once(partition: Partition) -> None:
    neighbours = neighbours_of(partition)
    twice = [KEYS[0], KEYS[0], KEYS[1]]
    assert partition.publish([3, 5, 7], twice, [16, 16, 32])
    assert not neighbours.look_up(prompt(KEYS[:4]), None)
    assert found(neighbours) == [0, 1]
    pinned = partition.unpinned(ALL)
    assert pinned is not None and len(pinned) == NUM_SLOTS - 2
    neighbours.end_step()
    assert partition.unpinned(ALL) == ALL


def test_step_looks_for_no_more_than_it_may(partition: Partition) -> None:
    neighbours = neighbours_of(partition, max_looks=4)
    assert partition.publish(ALL[:8], KEYS[:8], [None] * 8)
    # The first one goes on with what a step may find.
    assert not neighbours.look_up(prompt(KEYS[:8]), None)
    assert found(neighbours) == [0, 1, 2, 3]
    assert neighbours.look_up(prompt(KEYS[4:6]), None)
    neighbours.end_step()
    assert not neighbours.look_up(prompt(KEYS[4:6]), None)
    assert found(neighbours) == [4, 5]


def test_nothing_is_looked_for_behind_a_part_without_blocks(
    partition: Partition,
) -> None:
    neighbours = neighbours_of(partition)
    assert partition.publish([0], KEYS[:1], [None])
    missing = [key(10_000 + i) for i in range(600)]
    assert not neighbours.look_up(prompt([*missing, KEYS[0]]), None)
    assert found(neighbours) == []
    assert not neighbours.look_up(prompt([*missing[:500], KEYS[0]]), None)
    assert found(neighbours) == [0]


def test_busy_neighbour_is_waited_for_three_steps(partition: Partition) -> None:
    neighbours = neighbours_of(partition)
    assert partition.publish([0], KEYS[:1], [None])
    assert partition.lock.acquire()
    waits = []
    for _ in range(4):
        waits.append(neighbours.look_up(prompt(KEYS[:1]), None))
        neighbours.end_step()
    partition.lock.release()
    assert waits == [True, True, True, False]
    assert not neighbours.look_up(prompt(KEYS[:1]), None)
    assert found(neighbours) == [0]


def test_engine_that_has_left_finds_nothing(partition: Partition) -> None:
    neighbours = neighbours_of(partition)
    assert partition.publish([0], KEYS[:1], [None])
    assert not neighbours.look_up(prompt(KEYS[:1]), None)
    neighbours.leave()
    assert not neighbours.look_up(prompt(KEYS[:1]), None) and not neighbours.found
    neighbours.end_step()
    assert partition.unpinned(ALL) == ALL


def test_only_what_all_ranks_have_open_is_found(partition: Partition) -> None:
    neighbours = neighbours_of(partition)
    assert partition.publish([3, 5, 7], KEYS[:3], [None] * 3)
    counts = []
    # Its own slots come first, in whose place they have other numbers.
    for num_open in (8, NUM_SLOTS, NUM_SLOTS + 4, NUM_SLOTS + 6, 2 * NUM_SLOTS):
        neighbours.num_open = num_open
        assert not neighbours.look_up(prompt(KEYS[:3]), None)
        counts.append(len(found(neighbours)))
        pinned = partition.unpinned(ALL)
        assert pinned is not None and len(pinned) == NUM_SLOTS - counts[-1]
        neighbours.end_step()
    assert counts == [0, 0, 1, 2, 3]


def test_block_whose_load_failed_is_found_no_more(partition: Partition) -> None:
    """Until another one is in its slot; what earlier plans read stays."""
    neighbours = neighbours_of(partition)
    assert partition.publish([3, 5, 7], KEYS[:3], [None] * 3)
    for seq, number in ((1, 0), (2, 1)):
        neighbours.look_up(prompt(KEYS[:3]), None)
        slots = [slot.index for slot in neighbours.found.values()]
        plan = StepPlan(seq, load_slots=[slots[number]], load_blocks=[1])
        assert neighbours.record_plan(plan, NUM_SLOTS) == 1
        neighbours.end_step()
    neighbours.mark_failed(2)
    neighbours.record_ended([1, 2])
    neighbours.look_up(prompt(KEYS[:3]), None)
    assert found(neighbours) == [0, 2]
    neighbours.end_step()
    assert partition.withdraw(5) is Claim.FREE
    assert partition.publish([5, 6], [KEYS[3], KEYS[1]], [None] * 2)
    neighbours.look_up(prompt(KEYS[:4]), None)
    assert found(neighbours) == [0, 1, 2, 3]


def test_block_of_a_neighbour_is_stored_once_it_is_overwritten(
    partition: Partition,
) -> None:
    neighbours = neighbours_of(partition)
    assert partition.publish([3, 5], KEYS[:2], [16, 32])
    blocks = [KVCacheBlock(i) for i in range(200)]
    pool, table = SimpleNamespace(blocks=blocks), SimpleNamespace(num_slots=NUM_SLOTS)
    writer = SharedHostWriter(pool, table, None, None, None)
    loaded = [blocks[10], blocks[150]]
    for block, each in zip(loaded, KEYS):
        block._block_hash = BlockHashWithGroupId(each)
    slots = [NUM_SLOTS + 3, NUM_SLOTS + 5]
    plan = StepPlan(1, load_slots=slots, load_blocks=[10, 150])
    writer.record_loads(plan, neighbours)
    admits = []
    for block in loaded:
        # A step looks at a part of the device.
        for _ in range(4):
            writer.forget_overwritten()
        admits.append((writer.admits_all, *map(writer.is_admitted, loaded)))
        block._block_hash = BlockHashWithGroupId(KEYS[2])
    assert admits == [(False, False, False), (False, True, False)]
    for _ in range(4):
        writer.forget_overwritten()
    assert writer.admits_all


def test_copies_are_what_can_be_loaded(partition: Partition) -> None:
    neighbours = neighbours_of(partition)
    keys = [BlockHashWithGroupId(each) for each in KEYS[:4]]
    assert neighbours.find_copies(keys) == []
    twice = [KEYS[0], KEYS[0], KEYS[1], KEYS[2]]
    assert partition.publish([3, 5, 7, 9], twice, [None] * 4)
    copies = neighbours.find_copies(keys)
    assert [copy.key for copy in copies] == keys[:3]
    assert all(copy.partition is partition for copy in copies)
    assert [copy.slot for copy in copies[1:]] == [7, 9]
    # Nothing is pinned.
    assert partition.unpinned(ALL) == ALL
    # One is not open, and a load of another one has failed.
    neighbours.num_open = NUM_SLOTS + 9
    neighbours.look_up(prompt(KEYS[1:2]), None)
    plan = StepPlan(1, load_slots=[NUM_SLOTS + 7], load_blocks=[1])
    neighbours.record_plan(plan, NUM_SLOTS)
    neighbours.mark_failed(1)
    assert [copy.key for copy in neighbours.find_copies(keys)] == keys[:1]
    assert partition.assign(b"j" * 32, NUM_SLOTS) is False
    neighbours.end_step()
    neighbours.record_ended([1])
    neighbours.end_step()
    assert partition.assign(b"j" * 32, NUM_SLOTS)
    assert neighbours.find_copies(keys) == []


def test_block_of_which_a_neighbour_has_a_copy_is_not_stored_again(
    partition: Partition,
) -> None:
    neighbours = neighbours_of(partition)
    keys = [BlockHashWithGroupId(each) for each in KEYS[:2]]
    blocks = [KVCacheBlock(i) for i in range(2)]
    for block, each in zip(blocks, keys):
        block._block_hash = each
    cached = SimpleNamespace(get_one_block=dict(zip(keys, blocks)).get)
    pool = SimpleNamespace(blocks=blocks, cached_block_hash_to_block=cached)
    table = SimpleNamespace(num_slots=NUM_SLOTS)
    writer = SharedHostWriter(pool, table, None, None, None)
    # One of them is not on the device.
    assert partition.publish([3, 4], [KEYS[0], KEYS[2]], [None] * 2)
    writer.record_copies(neighbours.find_copies([keys[0], KEYS[2]]))  # type: ignore[list-item]
    assert [*map(writer.is_admitted, blocks)] == [False, True]
    assert partition.withdraw(3) is Claim.FREE
    assert [*map(writer.is_admitted, blocks)] == [True, True]


def test_slots_of_neighbours_are_numbered_in_a_ring() -> None:
    partitions = [Shared().partition for _ in range(4)]
    member = Membership.take(partitions, 2, IDENTITY, NUM_SLOTS + 5)
    table = SharedSlotTable(make_policy("lru", NUM_SLOTS), member, SchedulingTuning())
    neighbours = Neighbours(member, PromptLookup([16], 16, table, lambda key: None), 8)
    for number, i in enumerate((3, 0, 1)):
        assert partitions[i].publish([number], KEYS[number : number + 1], [None])
    neighbours.look_up(prompt(KEYS[:3]), None)
    each = NUM_SLOTS + 5
    indices = [slot.index for slot in neighbours.found.values()]
    assert indices == [each, 2 * each + 1, 3 * each + 2]
    assert [neighbours.place_of(index) for index in indices] == [
        (partitions[3], 0),
        (partitions[0], 1),
        (partitions[1], 2),
    ]
    assert member.end == 3 * each + NUM_SLOTS
