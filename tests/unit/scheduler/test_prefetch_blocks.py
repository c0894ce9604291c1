# SPDX-License-Identifier: Apache-2.0
"""The device blocks that loads ahead fill: which they are, who else may take them."""

from types import SimpleNamespace

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_tier.plan import StepPlan, StepReport

from ..prefetching import admit, block, defer, load_ahead, make_tier, places, taken
from ..tier import (
    BLOCK,
    Tier,
    assert_nothing_leaks,
    is_empty,
    loads,
    loads_ahead,
    stores,
)

# ------------------------------------------------------------------------- room


def test_loads_ahead_leave_those_of_others_alone() -> None:
    tier = make_tier(4)
    tier.demoted("abcd")
    tier.demoted("efg")
    ahead = defer(tier, "efg")
    # One block is left, and these need two.
    assert is_empty(block(tier, "ab"))
    assert [tier.where(n) for n in "abefg"] == 2 * ["host"] + 3 * ["device"]
    assert len(loads_ahead(defer(tier, "a"))) == 1
    # Once a request has taken them, they are blocks like others.
    tier.now = 4.0
    assert admit(tier, "efg").compute_after_loads == ahead.seq
    assert len(loads_ahead(defer(tier, "bcd"))) == 3
    assert "host" in [tier.where(n) for n in "efg"]


def test_loads_ahead_of_an_aborted_request_expire() -> None:
    tier = make_tier(4)
    tier.demoted("abcd")
    tier.demoted("efg")
    defer(tier, "efg")
    # They end at 3, and are kept for a second.
    tier.now = 3.99
    assert is_empty(block(tier, "ab"))
    tier.now = 4.01
    assert len(loads_ahead(defer(tier, "ab"))) == 2


def test_those_that_cannot_load_ahead_wait_until_they_are_alone() -> None:
    tier = make_tier(4)
    tier.demoted("abcd")
    tier.demoted("efg")
    defer(tier, "efg")
    free = [b.block_id for b in tier.pool.free_block_queue.get_all_free_blocks()]
    block(tier, "abcd")
    queue = tier.pool.free_block_queue
    assert [b.block_id for b in queue.get_all_free_blocks()] == free
    assert len(loads(admit(tier, "abcd", among_others=False))) == 4


def test_a_request_that_lacks_blocks_begins_to_load() -> None:
    tier = make_tier(4, tuning={"min_prefetch": 3})
    tier.demoted("abcd")
    tier.demoted("efg")
    plan = load_ahead(tier, "ab")
    assert loads_ahead(plan) == places(tier, "ab")
    # Its own are kept for it, and there is nothing else to load.
    assert is_empty(load_ahead(tier, "ab"))
    # Another one finds two blocks, and is not worth a plan.
    assert is_empty(load_ahead(tier, "efg"))
    tier.now = 2.0
    assert admit(tier, "ab").compute_after_loads == plan.seq


def test_loads_of_the_step_have_the_link_to_themselves() -> None:
    tier = make_tier(6, tuning={"min_prefetch": 1})
    tier.demoted("abcdef")
    tier.begin()
    (group,) = tier.promote(tier.find("ab"), among_others=False)
    tier.pool.touch(group)
    managers = [SimpleNamespace(block_size=BLOCK, get_num_skipped_tokens=lambda n: 0)]
    tier.pool.load_ahead(managers, (tier.find("cd"),), 2 * BLOCK)
    plan = tier.end()
    assert len(loads(plan)) == 2
    assert not loads_ahead(plan)
    # The next step, which loads nothing, begins.
    assert loads_ahead(load_ahead(tier, "cd")) == places(tier, "cd")
    tier.free(group)


def test_a_long_hit_is_loaded_as_far_as_blocks_go() -> None:
    tier = make_tier(4, tuning={"min_prefetch": 2})
    tier.demoted("abcd")
    tier.demoted("e")
    tier.begin()
    running = tier.compute("e")
    tier.end()
    plan = load_ahead(tier, "abcd")
    # From the front: a hit has no holes.
    assert [tier.where(n) for n in "abcd"] == ["device"] * 3 + ["host"]
    assert loads_ahead(plan) == places(tier, "abc")
    # What it has loaded so far is not taken for the rest.
    assert is_empty(load_ahead(tier, "abcd"))
    tier.free(running)


# --------------------------------------------------------------------- eviction


def test_a_block_loaded_ahead_may_be_evicted() -> None:
    tier = make_tier(3)
    tier.demoted("abc")
    ahead = defer(tier, "abc")
    plan, _ = taken(tier)
    # The forward pass overwrites what the loads may still fill.
    assert plan.compute_after_loads == ahead.seq
    # The host has them.
    assert not stores(plan) and [tier.where(n) for n in "abc"] == 3 * ["host"]
    # Nothing is kept for the request any more, and it starts over.
    again = defer(tier, "abc")
    assert loads_ahead(again) == places(tier, "abc")
    assert taken(tier)[0].compute_after_loads == again.seq


def test_a_load_ahead_is_cancelled_when_its_block_is_taken_in_its_step() -> None:
    tier = make_tier(3)
    tier.demoted("abc")
    tier.begin()
    assert tier.try_promote(tier.find("abc"), among_others=True) is None
    victim = tier.pool.get_new_blocks(1)[0]
    kept = places(tier, "bc")
    plan = tier.end()
    assert loads_ahead(plan) == kept and victim.block_id not in kept
    assert plan.compute_after_loads == 0
    assert tier.where("a") == "host"


def test_a_load_waits_for_loads_ahead_into_its_block() -> None:
    tier = make_tier(2)
    tier.demoted("ab")
    tier.demoted("cd")
    ahead = defer(tier, "ab")
    plan = admit(tier, "cd", among_others=False)
    assert loads(plan).keys() == loads_ahead(ahead).keys()
    assert plan.load_after_loads == ahead.seq


def test_that_holds_when_another_request_has_asked_for_the_fence() -> None:
    """It makes forward passes wait, and loads run beside them."""
    tier = make_tier(2)
    tier.demoted("ab")
    tier.demoted("c")
    ahead = defer(tier, "ab")
    tier.begin()
    (used,) = tier.promote(tier.find("a"))
    tier.pool.touch(used)
    assert tier.end().compute_after_loads == ahead.seq
    # Into the block of b, which no forward pass has waited for or used.
    plan = admit(tier, "c", among_others=False)
    assert loads(plan).keys() < loads_ahead(ahead).keys()
    assert plan.load_after_compute < ahead.seq
    assert plan.compute_after_loads == 0 and plan.load_after_loads == ahead.seq


def test_a_store_waits_for_loads_ahead_from_its_slot() -> None:
    tier = make_tier(4, num_slots=2)
    tier.demoted("ab")
    ahead = defer(tier, "ab")
    tier.begin()
    tier.free(tier.compute("xy"))
    tier.end()
    tier.begin()
    kept = tier.find("ab")
    tier.pool.touch(kept)
    tier.pool.get_new_blocks(2)
    plan = tier.end()
    assert stores(plan).keys() == set(loads_ahead(ahead).values())
    assert plan.store_after_loads == ahead.seq
    # Only the device has a and b now. Their stores wait for what fills them.
    tier.free(kept)
    tier.begin()
    tier.pool.get_new_blocks(2)
    later = tier.end()
    assert stores(later).keys() and set(stores(later).values()) == {
        b.block_id for b in kept
    }
    assert later.store_after_loads == ahead.seq


def test_a_failed_load_ahead_leaves_nothing_behind() -> None:
    tier = make_tier(4)
    tier.demoted("abcd")
    ahead = defer(tier, "abc")
    assert tier.pool.apply_report(StepReport(failed_load_seq=ahead.seq))
    assert [tier.where(n) for n in "abcd"] == 3 * ["nowhere"] + ["host"]
    # No room is kept for it, and what is under way still has its fence.
    tier.demoted("efgh")
    assert len(loads_ahead(defer(tier, "efgh"))) == 4


def test_a_reset_keeps_the_fence_of_loads_under_way() -> None:
    tier = make_tier(3)
    tier.demoted("abc")
    ahead = defer(tier, "abc")
    assert tier.pool.reset_prefix_cache()
    assert taken(tier)[0].compute_after_loads == ahead.seq


# ------------------------------------------------------------------ step in flight


def in_flight_on_two(tier: Tier) -> tuple[StepPlan, list[KVCacheBlock]]:
    """A step in flight, and two free blocks that it uses."""
    tier.idle()
    tier.begin()
    used = tier.pool.get_new_blocks(2)
    in_flight = tier.end()
    tier.free(used)
    return in_flight, used


def test_loads_avoid_blocks_that_a_step_in_flight_may_use() -> None:
    tier = make_tier(4)
    tier.demoted("a")
    in_flight, used = in_flight_on_two(tier)
    plan = defer(tier, "a")
    assert loads_ahead(plan).keys().isdisjoint(b.block_id for b in used)
    assert plan.load_after_compute < in_flight.seq
    assert_nothing_leaks(tier)


def test_loads_wait_for_the_forward_pass_that_uses_their_blocks() -> None:
    tier = make_tier(4)
    tier.demoted("abc")
    in_flight, used = in_flight_on_two(tier)
    plan = defer(tier, "abc")
    assert not loads_ahead(plan).keys().isdisjoint(b.block_id for b in used)
    assert plan.load_after_compute == in_flight.seq


def test_stores_wait_for_the_forward_pass_that_fills_their_blocks() -> None:
    tier = make_tier(4)
    tier.begin()
    first = tier.compute("a")
    tier.end()
    tier.begin()
    second = tier.compute("b")
    filled = tier.end()
    tier.idle(2)
    tier.free(first)
    tier.free(second)
    plan, _ = taken(tier)
    assert len(stores(plan)) == 2
    assert plan.store_after_compute == filled.seq


# ------------------------------------------------------------- kept for a request


def test_those_who_take_blocks_pass_over_what_others_wait_for() -> None:
    tier = make_tier(6)
    tier.demoted("abc")
    defer(tier, "abc")
    # Now those of the request are next in the free queue.
    tier.computed("xyz")
    kept = {b.block_id for b in tier.find("abc")}
    tier.begin()
    blocks = tier.pool.get_new_blocks(3)
    tier.end()
    assert kept.isdisjoint(b.block_id for b in blocks)
    # When nothing else is left, they are blocks like others.
    assert {b.block_id for b in tier.pool.get_new_blocks(3)} == kept
    assert [tier.where(n) for n in "abc"] == 3 * ["host"]


def test_blocks_stay_kept_when_another_request_has_waited_for_their_loads() -> None:
    tier = make_tier(6)
    tier.demoted("abcd")
    defer(tier, "abcd")
    tier.now = 4.0
    # It takes one of the blocks, and its forward pass waits for all of the plan.
    assert admit(tier, "a").compute_after_loads > 0
    kept = {b.block_id for b in tier.find("bcd")}
    blocks = tier.pool.get_new_blocks(3)
    assert kept.isdisjoint(b.block_id for b in blocks)
    tier.free(blocks)
    # Not for ever: the request may have been aborted.
    tier.now = 5.1
    tier.idle()
    assert not tier.pool.prefetches


def test_only_one_request_that_lacks_blocks_loads_in_a_plan() -> None:
    tier = make_tier(8, tuning={"min_prefetch": 1})
    tier.demoted("ab")
    tier.demoted("cd")
    tier.begin()
    managers = [SimpleNamespace(block_size=BLOCK, get_num_skipped_tokens=lambda n: 0)]
    for names in ("ab", "cd"):
        tier.pool.load_ahead(managers, (tier.find(names),), 2 * BLOCK)
    assert loads_ahead(tier.end()) == places(tier, "ab")


def test_loads_of_those_that_lack_blocks_spare_some() -> None:
    tier = make_tier(8, tuning={"min_prefetch": 1, "spare": 0.5})
    tier.demoted("abcdefgh")
    assert len(loads_ahead(load_ahead(tier, "abcdefgh"))) == 4
