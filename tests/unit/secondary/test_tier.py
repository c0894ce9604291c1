# SPDX-License-Identifier: Apache-2.0
"""The rule: nothing is begun that cannot arrive before computing would be there."""

import pytest

from vllm.v1.kv_tier.eviction.policies import LRU
from vllm.v1.kv_tier.layout import SecondaryLayout, SecondaryTier
from vllm.v1.kv_tier.scheduler.costs import Costs
from vllm.v1.kv_tier.scheduler.secondary.tier import PoolView, Tier
from vllm.v1.kv_tier.scheduler.slots import SlotTable
from vllm.v1.kv_tier.tuning import SchedulingTuning

from ..stores.objects import logged_by

BLOCKS = 32
FAST_S, PREFILL_S, SLOW_S = 0.25e-3, 0.5e-3, 12e-3
"""Seconds of a block: from the tier, computed, and from a disk that is writing."""


class Lookup:
    ask_s = 0.0


class Fetches:
    """From a tier, in a time of our own."""

    def __init__(self, always: bool = False) -> None:
        self.now = 100.0
        self.lookup = Lookup()
        tier = SecondaryTier(
            *("/kv", "fs", "LOCAL"),
            self.lookup,  # type: ignore[arg-type]
            1,
            deadline_s=5.0,
            fetches_always=always,
        )
        self.costs = costs = Costs(load_s=0.04e-3, max_stall_s=1.0)
        costs.prefill_s = PREFILL_S
        costs.clock = lambda: self.now
        self.tuning = SchedulingTuning()
        pool = PoolView(
            SecondaryLayout((tier,), 1, (16,), 4, BLOCKS, 64, 16),
            16,
            SlotTable(1, LRU(1)),
            costs,
            lambda key: False,
            self.tuning,
            can_jump=False,
        )
        self.rate = Tier(0, tier, pool)

    def fetch(self, block_s: float, num_jobs: int = 1) -> None:
        for _ in range(num_jobs):
            self.rate.begin_fetch(BLOCKS)
            self.now += block_s * BLOCKS
            self.rate.record_fetch([True] * BLOCKS, block_s * BLOCKS)

    @property
    def is_waited_for(self) -> bool:
        return self.rate.most_to_wait_for(BLOCKS) >= BLOCKS


def test_one_slow_job_says_nothing_of_the_others() -> None:
    tier = Fetches()
    tier.fetch(FAST_S, 3)
    for _ in range(4):
        tier.fetch(SLOW_S, 2)
        assert tier.is_waited_for
        tier.fetch(FAST_S, 3)
        assert tier.is_waited_for


def test_missing_blocks_take_no_time() -> None:
    tier = Fetches()
    tier.rate.begin_fetch(BLOCKS)
    tier.rate.record_fetch([False] * BLOCKS, FAST_S)
    assert tier.rate.is_unknown and tier.is_waited_for
    # One in 32, which took longer than it takes to compute it.
    tier.rate.begin_fetch(BLOCKS)
    tier.rate.record_fetch([True] + [False] * (BLOCKS - 1), 2 * PREFILL_S)
    assert not tier.is_waited_for


def test_a_slow_tier_is_avoided_for_a_while_by_those_who_wait() -> None:
    tier = Fetches()
    tier.fetch(FAST_S, 5)
    tier.fetch(SLOW_S, 3)
    assert tier.rate.is_avoided(False) and not tier.is_waited_for
    assert not tier.rate.begin_ask(1000, False)
    # Who computes meanwhile gains by it.
    assert not tier.rate.is_avoided(True) and tier.rate.begin_ask(1000, True)
    # A little later it is not tried again, whatever its rate; then a few blocks tell.
    tier.now += tier.tuning.remeasure_s - 1
    assert not tier.is_waited_for
    tier.now += 1
    assert tier.is_waited_for and tier.rate.is_unknown
    tier.fetch(FAST_S)
    assert tier.is_waited_for and not tier.rate.is_unknown


def test_a_faster_tier_has_longer_jobs() -> None:
    tier = Fetches()
    assert tier.rate.job_size == BLOCKS
    tier.fetch(FAST_S)
    seconds = tier.rate.job_size * FAST_S
    assert 0.9 * tier.tuning.fetch_job_s < seconds <= tier.tuning.fetch_job_s
    tier.fetch(SLOW_S, tier.tuning.num_fetches)
    assert tier.rate.job_size == BLOCKS


def test_few_blocks_are_not_worth_an_answer() -> None:
    tier = Fetches()
    tier.fetch(FAST_S, 3)
    for meets in (True, False):
        each_s = PREFILL_S if meets else PREFILL_S - FAST_S - tier.costs.load_s
        tier.lookup.ask_s = (BLOCKS + 2) * each_s
        tier.now += tier.tuning.retry_store_s
        assert tier.rate.begin_ask(BLOCKS, meets), "now and then"
        assert not tier.rate.begin_ask(BLOCKS, meets)
        assert tier.rate.begin_ask(2 * BLOCKS, meets)


def test_few_blocks_are_not_worth_a_step() -> None:
    tier = Fetches()
    tier.fetch(FAST_S, 3)
    gain_s = BLOCKS * (PREFILL_S - FAST_S - tier.costs.load_s)
    assert tier.is_waited_for
    tier.costs.join_s = {4: 2 * gain_s, 7: 1.1 * gain_s}
    assert not tier.is_waited_for
    assert tier.rate.most_to_wait_for(2 * BLOCKS) >= 2 * BLOCKS


def test_what_cannot_come_in_time_is_not_begun() -> None:
    tier = Fetches()
    tier.fetch(FAST_S, 3)
    in_time = 5.0 / FAST_S
    most = tier.rate.most_to_wait_for(10**6)
    assert in_time - 2 < most < in_time
    tier.rate.begin_fetch(1000)
    assert tier.rate.most_to_wait_for(10**6) == most - 1000


@pytest.mark.parametrize("block_s", [FAST_S, 3 * PREFILL_S])
def test_a_job_that_does_not_end_stops_everything(block_s: float) -> None:
    tier = Fetches()
    tier.fetch(block_s, 5)
    tier.now += tier.tuning.remeasure_s
    tier.rate.begin_fetch(BLOCKS)
    tier.now += tier.tuning.patience_s + 2 * BLOCKS * max(block_s, PREFILL_S)
    # Reports come with outputs, and steps may take longer than jobs.
    for _ in range(tier.tuning.settled_outputs):
        assert not tier.rate.is_avoided(True)
        tier.rate.record_output()
    assert tier.rate.is_avoided(True) and tier.rate.is_avoided(False)
    assert tier.rate.most_to_meet(1000, False) == 0
    tier.rate.record_late(tier.now - 1)
    tier.rate.record_fetch([False] * BLOCKS, 5.0)
    # Nor is it trusted again at once.
    assert tier.rate.is_avoided(True) and tier.rate.stats.late_requests == 1
    tier.now += tier.tuning.remeasure_s
    assert not tier.rate.is_avoided(True)


def test_outputs_before_a_job_is_late_say_nothing() -> None:
    tier = Fetches()
    tier.rate.begin_fetch(BLOCKS)
    for _ in range(9):
        tier.rate.record_output()
    tier.now += 1.0
    assert not tier.rate.is_avoided(False)


def test_a_tier_that_delivers_to_others_is_only_busy() -> None:
    tier = Fetches()
    since = tier.now
    tier.fetch(FAST_S)
    tier.rate.record_late(since)
    assert tier.is_waited_for
    tier.rate.record_late(tier.now + 1)
    assert not tier.is_waited_for


def test_always_is_waited_for_however_slow_it_is() -> None:
    tier = Fetches(always=True)
    tier.fetch(SLOW_S, 5)
    tier.lookup.ask_s = 1e3
    assert tier.is_waited_for and tier.rate.begin_ask(1, False)
    tier.rate.begin_fetch(BLOCKS)
    tier.now += 1e3
    for _ in range(9):
        tier.rate.record_output()
    assert tier.is_waited_for


def test_a_meeting_gets_what_arrives_before_the_front() -> None:
    tier = Fetches()
    # Unknown, it is taken for as fast as computing.
    assert tier.rate.most_to_meet(100, False) == 50
    tier.fetch(PREFILL_S / 3, 5)
    assert tier.rate.most_to_meet(100, False) == pytest.approx(75, abs=1)
    # 30 before them take ten blocks' time.
    tier.rate.begin_fetch(30)
    assert tier.rate.most_to_meet(100, False) == pytest.approx(0.75 * 90, abs=1)


def test_a_meeting_that_saves_less_than_its_steps_cost_is_not_begun() -> None:
    tier = Fetches()
    tier.fetch(PREFILL_S, 5)
    tier.costs.join_s = {4: 9 * PREFILL_S, 6: 20 * PREFILL_S}
    assert tier.rate.most_to_meet(60, True) == 30
    assert tier.rate.most_to_meet(50, True) == 0
    # But it is tried from time to time, since it may be faster by now.
    tier.now += tier.tuning.remeasure_s
    assert tier.rate.most_to_meet(50, True) == tier.tuning.first_fetch
    assert tier.rate.most_to_meet(50, True) == 0
    # More of what was begun costs no steps.
    assert tier.rate.most_to_meet(50, False) == 25


def test_the_log_says_why_a_tier_is_left_alone() -> None:
    tier = Fetches()
    with logged_by("vllm.v1.kv_tier.scheduler.secondary.tier") as lines:
        tier.fetch(FAST_S, 5)
        assert not lines
        tier.fetch(SLOW_S, 5)
        (line,) = lines
        assert "tier /kv is too slow: a block takes 12.04 ms to the device" in line
        assert "and 0.50 ms to compute" in line
        # Nor is it logged again soon, where it is slow now and then.
        tier.fetch(FAST_S, 5)
        tier.fetch(SLOW_S, 5)
        assert len(lines) == 1
        tier.now += tier.tuning.log_again_s
        tier.fetch(FAST_S, 5)
        tier.fetch(SLOW_S, 5)
        assert len(lines) == 2


def test_the_log_says_nothing_before_computing_was_measured() -> None:
    tier = Fetches()
    tier.costs.prefill_s = 0.0
    with logged_by("vllm.v1.kv_tier.scheduler.secondary.tier") as lines:
        tier.fetch(SLOW_S, 5)
        assert not tier.is_waited_for and not lines
        tier.costs.prefill_s = PREFILL_S
        tier.fetch(SLOW_S)
        assert len(lines) == 1


def test_the_log_says_nothing_where_requests_meet_a_slow_tier() -> None:
    tier = Fetches()
    tier.rate._can_meet = True
    with logged_by("vllm.v1.kv_tier.scheduler.secondary.tier") as lines:
        tier.fetch(SLOW_S, 5)
        assert not lines
        tier.rate.record_late(tier.now)
        assert not lines
        tier.rate.record_late(tier.now + 1)
        assert len(lines) == 1
