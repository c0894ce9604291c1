# SPDX-License-Identifier: Apache-2.0
"""Loads that a step would wait too long for: they run ahead of their request."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm.v1.kv_tier.plan import CopyTime, PrefillTime, StepReport
from vllm.v1.kv_tier.tuning import SchedulingTuning

from ..prefetching import admit, defer, make_tier, places, taken
from ..tier import (
    BLOCK,
    Asking,
    Tier,
    assert_nothing_leaks,
    is_empty,
    loads,
    loads_ahead,
)

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


def test_the_next_part_of_long_loads_is_asked_for_halfway() -> None:
    """So that the link has something to do when the first has come."""
    tier = Tier(20, load_s=2.0, max_load_stall_ms=500, tuning={"max_prefetch": 4})
    tier.demoted("abcdefghijkl")
    first = defer(tier, "abcdefghijkl")
    assert len(loads_ahead(first)) == 4
    (request,) = tier.requests[-1:]
    # They end at 8; a step would wait for half a second of the half that is left.
    tier.now = 3.4
    assert tier.pool.is_loading(request, True)
    tier.now = 3.6
    assert not tier.pool.is_loading(request, True)
    second = defer(tier, "abcdefghijkl")
    assert len(loads_ahead(second)) == 4
    assert not {*loads_ahead(second)} & {*loads_ahead(first)}


def test_loads_of_one_part_are_waited_for_to_the_end() -> None:
    tier = Tier(20, load_s=2.0, max_load_stall_ms=500, tuning={"max_prefetch": 4})
    tier.demoted("abcd")
    assert len(loads_ahead(defer(tier, "abcd"))) == 4
    (request,) = tier.requests[-1:]
    tier.now = 7.4
    assert tier.pool.is_loading(request, True)
    tier.now = 7.6
    assert not tier.pool.is_loading(request, True)


def test_a_request_waits_for_each_part_of_long_loads() -> None:
    """However few waits others are granted."""
    tier = make_tier(20, tuning={"max_prefetch": 2, "max_waits": 0})
    tier.demoted("abcdef")
    for _ in range(2):
        assert len(loads_ahead(defer(tier, "abcdef"))) == 2
        tier.now += 2.0


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


# -------------------------------------------------------------------- link queue


def test_loads_that_forward_passes_wait_for_anyway_stall_nobody() -> None:
    tier = make_tier(8)
    tier.demoted("ab")
    ahead = defer(tier, "ab")
    assert admit(tier, "a", among_others=False).compute_after_loads == ahead.seq
    assert admit(tier, "b").compute_after_loads == 0


def test_short_loads_overtake_long_ones() -> None:
    tier = make_tier(8, max_load_stall_ms=2000)
    tier.demoted("abcd")
    ahead = defer(tier, "abc")
    # Three seconds ahead of a step: those of one, which takes a second, come before.
    plan = admit(tier, "d")
    assert len(loads(plan)) == 1 and not plan.compute_after_loads
    # And those ahead come so much later.
    tier.now = 1.9
    assert is_empty(defer(tier, "abc"))
    tier.now = 2.0
    assert admit(tier, "abc").compute_after_loads == ahead.seq


def test_a_request_is_asked_again_whatever_others_load() -> None:
    """Each step has loads of its own, which overtake those that it waits for."""
    tier = make_tier(8, max_load_stall_ms=0)
    tier.demoted("abcd")
    defer(tier, "ab")
    (request,) = tier.requests[-1:]
    tier.pool.costs.queue(100, 50, 0, prefetch=False)
    tier.now = 3.9
    assert tier.pool.is_loading(request, True)
    tier.now = 4.1
    assert not tier.pool.is_loading(request, True)


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
    time = PrefillTime(100 * BLOCK, 100 * seconds_per_block)
    assert not tier.pool.apply_report(StepReport(prefill=time))


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
    times = {("load_ahead", 1): CopyTime(10, 5.0)}
    for _ in range(2):
        tier.pool.apply_report(StepReport(times=times))
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
    waiting: Any = tier.requests[-1]
    assert tier.pool.is_loading(waiting, True)
    assert not tier.pool.is_loading(waiting, False)
    other: Any = Asking(num_preemptions=0)
    assert not tier.pool.is_loading(other, True)
    tier.now = 2.5
    assert not tier.pool.is_loading(waiting, True)


def test_a_request_waits_a_few_times_only() -> None:
    tier = make_tier(3)
    tier.demoted("abc")
    request: Any = Asking(num_preemptions=0)
    managers = [SimpleNamespace(block_size=BLOCK, get_num_skipped_tokens=lambda n: 0)]

    def promote() -> bool:
        tier.begin()
        found = (tier.find("abc"),)
        return (
            tier.pool.promote(request, managers, found, 3 * BLOCK, 0, 2, True) is None
        )

    for _ in range(SchedulingTuning().max_waits):
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
