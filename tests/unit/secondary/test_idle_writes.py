# SPDX-License-Identifier: Apache-2.0
"""An engine without requests goes on with what it was to write below."""

import pytest

from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.releases import keys_are_bytes

from ..secondary_pool import SETTLED, Below
from ..tier import IdleScheduler

pytestmark = pytest.mark.skipif(
    not keys_are_bytes(), reason="refused: hashes are numbers of a process"
)


def idle(below: Below, num_steps: int = SETTLED + 1) -> list[StepPlan]:
    """Steps that run nothing."""
    plans = []
    for _ in range(num_steps):
        below.tier.begin()
        plans.append(below.pool.take_plan(is_idle=True))
    return plans


def writes_on(below: Below) -> bool:
    assert below.backing is not None
    return below.backing.writes_on


def test_an_idle_engine_steps_on_while_there_is_something_to_write() -> None:
    below = Below()
    assert not writes_on(below)
    below.tier.demoted("ab")
    assert writes_on(below)
    plans = idle(below)
    (job,) = below.jobs(plans)
    assert writes_on(below)
    # Its ranks are waited for, else it would spin.
    assert plans[-1].awaits_secondary
    below.end(job)
    assert not writes_on(below)
    assert not idle(below, 1)[0].awaits_secondary


def test_an_engine_that_is_paused_does_not_step_on() -> None:
    below = Below()
    scheduler = IdleScheduler(below.pool)
    assert not scheduler.has_requests()
    below.tier.demoted("ab")
    assert scheduler.has_requests()
    if scheduler.pause():
        assert not scheduler.has_requests()
        scheduler.resume()
    (job,) = below.jobs(idle(below))
    assert scheduler.has_requests()
    below.end(job)
    assert not scheduler.has_requests()


def test_an_idle_engine_does_not_wait_for_a_store_for_ever() -> None:
    below = Below(flush_s=3.0)
    below.tier.demoted("ab")
    idle(below)
    below.tier.now += 2.9
    idle(below, 1)
    assert writes_on(below)
    below.tier.now += 0.2
    assert not idle(below, 1)[0].awaits_secondary
    assert not writes_on(below)
    # After requests it has as much time again.
    below.hit("a")
    assert writes_on(below)


def test_without_time_an_idle_engine_writes_nothing() -> None:
    below = Below(flush_s=0.0)
    below.tier.demoted("ab")
    assert not writes_on(below)
    assert not any(plan.awaits_secondary for plan in idle(below))
