# SPDX-License-Identifier: Apache-2.0
"""Ranks that share host slots, with the real streams and threads.

They run on a device of no fixed order. Each rank has a thread that takes its steps, and
none waits for another but in the fences of the plans.
"""

import threading
import time
from collections.abc import Sequence
from functools import partial
from random import Random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from vllm.v1.kv_tier.copying.engine import CopyEngine, CopyEngines, Transfer
from vllm.v1.kv_tier.memory.regions import Region
from vllm.v1.kv_tier.memory.shared import SharedMemory
from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.tuning import RankTuning
from vllm.v1.kv_tier.worker.host_tier import HostTier
from vllm.v1.kv_tier.worker.sharing import Peers
from vllm.v1.kv_tier.worker.slots import RankSlots
from vllm.v1.kv_tier.worker.streams import CudaStreams

from . import upstream
from .fake_cuda import PACES, FakeCuda, Pace, pause
from .stream_play import collect_fast as collect_fast
from .stream_play import device
from .stream_play import no_logs as no_logs

NUM_RANKS, NUM_SLOTS, BLOCK_BYTES, NUM_STEPS = 2, 4, 64, 60
# Stores read the first ones, each load fills one of its own.
NUM_SOURCES = 200
NUM_BLOCKS = NUM_SOURCES + NUM_STEPS
TUNING = RankTuning(load_chunk_bytes=BLOCK_BYTES, store_chunk_bytes=BLOCK_BYTES)
NUM_SEEDS = 6


class QueuedEngine(CopyEngine):
    """Copies that the fake device executes."""

    def __init__(
        self,
        regions: Sequence[Region],
        slots: torch.Tensor,
        cuda: FakeCuda,
        rng: Random,
    ) -> None:
        super().__init__(regions, slots)
        self.cuda, self.rng = cuda, rng

    def transfer(self, pairs: NDArray[np.int64], to_device: bool) -> Transfer:
        return Queued(self, pairs.T.tolist(), to_device)


class Queued(Transfer):
    def __init__(
        self, engine: QueuedEngine, pairs: list[list[int]], to_device: bool
    ) -> None:
        self._engine, self._pairs, self._to_device = engine, pairs, to_device

    def copy(self, regions: range) -> None:
        pause(self._engine.rng, 1e-3)
        for block, slot in self._pairs:
            self._engine.cuda.launch(partial(self._move, block, slot))

    def _move(self, block: int, slot: int) -> None:
        rows = self._engine.regions[0].blocks
        if self._to_device:
            rows[block] = self._engine.slots[slot]
        else:
            self._engine.slots[slot] = rows[block]


class Rank:
    """A rank's tier, its device memory, and the thread that takes its steps."""

    def __init__(
        self, index: int, memory: SharedMemory, cuda: FakeCuda, seed: int
    ) -> None:
        self.rng = Random(seed + index)
        self.blocks = torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
        # Only what the first rank has is to be seen in the slots.
        for block in range(NUM_SOURCES):
            self.blocks[block] = block + 1 if index == 0 else 0
        regions = [Region(self.blocks)]
        slots = memory.bytes.view(NUM_SLOTS, BLOCK_BYTES)
        engine = QueuedEngine(regions, slots, cuda, self.rng)
        held = RankSlots(NUM_SLOTS, states=memory.states)
        peers = Peers(memory, index, held, tuning=TUNING)
        order = CudaStreams(torch.device("cpu"), None, TUNING, peers)
        engines = CopyEngines(engine, engine, engine, 1.0)
        self.tier = HostTier(regions, engines, order, held, tuning=TUNING, peers=peers)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.plans: list[StepPlan] = []

    def _run(self) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for plan in self.plans:
                    pause(self.rng, 5e-3)
                    output = upstream.empty_step()
                    output.kv_tier_plan = plan
                    self.tier.begin_step(output)
                    self.tier.end_step(None)
                self.tier.finish()
        except BaseException as e:
            self.error = e


def script(rng: Random) -> tuple[list[StepPlan], dict[int, int]]:
    """Plans with the fences that the scheduler gives, and what loads must find, by
    device block."""
    held: dict[int, tuple[int, int]] = {}
    last_load = [0] * NUM_SLOTS
    plans, expected = [], {}
    for seq in range(1, NUM_STEPS):
        plan = StepPlan(seq)
        slot, source = rng.randrange(NUM_SLOTS), rng.randrange(NUM_SOURCES)
        kind = rng.choice(["store", "clean", "nothing"])
        if kind != "nothing":
            setattr(plan, f"{kind}_slots", [slot])
            setattr(plan, f"{kind}_blocks", [source])
            setattr(plan, f"{kind}_after_loads", last_load[slot])
        if kind == "store":
            held[slot] = source + 1, seq
        readable = [each for each in held if kind != "clean" or each != slot]
        if readable and rng.random() < 0.8:
            read, target = rng.choice(readable), NUM_SOURCES + seq
            prefix = rng.choice(["load", "ahead"])
            setattr(plan, f"{prefix}_slots", [read])
            setattr(plan, f"{prefix}_blocks", [target])
            expected[target], plan.load_after_stores = held[read]
            last_load[read] = seq
        if kind == "clean":
            held[slot] = source + 1, seq
        plans.append(plan)
    return plans, expected


def play(cuda: FakeCuda, seed: int) -> int:
    """Let ranks take the same plans. Returns how many of their loads were refused, or
    found other bytes than they should."""
    memory = SharedMemory.create(NUM_SLOTS, BLOCK_BYTES, NUM_RANKS)
    plans, expected = script(Random(seed))
    ranks = [Rank(index, memory, cuda, seed) for index in range(NUM_RANKS)]
    for rank in ranks:
        rank.plans = plans
        rank.thread.start()
    ends = time.monotonic() + 120
    while any(rank.thread.is_alive() for rank in ranks):
        assert time.monotonic() < ends, "ranks wait for each other"
        cuda.progress()
        time.sleep(0.5e-3)
    memory.close()
    for rank in ranks:
        if rank.error is not None:
            raise rank.error
    cuda.wait_for_all()
    reports = [rank.tier.report._report for rank in ranks]
    # A rank that comes too early may find that the slot is not filled yet.
    refused = sum(len(report.failures) for report in reports if report is not None)
    return refused + sum(
        set(rank.blocks[block].tolist()) != {value}
        for rank in ranks
        for block, value in expected.items()
    )


@pytest.mark.parametrize("pace", PACES)
def test_every_load_finds_what_was_stored(
    pace: Pace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(NUM_SEEDS):
        with device(pace, seed, monkeypatch) as cuda:
            assert play(cuda, seed) == 0


@pytest.mark.parametrize("fence", ["wait_for_stores", "wait_for_loads"])
def test_a_missing_fence_is_found(fence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted race."""
    monkeypatch.setattr(Peers, fence, lambda *args: None)
    wrong = 0
    for seed in range(20):
        with device("random", seed, monkeypatch) as cuda:
            wrong += play(cuda, seed)
        if wrong:
            return
    raise AssertionError("no load has found anything else")


def load_from_who_has_left(cuda: FakeCuda) -> int | None:
    """The owner gives up in the first plan, and the other rank loads in the second what
    it was to store. Returns which plan the other one says has failed."""
    memory = SharedMemory.create(NUM_SLOTS, BLOCK_BYTES, NUM_RANKS)
    owner, other = (Rank(i, memory, cuda, 0) for i in range(NUM_RANKS))
    memory.close()
    owner.tier._switch_off(StepPlan(1))
    plan = StepPlan(2, load_slots=[0], load_blocks=[NUM_SOURCES], load_after_stores=1)
    other.plans = [StepPlan(1), plan]
    other.thread.start()
    other.thread.join(60)
    assert other.error is None and not other.thread.is_alive()
    report = other.tier.report._report
    return None if report is None else report.failed_load_seq


def test_what_a_rank_drops_does_not_count_as_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with device("eager", 0, monkeypatch) as cuda:
        assert load_from_who_has_left(cuda) == 2
