# SPDX-License-Identifier: Apache-2.0
"""Loads ahead where a step hides loads of its own, layer by layer."""

from typing import Any

import pytest

from vllm.v1.kv_tier.plan import StepReport
from vllm.v1.kv_tier.tuning import SchedulingTuning

from ..prefetching import admit, block, defer, load_ahead, make_tier
from ..tier import Tier, assert_nothing_leaks, is_empty, loads, loads_ahead


def make_layerwise(join_s: float = 2.0, **config: Any) -> Tier:
    """A tier whose steps compute for `join_s` seconds, and load a block in one."""
    settings = {"layerwise": True, "max_load_stall_ms": 0, **config}
    tier = make_tier(8, **settings)
    tier.pool.apply_report(StepReport(joins={2: join_s}))
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


def test_what_the_step_does_not_hide_is_loaded_ahead() -> None:
    tier = make_layerwise(tuning={"min_prefetch": 1})
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


def test_a_step_hides_as_many_loads_as_the_link_is_fast() -> None:
    tier = make_layerwise(load_s=0.5, tuning={"min_prefetch": 1})
    tier.demoted("abcdefg")
    assert len(loads_ahead(defer(tier, "abcdefg"))) == 3


@pytest.mark.parametrize("hidden_s, end_s", [(2.0, 4.0), (3.0, 3.0)])
def test_a_request_that_hides_its_loads_waits_for_those_of_others(
    hidden_s: float, end_s: float
) -> None:
    """Until no step loads, or as long as its own does not hide the rest."""
    tier = make_layerwise(hidden_s)
    tier.demoted("abcdefgh")
    tier.begin()
    assert tier.try_promote(tier.find("abcd")) is not None
    assert len(loads(tier.end())) == 4
    tier.begin()
    assert tier.try_promote(tier.find("ef"), among_others=True) is None
    tier.end()
    (request,) = tier.requests[-1:]
    tier.now = end_s - 0.1
    assert tier.pool.is_loading(request, True)
    tier.now = end_s + 0.1
    assert not tier.pool.is_loading(request, True)


@pytest.fixture
def half_loaded() -> Tier:
    """Two of "abcd" are loaded ahead, and its step will load the others; "efghi" is on
    the host."""
    tier = make_layerwise(tuning={"min_prefetch": 1})
    tier.demoted("abcd")
    tier.demoted("efghi")
    defer(tier, "abcd")
    return tier


def test_loads_ahead_leave_room_for_what_the_step_will_load(half_loaded: Tier) -> None:
    tier = half_loaded
    # Eight blocks: two are loaded, two more will be. For five there is no room.
    assert is_empty(block(tier, "efghi"))
    # Whoever waited for them is gone, or so it seems.
    tier.now = 2.0 + SchedulingTuning().claim_within_s + 0.1
    assert loads_ahead(defer(tier, "efghi"))


def test_nothing_is_loaded_ahead_before_what_a_step_will_load(
    half_loaded: Tier,
) -> None:
    tier = half_loaded
    # There is room, but "cd" would wait for the link.
    assert is_empty(load_ahead(tier, "ef"))
    # Whoever waited is gone, or so it seems.
    tier.now = 2.0 + SchedulingTuning().claim_within_s + 0.1
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
