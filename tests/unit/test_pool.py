# SPDX-License-Identifier: Apache-2.0
"""The tiered block pool alone: what it answers, plans and takes back."""

from collections.abc import Iterator
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.kv_tier import pool
from vllm.v1.kv_tier.config import GiB, KVTierConfig, KVTierLayout
from vllm.v1.kv_tier.host_table import HostSlot
from vllm.v1.kv_tier.plan import StepPlan, StepReport
from vllm.v1.kv_tier.pool import kv_tier_of, make_block_pool

from .tier import (
    BLOCK,
    SLOT_BYTES,
    Tier,
    assert_nothing_leaks,
    hash_of,
    hashes,
    ids,
    is_empty,
    loads,
    stores,
)

# ------------------------------------------------------------------------ seams


def test_the_pool_is_upstreams_without_a_tier() -> None:
    kwargs = {"num_gpu_blocks": 4, "enable_caching": True, "hash_block_size": BLOCK}
    plain = make_block_pool(SimpleNamespace(kv_tier=None), **kwargs)
    assert type(plain) is BlockPool and kv_tier_of(plain) is None
    layout = KVTierLayout(KVTierConfig(size_bytes=GiB), 4, SLOT_BYTES)
    tiered = make_block_pool(SimpleNamespace(kv_tier=layout), **kwargs)
    assert kv_tier_of(tiered) is tiered


def test_an_idle_step_has_an_empty_plan() -> None:
    assert Tier(4).idle(3) == [StepPlan(1), StepPlan(2), StepPlan(3)]


def test_plans_are_numbered_by_step() -> None:
    tier = Tier(2)
    tier.idle(3)
    plan = tier.demoted("ab")
    assert plan.seq == 5


# ----------------------------------------------------------------------- demote


def test_victims_are_stored_before_their_blocks_are_used() -> None:
    tier = Tier(3)
    blocks = tier.computed("abc")
    tier.begin()
    assert {b.block_id for b in tier.pool.get_new_blocks(3)} == {
        b.block_id for b in blocks
    }
    assert [tier.where(n) for n in "abc"] == 3 * ["host"]
    plan = tier.end()
    assert stores(plan) == {
        tier.slot(n).index: b.block_id for n, b in zip("abc", blocks)
    }
    # The forward pass of this very step overwrites them.
    assert plan.compute_after_stores == plan.seq


def test_a_block_that_was_not_computed_yet_is_not_stored() -> None:
    tier = Tier(2)
    tier.begin()
    tier.free(tier.compute("ab"))
    tier.pool.get_new_blocks(2)
    assert not stores(tier.end())
    assert tier.where("a") == tier.where("b") == "nowhere"


def test_a_block_hashed_between_steps_was_computed() -> None:
    """Async scheduling hashes when an output arrives."""
    tier = Tier(1)
    tier.begin()
    blocks = tier.pool.get_new_blocks(1)
    tier.end()
    tier.cache("a", blocks)
    tier.free(blocks)
    tier.begin()
    tier.pool.get_new_blocks(1)
    assert list(stores(tier.end()).values()) == [blocks[0].block_id]
    assert tier.where("a") == "host"


def test_unhashed_blocks_are_not_stored() -> None:
    tier = Tier(1)
    tier.begin()
    tier.free(tier.pool.get_new_blocks(1))
    tier.end()
    tier.begin()
    tier.pool.get_new_blocks(1)
    assert is_empty(tier.end())


def test_slots_of_this_plan_make_no_room() -> None:
    tier = Tier(2, num_slots=1)
    tier.computed("ab")
    tier.begin()
    tier.pool.get_new_blocks(2)
    plan = tier.end()
    assert len(stores(plan)) == 1
    assert [tier.where(n) for n in "ab"] == ["host", "nowhere"]


def test_a_victim_that_has_a_slot_is_not_stored_again() -> None:
    tier = Tier(1)
    tier.demoted("a")
    tier.begin()
    (group,) = tier.promote(tier.find("a"))
    tier.end()
    tier.begin()
    tier.pool.get_new_blocks(1)
    assert not stores(tier.end())
    assert tier.where("a") == "host"


def test_a_load_counts_as_use_of_its_slot_and_an_eviction_does_not() -> None:
    tier = Tier(2, num_slots=2)
    tier.demoted("ab")
    tier.begin()
    tier.promote(tier.find("b"))
    tier.promote(tier.find("a"))
    tier.end()
    # Takes the block of b, whose slot is good still.
    tier.computed("x")
    assert tier.where("b") == "host"
    tier.begin()
    tier.pool.touch(tier.find("a"))
    tier.pool.get_new_blocks(1)
    assert len(stores(tier.end())) == 1
    # x took the slot of b: a was loaded last.
    assert tier.where("b") == "nowhere" and tier.where("a") == "device"
    assert tier.slot("a") and tier.slot("x")


# ----------------------------------------------------------------------- lookup


def test_lookup_prefers_the_device() -> None:
    tier = Tier(2)
    tier.demoted("a")
    tier.computed("a")
    assert tier.where("a") == "device"
    assert isinstance(tier.slot("a"), HostSlot)


def test_groups_are_found_together_in_both_tiers() -> None:
    tier = Tier(1)
    tier.demoted("a")
    tier.computed("a", group_id=1)
    # Group 1 took the only block; group 0 is on the host.
    found = tier.pool.get_cached_block(hash_of("a"), [0, 1])
    assert found is not None
    assert [type(b) for b in found] == [HostSlot, KVCacheBlock]
    assert tier.pool.get_cached_block(hash_of("a"), [0, 2]) is None
    assert tier.pool.get_cached_block(hash_of("b"), [0]) is None


def test_groups_do_not_share_keys() -> None:
    tier = Tier(1)
    tier.demoted("a")
    assert tier.where("a", group_id=1) == "nowhere"


# ---------------------------------------------------------------------- promote


def test_promoted_blocks_are_cached_and_free_at_once() -> None:
    tier = Tier(4)
    tier.demoted("abc")
    tier.begin()
    (group,) = tier.promote(tier.find("abc"))
    assert [tier.where(n) for n in "abc"] == 3 * ["device"]
    # Others of the same step share them.
    assert tier.find("abc") == list(group)
    assert all(b.ref_cnt == 0 for b in group)
    assert [b.block_hash_num_tokens for b in group] == [32, 64, 96]
    assert_nothing_leaks(tier)
    tier.pool.touch(group)
    plan = tier.end()
    assert loads(plan) == {b.block_id: tier.slot(n).index for n, b in zip("abc", group)}


def test_a_hit_without_slots_is_returned_as_it_is() -> None:
    tier = Tier(2)
    tier.computed("ab")
    tier.begin()
    groups = (tier.find("ab"),)
    assert tier.promote(*groups) == groups
    assert not loads(tier.end())


def test_promotion_does_not_evict_the_device_part_of_its_own_hit() -> None:
    tier = Tier(3)
    tier.demoted("c")
    tier.computed("ab")
    (block_x,) = tier.computed("x")
    # The free queue is a, b, x: to load c would take a.
    tier.begin()
    group = tier.find("abc")
    (promoted,) = tier.promote(group)
    assert list(promoted) == [*group[:2], block_x]
    assert [tier.where(n) for n in "abc"] == 3 * ["device"]
    assert_nothing_leaks(tier)


def test_promotion_does_not_evict_the_slots_it_loads_from() -> None:
    tier = Tier(2, num_slots=2)
    tier.demoted("ab")
    tier.computed("xy")
    tier.begin()
    # Takes the blocks of x and y, which would like to have slots.
    (group,) = tier.promote(tier.find("ab"))
    plan = tier.end()
    assert loads(plan) == {b.block_id: tier.slot(n).index for n, b in zip("ab", group)}
    assert not stores(plan)
    assert tier.where("a") == tier.where("b") == "device"
    assert tier.where("x") == tier.where("y") == "nowhere"


def test_blocks_behind_the_window_are_not_loaded() -> None:
    tier = Tier(4)
    tier.demoted("abc")
    tier.begin()
    (group,) = tier.promote(tier.find("abc"), skipped_tokens=[2 * BLOCK - 1])
    assert group[0] is tier.pool.null_block
    assert [tier.where(n) for n in "abc"] == ["host", "device", "device"]
    assert len(loads(tier.end())) == 2


def test_each_group_has_its_own_window() -> None:
    tier = Tier(6)
    tier.begin()
    blocks = tier.compute("abc") + tier.compute("abc", group_id=1)
    tier.end()
    tier.free(blocks)
    tier.begin()
    taken = tier.pool.get_new_blocks(6)
    tier.end()
    tier.free(taken)
    tier.begin()
    promoted = tier.promote(
        tier.find("abc"), tier.find("abc", 1), skipped_tokens=[0, 2 * BLOCK]
    )
    assert [[b.is_null for b in group] for group in promoted] == [
        [False, False, False],
        [True, True, False],
    ]
    plan = tier.end()
    assert len(loads(plan)) == 4
    keys = {s.keys[0] for s in tier.host.filled() if s.index in loads(plan).values()}
    assert keys == {
        *(make_block_hash_with_group_id(h, 0) for h in hashes("abc")),
        make_block_hash_with_group_id(hash_of("c"), 1),
    }


def test_a_load_is_cancelled_when_its_block_is_taken_again() -> None:
    """Its request was preempted in the step that admitted it."""
    tier = Tier(2)
    tier.demoted("ab")
    tier.begin()
    tier.promote(tier.find("a"))
    block_a = tier.find("a")[0]
    (group,) = tier.promote(tier.find("b"))
    tier.pool.touch(group)
    taken = tier.pool.get_new_blocks(1)
    assert taken == [block_a]
    assert list(loads(tier.end())) == [group[0].block_id]
    assert tier.where("a") == "host"


# ----------------------------------------------------------------- invalidation


def test_an_invalid_block_is_gone_from_both_tiers() -> None:
    tier = Tier(2)
    tier.demoted("ab")
    tier.begin()
    (group,) = tier.promote(tier.find("ab"))
    tier.end()
    tier.pool.evict_blocks({group[0].block_id})
    assert [tier.where(n) for n in "ab"] == ["nowhere", "device"]
    assert len(tier.host) == 1


def test_an_invalid_block_is_not_stored() -> None:
    tier = Tier(2)
    blocks = tier.computed("ab")
    tier.begin()
    tier.pool.evict_blocks({blocks[0].block_id})
    tier.pool.get_new_blocks(2)
    assert list(stores(tier.end()).values()) == [blocks[1].block_id]
    assert tier.where("a") == "nowhere"


def test_invalidation_cancels_a_queued_store() -> None:
    tier = Tier(3)
    blocks = tier.computed("a")
    tier.begin()
    tier.pool.get_new_blocks(3)
    assert tier.where("a") == "host"
    # The same content on the device again turns out to be wrong.
    tier.cache("a", blocks)
    tier.pool.evict_blocks({blocks[0].block_id})
    assert tier.where("a") == "nowhere"
    assert not stores(tier.end())


def test_a_slot_freed_in_a_plan_is_not_filled_by_it() -> None:
    tier = Tier(3, num_slots=1)
    tier.demoted("a")
    block_b = tier.computed("b")[0]
    tier.begin()
    (group,) = tier.promote(tier.find("a"))
    tier.pool.evict_blocks({group[0].block_id})
    tier.pool.get_new_blocks(3)
    # The slot of a is still read by this plan.
    assert block_b.block_id not in stores(tier.end()).values()


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


# ----------------------------------------------------------------------- cleaner


def dirty(num_blocks: int) -> tuple[Tier, list[KVCacheBlock]]:
    """A pool full of free blocks that only the device has, the next victim first.

    Their names are A, B and so on. The cleaner has not looked at them yet.
    """
    tier = Tier(num_blocks)
    blocks = tier.computed("".join(chr(ord("A") + i) for i in range(num_blocks)))
    tier.pool._take_rate = 0.0
    tier.pool._last_clean = None
    return tier, blocks


def cleaned(plan: StepPlan) -> set[int]:
    return set(stores(plan).values())


def looked_at(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> list[KVCacheBlock]:
    """The free blocks that are looked at from now on."""
    seen: list[KVCacheBlock] = []
    free_blocks = tier.pool._free_blocks

    def look(*args: Any) -> Iterator[KVCacheBlock]:
        for block in free_blocks(*args):
            seen.append(block)
            yield block

    monkeypatch.setattr(tier.pool, "_free_blocks", look)
    return seen


def test_the_cleaner_keeps_three_quarters_of_the_device_clean() -> None:
    tier, blocks = dirty(15)
    plan = tier.idle()[0]
    assert cleaned(plan) == ids(blocks[:12])
    # They are on the device still, and the host may answer for them from now on.
    assert tier.where("A") == "device" and tier.slot("A").store_seq == plan.seq
    assert all(map(is_empty, tier.idle(2)))


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
    assert last == [blocks[24]] == [tier.pool._last_clean]
    tier.pool._drop_slot(tier.slot("F"))
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
    monkeypatch.setattr(pool, "_LOOK_ANEW", 3)
    tier, blocks = dirty(31)
    tier.idle()
    tier.pool._drop_slot(tier.slot("C"))
    seen = looked_at(tier, monkeypatch)
    assert list(map(cleaned, tier.idle(6))) == [
        *3 * [set()],
        ids([blocks[2]]),
        *2 * [set()],
    ]
    assert seen == blocks[:24]


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
    tier.pool._take_rate = 0.0
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
    tier.pool._take_rate = 0.0
    tier.begin()
    tier.promote(tier.find("abcdefghijklmnopqrst"))
    tier.end()
    assert tier.pool._take_rate == 0.0


def test_the_cleaner_stores_few_blocks_in_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "_MIN_STORES", 3)
    monkeypatch.setattr(pool, "_IDLE_STORES", 7)
    tier, blocks = dirty(31)
    found = [cleaned(plan) for plan in tier.idle(2)]
    assert found == [ids(blocks[:3]), ids(blocks[3:6])]
    # Unless a step takes more, which the next ones will do too.
    tier.begin()
    tier.pool.get_new_blocks(2)
    assert cleaned(tier.end()) == ids(blocks[6:10])
    # Or has nothing else to do.
    tier.begin()
    assert cleaned(tier.pool.take_plan(is_idle=True)) == ids(blocks[10:17])


def step_with_a_load(tier: Tier) -> StepPlan:
    tier.begin()
    tier.pool.get_new_blocks(1)
    tier.promote(tier.find("A"))
    return tier.end()


def test_the_cleaner_does_not_hold_up_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_LOOKS_BESIDE_LOADS", 3)
    # Else loads pass over the blocks that were freed just now.
    monkeypatch.setattr(pool, "_RECENT", 0)
    tier, blocks = dirty(31)
    # The two victims, and three more.
    assert cleaned(step_with_a_load(tier)) == ids(blocks[:5])
    assert cleaned(tier.idle()[0]) == ids(blocks[5:26])
    # What a load takes is made up for.
    tier.begin()
    tier.promote(tier.find("B"))
    assert cleaned(tier.end()) == ids([blocks[26]])


def test_the_cleaner_stores_fewer_blocks_beside_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "_STORES_BESIDE_LOADS", 2)
    monkeypatch.setattr(pool, "_RECENT", 0)
    tier, blocks = dirty(31)
    # The two victims, and two more.
    assert cleaned(step_with_a_load(tier)) == ids(blocks[:4])


@pytest.mark.parametrize("take_rate, num_clean", [(0.0, 2), (30.0, 4)])
def test_the_cleaner_leaves_most_of_a_small_host_alone(
    take_rate: float, num_clean: int
) -> None:
    """Else it would store the same blocks again and again."""
    tier = Tier(20, num_slots=8)
    tier.computed("abcdefghijklmnopqrst")
    tier.pool._take_rate = take_rate
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


# ------------------------------------------------------- several blocks, or keys


def test_two_blocks_of_one_key_share_a_slot() -> None:
    tier = Tier(2)
    tier.begin()
    blocks = tier.compute("a") + tier.compute("a")
    tier.end()
    tier.free(blocks)
    tier.begin()
    tier.pool.get_new_blocks(1)
    assert tier.where("a") == "device"
    tier.pool.get_new_blocks(1)
    assert tier.where("a") == "host"
    assert len(stores(tier.end())) == 1 and len(tier.host) == 1


@pytest.mark.skipif(
    "metrics_collector" not in signature(BlockPool).parameters,
    reason="this release has no metrics of single blocks",
)
def test_metrics_of_blocks_hear_of_every_victim() -> None:
    """Of those without content too, or the collector keeps what it knows of them."""
    tier = Tier(2)
    heard: list[int] = []
    tier.pool.metrics_collector = SimpleNamespace(
        on_block_evicted=lambda block: heard.append(block.block_id),
        on_block_allocated=lambda block: None,
    )
    tier.pool._tells_evictions = True
    blocks = tier.computed("a")
    tier.begin()
    assert ids(tier.pool.get_new_blocks(2)) == {*heard[-2:]} > ids(blocks)


# In some releases a block has one key only.
several_keys = pytest.mark.skipif(
    not hasattr(BlockPool, "cache_partial_block"), reason="blocks have one key"
)


def partial(tier: Tier, name: str, block: KVCacheBlock) -> None:
    """Also make the first half of a block a hit, under `name`."""
    request = SimpleNamespace(block_hashes=hashes(name), mm_features=None)
    tier.pool.cache_partial_block(request, block, BLOCK // 2, 0, BLOCK)


@several_keys
def test_all_keys_of_a_block_share_its_slot() -> None:
    tier = Tier(2, hash_block_size=BLOCK // 2)
    tier.begin()
    blocks = tier.pool.get_new_blocks(1)
    tier.cache("ab", blocks)
    (key,) = [blocks[0].block_hash]
    tier.end()
    partial(tier, "a", blocks[0])
    tier.free(blocks)
    assert blocks[0].block_hash == key
    tier.begin()
    tier.pool.get_new_blocks(2)
    assert len(stores(tier.end())) == 1
    slot = tier.host.filled()[0]
    assert slot.keys == (key, make_block_hash_with_group_id(hash_of("a"), 0))
    assert tier.where("a") == "host" and tier.slot("a") is slot
    # Back on the device, both keys find it again.
    tier.free(tier.pool.blocks[1:])
    tier.begin()
    (group,) = tier.promote([slot])
    assert group[0].block_hash == key
    assert group[0].block_hash_num_tokens == BLOCK
    assert tier.find("a") == list(group)
    tier.end()
    # And both go when it turns out to be wrong.
    tier.pool.evict_blocks({group[0].block_id})
    assert tier.where("a") == "nowhere" and len(tier.host) == 0


@several_keys
def test_a_block_that_got_another_key_is_stored_again() -> None:
    tier = Tier(1, hash_block_size=BLOCK // 2)
    tier.begin()
    blocks = tier.pool.get_new_blocks(1)
    tier.cache("ab", blocks)
    tier.end()
    tier.free(blocks)
    tier.idle()
    assert len(tier.host.filled()[0].keys) == 1
    partial(tier, "a", blocks[0])
    tier.begin()
    tier.pool.get_new_blocks(1)
    assert len(stores(tier.end())) == 1
    (slot,) = tier.host.filled()
    assert len(slot.keys) == 2


# -------------------------------------------------------------- what is void now


def test_blocks_of_a_request_preempted_in_its_step_are_forgotten() -> None:
    tier = Tier(3)
    tier.begin()
    old = tier.compute("a")
    tier.end()
    tier.begin()
    new = tier.compute("bc")
    tier.pool.evict_blocks({block.block_id for block in new})
    assert [tier.where(n) for n in "abc"] == ["device", "nowhere", "nowhere"]
    tier.free(old + new)
    tier.end()
    tier.begin()
    tier.pool.get_new_blocks(3)
    tier.end()
    assert [tier.where(n) for n in "abc"] == ["host", "nowhere", "nowhere"]


def test_reset_clears_both_tiers() -> None:
    tier = Tier(4)
    tier.demoted("ab")
    tier.computed("cd")
    assert tier.pool.reset_prefix_cache()
    assert [tier.where(n) for n in "abcd"] == 4 * ["nowhere"]
    assert len(tier.host) == 0
    assert all(map(is_empty, tier.idle(2)))


def test_reset_leaves_all_when_blocks_are_in_use() -> None:
    tier = Tier(4)
    tier.demoted("ab")
    tier.begin()
    tier.pool.get_new_blocks(1)
    tier.end()
    assert not tier.pool.reset_prefix_cache()
    assert [tier.where(n) for n in "ab"] == ["host", "host"]


def test_reset_cancels_queued_stores() -> None:
    tier = Tier(2)
    tier.computed("ab")
    tier.begin()
    taken = tier.pool.get_new_blocks(2)
    tier.free(taken)
    assert tier.pool.reset_prefix_cache()
    assert not stores(tier.end())
    assert len(tier.host) == 0


@pytest.mark.parametrize("policy", ["write_back", "write_through"])
def test_nothing_of_before_a_reset_is_stored_after_it(policy: str) -> None:
    tier = Tier(4, store_policy=policy)
    tier.computed("abcd")
    assert tier.pool.reset_prefix_cache()
    assert all(map(is_empty, tier.idle(2)))


def test_a_failed_store_drops_its_slot() -> None:
    tier = Tier(2)
    plan = tier.demoted("ab")
    index = tier.slot("a").index
    assert tier.pool.apply_report(StepReport(None, {index: plan.seq})) is None
    assert [tier.where(n) for n in "ab"] == ["nowhere", "host"]


def test_a_failed_store_does_not_drop_what_is_in_its_slot_now() -> None:
    tier = Tier(1, num_slots=1)
    plan = tier.demoted("a")
    index = tier.slot("a").index
    tier.demoted("b")
    assert tier.slot("b").index == index
    tier.pool.apply_report(StepReport(None, {index: plan.seq}))
    assert tier.where("b") == "host"


def test_a_failed_load_voids_what_came_since() -> None:
    tier = Tier(8)
    tier.demoted("ab")
    tier.begin()
    kept = tier.compute("k")
    tier.end()
    tier.free(kept)
    tier.begin()
    tier.promote(tier.find("a"))
    plan = tier.end()
    tier.begin()
    tier.compute("n")
    last = tier.end()
    report = StepReport(failed_load_seq=plan.seq)
    assert tier.pool.apply_report(report) == last.seq > plan.seq
    # a never arrived; n may have been computed from it; its slot is suspect.
    assert [tier.where(n) for n in "abkn"] == ["nowhere", "host", "device", "nowhere"]


def test_a_failed_load_voids_what_was_stored_since() -> None:
    tier = Tier(2)
    tier.demoted("a")
    tier.begin()
    tier.promote(tier.find("a"))
    plan = tier.end()
    tier.computed("n")
    tier.begin()
    tier.pool.get_new_blocks(2)
    later = tier.end()
    assert tier.where("n") == "host" and stores(later)
    assert tier.pool.apply_report(StepReport(failed_load_seq=plan.seq)) == later.seq
    assert tier.where("n") == tier.where("a") == "nowhere"
    assert len(tier.host) == 0


def test_when_a_rank_copies_no_more_the_host_is_forgotten() -> None:
    tier = Tier(4)
    tier.demoted("ab")
    assert not tier.pool.apply_report(StepReport(lost_blocks=[]))
    assert tier.where("a") == tier.where("b") == "nowhere"
    tier.computed("cdef")
    assert is_empty(tier.idle()[0])
    tier.begin()
    blocks = tier.pool.get_new_blocks(4)
    plan = tier.end()
    assert not stores(plan) and not plan.load_slots
    tier.free(blocks)
    assert_nothing_leaks(tier)
    assert tier.pool.take_stats().slots_total == 0


def test_blocks_that_a_late_load_may_overwrite_are_nobodys() -> None:
    tier = Tier(4)
    used = tier.computed("a")[0]
    tier.pool.touch([used])
    free = next(b for b in tier.pool.blocks[1:] if b is not used)
    lost = [free.block_id, used.block_id]
    # Two ranks may say so.
    for _ in range(2):
        tier.pool.apply_report(StepReport(lost_blocks=lost))
    assert tier.pool.get_num_free_blocks() == 2
    tier.free([used])
    assert tier.pool.get_num_free_blocks() == 2
    assert tier.where("a") == "nowhere"
    assert_nothing_leaks(tier)
    assert tier.pool.reset_prefix_cache()
    assert tier.pool.get_usage() == Tier(2).pool.get_usage()
    tier.begin()
    assert not {b.block_id for b in tier.pool.get_new_blocks(2)} & {*lost}


# ------------------------------------------------------------------------ fences


def test_a_load_waits_for_the_store_that_filled_its_slot() -> None:
    tier = Tier(3)
    stored = tier.demoted("ab")
    tier.idle(3)
    tier.begin()
    tier.promote(tier.find("a"))
    plan = tier.end()
    assert plan.load_after_stores == stored.seq


def test_a_load_waits_for_a_store_from_the_block_it_overwrites() -> None:
    tier = Tier(2)
    tier.demoted("a")
    tier.computed("xy")
    tier.idle()
    tier.begin()
    (group,) = tier.promote(tier.find("a"))
    tier.pool.touch(group)
    plan = tier.end()
    stored_by = tier.slot("x").store_seq
    assert stored_by > tier.slot("a").store_seq
    assert plan.load_after_stores >= stored_by


def test_a_forward_pass_does_not_wait_for_a_store_that_its_load_waits_for() -> None:
    tier = Tier(1)
    tier.demoted("a")
    blocks = tier.computed("x")
    tier.begin()
    assert tier.promote(tier.find("a")) == (blocks,)
    plan = tier.end()
    assert cleaned(plan) == ids(blocks) == set(loads(plan))
    assert plan.load_after_stores == plan.seq
    assert plan.compute_after_stores == 0


def test_a_forward_pass_waits_for_the_store_when_the_load_is_called_off() -> None:
    tier = Tier(1)
    tier.demoted("a")
    blocks = tier.computed("x")
    tier.begin()
    tier.promote(tier.find("a"))
    assert tier.pool.get_new_blocks(1) == blocks
    plan = tier.end()
    assert cleaned(plan) == ids(blocks) and not loads(plan)
    assert plan.compute_after_stores == plan.seq


def test_a_store_waits_for_loads_from_the_slot_it_overwrites() -> None:
    tier = Tier(1, num_slots=1)
    tier.demoted("a")
    tier.begin()
    tier.promote(tier.find("a"))
    loaded = tier.end()
    tier.begin()
    tier.free(tier.compute("b"))
    tier.end()
    tier.begin()
    tier.pool.get_new_blocks(1)
    plan = tier.end()
    assert stores(plan).keys() == {loaded.load_slots[0]}
    assert plan.store_after_loads == loaded.seq


def test_a_plan_may_hold_nothing_but_a_fence() -> None:
    tier = Tier(4)
    tier.computed("abcd")
    stored = tier.idle()[0]
    tier.begin()
    tier.pool.get_new_blocks(1)
    plan = tier.end()
    assert not stores(plan) and not loads(plan)
    assert plan.compute_after_stores == stored.seq


def test_fences_are_asked_for_once() -> None:
    tier = Tier(1)
    tier.computed("a")
    tier.idle()
    tier.begin()
    taken = tier.pool.get_new_blocks(1)
    assert tier.end().compute_after_stores > 0
    tier.free(taken)
    tier.begin()
    assert tier.pool.get_new_blocks(1) == taken
    assert tier.end().compute_after_stores == 0


# ------------------------------------------------------------------------- stats


def test_stats_tell_hits_apart() -> None:
    tier = Tier(8)
    tier.demoted("abc")
    tier.computed("d")
    tier.pool.take_stats()
    tier.begin()
    tier.promote(tier.find("d") + tier.find("abc"))
    tier.promote(tier.find("ab"), num_preemptions=1)
    tier.end()
    stats = tier.pool.take_stats()
    assert (stats.device_hit_tokens, stats.host_hit_tokens) == (BLOCK, 3 * BLOCK)
    assert stats.resumed_device_hit_tokens == 2 * BLOCK
    assert stats.resumed_host_hit_tokens == 0
    assert stats.loaded_blocks == 3
    again = tier.pool.take_stats()
    assert again.loaded_blocks == again.host_hit_tokens == 0


def test_host_hits_of_several_groups_count_once() -> None:
    tier = Tier(4)
    tier.begin()
    blocks = tier.compute("ab") + tier.compute("ab", group_id=1)
    tier.end()
    tier.free(blocks)
    tier.begin()
    tier.free(tier.pool.get_new_blocks(4))
    tier.end()
    tier.computed("a")
    tier.computed("a", group_id=1)
    tier.begin()
    tier.promote(tier.find("ab"), tier.find("ab", 1))
    stats = tier.pool.take_stats()
    assert (stats.device_hit_tokens, stats.host_hit_tokens) == (BLOCK, BLOCK)


def test_stats_tell_the_fill() -> None:
    tier = Tier(3, num_slots=2)
    tier.demoted("ab")
    tier.demoted("c")
    stats = tier.pool.take_stats()
    assert (stats.slots_used, stats.slots_total) == (2, 2)
    assert stats.slot_bytes == SLOT_BYTES
    assert stats.stored_blocks == 3 and stats.evicted_slots == 1
    assert tier.pool.take_stats().evicted_slots == 0
