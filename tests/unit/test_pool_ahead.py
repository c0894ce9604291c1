# SPDX-License-Identifier: Apache-2.0
"""Loads that a step would wait too long for: they run ahead of their request."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_tier import pool
from vllm.v1.kv_tier.plan import StepPlan, StepReport

from .tier import (
    BLOCK,
    Tier,
    assert_nothing_leaks,
    is_empty,
    loads,
    loads_ahead,
    stores,
)


def make_tier(num_blocks: int, **settings: Any) -> Tier:
    """A block takes a second to load; a step waits for half of that."""
    return Tier(num_blocks, **{"load_s": 1.0, "max_load_stall_ms": 500, **settings})


def defer(tier: Tier, names: str) -> StepPlan:
    """A step in which a request that hit `names` has to wait."""
    tier.begin()
    assert tier.try_promote(tier.find(names), among_others=True) is None
    assert tier.deferred
    return tier.end()


def block(tier: Tier, names: str) -> StepPlan:
    """A step that lacks blocks for a request that hit `names`."""
    tier.begin()
    assert tier.try_promote(tier.find(names), among_others=True) is None
    assert not tier.deferred
    return tier.end()


def admit(tier: Tier, names: str, among_others: bool = True) -> StepPlan:
    """A step in which a request that hit `names` is admitted."""
    tier.begin()
    (group,) = tier.promote(tier.find(names), among_others=among_others)
    tier.pool.touch(group)
    plan = tier.end()
    tier.free(group)
    return plan


def places(tier: Tier, names: str) -> dict[int, int]:
    """Slot by device block, for blocks that have both."""
    return {b.block_id: tier.slot(n).index for n, b in zip(names, tier.find(names))}


# --------------------------------------------------------------------- deferral


def test_a_long_load_runs_ahead() -> None:
    tier = make_tier(8)
    stored = tier.demoted("abc")
    tier.pool.take_stats()
    plan = defer(tier, "abc")
    assert not loads(plan) and plan.compute_after_loads == 0
    assert loads_ahead(plan) == places(tier, "abc")
    assert plan.load_after_stores == stored.seq
    # Like any cached block: whoever looks finds them, whoever needs room takes them.
    assert [tier.where(n) for n in "abc"] == 3 * ["device"]
    assert_nothing_leaks(tier)
    stats = tier.pool.take_stats()
    assert (stats.deferred_requests, stats.loaded_ahead_blocks) == (1, 3)
    # It was not admitted: neither its hit nor loads for this step count.
    assert stats.loaded_blocks == stats.host_hit_tokens == stats.device_hit_tokens == 0


def test_a_request_alone_in_its_step_waits_there() -> None:
    tier = make_tier(8)
    tier.demoted("abc")
    plan = admit(tier, "abc", among_others=False)
    assert loads(plan) == places(tier, "abc") and not loads_ahead(plan)
    assert tier.pool.take_stats().deferred_requests == 0


@pytest.mark.parametrize(
    "limit_ms, names, is_ahead",
    [(3000, "abc", False), (2999, "abc", True), (0, "a", True), (None, "abcd", False)],
)
def test_a_step_waits_up_to_the_limit(
    limit_ms: float | None, names: str, is_ahead: bool
) -> None:
    tier = make_tier(8, max_load_stall_ms=limit_ms)
    tier.demoted(names)
    plan = (defer if is_ahead else admit)(tier, names)
    assert len(loads_ahead(plan) if is_ahead else loads(plan)) == len(names)


def test_what_the_device_has_costs_nothing() -> None:
    tier = make_tier(8, max_load_stall_ms=1000)
    tier.demoted("e")
    tier.computed("abcd")
    assert len(loads(admit(tier, "abcde"))) == 1


def test_blocks_behind_the_window_do_not_defer() -> None:
    tier = make_tier(8, max_load_stall_ms=1000)
    tier.demoted("abc")
    tier.begin()
    promoted = tier.try_promote(
        tier.find("abc"), skipped_tokens=[2 * BLOCK], among_others=True
    )
    assert promoted is not None and [b.is_null for b in promoted[0]] == [1, 1, 0]
    assert len(loads(tier.end())) == 1


def test_the_request_joins_when_its_loads_are_about_to_end() -> None:
    tier = make_tier(8)
    tier.demoted("abc")
    ahead = defer(tier, "abc")
    blocks = set(loads_ahead(ahead))
    tier.now = 2.4
    plan = defer(tier, "abc")
    assert is_empty(plan)
    tier.now = 2.5
    plan = admit(tier, "abc")
    assert not loads(plan) and not loads_ahead(plan)
    # They may take longer than one thought.
    assert plan.compute_after_loads == ahead.seq
    assert {b.block_id for b in tier.find("abc")} == blocks
    stats = tier.pool.take_stats()
    assert stats.deferred_requests == 2
    # Its hit is one of the host, that of the next one is not.
    assert (stats.host_hit_tokens, stats.device_hit_tokens) == (3 * BLOCK, 0)
    admit(tier, "abc")
    stats = tier.pool.take_stats()
    assert (stats.host_hit_tokens, stats.device_hit_tokens) == (0, 3 * BLOCK)


def test_loads_that_have_not_begun_are_not_joined() -> None:
    tier = make_tier(8, max_load_stall_ms=5000)
    tier.demoted("abcdef")
    tier.begin()
    assert tier.try_promote(tier.find("abcdef"), among_others=True) is None
    # Short enough by now, but this step's forward pass would not wait for them.
    tier.now = 3.0
    assert tier.try_promote(tier.find("ab"), among_others=True) is None
    assert len(loads_ahead(tier.end())) == 6
    assert admit(tier, "ab").compute_after_loads > 0


def test_a_request_left_alone_joins_loads_under_way() -> None:
    tier = make_tier(8)
    tier.demoted("abc")
    ahead = defer(tier, "abc")
    plan = admit(tier, "abc", among_others=False)
    assert not loads(plan) and plan.compute_after_loads == ahead.seq


def test_the_device_part_of_a_deferred_hit_is_kept() -> None:
    tier = make_tier(3)
    tier.demoted("c")
    tier.computed("ab")
    (block_x,) = tier.computed("x")
    # The free queue is a, b, x: to load c would take a.
    plan = defer(tier, "abc")
    assert list(loads_ahead(plan)) == [block_x.block_id]
    assert [tier.where(n) for n in "abc"] == 3 * ["device"]
    assert_nothing_leaks(tier)


# ---------------------------------------------------------------- shared prefix


def test_requests_of_one_prefix_load_it_once() -> None:
    tier = make_tier(8)
    tier.demoted("abcd")
    tier.begin()
    assert tier.try_promote(tier.find("abc"), among_others=True) is None
    assert tier.try_promote(tier.find("abd"), among_others=True) is None
    plan = tier.end()
    assert loads_ahead(plan) == places(tier, "abcd")


def test_the_second_of_a_prefix_asks_for_no_fence() -> None:
    tier = make_tier(8)
    tier.demoted("abc")
    ahead = defer(tier, "abc")
    tier.now = 3.0
    assert admit(tier, "ab").compute_after_loads == ahead.seq
    # Forward passes run in order: the one before waited for all loads of the plan.
    assert admit(tier, "abc").compute_after_loads == 0


def test_the_latest_loads_of_a_hit_count() -> None:
    tier = make_tier(8)
    tier.demoted("abc")
    first, second = defer(tier, "ab"), defer(tier, "abc")
    assert first.seq < second.seq and len(loads_ahead(second)) == 1
    tier.now = 2.4
    # a and b are there, c is not.
    assert is_empty(defer(tier, "abc"))
    tier.now = 2.5
    assert admit(tier, "abc").compute_after_loads == second.seq


def test_a_fence_of_earlier_loads_leaves_later_ones() -> None:
    tier = make_tier(8)
    tier.demoted("ab")
    first, second = defer(tier, "a"), defer(tier, "b")
    tier.now = 2.0
    assert admit(tier, "a").compute_after_loads == first.seq
    assert admit(tier, "a").compute_after_loads == 0
    assert admit(tier, "b").compute_after_loads == second.seq


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


def load_ahead(tier: Tier, names: str) -> StepPlan:
    """A step that has no room to admit a request that hit `names`."""
    tier.begin()
    managers = [SimpleNamespace(block_size=BLOCK, get_num_skipped_tokens=lambda n: 0)]
    tier.pool.load_ahead(managers, (tier.find(names),), len(names) * BLOCK)
    return tier.end()


def test_a_request_that_lacks_blocks_begins_to_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "_MIN_AHEAD", 3)
    tier = make_tier(4)
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


def test_a_long_hit_is_loaded_as_far_as_blocks_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "_MIN_AHEAD", 2)
    tier = make_tier(4)
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


def taken(tier: Tier) -> tuple[StepPlan, list[KVCacheBlock]]:
    """A step that takes all blocks, which are free after it."""
    tier.begin()
    blocks = tier.pool.get_new_blocks(tier.pool.get_num_free_blocks())
    plan = tier.end()
    tier.free(blocks)
    return plan, blocks


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


# -------------------------------------------------------------------- link queue


def test_short_loads_wait_behind_long_ones() -> None:
    tier = make_tier(8, max_load_stall_ms=2000)
    tier.demoted("abcd")
    defer(tier, "abc")
    # One second alone, four behind the others.
    assert len(loads_ahead(defer(tier, "d"))) == 1
    tier.now = 1.9
    assert is_empty(defer(tier, "d"))
    tier.now = 2.0
    assert admit(tier, "d").compute_after_loads > 0


def test_loads_of_a_step_take_the_link_too() -> None:
    tier = make_tier(8, max_load_stall_ms=2000)
    tier.demoted("abc")
    tier.begin()
    assert tier.try_promote(tier.find("ab"), among_others=True) is not None
    assert tier.try_promote(tier.find("c"), among_others=True) is None
    plan = tier.end()
    assert (len(loads(plan)), len(loads_ahead(plan))) == (2, 1)


# --------------------------------------------------------------- load or compute


def prefill_takes(tier: Tier, seconds_per_block: float) -> None:
    times = 100 * BLOCK, 100 * seconds_per_block
    assert not tier.pool.apply_report(StepReport(prefill=times))


def test_slots_are_passed_over_while_computing_is_cheaper() -> None:
    tier = make_tier(4)
    tier.demoted("abc")
    tier.computed("d")
    prefill_takes(tier, 0.9)
    tier.begin()
    assert tier.where("a") == "nowhere" and tier.where("d") == "device"
    assert tier.pool.take_stats().recomputed_lookups == 1
    tier.end()
    # The link is not as slow as it was measured at start.
    for _ in range(2):
        tier.pool.apply_report(StepReport(loads=(10, 5.0)))
    tier.begin()
    assert tier.where("a") == "host"
    stats = tier.pool.take_stats()
    assert stats.recomputed_lookups == 0
    assert stats.load_seconds_per_block < stats.prefill_seconds_per_block == 0.9


def test_a_step_does_not_change_its_mind() -> None:
    """What a lookup found must still be there when the request is admitted."""
    tier = make_tier(4)
    tier.demoted("a")
    tier.begin()
    prefill_takes(tier, 0.9)
    assert tier.where("a") == "host"
    tier.end()
    tier.begin()
    assert tier.where("a") == "nowhere"


# ------------------------------------------------------------- hits inside a block


def test_a_hit_that_ends_in_a_block_of_its_step_waits() -> None:
    """Upstream copies such a block before the forward pass that fills it."""
    tier = make_tier(4)
    tier.begin()
    blocks = tier.compute("ab")
    half = BLOCK + BLOCK // 2
    assert tier.try_promote(tier.find("ab"), num_tokens=half) is None
    assert tier.try_promote(tier.find("ab")) is not None
    tier.end()
    tier.free(blocks)
    tier.begin()
    assert tier.try_promote(tier.find("ab"), num_tokens=half) is not None
    # It lacked content, not time.
    assert tier.pool.take_stats().deferred_requests == 0


def test_a_hit_that_ends_in_a_block_that_its_step_loads_does_not_wait() -> None:
    tier = make_tier(4)
    tier.demoted("ab")
    tier.begin()
    tier.promote(tier.find("ab"))
    half = BLOCK + BLOCK // 2
    assert tier.try_promote(tier.find("ab"), num_tokens=half) is not None


# ---------------------------------------------------------- waiting, and this step


def test_a_waiting_request_is_not_looked_up_until_its_loads_end() -> None:
    tier = make_tier(8)
    tier.demoted("abc")
    defer(tier, "abc")
    waiting: Any = SimpleNamespace(request_id=f"r{tier.num_requests}")
    assert tier.pool.is_loading(waiting, True)
    assert not tier.pool.is_loading(waiting, False)
    assert not tier.pool.is_loading(SimpleNamespace(request_id="other"), True)
    tier.now = 2.5
    assert not tier.pool.is_loading(waiting, True)


def test_loads_begin_before_other_requests_are_looked_at() -> None:
    tier = make_tier(3)
    tier.demoted("abc")
    other: Any = SimpleNamespace(request_id="other")
    tier.begin()
    assert not tier.pool.is_loading(other, True)
    assert tier.try_promote(tier.find("ab"), among_others=True) is None
    assert tier.pool.is_loading(other, True)
    assert not tier.pool.is_loading(other, False)
    tier.end()
    assert not tier.pool.is_loading(other, True)


def test_a_request_waits_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make_tier(3)
    tier.demoted("abc")
    request: Any = SimpleNamespace(request_id="r", num_preemptions=0)
    managers = [SimpleNamespace(block_size=BLOCK, get_num_skipped_tokens=lambda n: 0)]

    def promote() -> bool:
        tier.begin()
        found = (tier.find("abc"),)
        return (
            tier.pool.promote(request, managers, found, 3 * BLOCK, 0, 2, True) is None
        )

    for _ in range(pool._MAX_WAITS):
        assert promote()
        tier.end()
        # Those who overtake it take its blocks.
        taken(tier)
    assert not promote()
    assert len(loads(tier.end())) == 3


def test_nothing_is_loaded_into_what_the_step_still_uses() -> None:
    tier = make_tier(4)
    tier.demoted("ab")
    tier.begin()
    running = tier.pool.get_new_blocks(3)
    tier.end()
    tier.begin()
    # A copy on write of this step may read them.
    tier.free(running)
    assert tier.try_promote(tier.find("ab")) is None and not tier.deferred
    tier.end()
    plan = admit(tier, "ab", among_others=False)
    assert len(loads(plan)) == 2
    # The step before used some of the blocks.
    assert plan.load_after_compute == plan.seq - 1


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
    assert not tier.pool._ahead


def test_only_one_request_that_lacks_blocks_loads_in_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "_MIN_AHEAD", 1)
    tier = make_tier(8)
    tier.demoted("ab")
    tier.demoted("cd")
    tier.begin()
    managers = [SimpleNamespace(block_size=BLOCK, get_num_skipped_tokens=lambda n: 0)]
    for names in ("ab", "cd"):
        tier.pool.load_ahead(managers, (tier.find(names),), 2 * BLOCK)
    assert loads_ahead(tier.end()) == places(tier, "ab")


def test_loads_of_those_that_lack_blocks_spare_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "_MIN_AHEAD", 1)
    monkeypatch.setattr(pool, "_SPARE", 0.5)
    tier = make_tier(8)
    tier.demoted("abcdefgh")
    assert len(loads_ahead(load_ahead(tier, "abcdefgh"))) == 4


# ----------------------------------------------- loads that the own step will hide


def make_layerwise(**config: Any) -> Tier:
    """A tier whose steps compute for two seconds, and load a block in one."""
    tier = make_tier(8, layerwise=True, max_load_stall_ms=0, **config)
    tier.pool.apply_report(StepReport(joins={2: 2.0}))
    return tier


def test_a_step_waits_for_loads_that_it_hides() -> None:
    tier = make_layerwise()
    tier.demoted("ab")
    plan = admit(tier, "ab")
    assert len(loads(plan)) == 2 and not loads_ahead(plan)


def test_a_step_that_may_be_one_graph_hides_no_load() -> None:
    tier = make_layerwise()
    tier.demoted("ab")
    tier.begin()
    assert (
        tier.try_promote(tier.find("ab"), num_new_tokens=1, among_others=True) is None
    )
    assert len(loads_ahead(tier.end())) == 2


def test_what_the_step_does_not_hide_is_loaded_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "_MIN_AHEAD", 1)
    tier = make_layerwise()
    tier.demoted("abcd")
    ahead = defer(tier, "abcd")
    assert len(loads_ahead(ahead)) == 2
    assert [tier.where(n) for n in "abcd"] == 2 * ["device"] + 2 * ["host"]
    tier.now = 1.9
    assert is_empty(defer(tier, "abcd"))
    tier.now = 2.0
    plan = admit(tier, "abcd")
    assert len(loads(plan)) == 2 and plan.compute_after_loads == ahead.seq
    assert_nothing_leaks(tier)


@pytest.fixture
def half_loaded(monkeypatch: pytest.MonkeyPatch) -> Tier:
    """Two of "abcd" are loaded ahead, and its step will load the others; "efghi" is on
    the host."""
    monkeypatch.setattr(pool, "_MIN_AHEAD", 1)
    tier = make_layerwise()
    tier.demoted("abcd")
    tier.demoted("efghi")
    defer(tier, "abcd")
    return tier


def test_loads_ahead_leave_room_for_what_the_step_will_load(half_loaded: Tier) -> None:
    tier = half_loaded
    # Eight blocks: two are loaded, two more will be. For five there is no room.
    assert is_empty(block(tier, "efghi"))
    # Whoever waited for them is gone, or so it seems.
    tier.now = 2.0 + pool._CLAIM_WITHIN_S + 0.1
    assert loads_ahead(defer(tier, "efghi"))


def test_nothing_is_loaded_ahead_before_what_a_step_will_load(
    half_loaded: Tier,
) -> None:
    tier = half_loaded
    # There is room, but "cd" would wait for the link.
    assert is_empty(load_ahead(tier, "ef"))
    # Whoever waited is gone, or so it seems.
    tier.now = 2.0 + pool._CLAIM_WITHIN_S + 0.1
    assert loads_ahead(load_ahead(tier, "ef"))


def test_the_stores_of_victims_come_before_loads_into_them() -> None:
    tier = make_tier(2, max_load_stall_ms=0)
    tier.demoted("ab")
    tier.computed("cd")
    defer(tier, "ab")
    # Two stores, two loads.
    tier.now = 3.9
    assert is_empty(defer(tier, "ab"))
    tier.now = 4.0
    admit(tier, "ab")
