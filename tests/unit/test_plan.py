# SPDX-License-Identifier: Apache-2.0
"""How reports of the ranks reach the scheduler."""

from collections import Counter
from copy import deepcopy

import pytest

from vllm.v1.kv_tier.plan import CopyTime, PrefillTime, StepReport, Times, merge_reports
from vllm.v1.kv_tier.worker.report import StepReportAggregator, with_report
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from ..sim import upstream

LOAD_3 = StepReport(failed_load_seq=3)
LOAD_5 = StepReport(failed_load_seq=5)
STORE = StepReport(failed_store_slots={7: 4})


def prefill(num_tokens: int, seconds: float) -> StepReport:
    return StepReport(prefill=PrefillTime(num_tokens, seconds))


def times(**copies: tuple[int, float]) -> StepReport:
    """Kind and plan as in `store_1`."""
    keys = [name.rsplit("_", 1) for name in copies]
    return StepReport(
        times={
            (kind, int(seq)): CopyTime(*copies[f"{kind}_{seq}"]) for kind, seq in keys
        }
    )


def output() -> ModelRunnerOutput:
    return upstream.model_runner_output(["r"])


@pytest.mark.parametrize(
    "reports, merged",
    [
        ([], None),
        ([None, None], None),
        ([None, LOAD_3], LOAD_3),
        ([LOAD_5, LOAD_3], LOAD_3),
        ([LOAD_3, LOAD_5], LOAD_3),
        ([STORE, LOAD_5], StepReport(5, {7: 4})),
        ([STORE, StepReport(None, {8: 4})], StepReport(None, {7: 4, 8: 4})),
        ([StepReport()], StepReport()),
        # Tokens and seconds of the slowest rank.
        ([prefill(4, 2.0), None], prefill(4, 2.0)),
        ([prefill(4, 2.0), LOAD_3], StepReport(3, prefill=PrefillTime(4, 2.0))),
        ([LOAD_3, prefill(4, 2.0)], StepReport(3, prefill=PrefillTime(4, 2.0))),
        ([prefill(4, 2.0), prefill(1, 1.0)], prefill(1, 1.0)),
        ([prefill(1, 1.0), prefill(4, 2.0)], prefill(1, 1.0)),
        ([prefill(4, 2.0), prefill(9, 3.0), prefill(2, 0.9)], prefill(4, 2.0)),
        # A copy moved what it moved everywhere.
        (
            [
                times(store_1=(4, 2.0), load_1=(1, 1.0)),
                times(store_1=(0, 3.0), load_2=(1, 1.0)),
            ],
            times(store_1=(0, 3.0), load_1=(1, 1.0), load_2=(1, 1.0)),
        ),
        (
            [
                StepReport(failures=Counter(store=2)),
                StepReport(failures=Counter(store=1, load=1)),
            ],
            StepReport(failures=Counter(store=2, load=1)),
        ),
    ],
)
def test_a_copy_failed_if_it_failed_anywhere_and_took_what_the_slowest_took(
    reports: list[StepReport | None], merged: StepReport | None
) -> None:
    before = deepcopy(reports)
    assert merge_reports(reports) == merged
    assert reports == before


def test_no_report_is_put_on_the_shared_empty_output() -> None:
    found = with_report(EMPTY_MODEL_RUNNER_OUTPUT, LOAD_3)
    assert found is not EMPTY_MODEL_RUNNER_OUTPUT
    assert found.kv_tier_report == LOAD_3
    assert EMPTY_MODEL_RUNNER_OUTPUT.kv_tier_report is None


def test_an_output_without_a_report_is_not_copied() -> None:
    plain = output()
    assert with_report(plain, None) is plain


def test_one_output_with_the_reports_of_all_ranks() -> None:
    outputs = [output(), output(), output()]
    outputs[0].kv_tier_report = LOAD_5
    outputs[2].kv_tier_report = STORE
    found = StepReportAggregator().aggregate(outputs, output_rank=1)
    assert found is not None and found.req_ids == ["r"]
    assert found.kv_tier_report == StepReport(5, {7: 4})


def test_the_output_rank_passes_untouched_without_reports() -> None:
    outputs = [output(), output()]
    assert StepReportAggregator().aggregate(outputs, output_rank=1) is outputs[1]


def test_reports_wait_while_there_is_no_output() -> None:
    """`execute_model` returns None before `sample_tokens`."""
    aggregator = StepReportAggregator()
    failed = output()
    failed.kv_tier_report = LOAD_5
    assert aggregator.aggregate([None, failed], output_rank=0) is None
    second = aggregator.aggregate([output(), output()], output_rank=0)
    assert second is not None and second.kv_tier_report == LOAD_5
    third = aggregator.aggregate([output(), output()], output_rank=0)
    assert third is not None and third.kv_tier_report is None


def test_one_rank_that_copies_no_more_is_enough() -> None:
    reports = [None, StepReport(lost_blocks=[]), StepReport(), StepReport(7)]
    assert merge_reports(reports) == StepReport(7, lost_blocks=[])
    reports = [StepReport(lost_blocks=[1]), StepReport(lost_blocks=[2])]
    assert merge_reports(reports) == StepReport(lost_blocks=[1, 2])


def test_waiting_reports_merge_with_later_ones() -> None:
    aggregator = StepReportAggregator()
    outputs = [output(), output()]
    outputs[1].kv_tier_report = LOAD_5
    aggregator.aggregate([None, outputs[1]], output_rank=0)
    outputs[1].kv_tier_report = StepReport(3, {1: 1})
    found = aggregator.aggregate(outputs, output_rank=0)
    assert found is not None and found.kv_tier_report == StepReport(3, {1: 1})


def told(*reports: StepReport | None) -> list[ModelRunnerOutput | None]:
    outputs: list[ModelRunnerOutput | None] = []
    for report in reports:
        outputs.append(with_report(output(), report))
    return outputs


def times_of(found: ModelRunnerOutput | None) -> Times:
    assert found is not None
    return found.kv_tier_report.times if found.kv_tier_report is not None else {}


def test_times_wait_until_all_ranks_have_told_theirs() -> None:
    """Ranks see in different steps that a copy has ended."""
    aggregator = StepReportAggregator()
    fast = times(store_1=(4, 1.0), load_2=(1, 1.0))
    slow = times(store_1=(4, 3.0))
    late = times(load_2=(1, 2.0))
    assert times_of(aggregator.aggregate(told(fast, slow))) == {("store", 1): (4, 3.0)}
    assert times_of(aggregator.aggregate(told(None, None))) == {}
    assert times_of(aggregator.aggregate(told(None, late))) == {("load", 2): (1, 2.0)}
    assert times_of(aggregator.aggregate(told(None, None))) == {}


def test_times_wait_for_an_output_too() -> None:
    aggregator = StepReportAggregator()
    report = times(store_1=(4, 1.0))
    _, other = told(None, report)
    assert aggregator.aggregate([None, other], output_rank=0) is None
    found = aggregator.aggregate(told(report, LOAD_3), output_rank=0)
    assert times_of(found) == report.times
    assert found is not None and found.kv_tier_report is not None
    assert found.kv_tier_report.failed_load_seq == 3


def test_a_rank_that_never_tells_does_not_fill_memory() -> None:
    aggregator = StepReportAggregator()
    for seq in range(3000):
        report = times(**{f"store_{seq}": (1, 1.0)})
        assert times_of(aggregator.aggregate(told(report, None))) == {}
    assert len(aggregator._times) == len(aggregator._num_told) <= 1000
    both = times(store_3000=(1, 1.0))
    assert times_of(aggregator.aggregate(told(both, both))) == both.times
