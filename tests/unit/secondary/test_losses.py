# SPDX-License-Identifier: Apache-2.0
"""How long the host is passed over when loads fail, and blocks that nobody may have."""

import pytest

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_tier.plan import CopyTime, StepReport
from vllm.v1.kv_tier.scheduler.costs import LoadBreaker
from vllm.v1.kv_tier.scheduler.free_blocks import LostBlocks
from vllm.v1.kv_tier.tuning import SchedulingTuning

TUNING = SchedulingTuning(max_failed_loads=2, retry_loads_s=10, max_retry_loads_s=30)
FAILED = StepReport(failed_load_seq=1)


def ended(kind: str, num_blocks: int = 3) -> StepReport:
    return StepReport(times={(kind, 2): CopyTime(num_blocks, 0.1)})


def breaker(*reports: StepReport, now: float = 100.0) -> LoadBreaker:
    breaker = LoadBreaker(TUNING)
    for report in reports:
        breaker.take_report(report, now)
    return breaker


def test_so_many_failures_end_lookups_for_a_while() -> None:
    assert not breaker(FAILED).is_open(100)
    opened = breaker(FAILED, FAILED)
    assert opened.is_open(100) and opened.is_open(109.9)
    assert not opened.is_open(110)


def test_the_time_doubles_up_to_a_bound() -> None:
    opened = breaker(FAILED)
    for seconds in (10, 20, 30, 30):
        opened.take_report(FAILED, 100)
        assert opened.is_open(100 + seconds - 0.1)
        assert not opened.is_open(100 + seconds)


@pytest.mark.parametrize("kind", ["load", "load_ahead"])
def test_a_load_that_comes_begins_the_count_anew(kind: str) -> None:
    counting = breaker(FAILED, ended(kind), FAILED)
    assert not counting.is_open(100)
    counting.take_report(FAILED, 100)
    assert counting.is_open(100)


def test_a_load_that_comes_begins_the_time_anew() -> None:
    opened = breaker(FAILED, FAILED, FAILED, ended("load"), FAILED, FAILED, now=100)
    # Of the third failure, until 120; and of the last, until 110, which counts.
    assert not opened.is_open(110)


@pytest.mark.parametrize(
    "report", [ended("store"), ended("stall"), ended("load", 0), StepReport()]
)
def test_what_is_no_load_that_came_says_nothing(report: StepReport) -> None:
    assert breaker(FAILED, report, FAILED).is_open(100)


def test_lost_blocks_are_withdrawn_once_they_are_free() -> None:
    blocks = [KVCacheBlock(i) for i in range(4)]
    lost = LostBlocks()
    blocks[2].ref_cnt = 1
    lost.add([1, 2])
    assert lost.take_free(blocks) == [blocks[1]]
    assert (lost.in_use, lost.withdrawn) == ({2}, {1})
    # Another rank loses the same: it is gone already.
    lost.add([1, 2, 3])
    assert lost.in_use == {2, 3}
    blocks[2].ref_cnt = 0
    assert {b.block_id for b in lost.take_free(blocks)} == {2, 3}
    assert lost.withdrawn == {1, 2, 3} and not lost.in_use
