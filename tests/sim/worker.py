# SPDX-License-Identifier: Apache-2.0
"""A worker with simulated memory, whose copies are as unlucky as fences allow.

Everything that a real worker takes from a `SchedulerOutput` is taken from it
here: block tables, tokens, zeroing, copy-on-write and the host tier's plan. The
order of execution is that of a device with streams:

- forward passes run one after the other, each after the loads of its step;
- stores, loads of steps and loads ahead run in the order of their plans, each kind
  for itself, else whenever the fences of `StepPlan` let them. They are as late as
  possible, or, in a step that rushes, as early as possible.
"""

from collections import deque
from copy import copy
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_tier.copying.engine import CopyEngine, CopyEngines, Transfer
from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.worker.copies import InOrder
from vllm.v1.kv_tier.worker.host_tier import HostTier
from vllm.v1.kv_tier.worker.slots import RankSlots

from . import upstream
from .content import EMPTY, GARBAGE, Violation
from .forward import ForwardPasses
from .layouts import Layout
from .opening import Opening
from .secondary import Below, Memory
from .step import Step


class _Recorder(CopyEngine):
    """In place of one copy engine of the real `HostTier`: keeps what it is asked to
    do in the step."""

    step: Step

    def __init__(self, keep_in: str) -> None:
        super().__init__([], torch.empty(0, 0))
        self._keep_in = keep_in

    def transfer(self, pairs: NDArray[np.int64], to_device: bool) -> Transfer:
        blocks, slots = pairs.tolist()
        sources, targets = (slots, blocks) if to_device else (blocks, slots)
        fails = self.step.fail == ("load" if to_device else "store")
        if fails:
            sources = [-1] * len(sources)
        keep_in = self._keep_in
        if keep_in == "stores" and slots == self.step.plan.clean_slots:
            keep_in = "cleans"
        setattr(self.step, keep_in, list(zip(sources, targets)))
        if fails:
            raise RuntimeError("simulated")
        return _Nothing()


def after(plan: StepPlan, is_clean: bool) -> tuple[int, int]:
    """The forward passes and the loads that its stores of one kind come after."""
    if is_clean:
        return plan.clean_after_compute, plan.clean_after_loads
    return plan.store_after_compute, plan.store_after_loads


class _Stores(NamedTuple):
    """Stores of a step that have not been executed yet."""

    step: Step
    is_clean: bool

    @property
    def plan(self) -> StepPlan:
        return self.step.plan

    @property
    def after(self) -> tuple[int, int]:
        return after(self.plan, self.is_clean)

    def is_before(self, fence: int, of: StepPlan | None) -> bool:
        """Whether a fence of a plan waits for them."""
        return self.plan.seq <= fence - (self.is_clean and self.plan is of)


class _Nothing(Transfer):
    def copy(self, regions: range) -> None:
        pass


class _Simulated(InOrder):
    """Copies end when the worker runs them."""

    def __init__(self, worker: "Worker") -> None:
        super().__init__()
        self._worker = worker

    def have_ended(self, stores: int, loads: int) -> bool:
        return self._worker.have_ended(stores, loads)


class Worker(ForwardPasses):
    """Memory of one rank, and what runs on it.

    Args:
        layout: Groups of the model.
        num_blocks: Device blocks.
        num_slots: Host slots.
        roots: By request id, what its KV depends on beside its tokens.
        below: The tier below, if there is one.
        opening: Ranks that open slots, if not all are open from the start.

    """

    def __init__(
        self,
        layout: Layout,
        num_blocks: int,
        num_slots: int,
        roots: dict[str, int],
        below: Below | None = None,
        opening: Opening | None = None,
    ) -> None:
        super().__init__(layout, num_blocks, roots)
        self._opening = opening
        self.host: list[list[int]] = [[EMPTY] * self._width for _ in range(num_slots)]
        self._steps: deque[Step] = deque()
        # Steps whose stores, loads or loads ahead have not been executed yet.
        self._stores: deque[_Stores] = deque()
        self._loads: deque[Step] = deque()
        self._ahead: deque[Step] = deque()
        # Plans whose fences the next forward pass waits for.
        self._owed: deque[StepPlan] = deque()
        self._computed = 0
        self._last_seq = 0
        self._recorders = [_Recorder(kind) for kind in ("loads", "ahead", "stores")]
        step_loads, loads, stores = self._recorders
        engines = CopyEngines(step_loads, loads, stores, 1.0)
        slots = RankSlots(num_slots)
        self._tier = HostTier([], engines, _Simulated(self), slots)
        self._below = below
        self._attach([self.host])

    @property
    def all_ranks(self) -> "list[Worker]":
        """This rank, and those that take the same steps."""
        return [self]

    def submit(
        self, output: SchedulerOutput, epoch: int, rush: bool, fail: str | None
    ) -> Step:
        """Queue a step, as `execute_model` does."""
        step = self._next_step(output, epoch, rush, fail)
        for recorder in self._recorders:
            recorder.step = step
        for first, end in step.plan.unmap_blocks:
            for block in range(first, end):
                self.device[block] = [EMPTY] * self._width
        if self._opening is not None:
            self._open_slots(self._opening, step)
        self._tier.begin_step(output)
        self._end_step(step)
        for pairs, queue in (
            (step.loads, self._loads),
            (step.ahead, self._ahead),
        ):
            if pairs:
                queue.append(step)
        if step.stores:
            self._stores.append(_Stores(step, is_clean=False))
        if step.cleans:
            self._stores.append(_Stores(step, is_clean=True))
        self._steps.append(step)
        if rush:
            self._run_ready()
        if self._below is not None:
            self._below.run(self.have_ended, self._tier.report)
        return step

    def _open_slots(self, opening: Opening, step: Step) -> None:
        in_flight = {slot for each in self._loads for slot, _ in each.loads}
        in_flight |= {slot for each in self._ahead for slot, _ in each.ahead}
        for each in self._stores:
            pairs = each.step.cleans if each.is_clean else each.step.stores
            in_flight |= {slot for _, slot in pairs}
        if self._below is not None:
            in_flight |= self._below.slots_in_use
        lost = opening.run(step.rush)
        opening.begin_step(step.plan, in_flight)
        lost |= opening.run(step.rush)
        opening.report(self._tier.report)
        for slot in lost:
            self.host[slot] = [GARBAGE] * self._width

    def _attach(self, memory: Memory) -> None:
        """The tier below, if there is one, moves what the slots of this tier hold."""
        if self._below is not None:
            self._below.attach(memory, self._tier.slots)
            self._tier.secondary = self._below  # type: ignore[assignment]

    def have_ended(self, stores: int, loads: int) -> bool:
        """As `CopyOrder.have_ended`."""
        return not (
            any(each.plan.seq <= stores for each in self._stores)
            or any(step.plan.seq <= loads for step in (*self._loads, *self._ahead))
        )

    def _next_step(
        self, output: SchedulerOutput, epoch: int, rush: bool, fail: str | None
    ) -> Step:
        for new in output.scheduled_new_reqs:
            upstream.detach(new)
        plan = output.kv_tier_plan
        assert plan is not None
        self._check_plan(plan)
        return Step(output, epoch, rush, fail, plan)

    def _end_step(self, step: Step) -> None:
        req_ids = list(step.output.num_scheduled_tokens)
        output = upstream.model_runner_output(req_ids)
        step.result = self._tier.end_step(output)
        report = step.result.kv_tier_report
        if self._opening is not None and report is not None:
            report.ended *= self._opening.num_ended

    def run_next(self) -> Step:
        """Execute the oldest step that was not."""
        step = self._steps[0]
        if self.real_ranks is not None:
            self.real_ranks.begin(step)
        if step.rush:
            self._run_ready()
        if step in self._loads:
            self._run_loads(step.plan.seq)
        self._owed.append(step.plan)
        if step.output.num_scheduled_tokens:
            # The output of a step that computes nothing waits for nothing.
            self._pay(step.plan.seq)
        self._steps.popleft()
        if self.real_ranks is not None:
            self._before = [block.copy() for block in self.device]
        for block in upstream.blocks_to_zero(step.output):
            self.device[block] = [EMPTY] * self._width
        for source, target in upstream.block_copies(step.output):
            self.device[target] = self.device[source].copy()
        step.result.sampled_token_ids = self._forward(step)
        if self.pools:
            vector = torch.zeros(1)
            step.result.pooler_output = [vector if p else None for p in step.pooled]
        if self.real_ranks is not None:
            self.real_ranks.wrote(self._before, self.device)
        step.is_done = True
        self._computed = step.plan.seq
        return step

    def run_until(self, step: Step) -> None:
        """Execute `step`, after all before it."""
        while self.run_next() is not step:
            pass

    def run_all(self) -> None:
        while self._steps:
            self.run_next()

    def garbage(self) -> set[int]:
        """Device blocks with garbage in them."""
        return {i for i, block in enumerate(self.device) if GARBAGE in block}

    def settled(self) -> "Worker":
        """A copy in which everything queued has been executed."""
        if not (self._steps or self._stores or self._ahead):
            return self
        worker = self._copy()
        worker.settle()
        return worker

    def settle(self) -> None:
        """Execute everything queued, as before the device's memory goes away."""
        self.run_all()
        self._run_stores(self._last_seq, None)
        self._run_ahead(self._last_seq)

    def _copy(self) -> "Worker":
        new = copy(self)
        new.real_ranks = None
        new.device = self.device.copy()
        new.host = [block.copy() for block in self.host]
        new._stores = self._stores.copy()
        new._loads = self._loads.copy()
        new._ahead = self._ahead.copy()
        new._owed = self._owed.copy()
        if self._steps:
            new._steps = deque(copy(step) for step in self._steps)
            for step in new._steps:
                step.result = copy(step.result)
                step.spoiled = step.spoiled.copy()
            new._requests = {k: r.copy() for k, r in self._requests.items()}
        return new

    # ------------------------------------------------------------------ copies

    def _check_plan(self, plan: StepPlan) -> None:
        if plan.seq <= self._last_seq:
            raise Violation("plan", f"{plan} follows the plan of {self._last_seq}")
        self._last_seq = plan.seq
        filled = [*plan.load_blocks, *plan.ahead_blocks]
        for places in ([*plan.store_slots, *plan.clean_slots], filled):
            if len(set(places)) != len(places):
                raise Violation("plan", f"{plan} writes a place twice")
        if plan.store_after_loads >= plan.seq:
            raise Violation("plan", f"{plan} has copies that wait for one another")
        if 0 in [*plan.store_blocks, *plan.clean_blocks, *filled]:
            raise Violation("plan", f"{plan} copies the null block")

    def _run_stores(self, up_to: int, of: StepPlan | None) -> None:
        """Run the stores of plans up to `up_to`, a fence of the plan `of`, and what
        they wait for."""
        while self._stores and self._stores[0].is_before(up_to, of):
            self._run_next_stores()

    def _run_next_stores(self) -> None:
        stores = self._stores[0]
        computed, loaded = stores.after
        self._need_compute(stores.step, computed)
        self._run_loads(loaded)
        self._run_ahead(loaded)
        if self._stores and self._stores[0] is stores:
            self._stores.popleft()
            self._store(stores)

    def _run_loads(self, up_to: int) -> None:
        while self._loads and self._loads[0].plan.seq <= up_to:
            step = self._loads[0]
            self._before_loads(step)
            if self._loads and self._loads[0] is step:
                self._loads.popleft()
                self._load(step.loads)

    def _run_ahead(self, up_to: int) -> None:
        while self._ahead and self._ahead[0].plan.seq <= up_to:
            step = self._ahead[0]
            self._before_loads(step)
            if self._ahead and self._ahead[0] is step:
                self._ahead.popleft()
                self._load(step.ahead)

    def _before_loads(self, step: Step) -> None:
        plan = step.plan
        self._need_compute(step, plan.load_after_compute)
        self._run_stores(plan.load_after_stores, plan)
        if plan.load_after_loads >= plan.seq:
            raise Violation("plan", f"{plan} has loads that wait for one another")
        self._run_ahead(plan.load_after_loads)

    def _need_compute(self, step: Step, seq: int) -> None:
        if seq > self._computed:
            raise Violation("plan", f"{step.plan} has copies that come too late")
        self._pay(seq)

    def _pay(self, seq: int) -> None:
        """Run what forward passes up to `seq` wait for."""
        while self._owed and self._owed[0].seq <= seq:
            plan = self._owed.popleft()
            self._run_stores(plan.compute_after_stores, plan)
            self._run_ahead(plan.compute_after_loads)

    @property
    def _last_computed(self) -> int:
        """The last forward pass that is over, with all that it waits for."""
        return self._owed[0].seq - 1 if self._owed else self._computed

    def _run_ready(self) -> None:
        """Run whatever may run before the next forward pass, loads first."""
        progress = True
        while progress:
            progress = False
            while self._owed and self._waits_for_nothing(self._owed[0]):
                self._owed.popleft()
                progress = True
            for queue, run in (
                (self._loads, self._run_loads),
                (self._ahead, self._run_ahead),
            ):
                if queue and self._may_load(queue[0].plan):
                    run(queue[0].plan.seq)
                    progress = True
            if self._stores and self._may_store(self._stores[0]):
                self._run_next_stores()
                progress = True

    def _waits_for_nothing(self, plan: StepPlan) -> bool:
        if self._stores and self._stores[0].is_before(plan.compute_after_stores, plan):
            return False
        return not (self._ahead and self._ahead[0].plan.seq <= plan.compute_after_loads)

    def _may_store(self, stores: _Stores) -> bool:
        computed, loaded = stores.after
        return computed <= self._last_computed and not any(
            queue and queue[0].plan.seq <= loaded
            for queue in (self._loads, self._ahead)
        )

    def _may_load(self, plan: StepPlan) -> bool:
        if plan.load_after_compute > self._last_computed:
            return False
        if self._stores and self._stores[0].is_before(plan.load_after_stores, plan):
            return False
        return not (self._ahead and self._ahead[0].plan.seq <= plan.load_after_loads)

    def _store(self, stores: _Stores) -> None:
        step = stores.step
        for block, slot in step.cleans if stores.is_clean else step.stores:
            self.host[slot] = (
                [GARBAGE] * self._width if block < 0 else self.device[block].copy()
            )

    def _load(self, pairs: list[tuple[int, int]]) -> None:
        for slot, block in pairs:
            self.device[block] = (
                [GARBAGE] * self._width if slot < 0 else self.host[slot].copy()
            )
