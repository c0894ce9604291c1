# SPDX-License-Identifier: Apache-2.0
"""What is void, in both tiers: invalid blocks, resets, and copies that failed."""

import pytest

from vllm.v1.kv_tier.plan import StepReport

from ..tier import Tier, assert_nothing_leaks, is_empty, stores

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
