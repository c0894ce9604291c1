# SPDX-License-Identifier: Apache-2.0
"""What reads from a secondary tier are expected to cost."""

from collections.abc import Sequence

from vllm.v1.kv_tier.layout import SecondaryTier
from vllm.v1.kv_tier.scheduler.costs import Costs
from vllm.v1.kv_tier.scheduler.secondary.lookup import AsyncLookup
from vllm.v1.kv_tier.scheduler.secondary.tier import ReadCostModel
from vllm.v1.kv_tier.stats import SecondaryStats
from vllm.v1.kv_tier.tuning import SchedulingTuning

from ..stores.objects import logged_by

BLOCKS = 32
FAST_S, PREFILL_S, SLOW_S = 0.25e-3, 0.5e-3, 12e-3
"""Seconds of a block: from the tier, computed, and from a disk that is writing."""


def exists(keys: Sequence[bytes]) -> list[bool]:
    return [True] * len(keys)


class Fetches:
    """From a tier, in a time of our own."""

    def __init__(self) -> None:
        self.now = 100.0
        tier = SecondaryTier(
            "/kv", "fs", "LOCAL", AsyncLookup(exists), 1, deadline_s=5.0
        )
        self.costs = costs = Costs(load_s=0.04e-3, max_stall_s=1.0)
        costs.prefill_s = PREFILL_S
        costs.clock = lambda: self.now
        self.tuning = SchedulingTuning()
        self.source = ReadCostModel(tier, costs, SecondaryStats(), self.tuning)

    def fetch(self, block_s: float, num_jobs: int = 1) -> None:
        for _ in range(num_jobs):
            self.source.begin_fetch(BLOCKS)
            self.now += block_s * BLOCKS
            self.source.record_fetch([True] * BLOCKS, block_s * BLOCKS)


def test_a_job_that_something_held_up_says_nothing_of_the_others() -> None:
    tier = Fetches()
    tier.fetch(FAST_S, 3)
    for _ in range(4):
        tier.fetch(SLOW_S, 2)
        assert tier.source.is_worth_it
        tier.fetch(FAST_S, 3)
        assert tier.source.is_worth_it


def test_what_was_not_there_took_no_time() -> None:
    tier = Fetches()
    tier.source.begin_fetch(BLOCKS)
    tier.source.record_fetch([False] * BLOCKS, FAST_S)
    assert not tier.source.is_known
    # One in 32, which took longer than it takes to compute it.
    tier.source.begin_fetch(BLOCKS)
    tier.source.record_fetch([True] + [False] * (BLOCKS - 1), 2 * PREFILL_S)
    assert tier.source.is_known and not tier.source.is_worth_it


def test_nor_does_the_first_one_for_long() -> None:
    tier = Fetches()
    tier.fetch(SLOW_S)
    assert not tier.source.is_worth_it
    tier.fetch(FAST_S, 2)
    assert tier.source.is_worth_it


def test_a_tier_that_became_slow_is_left_alone_after_three() -> None:
    tier = Fetches()
    tier.fetch(FAST_S, 5)
    tier.fetch(SLOW_S, 3)
    assert not tier.source.is_worth_it
    # Later it is tried anew, and what was known is forgotten.
    tier.now += tier.tuning.remeasure_s
    assert tier.source.is_worth_it and not tier.source.is_known
    tier.fetch(FAST_S)
    assert tier.source.is_worth_it and tier.source.is_known


def test_jobs_of_a_fast_tier_are_longer() -> None:
    tier = Fetches()
    assert tier.source.job_size(BLOCKS) == BLOCKS
    tier.fetch(FAST_S)
    seconds = tier.source.job_size(BLOCKS) * FAST_S
    assert 0.9 * tier.tuning.fetch_job_s < seconds <= tier.tuning.fetch_job_s
    tier.fetch(SLOW_S, tier.tuning.num_fetches)
    assert tier.source.job_size(BLOCKS) == BLOCKS


def test_few_blocks_are_not_worth_the_wait_for_any() -> None:
    tier = Fetches()
    tier.fetch(FAST_S, 3)
    worth = BLOCKS * (PREFILL_S - FAST_S - tier.costs.load_s)
    assert tier.source.gain_s(BLOCKS, True) > 0.9 * worth
    for _ in range(2):
        tier.source.record_wait(FAST_S * BLOCKS + 2 * worth, BLOCKS)
        tier.source.record_wait(FAST_S * 4 * BLOCKS + 2 * worth, 4 * BLOCKS)
    assert tier.source.gain_s(BLOCKS, True) < 0 < tier.source.gain_s(4 * BLOCKS, True)
    tier.source.record_question()
    assert not tier.source.is_worth_asking(BLOCKS, True)
    assert tier.source.is_worth_asking(4 * BLOCKS, True)


def test_what_long_prefixes_wait_for_says_nothing_of_others() -> None:
    tier = Fetches()
    tier.fetch(FAST_S, 3)
    before = tier.source.gain_s(BLOCKS, True)
    for _ in range(2):
        tier.source.record_wait(100.0, 4 * BLOCKS)
    assert tier.source.gain_s(4 * BLOCKS, True) < 0
    assert tier.source.gain_s(BLOCKS, True) == before


def test_nor_does_one_wait_that_met_something_else() -> None:
    tier = Fetches()
    tier.fetch(FAST_S, 3)
    tier.source.record_wait(100.0, BLOCKS)
    assert tier.source.gain_s(BLOCKS, True) > 0
    tier.source.record_wait(FAST_S * BLOCKS, BLOCKS)
    assert tier.source.gain_s(BLOCKS, True) > 0
    tier.source.record_wait(100.0, BLOCKS)
    assert tier.source.gain_s(BLOCKS, True) < 0


def test_nobody_loses_what_others_use() -> None:
    tier = Fetches()
    tier.fetch(FAST_S, 3)
    for _ in range(2):
        tier.source.record_wait(100.0, BLOCKS)
    tier.source.record_question()
    assert tier.source.gain_s(BLOCKS, False) > 0
    assert tier.source.is_worth_asking(BLOCKS, False)
    assert not tier.source.is_worth_asking(BLOCKS, True)


def test_a_step_that_joins_takes_its_time_anyway() -> None:
    tier = Fetches()
    tier.fetch(FAST_S, 3)
    gain_s = tier.source.gain_s(BLOCKS, True)
    tier.costs.join_s = {4: 2 * gain_s, 7: 1.1 * gain_s}
    for is_idle in (True, False):
        assert tier.source.gain_s(BLOCKS, is_idle) < 0
        assert tier.source.gain_s(2 * BLOCKS, is_idle) > 0


def test_what_was_waited_for_is_measured_anew() -> None:
    tier = Fetches()
    tier.fetch(FAST_S, 3)
    for _ in range(2):
        tier.source.record_wait(100.0, BLOCKS)
    assert tier.source.gain_s(BLOCKS, True) < 0
    tier.now += tier.tuning.retry_store_s
    assert tier.source.gain_s(BLOCKS, True) > 0


def test_it_is_told_why_a_tier_brings_nothing() -> None:
    tier = Fetches()
    with logged_by("vllm.v1.kv_tier.scheduler.secondary.tier") as lines:
        tier.fetch(FAST_S, 5)
        assert not lines
        tier.fetch(SLOW_S, 5)
        (line,) = lines
        assert "tier /kv takes 12.04 ms to bring a block to the device" in line
        assert "which takes 0.50 ms to compute" in line
        # Nor is it told again soon, where it is slow now and then.
        tier.fetch(FAST_S, 5)
        tier.fetch(SLOW_S, 5)
        assert len(lines) == 1
        tier.now += tier.tuning.tell_again_s
        tier.fetch(FAST_S, 5)
        tier.fetch(SLOW_S, 5)
        assert len(lines) == 2


def test_nor_is_it_told_before_computing_was_measured() -> None:
    tier = Fetches()
    tier.costs.prefill_s = 0.0
    with logged_by("vllm.v1.kv_tier.scheduler.secondary.tier") as lines:
        tier.fetch(SLOW_S, 5)
        assert not tier.source.is_worth_it and not lines
        tier.costs.prefill_s = PREFILL_S
        tier.fetch(SLOW_S)
        assert len(lines) == 1
