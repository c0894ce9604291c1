# SPDX-License-Identifier: Apache-2.0
"""The host tier of one rank."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from vllm.logger import init_logger
from vllm.v1.kv_tier.calibrate import CopyEngines, choose_engines
from vllm.v1.kv_tier.checksum import SlotChecksums
from vllm.v1.kv_tier.copy_engine import CopyEngine, Transfer, slot_bytes
from vllm.v1.kv_tier.host_buffer import HostBuffer
from vllm.v1.kv_tier.layer_waits import LayerWaits
from vllm.v1.kv_tier.plan import StepPlan, StepReport, Times
from vllm.v1.kv_tier.regions import Region
from vllm.v1.kv_tier.streams import (
    Copies,
    CopyHangs,
    CopyOrder,
    CudaStreams,
    InOrder,
)
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
)

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

logger = init_logger(__name__)

# A part of a load that layers wait for is large enough for its launch not to count
# (a millisecond on a fast link, and a tenth of it to launch), and there are not more
# than so many.
_PART_BYTES = 64 << 20
_MAX_PARTS = 16

# What is copied where no step waits goes in chunks of so many bytes, or of so many
# seconds of launches: they are few enough to be overtaken, and long enough on the
# device for a thread to come back in time. The tokens of every step queue behind the
# stores.
_LOAD_CHUNK_BYTES, _STORE_CHUNK_BYTES = 64 << 20, 32 << 20
_CHUNK_LAUNCH_S = 0.3e-3

# A thread takes over where the launch of loads would hold up a step for longer.
_LONG_LAUNCH_S = 0.5e-3

# What a step must have to say what prefill costs: so many tokens, and so many for
# each request. One with less prefill says what it takes a request to join.
_PREFILL_TOKENS, _PREFILL_TOKENS_EACH = 1024, 64


class HostTier:
    """Carries out the `StepPlan`s of one rank.

    Args:
        regions: KV memory of the rank, in the order of the layers.
        engines: What copies between them and the host slots.
        order: When.
        layer_waits: Where the layers wait for loads, if they can.
        checksums: What each load is checked by, if it is.

    """

    def __init__(
        self,
        regions: Sequence[Region],
        engines: CopyEngines,
        order: CopyOrder,
        layer_waits: LayerWaits | None = None,
        checksums: SlotChecksums | None = None,
    ) -> None:
        self.engines = engines
        self._regions = regions
        self._order = order
        self._layer_waits = layer_waits
        self.checksums = checksums
        self._seq = 0
        self._join: tuple[int, float] | None = None
        self._is_off = False
        # Lanes report failures too.
        self._lock = threading.Lock()
        self._report: StepReport | None = None
        # Slots whose last store failed: a load from them must fail too.
        self._bad_slots: set[int] = set()
        # Copies that failed, until their times are reported.
        self._failed: set[tuple[str, int]] = set()

    @classmethod
    def allocate(
        cls,
        regions: Sequence[Region],
        num_slots: int,
        device: torch.device,
        copy_engine: str = "auto",
        layer_waits: LayerWaits | None = None,
        verify: bool = False,
    ) -> "HostTier":
        """A tier with host memory of its own.

        Args:
            regions: KV memory of the rank, in the order of the layers.
            num_slots: Host slots, the same on every rank.
            device: Where the regions are.
            copy_engine: `auto`, or the engine that must be used.
            layer_waits: Where the layers wait for loads, if they can.
            verify: Check before each load that the slot holds what was stored.

        Raises:
            MemoryError: The host memory cannot be had.
            ValueError: The copy engine cannot be used.

        """
        on_gpu = device.type == "cuda"
        buffer = HostBuffer(
            num_slots,
            slot_bytes(regions),
            pin=on_gpu,
            device=device if on_gpu else None,
        )
        engines = choose_engines(
            regions, buffer.slots, copy_engine, device, pinned=buffer.pinned
        )
        order = CudaStreams(device, layer_waits) if on_gpu else InOrder()
        checksums = SlotChecksums(buffer.slots, device) if verify else None
        tier = cls(regions, engines, order, layer_waits, checksums)
        tier.buffer = buffer
        return tier

    buffer: HostBuffer
    """Kept as long as the tier is."""

    is_last_stage = True
    """Whether the outputs of this rank's pipeline stage have tokens. The reports of
    the others go alone."""

    @torch.inference_mode()
    def begin_step(self, scheduler_output: "SchedulerOutput") -> None:
        """Queue the copies of a step. Call it before anything else of the step."""
        plan = scheduler_output.kv_tier_plan
        if plan is None:
            return
        self._seq = plan.seq
        if self._is_off:
            # The scheduler did not know yet.
            if plan.load_slots or plan.ahead_slots:
                self._load_failed("hang", plan.seq)
            return
        num_loads = len(plan.load_slots)
        load_parts = self._parts(num_loads) if num_loads else []
        copies = Copies(
            lambda after_part: self._store(plan, after_part),
            lambda after_part: self._load(plan, load_parts, after_part),
            lambda after_part: self._load_ahead(plan, after_part),
            lambda after_part: self._clean(plan, after_part),
            load_parts,
            self._launches_long(num_loads),
        )
        layerwise = num_loads > 0 and self._can_wait_by_layer(scheduler_output)
        try:
            self._order.begin_step(plan, copies, layerwise)
        except CopyHangs:
            self._switch_off(plan)
            return
        self._take_times(plan, scheduler_output)
        num_tokens = scheduler_output.total_num_scheduled_tokens
        num_requests = len(scheduler_output.num_scheduled_tokens)
        if (
            self._layer_waits is not None
            and num_requests < num_tokens < _PREFILL_TOKENS
            and not copies.load_launches_long
        ):
            self._join = num_tokens.bit_length(), time.perf_counter()

    def end_step(self, output: Any) -> Any:
        """The step's forward pass is queued. Returns `output`, maybe with a report."""
        if self._join is not None:
            size, begun = self._join
            self._join = None
            with self._lock:
                self._reported().joins[size] = time.perf_counter() - begun
        if not self._order.end_step():
            logger.error(
                "KV tier: a layer did not wait for its loads. The step is computed "
                "again, and from now on steps wait for all their loads at once. "
                "Please report it with the model and the attention backend; "
                "--kv-offloading-config '{\"layerwise_loads\": false}' avoids it."
            )
            self._layer_waits = None
            self._load_failed("layer_wait", self._seq)
        return self.attach_report(output)

    def _switch_off(self, plan: StepPlan) -> None:
        """A copy hangs: do without copies from now on."""
        logger.error(
            "KV tier: a copy between device and host memory does not end. The tier is "
            "off from now on, and requests are computed without it. Look for errors "
            "of the GPU and its driver (dmesg), and restart the engine."
        )
        self._is_off = True
        filling = self._order.give_up()
        with self._lock:
            self._reported().lost_blocks = sorted({*chain(*filling.values())})
        if plan.load_slots or plan.ahead_slots:
            self._load_failed("hang", plan.seq)
        if filling:
            self._load_failed("hang", min(filling))

    def finish(self) -> None:
        """Wait for all copies: the device memory may go away (sleep mode).

        Upstream waits for the device, which does not know of what has not been
        launched yet (upstream issue 45268).
        """
        if not self._is_off:
            self._order.finish()

    def _can_wait_by_layer(self, scheduler_output: "SchedulerOutput") -> bool:
        waits = self._layer_waits
        if waits is None or getattr(scheduler_output, "kv_cache_block_copies", None):
            # Copies on write come before the forward pass.
            return False
        tokens = scheduler_output.num_scheduled_tokens.values()
        return max(tokens, default=0) > waits.max_decode_tokens

    def _take_times(self, plan: StepPlan, scheduler_output: "SchedulerOutput") -> None:
        num_tokens = scheduler_output.total_num_scheduled_tokens
        each = len(scheduler_output.num_scheduled_tokens) * _PREFILL_TOKENS_EACH
        waits = plan.load_slots or plan.compute_after_loads
        is_prefill = num_tokens >= max(_PREFILL_TOKENS, each) and not waits
        loads, prefill = self._order.take_times(num_tokens if is_prefill else 0)
        times = self._order.take_copy_times()
        if loads[0] or prefill[0] or times:
            with self._lock:
                report = self._reported()
                report.loads = _sum(report.loads, loads)
                report.prefill = _sum(report.prefill, prefill)
                report.times.update(self._without_failed(times))

    def _without_failed(self, times: Times) -> Times:
        failed = self._failed.intersection(times)
        self._failed -= failed
        return times | {key: (0, times[key][1]) for key in failed}

    # ------------------------------------------------------------------ copies

    def _parts(self, num_blocks: int) -> list[range]:
        """Regions that a step waits for together, in the order of the layers."""
        sizes = [num_blocks * region.block_bytes for region in self._regions]
        part_bytes = max(_PART_BYTES, sum(sizes) // _MAX_PARTS)
        parts, start, size = [], 0, 0
        for i, region_bytes in enumerate(sizes):
            size += region_bytes
            if size >= part_bytes or i + 1 == len(self._regions):
                parts.append(range(start, i + 1))
                start, size = i + 1, 0
        return parts

    def _chunks(
        self, engine: CopyEngine, num_blocks: int, num_bytes: int
    ) -> Iterator[slice]:
        """Blocks that are copied together where no step waits."""
        block_bytes = sum(region.block_bytes for region in self._regions)
        launch_s = engine.launch_s(len(self._regions))
        size = num_bytes // max(block_bytes, 1)
        if launch_s:
            size = min(size, int(_CHUNK_LAUNCH_S / launch_s))
        size = max(size, 1)
        return (slice(i, i + size) for i in range(0, num_blocks, size))

    def _launches_long(self, num_blocks: int) -> bool:
        if self.checksums is not None:
            # They are compared first.
            return True
        pieces = num_blocks * len(self._regions)
        return self.engines.step_loads.launch_s(pieces) > _LONG_LAUNCH_S

    def _store(self, plan: StepPlan, after_part: Callable[[], None]) -> None:
        self._store_blocks(
            "store", plan.seq, plan.store_blocks, plan.store_slots, after_part
        )

    def _clean(self, plan: StepPlan, after_part: Callable[[], None]) -> None:
        self._store_blocks(
            "clean", plan.seq, plan.clean_blocks, plan.clean_slots, after_part
        )

    def _store_blocks(
        self,
        kind: str,
        seq: int,
        blocks: list[int],
        slots: list[int],
        after_part: Callable[[], None],
    ) -> None:
        try:
            engine = self.engines.stores
            for chunk in self._chunks(engine, len(slots), _STORE_CHUNK_BYTES):
                self._copy(engine.stores(blocks[chunk], slots[chunk]), after_part)
                if self.checksums is not None:
                    self.checksums.stored(slots[chunk])
            self._bad_slots.difference_update(slots)
        except Exception:
            logger.exception("KV tier: storing %d blocks failed.", len(slots))
            self._bad_slots.update(slots)
            with self._lock:
                report = self._reported()
                report.failed_store_slots.update(dict.fromkeys(slots, seq))
                report.failures["store"] += 1
                self._failed.add((kind, seq))

    def _load(
        self, plan: StepPlan, parts: list[range], after_part: Callable[[], None]
    ) -> None:
        blocks, slots = plan.load_blocks, plan.load_slots
        if not slots:
            return
        with self._loading("load", plan.seq, slots):
            self._check(slots)
            transfer = self.engines.step_loads.loads(slots, blocks)
            for part in parts:
                transfer.copy(part)
                after_part()

    def _load_ahead(self, plan: StepPlan, after_part: Callable[[], None]) -> None:
        blocks, slots = plan.ahead_blocks, plan.ahead_slots
        with self._loading("load_ahead", plan.seq, slots):
            engine = self.engines.loads
            for chunk in self._chunks(engine, len(slots), _LOAD_CHUNK_BYTES):
                self._check(slots[chunk])
                self._copy(engine.loads(slots[chunk], blocks[chunk]), after_part)

    def _copy(self, transfer: Transfer, after_part: Callable[[], None]) -> None:
        transfer.copy(range(len(self._regions)))
        after_part()

    def _check(self, slots: list[int]) -> None:
        """Before these slots are loaded, while the load can still be refused."""
        if not self._bad_slots.isdisjoint(slots):
            raise RuntimeError("The slot was never filled.")
        if self.checksums is not None:
            self.checksums.check(slots)

    @contextmanager
    def _loading(self, kind: str, seq: int, slots: list[int]) -> Iterator[None]:
        try:
            yield
        except Exception:
            logger.exception(
                "KV tier: loading %d blocks failed. What depends on them is "
                "computed again.",
                len(slots),
            )
            self._load_failed("load", seq)
            with self._lock:
                self._failed.add((kind, seq))

    # ------------------------------------------------------------------ report

    def _reported(self) -> StepReport:
        if self._report is None:
            self._report = StepReport()
        return self._report

    def _load_failed(self, kind: str, seq: int) -> None:
        with self._lock:
            report = self._reported()
            report.failures[kind] += 1
            report.failed_load_seq = min(report.failed_load_seq or seq, seq)

    def attach_report(self, output: Any) -> Any:
        """Put what is to report since the last output on `output`, if anything is.

        An output that is no model output yet (None between `execute_model` and
        `sample_tokens`) passes as it is, and the report waits for the next one. Not
        so in the first stages of a pipeline, where a pooling model has no next one:
        an output with nothing else goes to the `StepReportAggregator`.
        """
        if self._report is None:
            return output
        if output is None and not self.is_last_stage:
            output = EMPTY_MODEL_RUNNER_OUTPUT
        if not isinstance(output, AsyncModelRunnerOutput | ModelRunnerOutput):
            return output
        with self._lock:
            report, self._report = self._report, None
        if isinstance(output, AsyncModelRunnerOutput):
            return _ReportingOutput(output, report)
        return with_report(output, report)


def _sum(a: tuple[int, float], b: tuple[int, float]) -> tuple[int, float]:
    return a[0] + b[0], a[1] + b[1]


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
        self, output: AsyncModelRunnerOutput, report: StepReport | None
    ) -> None:
        # Some releases ask an output for more than `get_output`.
        self._output: Any = output
        self._step_report = report

    def get_output(self) -> ModelRunnerOutput:
        return with_report(self._output.get_output(), self._step_report)

    def get_kv_connector_output(self) -> "KVConnectorOutput | None":
        return self._output.get_kv_connector_output()
