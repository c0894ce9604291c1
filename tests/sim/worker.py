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
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_tier.calibrate import CopyEngines
from vllm.v1.kv_tier.copy_engine import CopyEngine, Transfer
from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.streams import InOrder
from vllm.v1.kv_tier.worker import HostTier
from vllm.v1.outputs import ModelRunnerOutput

from ..names import cdiv
from . import upstream
from .content import EMPTY, GARBAGE, VOCAB, Sequence, Violation
from .layouts import Group, Layout

Block = list[int]


@dataclass
class Step:
    """A step that was sent to the worker."""

    output: SchedulerOutput
    epoch: int
    rush: bool
    fail: str | None
    """What fails in this step: `store` or `load`, every copy of that kind, or
    `compute`, the forward pass of its first request."""
    plan: StepPlan
    stores: list[tuple[int, int]] = field(default_factory=list)
    """(device block, host slot); block -1 leaves garbage in the slot."""
    cleans: list[tuple[int, int]] = field(default_factory=list)
    """As `stores`."""
    loads: list[tuple[int, int]] = field(default_factory=list)
    """(host slot, device block); slot -1 leaves garbage in the block."""
    ahead: list[tuple[int, int]] = field(default_factory=list)
    """As `loads`."""
    is_void: bool = False
    """It works on what a failure left, which the scheduler cannot know yet."""
    spoiled: set[str] = field(default_factory=set)
    """Requests that read a wrong value."""
    is_done: bool = False
    result: ModelRunnerOutput = field(init=False)


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


@dataclass
class _Request:
    sequence: Sequence
    tables: list[list[int]]
    """Device block ids of each group."""
    state_index: int | None = None
    """Index in the tables of the block with the running state (Mamba)."""

    def copy(self) -> "_Request":
        tables = [table.copy() for table in self.tables]
        return _Request(self.sequence.copy(), tables, self.state_index)


class Worker:
    """Memory of one rank, and what runs on it.

    Args:
        layout: Groups of the model.
        num_blocks: Device blocks.
        num_slots: Host slots.
        roots: By request id, what its KV depends on beside its tokens.

    """

    def __init__(
        self, layout: Layout, num_blocks: int, num_slots: int, roots: dict[str, int]
    ) -> None:
        self._roots = roots
        self._layout = layout
        self._width = layout.block_size
        self.device = [[EMPTY] * self._width for _ in range(num_blocks)]
        self.host = [[EMPTY] * self._width for _ in range(num_slots)]
        self._steps: deque[Step] = deque()
        # Steps whose stores, loads or loads ahead have not been executed yet.
        self._stores: deque[_Stores] = deque()
        self._loads: deque[Step] = deque()
        self._ahead: deque[Step] = deque()
        self._computed = 0
        self._requests: dict[str, _Request] = {}
        self._last_seq = 0
        self._recorders = [_Recorder(kind) for kind in ("loads", "ahead", "stores")]
        step_loads, loads, stores = self._recorders
        engines = CopyEngines(step_loads, loads, stores, 1.0, 1.0)
        self._tier = HostTier([], engines, InOrder())

    def submit(
        self, output: SchedulerOutput, epoch: int, rush: bool, fail: str | None
    ) -> Step:
        """Queue a step, as `execute_model` does."""
        step = self._next_step(output, epoch, rush, fail)
        for recorder in self._recorders:
            recorder.step = step
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
        return step

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

    def run_next(self) -> Step:
        """Execute the oldest step that was not."""
        step = self._steps[0]
        if step.rush:
            self._run_ready()
        if step in self._loads:
            self._run_loads(step.plan.seq)
        self._run_stores(step.plan.compute_after_stores, step.plan)
        self._run_ahead(step.plan.compute_after_loads)
        self._steps.popleft()
        for block in upstream.blocks_to_zero(step.output):
            self.device[block] = [EMPTY] * self._width
        for source, target in upstream.block_copies(step.output):
            self.device[target] = self.device[source].copy()
        step.result.sampled_token_ids = self._forward(step)
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
        worker.run_all()
        last = worker._last_seq
        worker._run_stores(last, None)
        worker._run_ahead(last)
        return worker

    def _copy(self) -> "Worker":
        new = copy(self)
        new.device = [block.copy() for block in self.device]
        new.host = [block.copy() for block in self.host]
        new._stores = self._stores.copy()
        new._loads = self._loads.copy()
        new._ahead = self._ahead.copy()
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

    def _run_ready(self) -> None:
        """Run whatever may run before the next forward pass, loads first."""
        progress = True
        while progress:
            progress = False
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

    def _may_store(self, stores: _Stores) -> bool:
        computed, loaded = stores.after
        return computed <= self._computed and not any(
            queue and queue[0].plan.seq <= loaded
            for queue in (self._loads, self._ahead)
        )

    def _may_load(self, plan: StepPlan) -> bool:
        if plan.load_after_compute > self._computed:
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

    # ----------------------------------------------------------------- compute

    def _forward(self, step: Step) -> list[list[int]]:
        output = step.output
        computed = self._update_requests(step)
        scheduled = output.num_scheduled_tokens
        if step.fail == "compute":
            step.spoiled.update(list(scheduled)[:1])
        for req_id in scheduled:
            if not self._begin_states(req_id, computed[req_id], scheduled[req_id]):
                self._spoil(step, req_id)
        sampled: list[list[int]] = []
        for req_id, num_tokens in scheduled.items():
            request = self._requests[req_id]
            start, end = computed[req_id], computed[req_id] + num_tokens
            if not self._is_read_right(request, start):
                self._spoil(step, req_id)
            is_spoiled = req_id in step.spoiled
            self._write(request, start, end, is_spoiled)
            tokens = request.sequence.tokens
            sampled.append([])
            if end >= len(tokens):
                token = request.sequence.next_token()
                if is_spoiled:
                    token = (token + 1) % VOCAB
                request.sequence.append(token)
                sampled[-1].append(token)
        return sampled

    def _update_requests(self, step: Step) -> dict[str, int]:
        """Take over what is new.

        Returns:
            Number of computed tokens of every scheduled request.

        """
        output = step.output
        computed: dict[str, int] = {}
        for req_id in output.finished_req_ids:
            self._requests.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            tokens = upstream.prefill_tokens(new)
            self._begin(step, new.req_id, tokens, new.block_ids)
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            block_ids = cached.new_block_ids[i]
            computed[req_id] = cached.num_computed_tokens[i]
            request = self._requests[req_id]
            tokens = upstream.resumed_tokens(cached, req_id)
            if tokens is not None:
                self._begin(step, req_id, tokens, block_ids)
            elif block_ids is not None:
                for table, new_ids in zip(request.tables, block_ids, strict=True):
                    table.extend(new_ids)
        return computed

    def _begin(
        self,
        step: Step,
        req_id: str,
        tokens: list[int],
        block_ids: Seq[Seq[int]],
    ) -> None:
        root = self._roots[req_id]
        sequence = Sequence(root, len(self._layout.groups), step.epoch, tokens)
        self._requests[req_id] = _Request(sequence, [list(ids) for ids in block_ids])

    def _spoil(self, step: Step, req_id: str) -> None:
        if not step.is_void:
            raise Violation("read", f"{req_id} reads a wrong value in {step}")
        step.spoiled.add(req_id)

    def _begin_states(self, req_id: str, start: int, num_tokens: int) -> bool:
        """Bring running states to the blocks that this step writes.

        Returns:
            Whether they are the right ones.

        """
        request = self._requests[req_id]
        before, is_right = request.state_index, True
        for g, group in enumerate(self._layout.groups):
            if group.first_read is not None:
                continue
            size, table = group.block_size, request.tables[g]
            if group.keeps_all_states:
                want = request.sequence.values[g][start - 1] if start else None
                state = self.device[table[(start - 1) // size]][0] if start else None
                is_right &= state == want
                continue
            source = (start - 1) // size if before is None else before
            target = (start + num_tokens - 1) // size
            request.state_index = target
            if source not in (-1, target):
                self.device[table[target]] = self.device[table[source]].copy()
            if start > 0:
                want = request.sequence.values[g][start - 1]
                is_right &= self.device[table[target]][0] == want
        return is_right

    def _is_read_right(self, request: _Request, start: int) -> bool:
        for group, table, values in zip(
            self._layout.groups, request.tables, request.sequence.values, strict=True
        ):
            if group.first_read is None:
                continue
            size = group.block_size
            position = group.first_read(start)
            while position < start:
                index, offset = divmod(position, size)
                end = min(start, (index + 1) * size)
                have = self.device[table[index]][offset : offset + end - position]
                if have != values[position:end]:
                    return False
                position = end
        return True

    def _write(self, request: _Request, start: int, end: int, is_spoiled: bool) -> None:
        for group, table, values in zip(
            self._layout.groups, request.tables, request.sequence.values, strict=True
        ):
            size = group.block_size
            if group.keeps_all_states:
                for i in range(start // size, cdiv(end, size)):
                    state = (
                        GARBAGE if is_spoiled else values[min((i + 1) * size, end) - 1]
                    )
                    block = self._writable(table[i])
                    self.device[block] = [state] * self._width
                continue
            if group.first_read is None:
                state = GARBAGE if is_spoiled else values[end - 1]
                block = self._writable(table[(end - 1) // size])
                self.device[block] = [state] * self._width
                self._write_checkpoint(group, table, values, start, end, is_spoiled)
                continue
            for position in range(start, end):
                block = self._writable(table[position // size])
                value = GARBAGE if is_spoiled else values[position]
                self.device[block][position % size] = value

    def _write_checkpoint(
        self,
        group: Group,
        table: list[int],
        values: list[int],
        start: int,
        end: int,
        is_spoiled: bool,
    ) -> None:
        """Keep a state from inside the chunk, where the backend does."""
        spec = group.spec
        assert isinstance(spec, MambaSpec)
        if not upstream.num_checkpoint_blocks(spec):
            return
        [offset], [index] = upstream.compute_mamba_prefill_checkpoints(
            [end],
            [end - start],
            hash_block_size=self._layout.hash_block_size,
            mamba_block_size=spec.block_size,
            checkpoint_alignment=spec.prefill_checkpoint_alignment,
            drop_eagle_block=False,
            cache_hit_alignment_tokens=self._layout.hit_alignment,
        )
        # A request that needs no checkpoint has the null block there.
        if index >= 0 and table[index] != 0:
            state = GARBAGE if is_spoiled else values[start + offset - 1]
            self.device[table[index]] = [state] * self._width

    @staticmethod
    def _writable(block: int) -> int:
        if block == 0:
            raise Violation("read", "a forward pass writes the null block")
        return block
