# SPDX-License-Identifier: Apache-2.0
"""What a rank tells the scheduler, how it gets there, and one report of all ranks."""

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_tier.plan import (
    OpenSlots,
    PrefillTime,
    SecondaryResult,
    StepReport,
    Times,
    merge_reports,
    merge_times,
)
from vllm.v1.kv_tier.weight_changes import note_rank_call
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
)

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput


class StepReportBuilder:
    """The report in the making, and its only owner. Copy threads write to it too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._report: StepReport | None = None
        self.reports_late = False
        """Whether jobs of secondary tiers end while steps run, see `take_secondary`."""
        # Failed copies by kind and plan, until their times are reported.
        self._failed: set[tuple[str, int]] = set()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return self._report is None

    def void_since(self, reason: str, seq: int) -> None:
        """Report that content of plan `seq` is missing, so later results may be wrong.

        `reason` is a kind of `StepReport.failures`.
        """
        with self._lock:
            self._void_since(reason, seq)

    def record_load_failure(self, kind: str, seq: int) -> None:
        """Report that copies of `kind` (`load`, `load_ahead`) of plan `seq` failed."""
        with self._lock:
            self._void_since("load", seq)
            self._failed.add((kind, seq))

    def record_store_failure(self, kind: str, seq: int, slots: Sequence[int]) -> None:
        """Report that copies of `kind` (`store`, `clean`) of plan `seq` failed."""
        with self._lock:
            report = self._reported()
            report.failed_store_slots.update(dict.fromkeys(slots, seq))
            report.failures["store"] += 1
            self._failed.add((kind, seq))

    def record_hang(self, lost_blocks: list[int]) -> None:
        """Report that this rank copies no more, and which blocks loads may write to."""
        with self._lock:
            self._reported().lost_blocks = lost_blocks

    def record_job(self, result: SecondaryResult) -> None:
        """Report the end of a job of a secondary tier."""
        with self._lock:
            self._reported().secondary.append(result)

    def take_secondary(self) -> list[SecondaryResult]:
        """Take the results of jobs that are not reported yet.

        Unlike the rest of a report, they do not depend on the step whose output carries
        them, which may have been queued long ago.
        """
        with self._lock:
            report = self._report
            if report is None:
                return []
            late, report.secondary = report.secondary, []
            if report == StepReport():
                self._report = None
            return late

    def take(self) -> StepReport | None:
        """What was not reported yet, for the end of the engine."""
        with self._lock:
            report, self._report = self._report, None
        return report

    def record_ended(self, seqs: list[int]) -> None:
        """Report that all work of plans up to each of these has ended."""
        with self._lock:
            self._reported().ended += seqs

    def record_open(self, rank: int, state: OpenSlots) -> None:
        """Report how many host slots `rank`, which is this one, has open."""
        with self._lock:
            self._reported().open_slots[rank] = state

    def record_join(self, size: int, seconds: float) -> None:
        """Report what `JoinTimer` measured."""
        with self._lock:
            self._reported().joins[size] = seconds

    def record_times(self, prefill: PrefillTime, times: Times) -> None:
        """Report new times."""
        if not (prefill.num_tokens or times):
            return
        with self._lock:
            report = self._reported()
            report.prefill = PrefillTime(
                report.prefill.num_tokens + prefill.num_tokens,
                report.prefill.seconds + prefill.seconds,
            )
            failed = self._failed.intersection(times)
            self._failed -= failed
            report.times.update(times)
            for key in failed:
                report.times[key] = times[key]._replace(num_blocks=0)

    def attach(self, output: Any, is_last_stage: bool) -> Any:
        """Attach the report to `output`, if there is anything to report.

        An output that is not a model output yet (None between `execute_model` and
        `sample_tokens`) is returned as it is, and the report waits for the next one. In
        the first stages of a pipeline, where a pooling model has no next output, an
        output that carries only the report goes to the `StepReportAggregator`.
        """
        is_late = self.reports_late and isinstance(output, AsyncModelRunnerOutput)
        if self.is_empty and not is_late:
            return output
        if output is None and not is_last_stage:
            output = EMPTY_MODEL_RUNNER_OUTPUT
        if not isinstance(output, AsyncModelRunnerOutput | ModelRunnerOutput):
            return output
        with self._lock:
            report, self._report = self._report, None
        if isinstance(output, AsyncModelRunnerOutput):
            return _ReportingOutput(output, report, self)
        return with_report(output, report)

    def _reported(self) -> StepReport:
        if self._report is None:
            self._report = StepReport()
        return self._report

    def _void_since(self, reason: str, seq: int) -> None:
        report = self._reported()
        report.failures[reason] += 1
        report.failed_load_seq = min(report.failed_load_seq or seq, seq)


def with_report(
    output: ModelRunnerOutput, report: StepReport | None
) -> ModelRunnerOutput:
    """A copy of `output` with `report`; a copy, since the empty output is shared."""
    if report is not None:
        output = copy(output)
        output.kv_tier_report = report
    return output


class _ReportingOutput(AsyncModelRunnerOutput):
    def __init__(
        self,
        output: AsyncModelRunnerOutput,
        report: StepReport | None,
        builder: StepReportBuilder,
    ) -> None:
        # Some releases call more than `get_output`.
        self._output: Any = output
        self._step_report = report
        self._builder = builder

    def get_output(self) -> ModelRunnerOutput:
        output, report = self._output.get_output(), self._step_report
        if late := self._builder.take_secondary():
            report = report or StepReport()
            report.secondary += late
        return with_report(output, report)

    def get_kv_connector_output(self) -> "KVConnectorOutput | None":
        return self._output.get_kv_connector_output()


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
