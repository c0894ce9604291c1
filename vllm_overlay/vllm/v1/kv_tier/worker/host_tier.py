# SPDX-License-Identifier: Apache-2.0
"""The host tier of one rank, which workers call at both ends of a step."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.logger import init_logger
from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.copying.calibrate import choose_engines, copy_groups
from vllm.v1.kv_tier.copying.engine import CopyEngines, slot_bytes
from vllm.v1.kv_tier.memory.buffer import HostBuffer, shared_buffer
from vllm.v1.kv_tier.memory.checksums import SlotChecksums
from vllm.v1.kv_tier.memory.opener import SlotOpener
from vllm.v1.kv_tier.memory.pages import discard_blocks
from vllm.v1.kv_tier.memory.regions import Region
from vllm.v1.kv_tier.memory.shared import NotShared, SharedMemory
from vllm.v1.kv_tier.plan import SecondaryJob, StepPlan
from vllm.v1.kv_tier.stores.base import BlockStore
from vllm.v1.kv_tier.tuning import DEFAULT_TUNING, RankTuning
from vllm.v1.kv_tier.worker.copies import Copier, CopyHangs, CopyOrder, InOrder
from vllm.v1.kv_tier.worker.layers import LayerWaits
from vllm.v1.kv_tier.worker.pooled import PooledSlots
from vllm.v1.kv_tier.worker.report import StepReportBuilder
from vllm.v1.kv_tier.worker.secondary import SecondaryIO
from vllm.v1.kv_tier.worker.sharing import Peers, SharedSlots
from vllm.v1.kv_tier.worker.slots import FILLED, RankSlots
from vllm.v1.kv_tier.worker.streams import CudaStreams

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

logger = init_logger(__name__)


def num_prefill_tokens(
    plan: StepPlan, scheduler_output: "SchedulerOutput", tuning: RankTuning
) -> int:
    """Tokens of a step that is mostly prefill and waits for no load, else 0."""
    num_tokens = scheduler_output.total_num_scheduled_tokens
    num_requests = len(scheduler_output.num_scheduled_tokens)
    least = max(tuning.prefill_tokens, num_requests * tuning.prefill_tokens_each)
    waits = plan.load_slots or plan.compute_after_loads
    return num_tokens if num_tokens >= least and not waits else 0


class JoinTimer:
    """Times the launch of steps in which requests join with little to compute.

    Such a step takes at least that long, and can hide loads for that time.

    Args:
        tuning: Limit of what counts as little.

    """

    def __init__(self, tuning: RankTuning) -> None:
        self._tuning = tuning
        self._begun: tuple[int, float] | None = None

    def begin(self, scheduler_output: "SchedulerOutput") -> None:
        """Start timing, after a step's copies and before its forward pass."""
        num_tokens = scheduler_output.total_num_scheduled_tokens
        num_requests = len(scheduler_output.num_scheduled_tokens)
        if num_requests < num_tokens < self._tuning.prefill_tokens:
            self._begun = num_tokens.bit_length(), time.perf_counter()

    def end(self) -> tuple[int, float] | None:
        """Stop timing: the forward pass is queued.

        Returns:
            The bit length of the step's number of tokens, and the seconds since
            `begin`; None if this step is not timed.

        """
        if self._begun is None:
            return None
        (size, begun), self._begun = self._begun, None
        return size, time.perf_counter() - begun


class HostTier:
    """Carries out the `StepPlan`s of one rank.

    Args:
        regions: KV memory of the rank, in the order of the layers.
        engines: Copy engines.
        order: Orders copies and compute.
        slots: State of the host slots.
        layer_waits: Waits of the layers, if layers wait for their own loads.
        tuning: Constants that users do not set.
        peers: The ranks that share the host slots, if any.

    """

    def __init__(
        self,
        regions: Sequence[Region],
        engines: CopyEngines,
        order: CopyOrder,
        slots: RankSlots,
        layer_waits: LayerWaits | None = None,
        tuning: RankTuning = DEFAULT_TUNING,
        peers: Peers | None = None,
    ) -> None:
        self.engines = engines
        self._regions = regions
        self.slots = slots
        self._tuning = tuning
        self._order = order
        self._layer_waits = layer_waits
        self.report = StepReportBuilder()
        """What to report next."""
        self._peers = peers
        self._copier = Copier(regions, engines, self.report, slots, tuning, peers)
        self.secondary: SecondaryIO | None = None
        """The secondary tiers, if any."""
        self._join = JoinTimer(tuning)
        # Plans whose end is to be reported, and what plans store whose checksums are
        # not taken yet, with which neighbours compare it.
        self._to_report: list[int] = []
        self._unchecked: dict[int, list[int]] = {}
        self._seq = 0
        self._is_off = False

    @classmethod
    def allocate(
        cls,
        regions: Sequence[Region],
        num_slots: int,
        device: torch.device,
        copy_engine: str = "auto",
        layer_waits: LayerWaits | None = None,
        verify: bool = False,
        tuning: RankTuning = DEFAULT_TUNING,
        shared: SharedSlots | None = None,
        num_mapped: int | None = None,
        as_file: bool = False,
        group_bytes: Sequence[int] = (),
        first_bytes: int | None = None,
        pooled: PooledSlots | None = None,
    ) -> "HostTier":
        """Make a tier, and allocate its host memory.

        Args:
            regions: KV memory of the rank, in the order of the layers.
            num_slots: Number of host slots, the same on every rank.
            device: Device of the regions.
            copy_engine: `auto`, or the engine to use.
            layer_waits: Waits of the layers, if layers wait for their own loads.
            verify: Check before each load that the slot has not changed.
            tuning: Constants that users do not set.
            shared: Slots that the rank shares with others; None for its own.
            num_mapped: Number of device blocks with memory, the first ones; None for
                all.
            as_file: Whether processes of stores should be able to map the memory.
            first_bytes: Bytes of its own host slots to open at once; None for all.
            group_bytes: By KV cache group, how many of the first bytes of a slot its
                blocks need; empty if all need all.
            pooled: Slots in the memory of a pool; None for its own.

        Raises:
            MemoryError: There is not enough host memory.
            ValueError: The copy engine cannot be used.

        """
        on_gpu = device.type == "cuda"
        memory_file = None
        if shared is not None:
            buffer = shared.buffer
        elif pooled is not None:
            buffer = pooled.buffer
        else:
            size = num_slots, slot_bytes(regions)
            buffer, memory_file = _own_memory(*size, device, as_file, first_bytes)
        empty = range(buffer.num_open) if pooled is None else pooled.empty
        # Tests of engines overwrite slots, so ranks that share them take turns.
        with shared.memory.alone() if shared is not None else nullcontext():
            engines = _engines(
                regions, buffer, copy_engine, device, num_mapped, empty, group_bytes
            )
        slots = _slots(buffer.slots, device, verify, shared, pooled, group_bytes)
        peers = None
        if shared is not None:
            peers = Peers(shared.memory, shared.index, slots, tuning)
        order: CopyOrder = InOrder(peers)
        if on_gpu:
            order = CudaStreams(device, layer_waits, tuning, peers)
        tier = cls(regions, engines, order, slots, layer_waits, tuning, peers)
        tier.buffer = buffer
        tier._memory_file = memory_file
        tier._pooled = pooled
        return tier

    def open_secondary(self, stores: Sequence[BlockStore]) -> None:
        """Use these stores for the jobs of plans."""
        file = self._memory_file
        self.secondary = SecondaryIO(
            stores, self.buffer.slots, self.slots, self.report, self._tuning, file
        )
        if file is not None:
            file.close()

    buffer: HostBuffer
    """Kept alive by the tier."""

    _pooled: PooledSlots | None = None
    """Keeps the connection to the pool open."""

    _memory_file: SharedMemory | None = None
    """The same memory, if it is a file."""

    opener: SlotOpener | None = None
    """Opens slots while steps run, unless all are open from the start."""

    rank = 0
    """Number of this rank."""

    is_last_stage = True
    """Whether this rank's pipeline stage outputs tokens. Reports of other stages are
    sent without."""

    @torch.inference_mode()
    def begin_step(self, scheduler_output: "SchedulerOutput") -> None:
        """Queue the copies of a step, before any other work of it."""
        plan = scheduler_output.kv_tier_plan
        if plan is None:
            return
        plan.check()
        self._seq = plan.seq
        if self._is_off:
            # The scheduler does not know yet.
            self._refuse_loads(plan)
            return
        if self._peers is not None and self._peers.is_lost:
            self._switch_off(plan)
            return
        for first, end in plan.unmap_blocks:
            discard_blocks(self._regions, first, end)
        copies = self._copier.copies(plan)
        layerwise = bool(plan.load_slots) and self._can_wait_by_layer(scheduler_output)
        try:
            self._order.begin_step(plan, copies, layerwise)
        except CopyHangs:
            self._switch_off(plan)
            return
        if self.secondary is not None:
            self.secondary.begin_step(plan, self._order.have_ended)
            self.secondary.set_launching(
                scheduler_output.total_num_scheduled_tokens > 0
            )
        if self._unchecked:
            self._forget_checked()
        if plan.report_end or self._to_report:
            self._report_ends(plan)
        if (
            self._pooled is not None
            and self.slots.checksums is not None
            and (stores := [*plan.store_slots, *plan.clean_slots])
        ):
            self._unchecked[plan.seq] = stores
        if plan.host_aim is not None and self.opener is not None:
            self.opener.aim(*plan.host_aim)
        if self.opener is not None and (state := self.opener.take()) is not None:
            self.report.record_open(self.rank, state)
        num_tokens = num_prefill_tokens(plan, scheduler_output, self._tuning)
        prefill = self._order.take_prefill_time(num_tokens)
        self.report.record_times(prefill, self._order.take_copy_times())
        if self._layer_waits is not None and not copies.load_launches_long:
            self._join.begin(scheduler_output)

    def _report_ends(self, plan: StepPlan) -> None:
        """Report which plans have ended.

        The output with this report follows the forward pass before this step, so
        earlier forward passes have ended too.
        """
        end = next(iter(self._unchecked), plan.seq)
        ended = [
            seq
            for seq in self._to_report
            if seq < end and self._order.have_ended(seq, seq)
        ]
        if ended:
            self.report.record_ended(ended)
            self._to_report = [seq for seq in self._to_report if seq not in ended]
        if plan.report_end:
            self._to_report.append(plan.seq)

    def _forget_checked(self) -> None:
        for seq, slots in [*self._unchecked.items()]:
            if not (self._order.have_ended(seq, 0) and self.slots.are_checked(slots)):
                break
            del self._unchecked[seq]

    def end_step(self, output: Any) -> Any:
        """Note that the forward pass is queued.

        Returns `output`, possibly with a report.
        """
        if self.secondary is not None:
            self.secondary.set_launching(False)
        if joined := self._join.end():
            self.report.record_join(*joined)
        if not self._order.end_step():
            logger.error(
                "KV tier: a layer did not wait for its loads. The step is computed "
                "again, and from now on steps wait for all their loads at once. "
                "Please report it with the model and the attention backend; "
                '--kv-offloading-config \'{"debug": {"layerwise_loads": false}}\' '
                "avoids it."
            )
            self._layer_waits = None
            self.report.void_since("layer_wait", self._seq)
        return self.attach_report(output)

    def attach_report(self, output: Any) -> Any:
        """Attach what there is to report to `output`.

        Args:
            output: A model output, or None if a later call has it.

        """
        return self.report.attach(output, self.is_last_stage)

    def finish(self) -> None:
        """Wait for all copies, before the device memory is released (sleep mode).

        Upstream waits for the device, which does not know about copies that are not
        launched yet (upstream issue 45268).
        """
        if not self._is_off:
            self._order.finish()

    def flush(self, jobs: Sequence[tuple[float, Sequence[SecondaryJob]]]) -> int:
        """Write to secondary tiers before the engine ends, see `SecondaryIO.flush`."""
        if self.secondary is None or self._is_off:
            return 0
        return self.secondary.flush(jobs, self._order.have_ended)

    def _switch_off(self, plan: StepPlan) -> None:
        """Stop copying after a copy hung."""
        logger.error(
            "KV tier: a copy between device and host memory does not end. The tier is "
            "off from now on, and requests are computed without it. Look for errors "
            "of the GPU and its driver (dmesg), and restart the engine."
        )
        self._is_off = True
        if self._peers is not None:
            # First, since copies that are given up must not count as done.
            self._peers.leave()
        filling = self._order.give_up()
        self.report.record_hang(sorted({*chain(*filling.values())}))
        self._refuse_loads(plan)
        if filling:
            self.report.void_since("hang", min(filling))

    def _refuse_loads(self, plan: StepPlan) -> None:
        if plan.load_slots or plan.ahead_slots:
            self.report.void_since("hang", plan.seq)

    def _can_wait_by_layer(self, scheduler_output: "SchedulerOutput") -> bool:
        waits = self._layer_waits
        if waits is None or releases.copies_blocks(scheduler_output):
            # Copies on write precede the forward pass.
            return False
        tokens = scheduler_output.num_scheduled_tokens.values()
        return max(tokens, default=0) > waits.max_decode_tokens


def _engines(
    regions: Sequence[Region],
    buffer: HostBuffer,
    copy_engine: str,
    device: torch.device,
    num_mapped: int | None,
    empty: Sequence[int],
    group_bytes: Sequence[int],
) -> CopyEngines:
    engines = choose_engines(
        regions,
        buffer.slots,
        copy_engine,
        device,
        pinned=buffer.pinned,
        num_blocks=num_mapped,
        empty=empty,
    )
    if not group_bytes:
        return engines
    return copy_groups(engines, group_bytes, device, empty, num_mapped)


def _own_memory(
    num_slots: int,
    num_bytes: int,
    device: torch.device,
    as_file: bool,
    first_bytes: int | None,
) -> tuple[HostBuffer, SharedMemory | None]:
    """Memory of this rank alone, and its file if it has one."""
    if as_file and num_bytes:
        try:
            return _file_memory(num_slots, num_bytes, device, first_bytes)
        except NotShared as e:
            reason = str(e)
        # After the `except` block, whose traceback would keep the memory alive.
        logger.info(
            "KV tier: no separate processes read and write objects for this rank, "
            "which is slower: %s.",
            reason,
        )
    on_gpu = device.type == "cuda"
    return HostBuffer(
        num_slots,
        num_bytes,
        pin=on_gpu,
        device=device if on_gpu else None,
        first_bytes=first_bytes,
    ), None


def _file_memory(
    num_slots: int, num_bytes: int, device: torch.device, first_bytes: int | None
) -> tuple[HostBuffer, SharedMemory]:
    memory = SharedMemory.create(num_slots, num_bytes, num_ranks=1)
    buffer = shared_buffer(memory, num_slots, device, set(), first_bytes)
    return buffer, memory


def _slots(
    memory: torch.Tensor,
    device: torch.device,
    verify: bool,
    shared: SharedSlots | None,
    pooled: PooledSlots | None,
    group_bytes: Sequence[int],
) -> RankSlots:
    """The slots of this rank, or those that it shares with others."""
    if pooled is not None:
        checked = SlotChecksums(memory, device, pooled.checksums) if verify else None
        return RankSlots(len(memory), checked, pooled.states, num_own=pooled.num_own)
    if not memory.shape[1]:
        # Without KV memory, every fetch counts as complete.
        return RankSlots(len(memory), states=np.full(len(memory), FILLED, np.uint8))
    sums, states = None, None
    if shared is not None:
        sums, states = shared.memory.sums, shared.memory.states
        # The ranks that only load do not see of which group the content of a slot is.
        group_bytes = ()
    checksums = SlotChecksums(memory, device, sums) if verify else None
    return RankSlots(len(memory), checksums, states, group_bytes)
