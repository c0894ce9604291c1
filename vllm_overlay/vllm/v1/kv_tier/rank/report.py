# SPDX-License-Identifier: Apache-2.0
"""What a rank tells the scheduler, and how it gets there: on a model output."""

import threading
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_tier.plan import (
    PrefillTime,
    SecondaryResult,
    StepReport,
    Times,
)
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
)

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput


class ReportDraft:
    """The report in the making, and its only owner. Copy threads write to it too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._report: StepReport | None = None
        self.tells_late = False
        """Whether jobs of tiers below end while steps run, see `take_secondary`."""
        # Copies that failed, by kind and plan, until their times are told.
        self._failed: set[tuple[str, int]] = set()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return self._report is None

    def void_since(self, reason: str, seq: int) -> None:
        """What plan `seq` was to load is not there, and what was computed since may be
        wrong. `reason` is a kind of `StepReport.failures`."""
        with self._lock:
            self._void_since(reason, seq)

    def load_failed(self, kind: str, seq: int) -> None:
        """The copies of `kind` (`load` or `load_ahead`) of plan `seq` failed."""
        with self._lock:
            self._void_since("load", seq)
            self._failed.add((kind, seq))

    def store_failed(self, kind: str, seq: int, slots: Sequence[int]) -> None:
        """The copies of `kind` (`store` or `clean`) of plan `seq` failed."""
        with self._lock:
            report = self._reported()
            report.failed_store_slots.update(dict.fromkeys(slots, seq))
            report.failures["store"] += 1
            self._failed.add((kind, seq))

    def copies_hang(self, lost_blocks: list[int]) -> None:
        """This rank copies no more, and loads may still write to these blocks."""
        with self._lock:
            self._reported().lost_blocks = lost_blocks

    def secondary_ended(self, result: SecondaryResult) -> None:
        """A job of the tier below has ended."""
        with self._lock:
            self._reported().secondary.append(result)

    def take_secondary(self) -> list[SecondaryResult]:
        """Jobs that nobody was told of. Unlike all else they have nothing to do with
        the step whose output tells of them, which may have been queued long ago."""
        with self._lock:
            report = self._report
            if report is None:
                return []
            late, report.secondary = report.secondary, []
            if report == StepReport():
                self._report = None
            return late

    def take(self) -> StepReport | None:
        """What nobody was told of yet, for the end of the engine."""
        with self._lock:
            report, self._report = self._report, None
        return report

    def ended(self, seqs: list[int]) -> None:
        """All is over that plans up to these touched, or is with this step."""
        with self._lock:
            self._reported().ended += seqs

    def joined(self, size: int, seconds: float) -> None:
        """What `JoinTimer` measured."""
        with self._lock:
            self._reported().joins[size] = seconds

    def measured(self, prefill: PrefillTime, times: Times) -> None:
        """Times that nobody was told of."""
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
        """Put the report on `output`, if there is anything to tell.

        An output that is no model output yet (None between `execute_model` and
        `sample_tokens`) passes as it is, and the report waits for the next one. Not
        so in the first stages of a pipeline, where a pooling model has no next one:
        an output with nothing else goes to the `StepReportAggregator`.
        """
        is_late = self.tells_late and isinstance(output, AsyncModelRunnerOutput)
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
    """`output` with `report`. A copy, since the empty output is shared."""
    if report is not None:
        output = copy(output)
        output.kv_tier_report = report
    return output


class _ReportingOutput(AsyncModelRunnerOutput):
    def __init__(
        self,
        output: AsyncModelRunnerOutput,
        report: StepReport | None,
        draft: ReportDraft,
    ) -> None:
        # Some releases ask an output for more than `get_output`.
        self._output: Any = output
        self._step_report = report
        self._draft = draft

    def get_output(self) -> ModelRunnerOutput:
        output, report = self._output.get_output(), self._step_report
        if late := self._draft.take_secondary():
            report = report or StepReport()
            report.secondary += late
        return with_report(output, report)

    def get_kv_connector_output(self) -> "KVConnectorOutput | None":
        return self._output.get_kv_connector_output()
