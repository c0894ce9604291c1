# SPDX-License-Identifier: Apache-2.0
"""What executors ask the tier: one model output for the scheduler, with the reports of
all ranks, and who must know of a call to them."""

from collections import Counter
from collections.abc import Iterable, Sequence

from vllm.v1.kv_tier.plan import StepReport, Times, merge_reports, merge_times
from vllm.v1.kv_tier.rank.report import with_report
from vllm.v1.kv_tier.scheduling.rank_calls import note_rank_call
from vllm.v1.outputs import ModelRunnerOutput

__all__ = ["StepReportAggregator", "note_rank_call"]


class StepReportAggregator:
    """Merges the reports of all ranks into the output of one of them.

    A multi-process executor returns the output of one rank only, but a copy may fail on
    any rank.

    Args:
        max_times: Most copies that only some ranks have reported, to bound memory.

    """

    def __init__(self, max_times: int = 1000) -> None:
        self._max_times = max_times
        self._waiting: StepReport | None = None
        # Times that not all ranks have reported yet, and how many have.
        self._times: Times = {}
        self._num_told: Counter[tuple[str, int]] = Counter()

    def aggregate(
        self, outputs: Sequence[ModelRunnerOutput | None], output_rank: int = 0
    ) -> ModelRunnerOutput | None:
        """The output of `output_rank` with the reports of all ranks.

        While that rank has no output, reports wait for the next call.
        """
        reports = [
            o.kv_tier_report
            for o in outputs
            if o is not None and o.kv_tier_report is not None
        ]
        times = self._waiting.times if self._waiting is not None else {}
        self._waiting = merge_reports([self._waiting, *reports])
        if reports and self._waiting is not None:
            self._waiting.times = times | self._told_by_all(reports, len(outputs))
        output = outputs[output_rank]
        if output is None or self._waiting is None:
            return output
        report, self._waiting = self._waiting, None
        return with_report(output, report)

    def _told_by_all(self, reports: Iterable[StepReport], num_ranks: int) -> Times:
        """Times of the slowest rank, for copies that every rank has reported."""
        for report in reports:
            self._num_told.update(report.times.keys())
            merge_times(self._times, report.times)
        all_told = [k for k in self._times if self._num_told[k] == num_ranks]
        told = {key: self._times[key] for key in all_told}
        too_many = list(self._times)[: max(0, len(self._times) - self._max_times)]
        for key in (*all_told, *too_many):
            self._times.pop(key, None)
            self._num_told.pop(key, None)
        return told
