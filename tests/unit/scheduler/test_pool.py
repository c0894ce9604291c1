# SPDX-License-Identifier: Apache-2.0
"""The tiered block pool alone: what it answers, plans and takes back."""

from types import SimpleNamespace

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.kv_tier.config import GiB, KVTierConfig
from vllm.v1.kv_tier.layout import KVTierLayout
from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.pool import kv_tier_of, make_block_pool
from vllm.v1.kv_tier.scheduler.slots import HostSlot

from ..tier import (
    BLOCK,
    SLOT_BYTES,
    Tier,
    assert_nothing_leaks,
    hash_of,
    hashes,
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
    keys = {
        s.keys[0] for s in tier.host.filled_slots() if s.index in loads(plan).values()
    }
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
