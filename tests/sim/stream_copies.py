# SPDX-License-Identifier: Apache-2.0
"""The parts of a `StreamWorker` that stand below the real `HostTier`.

Copies are launched layer by layer on the fake device, fail where they are told to, and
check their fences when they are executed.
"""

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.v1.kv_tier.copying.engine import CopyEngine, Transfer
from vllm.v1.kv_tier.memory.checksums import SlotChecksums
from vllm.v1.kv_tier.memory.regions import Region
from vllm.v1.kv_tier.plan import PrefillTime, StepPlan, Times
from vllm.v1.kv_tier.tuning import RankTuning
from vllm.v1.kv_tier.worker.copies import Copies, CopyOrder
from vllm.v1.kv_tier.worker.streams import CudaStreams

from .content import GARBAGE, Violation
from .fake_cuda import pause
from .step import Step
from .worker import after

if TYPE_CHECKING:
    from .stream_worker import StreamWorker

NUM_LAYERS = 6
LAYER_BYTES = 32
SMALL_PARTS = RankTuning(
    part_bytes=2 * LAYER_BYTES,
    load_chunk_bytes=2 * LAYER_BYTES,
    store_chunk_bytes=LAYER_BYTES,
)
"""Two layers of one block make a part of a load, else each one. Chunks have a block."""


class FakeChecksums(SlotChecksums):
    """Of simulated slots."""

    def __init__(self, worker: "StreamWorker", num_slots: int) -> None:
        super().__init__(torch.empty(num_slots, 0), torch.device("cuda", 0))
        self._slots = worker.slots

    def _sum(self, slot: int) -> bytes:
        return repr([memory[slot] for memory in self._slots]).encode()


class WatchedOrder(CopyOrder):
    """The order of another, and what it does with the copies."""

    step: Step

    def __init__(self, worker: "StreamWorker", order: CudaStreams) -> None:
        self._worker = worker
        self._order = order
        self._asked: set[tuple[str, int]] = set()
        self._told: Times = {}

    def begin_step(self, plan: StepPlan, copies: Copies, layerwise: bool) -> None:
        for kind, pairs in (
            ("store", plan.store_slots),
            ("clean", plan.clean_slots),
            ("load", plan.load_slots),
            ("load_ahead", plan.ahead_slots),
        ):
            if pairs:
                self._asked.add((kind, plan.seq))
                if kind == "load":
                    self._asked.add(("stall", plan.seq))
                run = self._worker.watched(kind, self.step, getattr(copies, kind))
                setattr(copies, kind, run)
        self._order.begin_step(plan, copies, layerwise)

    def end_step(self) -> bool:
        return self._order.end_step()

    def have_ended(self, stores: int, loads: int) -> bool:
        return self._order.have_ended(stores, loads)

    def give_up(self) -> dict[int, list[int]]:
        return self._order.give_up()

    def finish(self) -> None:
        self._order.finish()

    def take_prefill_time(self, num_tokens: int) -> PrefillTime:
        prefill = self._order.take_prefill_time(num_tokens)
        if prefill.seconds < 0:
            raise Violation("plan", f"times run backwards: {prefill}")
        # Simulated time is another one.
        return PrefillTime(0, 0.0)

    def take_copy_times(self) -> Times:
        times = self._order.take_copy_times()
        for key, (num_blocks, seconds) in times.items():
            if num_blocks < 1 or seconds < 0 or key in self._told:
                raise Violation("plan", f"{key} took {seconds} again: {num_blocks}")
        self._told.update(times)
        return times

    def check_told(self) -> None:
        # A copy has ended a moment before its thread says so.
        self._order.finish()
        self._order._forget_ended()
        self.take_copy_times()
        if silent := self._asked - self._told.keys():
            raise Violation("plan", f"nothing was told of {silent}")


class FakeCopyEngine(CopyEngine):
    def __init__(
        self, worker: "StreamWorker", regions: list[Region], slots: torch.Tensor
    ) -> None:
        super().__init__(regions, slots)
        self._worker = worker

    def launch_s(self, num_pieces: int) -> float:
        return 1.0 if self._worker.luck.launches_long else 0.0

    def transfer(self, pairs: NDArray[np.int64], to_device: bool) -> Transfer:
        worker = self._worker
        kind, step = worker.of_thread.copy
        fail_at = NUM_LAYERS
        if step.fail == ("load" if to_device else "store"):
            fail_at = worker.rng.randrange(NUM_LAYERS)
        return _Transfer(worker, kind, step.plan, pairs.T.tolist(), fail_at)


class _Transfer(Transfer):
    """Fails at a layer, and leaves garbage from there on."""

    def __init__(
        self,
        worker: "StreamWorker",
        kind: str,
        plan: StepPlan,
        pairs: list[tuple[int, int]],
        fail_at: int,
    ) -> None:
        self._worker = worker
        self._kind = kind
        self._plan = plan
        self._pairs = pairs
        self._fail_at = fail_at

    def copy(self, regions: range) -> None:
        worker = self._worker
        if worker.hang is not None:
            worker.hang.reach(self._kind)
        pause(worker.rng, worker.luck.slowest_launch_s)
        for layer in regions:
            if layer == self._fail_at:
                for rest in range(layer, NUM_LAYERS):
                    worker.cuda.launch(partial(self._run, rest, True))
                raise RuntimeError("simulated")
            worker.cuda.launch(partial(self._run, layer, False))

    def _run(self, layer: int, fails: bool) -> None:
        worker, plan = self._worker, self._plan
        device, host = worker.layers[layer], worker.slots[layer]
        if self._kind in ("store", "clean"):
            compute, loads = after(plan, self._kind == "clean")
            worker.need(plan, self._kind, compute, loads=loads, ahead=loads)
            for block, slot in self._pairs:
                host[slot] = device[block].copy()
                if fails:
                    host[slot] = [GARBAGE] * len(host[slot])
            return
        stores, ahead = plan.load_after_stores, plan.load_after_loads
        worker.need(plan, self._kind, plan.load_after_compute, stores, ahead=ahead)
        for block, slot in self._pairs:
            device[block] = host[slot].copy()
            if fails:
                device[block] = [GARBAGE] * len(device[block])
        if self._kind == "load":
            worker.loading[plan.seq].discard(layer)
