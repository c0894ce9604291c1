# SPDX-License-Identifier: Apache-2.0
"""Slots of the host table: who holds them, and when they are free again."""

import gc

import pytest

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_tier.policy import LRU, POLICIES, make_policy
from vllm.v1.kv_tier.scheduler.slots import HostSlot, SlotTable

from ...names import block_hash


def key(name: str, group_id: int = 0):
    return make_block_hash_with_group_id(block_hash(name.encode()), group_id)


def table(num_slots: int) -> SlotTable:
    return SlotTable(num_slots, LRU(num_slots))


def insert(host: SlotTable, name: str, seq: int = 1) -> HostSlot:
    """In the plan in the making."""
    index = host.insert((key(name),), 32, seq)
    slot = host.get(key(name))
    assert slot is not None and slot.index == index and host.is_pinned(slot)
    return slot


def inserted(host: SlotTable, name: str, seq: int = 1) -> HostSlot:
    """In an earlier plan."""
    slot = insert(host, name, seq)
    host.unpin_all()
    return slot


def test_a_slot_is_found_by_its_keys_and_index() -> None:
    host = table(2)
    keys = key("a"), key("a", 1)
    index = host.insert(keys, 48, seq=7)
    assert index is not None
    slot = host.at(index)
    assert slot is not None
    assert [host.get(k) for k in keys] == [slot, slot]
    assert host.at(slot.index) == slot
    assert host.filled_slots() == [slot] and len(host) == 1
    assert (slot.store_seq, slot.block_hash, slot.block_hash_num_tokens) == (
        7,
        keys[0],
        48,
    )
    assert host.get(key("b")) is None and host.at(1 - slot.index) is None


def test_a_slot_counts_as_a_block_to_allocate() -> None:
    slot = insert(table(1), "a")
    assert slot.ref_cnt == 0 and not slot.is_null and slot.block_id == -1


def test_slots_are_distinct_until_one_must_make_room() -> None:
    host = table(3)
    slots = [inserted(host, n) for n in "abc"]
    assert {s.index for s in slots} == {0, 1, 2}
    assert host.num_evicted == 0
    d = insert(host, "d")
    assert d.index == slots[0].index
    assert host.get(key("a")) is None and host.num_evicted == 1 and len(host) == 3


def test_eviction_follows_use() -> None:
    host = table(2)
    a, b = inserted(host, "a"), inserted(host, "b")
    host.pin([a])
    host.mark_loaded([a], 5)
    host.unpin_all()
    assert insert(host, "c").index == b.index


@pytest.mark.parametrize("policy", ["lru", "proven"])
def test_end_of_a_used_prefix_is_evicted_before_its_beginning(policy: str) -> None:
    host = SlotTable(3, make_policy(policy, 3))
    prefix = [inserted(host, name) for name in "abc"]
    host.pin(prefix)
    host.unpin_all()
    assert [insert(host, name).index for name in "de"] == [2, 1]


def test_a_pinned_slot_makes_no_room() -> None:
    host = table(2)
    a, b = inserted(host, "a"), inserted(host, "b")
    host.pin([a])
    assert insert(host, "c").index == b.index
    assert host.insert((key("d"),), 32, 1) is None
    assert len(host) == 2 and host.get(key("d")) is None
    host.unpin_all()
    assert insert(host, "d").index == a.index


def test_a_slot_removed_while_pinned_is_not_reused_in_the_plan() -> None:
    host = table(1)
    a = insert(host, "a")
    host.remove(a)
    assert host.get(key("a")) is None and len(host) == 0
    assert host.insert((key("b"),), 32, 1) is None
    host.unpin_all()
    assert insert(host, "b").index == a.index


def test_a_key_may_come_back_while_its_old_slot_is_in_use() -> None:
    host = table(2)
    old = inserted(host, "a")
    host.pin([old])
    host.remove(old)
    new = insert(host, "a")
    assert new.index != old.index
    host.unpin_all()
    assert host.get(key("a")) == new
    assert insert(host, "b").index == old.index


def test_a_removed_slot_is_free_at_once_when_no_copy_uses_it() -> None:
    host = table(1)
    a = inserted(host, "a")
    host.remove(a)
    assert insert(host, "b").index == a.index
    assert host.num_evicted == 0


def test_all_keys_of_an_evicted_slot_are_gone() -> None:
    host = table(1)
    host.insert((key("a"), key("a", 1)), 32, 1)
    host.unpin_all()
    insert(host, "b")
    assert host.get(key("a")) is None and host.get(key("a", 1)) is None


def test_the_last_load_outlives_the_content() -> None:
    host = table(1)
    a = inserted(host, "a")
    assert host.last_load([a.index]) == 0
    host.mark_loaded([a], 5)
    assert host.last_load([a.index]) == 5
    b = insert(host, "b", seq=6)
    assert b.index == a.index
    # The new content was never loaded, but a store must wait for that load.
    assert host.last_load([b.index]) == 5


def test_no_slot_leaks() -> None:
    host = table(4)
    for i in range(50):
        slot = inserted(host, f"k{i}")
        if i % 3 == 0:
            host.pin([slot])
        if i % 5 == 0:
            host.remove(slot)
        if i % 2 == 0:
            host.unpin_all()
    host.unpin_all()
    for slot in host.filled_slots():
        host.remove(slot)
    slots = [insert(host, n) for n in "abcd"]
    assert sorted(s.index for s in slots) == [0, 1, 2, 3]


def test_a_key_cannot_be_in_two_slots() -> None:
    host = table(2)
    insert(host, "a")
    with pytest.raises(AssertionError):
        host.insert((key("a"),), 32, 2)


def test_a_closed_table_has_nothing_and_takes_nothing() -> None:
    host = table(2)
    removed = inserted(host, "a"), insert(host, "b")
    host.close()
    assert host.filled_slots() == [] and len(host) == 0
    assert [host.get(key(n)) for n in "ab"] == [None, None]
    assert [host.at(slot.index) for slot in removed] == [None, None]
    assert host.insert((key("c"),), 32, 2) is None
    host.unpin_all()
    assert host.insert((key("c"),), 32, 3) is None


def test_released_slots_that_are_being_written_make_room_first_afterwards() -> None:
    host = table(6)
    slots = [inserted(host, n) for n in "abcdef"]
    held = slots[2:5]
    for slot in held:
        host.release(slot)
    host.hold(0, [s.index for s in held], [s.keys[0] for s in held])
    # The policy chooses: the oldest, which nobody writes.
    insert(host, "x"), insert(host, "y")
    host.unpin_all()
    assert host.get(key("a")) is None and host.get(key("b")) is None
    host.end_hold(0, [s.index for s in held], [s.keys[0] for s in held])
    host.pin([slots[3]])
    host.unpin_all()
    insert(host, "z"), insert(host, "v")
    host.unpin_all()
    assert [host.get(key(n)) is None for n in "cdef"] == [True, False, True, False]


def test_what_is_released_last_makes_room_first() -> None:
    host = table(4)
    for n in "abcd":
        host.release(inserted(host, n))
    insert(host, "x")
    assert host.get(key("d")) is None and host.get(key("a")) is not None
    host.unpin_all()
    assert [s.keys[0] for s in host.by_value()] == [key(n) for n in "xabc"]


def test_no_victim_is_searched_for_among_all_that_is_being_written() -> None:
    host = table(20_000)
    slots = [inserted(host, str(i)) for i in range(20_000)]
    held = slots[:19_000]
    host.hold(0, [s.index for s in held], [s.keys[0] for s in held])
    num_passed: list[int] = []
    while host.insert((key(f"x{len(num_passed)}"),), 32, 2) is None:
        num_passed.append(len(host._passed))
        host.unpin_all()
        assert len(num_passed) < 10
    # Each of them is passed over once.
    assert num_passed == [8192, 2 * 8192]


def hold(host: SlotTable, slots: list[HostSlot]) -> tuple[int, list[int], list[bytes]]:
    """A tier below begins to write `slots`. Returns what ends it."""
    job = 0, [s.index for s in slots], [s.keys[0] for s in slots]
    host.hold(*job)
    return job  # type: ignore[return-value]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_written_below_outlives_nothing_newer(policy: str) -> None:
    """To be passed over by a victim is no use."""
    host = SlotTable(100, make_policy(policy, 100))
    slots = [inserted(host, str(i)) for i in range(100)]
    job = hold(host, slots[:30])
    inserted(host, "new", 2)
    host.end_hold(*job)
    for i in range(30):
        inserted(host, f"x{i}", 3)
    assert not any(host.get(key(str(i))) for i in range(31))
    assert all(host.get(key(str(i))) for i in range(31, 100))


def test_what_is_used_while_it_is_written_or_after_it_is_no_victim() -> None:
    host = table(6)
    a, b, c, *_ = [inserted(host, n) for n in "abcdef"]
    job = hold(host, [a, b, c])
    inserted(host, "x")
    # It is loaded, used on the device, and dropped and stored again.
    host.pin([a])
    host.unpin_all()
    host.keep_passed([key("b")])
    host.remove(c)
    inserted(host, "c")
    host.end_hold(*job)
    for n in "yz":
        inserted(host, n)
    assert host.get(key("a")) == a and host.get(key("b")) == b
    assert [host.is_ordered(key(n)) for n in "abcefxyz"] == 3 * [True] + [
        False,
        False,
        True,
        True,
        True,
    ]


def test_slots_make_no_new_objects_for_the_garbage_collector() -> None:
    host = table(1000)
    keys = [(key(str(i)),) for i in range(3000)]
    for each in keys[:1000]:
        host.insert(each, 32, 1)
    host.unpin_all()
    gc.collect()
    before = len(gc.get_objects())
    for each in keys[1000:]:
        assert host.insert(each, 32, 2) is not None
        host.unpin_all()
    assert abs(len(gc.get_objects()) - before) < 100


@pytest.mark.parametrize("policy", POLICIES)
def test_many_slots_are_in_several_tables(policy: str) -> None:
    """None of which is so large that a step would notice when Python rebuilds it."""
    num_slots = 30_000
    host = SlotTable(num_slots, make_policy(policy, num_slots))
    keys = [key(f"{i}") for i in range(num_slots + 5_000)]
    for i, each in enumerate(keys):
        assert host.insert((each,), 16 * (i + 1), 1) is not None
        if i % 500 == 0:
            host.unpin_all()
    assert 1 < host.places.num_parts == len(host.places.parts)
    assert max(map(len, host.places.parts)) < 10_922
    assert len(host) == num_slots == len(dict(host.places.items()))
    found = [slot for each in keys if (slot := host.get(each)) is not None]
    assert len({slot.index for slot in found}) == num_slots
    assert all(host.at(slot.index) == slot for slot in found)
    assert found[-1].num_tokens == 16 * len(keys)


@pytest.mark.parametrize("policy", POLICIES)
def test_several_blocks_are_stored_as_one_by_one(policy: str) -> None:
    """Pinned slots and slots in writes are passed over, as far as there are others."""
    tables = [SlotTable(8, make_policy(policy, 8)) for _ in range(2)]
    old, new = [[key(f"{kind}{i}") for i in range(8)] for kind in ("old", "new")]
    found = []
    for host in tables:
        slots = [inserted(host, each) for each in map("old{}".format, range(8))]
        host.unpin_all()
        host.pin([slots[2]])
        host.hold(0, [slots[0].index], [old[0]])
        if host is tables[0]:
            indices = host.insert_all(new, [32] * 8, 2)
        else:
            one_by_one = [host.insert((each,), 32, 2) for each in new]
            indices = [index for index in one_by_one if index is not None]
        assert len(indices) == 6 and not {0, 2} & {*indices}
        found.append((indices, [host.get(each) for each in old + new]))
        host.unpin_all()
        host.end_hold(0, [slots[0].index], [old[0]])
        # What was written is the next victim.
        assert host.insert((key("last"),), 32, 3) == slots[0].index
    assert found[0] == found[1]
