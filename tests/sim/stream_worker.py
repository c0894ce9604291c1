# SPDX-License-Identifier: Apache-2.0
"""The simulated worker with the real `HostTier` and `CudaStreams` on a fake device.

Other than in `Worker`, memory has layers, and what a step does is queued: copies by
the tier on its streams, compute, layer by layer, on the stream of the engine. Every
piece of work checks the fences of its plan when it is executed.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from random import Random

import torch

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_tier.copying.engine import CopyEngines
from vllm.v1.kv_tier.memory.regions import Region
from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.tuning import RankTuning
from vllm.v1.kv_tier.worker.copies import Copy
from vllm.v1.kv_tier.worker.host_tier import HostTier
from vllm.v1.kv_tier.worker.layers import LayerWaits
from vllm.v1.kv_tier.worker.slots import RankSlots
from vllm.v1.kv_tier.worker.streams import CudaStreams

from . import upstream
from .content import EMPTY, GARBAGE, Violation
from .engine import Engine
from .fake_cuda import PATIENCE_S, Event, FakeCuda
from .scheduler import Setup
from .secondary import Below
from .step import Step
from .stream_copies import (
    LAYER_BYTES,
    NUM_LAYERS,
    SMALL_PARTS,
    FakeChecksums,
    FakeCopyEngine,
    WatchedOrder,
)
from .worker import Worker


@dataclass(frozen=True)
class Luck:
    """How the tier is used."""

    layerwise: bool
    """Layers wait for the loads of a step, each for its own."""
    launches_long: bool
    """A thread launches the loads of a step."""
    slowest_launch_s: float = 1e-3
    """Of one part of a copy."""
    verify: bool = False
    """Slots are checked before they are loaded."""


class Hang:
    """A launch that does not return before it is released.

    Args:
        kind: `store`, `clean` or `load_ahead`.
        skip: How many launches of that kind return.

    """

    def __init__(self, kind: str, skip: int) -> None:
        self.is_reached = self.is_released = False
        self._kind = kind
        self._left = skip
        self._released = threading.Event()

    def reach(self, kind: str) -> None:
        if kind != self._kind or self.is_reached:
            return
        self._left -= 1
        if self._left < 0:
            self.is_reached = True
            self._released.wait(60)

    def release(self) -> None:
        self.is_released = True
        self._released.set()


class StreamEngine(Engine):
    """An engine with a `StreamWorker`.

    Args:
        setup: As of `Engine`.
        cuda: Where the worker runs.
        luck: See there.
        seed: Of when memory is looked at, and of what the worker does at random.
        tuning: Of the worker.

    """

    def __init__(
        self,
        setup: Setup,
        cuda: FakeCuda,
        luck: Luck,
        seed: int = 0,
        tuning: RankTuning = SMALL_PARTS,
    ) -> None:
        super().__init__(setup)
        self._rng = Random(seed)
        self._worker: StreamWorker = StreamWorker(
            setup, self._roots, cuda, luck, self._rng, tuning, self.below
        )

    def drain(self) -> None:
        super().drain()
        self._worker.settled()
        self._worker.check_told()

    def _check(self) -> None:
        self._invariants.check_counts()
        # A look at memory lets everything end, so it must be rare. What fails
        # meanwhile is not on any output yet.
        if self._rng.random() < 0.1:
            worker = self._worker.settled()
            if worker.unreported() is None:
                try:
                    super()._check()
                except Violation:
                    # Nothing has settled while a copy hangs.
                    if worker.is_off or not worker.is_held:
                        raise


class StreamWorker(Worker):
    """A worker whose copies and compute are queued on streams."""

    def __init__(
        self,
        setup: Setup,
        roots: dict[str, int],
        cuda: FakeCuda,
        luck: Luck,
        rng: Random,
        tuning: RankTuning = SMALL_PARTS,
        below: Below | None = None,
    ) -> None:
        sizes = setup.num_blocks, setup.num_slots
        super().__init__(setup.layout, *sizes, roots, below)
        self.cuda = cuda
        self.rng = rng
        self.luck = luck
        self.layers = [self.device, *self._more_memory(setup.num_blocks)]
        self.slots = [self.host, *self._more_memory(setup.num_slots)]
        self.of_thread = threading.local()
        """`copy`: kind and step of the copy that a thread launches."""
        self.loading: dict[int, set[int]] = {}
        """By seq, layers that the loads of a step must still fill."""
        self.pending: dict[str, set[int]] = defaultdict(set)
        """By kind, plans with copies that have not ended."""
        self.hang: Hang | None = None
        self._launched: list[threading.Event] = []
        self._misread: dict[int, set[str]] = defaultdict(set)
        self._sampled: dict[int, list[list[int]]] = {}
        self._ends: dict[int, Event] = {}
        shape = (setup.num_blocks, LAYER_BYTES)
        blocks = torch.empty(shape, dtype=torch.uint8, device="meta")
        slots = torch.empty(setup.num_slots, 0, dtype=torch.uint8, device="meta")
        regions = [Region(blocks) for _ in range(NUM_LAYERS)]
        engine = FakeCopyEngine(self, regions, slots)
        waits = None
        if luck.layerwise:
            layers = {str(i): i for i in range(NUM_LAYERS)}
            waits = LayerWaits(layers, max_decode_tokens=-1)
        self._waits = waits
        self._order = WatchedOrder(
            self, CudaStreams(torch.device("cpu"), waits, tuning)
        )
        engines = CopyEngines(engine, engine, engine, 1.0)
        sums = FakeChecksums(self, setup.num_slots) if luck.verify else None
        held = RankSlots(setup.num_slots, sums)
        self._tier = HostTier(regions, engines, self._order, held, waits, tuning)
        self._attach(self.slots)

    def _more_memory(self, size: int) -> list[list[list[int]]]:
        return [
            [[EMPTY] * self._width for _ in range(size)] for _ in range(NUM_LAYERS - 1)
        ]

    # ------------------------------------------------------- what the engine asks

    def submit(
        self, output: SchedulerOutput, epoch: int, rush: bool, fail: str | None
    ) -> Step:
        step = self._next_step(output, epoch, rush, fail)
        self._order.step = step
        self._tier.begin_step(output)
        if not self.is_off and self.rng.random() < 0.2:
            # Tiers below ask so too, and what has come is forgotten then.
            self._order.have_ended(step.plan.seq, step.plan.seq)
        for layer in range(NUM_LAYERS):
            if self._waits is not None and self._waits.is_armed:
                self._waits.wait(str(layer))
            self.cuda.launch(partial(self._compute, step, layer))
        self._end_step(step)
        end = self._ends[step.plan.seq] = torch.cuda.Event()
        end.record()
        self._steps.append(step)
        if self._below is not None and not self.is_off:
            self._below.run(self._order.have_ended, self._tier.report)
        self.cuda.check()
        return step

    def run_until(self, step: Step) -> None:
        seq = step.plan.seq
        self._ends.pop(seq).synchronize()
        self.cuda.check()
        self._steps.remove(step)
        step.result.sampled_token_ids = self._sampled.pop(seq)
        step.is_done = True
        misread = self._misread.pop(seq, None)
        if misread and not step.is_void:
            raise Violation("read", f"{misread} read a wrong value in {step}")

    def run_all(self) -> None:
        self.settled()

    def garbage(self) -> set[int]:
        return {
            i
            for memory in self.layers
            for i, block in enumerate(memory)
            if GARBAGE in block
        }

    def settled(self) -> "StreamWorker":
        """Lets everything end that was queued."""
        ends = time.monotonic() + PATIENCE_S
        for launched in self._launched:
            while not (self.is_off or self.is_held or launched.wait(0.01)):
                if time.monotonic() > ends:
                    raise Violation("stuck", "a copy is never launched")
        self.cuda.wait_for_all()
        self.cuda.check()
        if self.is_off or self.is_held:
            return self
        self._launched.clear()
        late = {kind: seqs for kind, seqs in self.pending.items() if seqs}
        if late:
            raise Violation("plan", f"never copied: {late}")
        return self

    def check_told(self) -> None:
        """Every copy has ended: each told its time, and how long a step waited."""
        # Once the tier is off, nobody asks.
        if not self.is_off:
            self._order.check_told()

    @property
    def is_off(self) -> bool:
        """A copy hung, and the tier gave up. Fences say nothing then, and copies that
        were begun may come at any time."""
        return self._tier._is_off

    @property
    def is_held(self) -> bool:
        """A copy hangs."""
        return self.hang is not None and (
            self.hang.is_reached and not self.hang.is_released
        )

    def finish(self) -> int:
        """As before the engine sleeps. Returns how many plans had copies left."""
        num_left = sum(map(len, self.pending.values()))
        self._tier.finish()
        return num_left

    def unreported(self) -> object:
        """Failures that no output has told of."""
        report = self._tier.report
        return None if report.is_empty else report

    # ------------------------------------------------------------------ compute

    def _compute(self, step: Step, layer: int) -> None:
        plan, output = step.plan, step.output
        if layer == 0:
            self.need(plan, "compute", stores=plan.compute_after_stores)
            self.need(plan, "compute", ahead=plan.compute_after_loads)
            for memory in self.layers:
                for block in upstream.blocks_to_zero(output):
                    memory[block] = [EMPTY] * self._width
                for source, target in upstream.block_copies(output):
                    memory[target] = memory[source].copy()
        if layer in self.loading.get(plan.seq, ()) and not self.is_off:
            raise Violation("fence", f"layer {layer} comes before its load: {plan}")
        # Layers see the same requests; the last one leaves them as the step does.
        worker = self
        if layer + 1 < NUM_LAYERS:
            worker = copy(self)
            worker._requests = {k: r.copy() for k, r in self._requests.items()}
        worker.device = self.layers[layer]
        sampled = worker._forward(step)
        if worker is self:
            self._sampled[plan.seq] = sampled
            self._computed = plan.seq

    def _spoil(self, step: Step, req_id: str) -> None:
        # Whether the step is void is known when it has been submitted.
        self._misread[step.plan.seq].add(req_id)
        step.spoiled.add(req_id)

    def need(
        self,
        plan: StepPlan,
        what: str,
        compute: int = 0,
        stores: int = 0,
        loads: int = 0,
        ahead: int = 0,
    ) -> None:
        """Copies up to these plans must have ended."""
        if self.is_off:
            return
        fences = {
            "store": stores,
            "clean": min(stores, plan.seq - 1),
            "load": loads,
            "load_ahead": ahead,
        }
        for kind, seq in fences.items():
            if early := [each for each in self.pending[kind] if each <= seq]:
                raise Violation("fence", f"{what} before {kind} of {early}: {plan}")
        if self._computed < compute:
            raise Violation("fence", f"{what} before compute of {compute}: {plan}")

    # ------------------------------------------------------------------- copies

    def watched(self, kind: str, step: Step, run: Copy) -> Copy:
        """`run`, with all that is to be known of it."""
        seq = step.plan.seq
        launched = threading.Event()
        self._launched.append(launched)
        with self.cuda.lock:
            self.pending[kind].add(seq)
            if kind == "load":
                self.loading[seq] = set(range(NUM_LAYERS))

        def end() -> None:
            self.pending[kind].remove(seq)
            if kind == "load":
                del self.loading[seq]

        def watched(between_parts: Callable[[], None]) -> None:
            self.of_thread.copy = kind, step
            try:
                run(between_parts)
            finally:
                self.cuda.launch(end)
                launched.set()

        return watched
