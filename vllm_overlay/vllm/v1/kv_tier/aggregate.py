# SPDX-License-Identifier: Apache-2.0
"""One model output for the scheduler, with the reports of all ranks."""

from collections.abc import Sequence

from vllm.v1.kv_tier.plan import StepReport, merge_reports
from vllm.v1.kv_tier.worker import with_report
from vllm.v1.outputs import ModelRunnerOutput


class StepReportAggregator:
    """Merges the reports of all ranks onto the output of one of them.

    A multi-process executor returns one rank's output only, but a copy may fail
    on any.
    """

    def __init__(self) -> None:
        self._waiting: StepReport | None = None

    def aggregate(
        self, outputs: Sequence[ModelRunnerOutput | None], output_rank: int = 0
    ) -> ModelRunnerOutput | None:
        """The output of `output_rank` with every rank's report.

        Reports wait for the next call while that rank has no output.
        """
        reports = [o.kv_tier_report for o in outputs if o is not None]
        self._waiting = merge_reports([self._waiting, *reports])
        output = outputs[output_rank]
        if output is None or self._waiting is None:
            return output
        report, self._waiting = self._waiting, None
        return with_report(output, report)
