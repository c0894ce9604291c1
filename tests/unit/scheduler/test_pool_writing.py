# SPDX-License-Identifier: Apache-2.0
"""What the pool stores before its block is taken: write_through, and the cleaner."""

from typing import Any

import pytest

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.scheduler.host_writer import Cleaner

from ..tier import Tier, cleaned, ids, is_empty, stores

# ----------------------------------------------------------------- write_through


def test_write_through_stores_a_block_in_the_step_after_it_was_filled() -> None:
    tier = Tier(3, store_policy="write_through")
    tier.begin()
    blocks = tier.compute("ab")
    assert not stores(tier.end())
    plan = tier.idle()[0]
    assert set(stores(plan).values()) == {b.block_id for b in blocks}
    assert plan.compute_after_stores == 0
    assert is_empty(tier.idle()[0])
    assert tier.where("a") == "device" and tier.slot("a")


def test_write_through_forgets_blocks_that_lost_their_content() -> None:
    tier = Tier(2, store_policy="write_through")
    tier.begin()
    blocks = tier.compute("ab")
    tier.end()
    tier.pool.evict_blocks({blocks[0].block_id})
    assert list(stores(tier.idle()[0]).values()) == [blocks[1].block_id]


def test_write_through_does_not_store_what_was_loaded() -> None:
    tier = Tier(2, store_policy="write_through")
    tier.demoted("ab")
    tier.begin()
    tier.promote(tier.find("ab"))
    assert not stores(tier.end())
    assert all(map(is_empty, tier.idle(2)))


def test_a_victim_under_write_through_costs_no_second_store() -> None:
    tier = Tier(1, store_policy="write_through")
    tier.computed("a")
    plan = tier.idle()[0]
    tier.begin()
    tier.pool.get_new_blocks(1)
    later = tier.end()
    assert stores(plan) and not stores(later)
    # The store may still run when the forward pass overwrites the block.
    assert later.compute_after_stores == plan.seq


def test_write_through_stores_one_of_two_blocks_of_one_key() -> None:
    tier = Tier(3, store_policy="write_through")
    tier.begin()
    first, second = tier.compute("a") + tier.compute("a")
    tier.end()
    assert cleaned(tier.idle()[0]) < ids([first, second])
    assert len(tier.host) == 1 and not any(map(stores, tier.idle(2)))


# ----------------------------------------------------------------------- cleaner


def dirty(num_blocks: int, **tuning: Any) -> tuple[Tier, list[KVCacheBlock]]:
    """A pool full of free blocks that only the device has, the next victim first.

    Their names are A, B and so on. The cleaner has not looked at them yet.
    """
    tier = Tier(num_blocks, tuning=tuning)
    blocks = tier.computed("".join(chr(ord("A") + i) for i in range(num_blocks)))
    tier.forget_rate()
    return tier, blocks


def looked_at(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> list[KVCacheBlock]:
    """The free blocks that are looked at from now on."""
    seen: list[KVCacheBlock] = []
    cleaner: Any = tier.pool.store_timing
    clean = cleaner._clean

    def look(after: KVCacheBlock | None, num_looks: int, max_stores: int) -> Any:
        block = after or tier.pool.free_block_queue.fake_free_list_head
        for _ in range(num_looks):
            assert (block := block.next_free_block) is not None
            seen.append(block)
        return clean(after, num_looks, max_stores)

    monkeypatch.setattr(cleaner, "_clean", look)
    return seen


def test_the_cleaner_stops_at_the_first_block_without_a_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks are stored together, and the next plan goes on after those that were."""
    tier, blocks = dirty(15)
    host: Any = tier.host
    insert_all = host.insert_all
    monkeypatch.setattr(host, "insert_all", lambda k, *args: insert_all(k[:2], *args))
    for i in (0, 2, 4):
        assert cleaned(tier.idle()[0]) == ids(blocks[i : i + 2])


def test_the_cleaner_keeps_three_quarters_of_the_device_clean() -> None:
    tier, blocks = dirty(15)
    plan = tier.idle()[0]
    assert cleaned(plan) == ids(blocks[:12])
    # They are on the device still, and the host may answer for them from now on.
    assert tier.where("A") == "device" and tier.slot("A").store_seq == plan.seq
    assert all(map(is_empty, tier.idle(2)))


@pytest.mark.parametrize("clean_s, num_clean", [(7.0, 7), (100.0, 12)])
def test_the_cleaner_keeps_no_more_clean_than_hits_take_at_once(
    clean_s: float, num_clean: int
) -> None:
    """A block takes a second to load."""
    tier = Tier(15, load_s=1.0, tuning={"clean_s": clean_s})
    blocks = tier.computed("ABCDEFGHIJKLMNO")
    tier.forget_rate()
    assert cleaned(tier.idle()[0]) == ids(blocks[:num_clean])


def test_the_cleaner_keeps_some_times_clean_what_hits_took_lately() -> None:
    tier, blocks = dirty(15, clean_loads=2.0, load_rate_decay=0.0)
    assert is_empty(tier.idle()[0]), "No hit took anything"
    tier.begin()
    timing = tier.pool.store_timing
    timing.record_allocated(3)
    timing.record_allocated_for_loads(3)
    assert cleaned(tier.end()) == ids(blocks[:6])


def test_the_cleaner_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    tier, blocks = dirty(31)
    first = tier.idle()[0]
    seen = looked_at(tier, monkeypatch)
    for i in (24, 26, 28):
        tier.begin()
        tier.pool.get_new_blocks(2)
        seen.clear()
        plan = tier.end()
        assert seen == blocks[i : i + 2] and cleaned(plan) == ids(seen)
        # A clean victim costs nothing but a fence.
        assert plan.compute_after_stores == first.seq


@pytest.mark.parametrize("how", ["hit", "hit and freed", "moved by a load"])
def test_the_cleaner_begins_anew_when_the_block_where_it_stopped_was_hit(
    how: str,
) -> None:
    tier, blocks = dirty(31)
    tier.idle()
    tier.begin()
    tier.pool.get_new_blocks(1)
    tier.end()
    last = tier.find(chr(ord("A") + 24))
    assert last == [blocks[24]] == [tier.pool.free.cursor]
    tier.drop("F")
    tier.begin()
    if how == "moved by a load":
        tier.promote(last + tier.find("A"))
    else:
        tier.pool.touch(last)
        if how == "hit and freed":
            tier.free(last)
    assert blocks[5].block_id in cleaned(tier.end())


@pytest.mark.parametrize("frees", [False, True])
def test_the_cleaner_begins_anew_when_the_block_where_it_stopped_was_taken(
    frees: bool,
) -> None:
    tier, blocks = dirty(31)
    tier.idle()
    tier.begin()
    taken = tier.compute("abcdefghijklmnopqrstuvwx")
    assert taken[-1] is blocks[23]
    if frees:
        tier.free(taken)
    assert cleaned(tier.end()) == ids(blocks[24:])


def test_the_cleaner_begins_anew_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host may have dropped a slot since."""
    tier, blocks = dirty(31, recheck_steps=3)
    tier.idle()
    tier.drop("C")
    seen = looked_at(tier, monkeypatch)
    assert list(map(cleaned, tier.idle(6))) == [
        *3 * [set()],
        ids([blocks[2]]),
        *2 * [set()],
    ]
    assert seen == blocks[:24]


def test_the_cleaner_does_not_begin_anew_while_nothing_runs() -> None:
    """Else an engine that steps until its stores are published might never rest."""
    tier, blocks = dirty(31, recheck_steps=3)
    tier.idle()
    tier.drop("C")
    for _ in range(8):
        tier.begin()
        assert not cleaned(tier.pool.take_plan(is_idle=True)) & ids(blocks[:3])
    assert ids([blocks[2]]) in map(cleaned, tier.idle(6))


def test_the_cleaner_looks_as_far_as_two_steps_take() -> None:
    tier, blocks = dirty(63)
    tier.begin()
    assert tier.pool.get_new_blocks(13) == blocks[:13]
    # The victims, and twice as many; a quarter of the host would be one less.
    assert cleaned(tier.end()) == ids(blocks[:39])


def test_steps_with_nothing_to_clean_do_not_widen_the_window() -> None:
    tier = Tier(31)
    tier.begin()
    blocks = tier.compute("".join(chr(ord("A") + i) for i in range(30)))
    tier.end()
    tier.forget_rate()
    for _ in range(10):
        tier.begin()
        taken = tier.pool.get_new_blocks(1)
        tier.end()
        tier.free(taken)
    tier.free(blocks)
    # The free block without a key counts as clean.
    assert len(cleaned(tier.idle()[0])) == 23


def test_what_loads_take_does_not_widen_the_window() -> None:
    tier = Tier(31)
    tier.demoted("".join(map(chr, range(ord("a"), ord("a") + 20))))
    tier.forget_rate()
    tier.begin()
    tier.promote(tier.find("abcdefghijklmnopqrst"))
    tier.end()
    assert isinstance(tier.pool.store_timing, Cleaner)
    assert tier.pool.store_timing.alloc_rate == 0.0


def test_the_cleaner_stores_few_blocks_in_a_step() -> None:
    tier, blocks = dirty(31, min_stores=3, idle_stores=7)
    found = [cleaned(plan) for plan in tier.idle(2)]
    assert found == [ids(blocks[:3]), ids(blocks[3:6])]
    # Unless a step takes more, which the next ones will do too.
    tier.begin()
    tier.pool.get_new_blocks(2)
    assert cleaned(tier.end()) == ids(blocks[6:10])
    # Or has nothing else to do.
    tier.begin()
    assert cleaned(tier.pool.take_plan(is_idle=True)) == ids(blocks[10:17])


def test_the_cleaner_stores_several_blocks_or_none() -> None:
    """A step that takes one block needs two clean ones; each store costs a thread."""
    tier, blocks = dirty(31, clean_batch=4, clean_loads=0.0, alloc_rate_decay=1.0)
    found = []
    for _ in range(10):
        tier.begin()
        tier.pool.get_new_blocks(1)
        found.append(cleaned(tier.end()))
    # The first victim, and the two and four that are next.
    assert [len(each) for each in found] == [7, 0, 0, 0, 0, 5, 0, 0, 0, 0]
    assert found[0] == ids(blocks[:7]) and found[5] == ids(blocks[7:12])


def step_with_a_load(tier: Tier) -> StepPlan:
    tier.begin()
    tier.pool.get_new_blocks(1)
    tier.promote(tier.find("A"))
    return tier.end()


def test_the_cleaner_does_not_hold_up_loads() -> None:
    # Else loads pass over the blocks that were freed just now.
    tier, blocks = dirty(31, looks_during_loads=3, num_recent=0)
    # The two victims, and three more.
    assert cleaned(step_with_a_load(tier)) == ids(blocks[:5])
    assert cleaned(tier.idle()[0]) == ids(blocks[5:26])
    # What a load takes is made up for.
    tier.begin()
    tier.promote(tier.find("B"))
    assert cleaned(tier.end()) == ids([blocks[26]])


def test_the_cleaner_stores_fewer_blocks_beside_loads() -> None:
    tier, blocks = dirty(31, stores_during_loads=2, num_recent=0)
    # The two victims, and two more.
    assert cleaned(step_with_a_load(tier)) == ids(blocks[:4])


@pytest.mark.parametrize("num_clean, num_stores", [(5, 5), (20, 2)])
def test_the_cleaner_leaves_the_way_to_what_is_read(
    num_clean: int, num_stores: int
) -> None:
    # If enough victims are clean for what will be loaded into them.
    tuning = {"min_stores": 0, "idle_stores": num_clean, "stores_during_loads": 2}
    tier, blocks = dirty(31, **tuning)
    tier.begin()
    assert cleaned(tier.pool.take_plan(is_idle=True)) == ids(blocks[:num_clean])
    tier.begin()
    tier.pool.store_timing.write(is_idle=True, is_read=True)
    assert cleaned(tier.end()) == ids(blocks[num_clean : num_clean + num_stores])


@pytest.mark.parametrize("take_rate, num_clean", [(0.0, 2), (30.0, 4)])
def test_the_cleaner_leaves_most_of_a_small_host_alone(
    take_rate: float, num_clean: int
) -> None:
    """Else it would store the same blocks again and again."""
    tier = Tier(20, num_slots=8)
    tier.computed("abcdefghijklmnopqrst")
    assert isinstance(tier.pool.store_timing, Cleaner)
    tier.pool.store_timing.alloc_rate = take_rate
    assert [len(stores(plan)) for plan in tier.idle(3)] == [num_clean, 0, 0]


def test_the_cleaner_leaves_this_steps_blocks_alone() -> None:
    tier = Tier(4)
    tier.begin()
    tier.free(tier.compute("abcd"))
    assert not stores(tier.end())
    assert len(stores(tier.idle()[0])) == 4


def test_the_cleaner_leaves_blocks_in_use_alone() -> None:
    tier = Tier(4)
    tier.begin()
    used = tier.compute("ab")
    tier.free(tier.compute("cd"))
    tier.end()
    assert {b.block_id for b in used}.isdisjoint(stores(tier.idle()[0]).values())
