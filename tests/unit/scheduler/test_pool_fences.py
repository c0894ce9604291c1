# SPDX-License-Identifier: Apache-2.0
"""Fences between the copies and forward passes that share a place."""

from ..tier import Tier, cleaned, ids, loads, stores


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


def test_a_load_waits_for_a_store_from_a_block_that_lost_its_key_before() -> None:
    """Between steps, so that the next plan got the fence, but did not use the block."""
    tier = Tier(1)
    tier.demoted("a")
    blocks = tier.computed("x")
    (stored, *_) = [plan for plan in tier.idle(2) if cleaned(plan)]
    assert cleaned(stored) == ids(blocks)
    tier.pool.evict_blocks(ids(blocks))
    tier.begin()
    assert tier.end().compute_after_stores == stored.seq
    tier.begin()
    assert tier.promote(tier.find("a")) == (blocks,)
    assert tier.end().load_after_stores == stored.seq


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
