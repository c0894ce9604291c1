# SPDX-License-Identifier: Apache-2.0
"""The host tier of one rank."""

from copy import copy
from typing import TYPE_CHECKING, Any

import torch

from vllm.logger import init_logger
from vllm.v1.kv_tier.copy_engine import TorchCopyEngine, slot_bytes
from vllm.v1.kv_tier.host_buffer import HostBuffer
from vllm.v1.kv_tier.plan import StepPlan, StepReport
from vllm.v1.kv_tier.regions import Region
from vllm.v1.kv_tier.streams import CopyOrder, CudaStreams, InOrder
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput

logger = init_logger(__name__)


class HostTier:
    """Carries out the `StepPlan`s of one rank.

    Args:
        regions: KV memory of the rank.
        num_slots: Host slots, the same on every rank.
        device: Where the regions are.

    Raises:
        MemoryError: The host memory cannot be had.

    """

    def __init__(
        self, regions: list[Region], num_slots: int, device: torch.device
    ) -> None:
        on_gpu = device.type == "cuda"
        self.buffer = HostBuffer(num_slots, slot_bytes(regions), pin=on_gpu)
        self.engine = TorchCopyEngine(regions, self.buffer.slots)
        self._order: CopyOrder = CudaStreams(device) if on_gpu else InOrder()
        self._report: StepReport | None = None
        # Slots whose last store failed: a load from them must fail too.
        self._bad_slots: set[int] = set()

    @torch.inference_mode()
    def begin_step(self, plan: StepPlan | None) -> None:
        """Queue the copies of a step. Call it before anything else of the step."""
        if plan is not None:
            self._order.run(plan, lambda: self._store(plan), lambda: self._load(plan))

    def _store(self, plan: StepPlan) -> None:
        slots = plan.store_slots
        try:
            self.engine.store(plan.store_blocks, slots)
            self._bad_slots.difference_update(slots)
        except RuntimeError:
            logger.exception("KV tier: storing %d blocks failed.", len(slots))
            self._bad_slots.update(slots)
            report = self._failed()
            report.failed_store_slots.update(dict.fromkeys(slots, plan.seq))

    def _load(self, plan: StepPlan) -> None:
        slots = plan.load_slots
        try:
            if not self._bad_slots.isdisjoint(slots):
                raise RuntimeError("The slot was never filled.")
            self.engine.load(slots, plan.load_blocks)
        except RuntimeError:
            logger.exception(
                "KV tier: loading %d blocks failed. What depends on them is "
                "computed again.",
                len(slots),
            )
            report = self._failed()
            report.failed_load_seq = min(report.failed_load_seq or plan.seq, plan.seq)

    def _failed(self) -> StepReport:
        if self._report is None:
            self._report = StepReport()
        return self._report

    def attach_report(self, output: Any) -> Any:
        """Put the failures since the last output on `output`, if there are any.

        An output that is no model output yet (None between `execute_model` and
        `sample_tokens`) passes as it is, and the report waits for the next one.
        """
        if self._report is None:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            report, self._report = self._report, None
            return _ReportingOutput(output, report)
        if isinstance(output, ModelRunnerOutput):
            report, self._report = self._report, None
            return with_report(output, report)
        return output


def with_report(
    output: ModelRunnerOutput, report: StepReport | None
) -> ModelRunnerOutput:
    """`output` with `report`. A copy, since the empty output is shared."""
    if report is not None:
        output = copy(output)
        output.kv_tier_report = report
    return output


class _ReportingOutput(AsyncModelRunnerOutput):
    def __init__(self, output: AsyncModelRunnerOutput, report: StepReport) -> None:
        # Some releases ask an output for more than `get_output`.
        self._output: Any = output
        self._step_report = report

    def get_output(self) -> ModelRunnerOutput:
        return with_report(self._output.get_output(), self._step_report)

    def get_kv_connector_output(self) -> "KVConnectorOutput | None":
        return self._output.get_kv_connector_output()
