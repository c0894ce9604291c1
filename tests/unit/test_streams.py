# SPDX-License-Identifier: Apache-2.0
"""Fences of plans on the streams of a GPU, each with and without it.

Whatever must be waited for takes tens of milliseconds, and what must wait does not,
so that a missing fence shows.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from vllm.v1.kv_tier.layer_waits import LayerWaits
from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.streams import Copies, CudaStreams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SLEEP = 100_000_000
"""GPU cycles: some tens of milliseconds."""
OLD, NEW = 1.0, 2.0


def sleep() -> None:
    torch.cuda._sleep(SLEEP)


class Rank:
    """A block per cell in device and host memory, and what runs on them."""

    def __init__(self, waits: LayerWaits | None = None) -> None:
        device = torch.device("cuda", 0)
        self.order = CudaStreams(device, waits)
        self.blocks = torch.zeros(8, device=device)
        self.slots = torch.zeros(8, device=device)
        # What a forward pass read.
        self.read = torch.zeros(8, device=device)
        self.launches_long = False
        self._seq = 0

    def step(
        self,
        *forward: Callable[[], object],
        slow: Sequence[str] = (),
        layerwise: bool = False,
        **plan: Any,
    ) -> bool:
        """A step: its plan, with the copies of `slow` kinds, and its forward pass."""
        self._seq += 1
        order, p = self.order, StepPlan(self._seq, **plan)

        def copy(kind: str, pairs: Iterator[tuple[int, int]]) -> Callable:
            to, from_ = self.blocks, self.slots
            if kind in ("store", "clean"):
                to, from_ = from_, to

            def run(after_part: Callable[[], None]) -> None:
                for source, target in pairs:
                    if kind in slow:
                        sleep()
                    to[target].copy_(from_[source])
                    after_part()

            return run

        copies = Copies(
            copy("store", zip(p.store_blocks, p.store_slots)),
            copy("load", zip(p.load_slots, p.load_blocks)),
            copy("ahead", zip(p.ahead_slots, p.ahead_blocks)),
            copy("clean", zip(p.clean_blocks, p.clean_slots)),
            load_parts=[range(i, i + 1) for i in range(len(p.load_slots))],
            load_launches_long=self.launches_long,
        )
        order.begin_step(p, copies, layerwise)
        for kernel in forward:
            kernel()
        return order.end_step()

    # Kernels of a forward pass.

    def writes(self, block: int, value: float) -> Callable[[], object]:
        return lambda: self.blocks[block].fill_(value)

    def reads(self, block: int) -> Callable[[], object]:
        return lambda: self.read[block].copy_(self.blocks[block])


@pytest.fixture(autouse=True)
def compute_stream() -> Iterator[None]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield
    torch.cuda.synchronize()


@pytest.fixture
def rank() -> Rank:
    rank = Rank()
    # What is loaded at first use may wait for the device.
    torch.cuda._sleep(1)
    rank.blocks[7].copy_(rank.slots[7])
    rank.blocks.fill_(OLD)
    rank.slots.fill_(OLD)
    torch.cuda.synchronize()
    return rank


# ------------------------------------------------------------------------ fences


@dataclass
class Case:
    """Steps that go wrong without a fence."""

    fence: str
    seq: int
    """Of the fence."""
    run: Callable[[Rank, dict[str, int]], object]
    """Runs them, with the fence (or not)."""
    place: Callable[[Rank], torch.Tensor]
    """Where to look at the end."""
    right: float


Run = Callable[[Rank, dict[str, int]], None]


def store_after_compute(kind: str) -> Run:
    def run(rank: Rank, fence: dict[str, int]) -> None:
        rank.step(sleep, rank.writes(0, NEW))
        rank.step(**{f"{kind}_blocks": [0], f"{kind}_slots": [0]}, **fence)

    return run


def compute_after_stores(kind: str) -> Run:
    def run(rank: Rank, fence: dict[str, int]) -> None:
        rank.step(slow=[kind], **{f"{kind}_blocks": [0], f"{kind}_slots": [0]})
        rank.step(rank.writes(0, NEW), **fence)

    return run


def compute_after_own_stores(rank: Rank, fence: dict[str, int]) -> None:
    rank.step(
        rank.writes(0, NEW), slow=["store"], store_blocks=[0], store_slots=[0], **fence
    )


def compute_after_loads(rank: Rank, fence: dict[str, int]) -> None:
    rank.slots[0].fill_(NEW)
    torch.cuda.synchronize()
    rank.step(slow=["ahead"], ahead_slots=[0], ahead_blocks=[0])
    rank.step(rank.reads(0), **fence)


def load_after_stores(kind: str, stored: str = "store") -> Run:
    def run(rank: Rank, fence: dict[str, int]) -> None:
        rank.blocks[0].fill_(NEW)
        torch.cuda.synchronize()
        rank.step(slow=[stored], **{f"{stored}_blocks": [0], f"{stored}_slots": [0]})
        rank.step(**{f"{kind}_slots": [0], f"{kind}_blocks": [1]}, **fence)

    return run


def load_after_own_stores(rank: Rank, fence: dict[str, int]) -> None:
    """Into the block of a victim: demotion and promotion in one step."""
    rank.slots[1].fill_(NEW)
    torch.cuda.synchronize()
    plan = {"store_blocks": [0], "store_slots": [0]}
    rank.step(slow=["store"], load_slots=[1], load_blocks=[0], **plan, **fence)


def load_after_compute(kind: str) -> Run:
    def run(rank: Rank, fence: dict[str, int]) -> None:
        rank.slots[0].fill_(NEW)
        torch.cuda.synchronize()
        rank.step(sleep, rank.reads(0))
        rank.step(**{f"{kind}_slots": [0], f"{kind}_blocks": [0]}, **fence)

    return run


def load_after_loads(rank: Rank, fence: dict[str, int]) -> None:
    rank.slots[1].fill_(NEW)
    torch.cuda.synchronize()
    rank.step(slow=["ahead"], ahead_slots=[0], ahead_blocks=[0])
    rank.step(load_slots=[1], load_blocks=[0], **fence)


def store_after_loads(kind: str, stored: str = "store") -> Run:
    def run(rank: Rank, fence: dict[str, int]) -> None:
        rank.blocks[1].fill_(NEW)
        torch.cuda.synchronize()
        rank.step(slow=[kind], **{f"{kind}_slots": [0], f"{kind}_blocks": [0]})
        rank.step(**{f"{stored}_blocks": [1], f"{stored}_slots": [0]}, **fence)

    return run


def block(i: int) -> Callable[[Rank], torch.Tensor]:
    return lambda rank: rank.blocks[i]


def slot(i: int) -> Callable[[Rank], torch.Tensor]:
    return lambda rank: rank.slots[i]


def read(i: int) -> Callable[[Rank], torch.Tensor]:
    return lambda rank: rank.read[i]


CASES = {
    "store_after_compute": Case(
        "store_after_compute", 1, store_after_compute("store"), slot(0), NEW
    ),
    "clean_after_compute": Case(
        "clean_after_compute", 1, store_after_compute("clean"), slot(0), NEW
    ),
    "compute_after_stores": Case(
        "compute_after_stores", 1, compute_after_stores("store"), slot(0), OLD
    ),
    "compute_after_cleans": Case(
        "compute_after_stores", 1, compute_after_stores("clean"), slot(0), OLD
    ),
    "compute_after_own_stores": Case(
        "compute_after_stores", 1, compute_after_own_stores, slot(0), OLD
    ),
    "compute_after_loads": Case(
        "compute_after_loads", 1, compute_after_loads, read(0), NEW
    ),
    "load_after_stores": Case(
        "load_after_stores", 1, load_after_stores("load"), block(1), NEW
    ),
    "load_after_cleans": Case(
        "load_after_stores", 1, load_after_stores("load", "clean"), block(1), NEW
    ),
    "ahead_after_stores": Case(
        "load_after_stores", 1, load_after_stores("ahead"), block(1), NEW
    ),
    "load_after_own_stores": Case(
        "load_after_stores", 1, load_after_own_stores, slot(0), OLD
    ),
    "load_after_compute": Case(
        "load_after_compute", 1, load_after_compute("load"), read(0), OLD
    ),
    "ahead_after_compute": Case(
        "load_after_compute", 1, load_after_compute("ahead"), read(0), OLD
    ),
    "load_after_loads": Case("load_after_loads", 1, load_after_loads, block(0), NEW),
    "store_after_loads": Case(
        "store_after_loads", 1, store_after_loads("load"), block(0), OLD
    ),
    "clean_after_loads": Case(
        "clean_after_loads", 1, store_after_loads("load", "clean"), block(0), OLD
    ),
    "store_after_loads_ahead": Case(
        "store_after_loads", 1, store_after_loads("ahead"), block(0), OLD
    ),
}
# The cleaner lets the loads of steps up to its own go first, which want the link too.
ORDERED_ANYWAY = {"clean_after_loads"}


@pytest.mark.parametrize("launches_long", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_fences_hold(rank: Rank, name: str, launches_long: bool) -> None:
    case = CASES[name]
    rank.launches_long = launches_long
    case.run(rank, {case.fence: case.seq})
    _wait_for_lanes(rank)
    assert case.place(rank).item() == case.right


@pytest.mark.parametrize("name", sorted(CASES.keys() - ORDERED_ANYWAY))
def test_without_its_fence_each_case_goes_wrong(rank: Rank, name: str) -> None:
    """Else the test above would prove nothing, and steps would wait for too much."""
    case = CASES[name]
    case.run(rank, {})
    _wait_for_lanes(rank)
    assert case.place(rank).item() != case.right


def _wait_for_lanes(rank: Rank) -> None:
    """For what no fence asked the compute stream to wait for."""
    for marks in rank.order._jobs.values():
        for job in marks.values():
            job.wait_on_host()
    torch.cuda.synchronize()


# ---------------------------------------------------------------- loads of a step


@pytest.mark.parametrize("launches_long", [False, True])
def test_a_step_reads_what_it_loads(rank: Rank, launches_long: bool) -> None:
    rank.launches_long = launches_long
    rank.slots[:3] = torch.tensor([5.0, 6.0, 7.0])
    torch.cuda.synchronize()
    reads = [rank.reads(i) for i in (3, 4, 5)]
    rank.step(*reads, slow=["load"], load_slots=[0, 1, 2], load_blocks=[3, 4, 5])
    torch.cuda.synchronize()
    assert rank.read[3:6].tolist() == [5, 6, 7]


def test_a_step_does_not_wait_for_its_stores_and_loads_ahead(rank: Rank) -> None:
    ended = torch.cuda.Event()
    rank.step(
        rank.reads(0),
        ended.record,
        slow=["clean", "ahead"],
        store_blocks=[0],
        store_slots=[0],
        clean_blocks=[1],
        clean_slots=[1],
        ahead_slots=[2],
        ahead_blocks=[2],
        compute_after_stores=1,
    )
    ended.synchronize()
    assert rank.order._stored[1].has_come()
    jobs = [rank.order._cleaned[1], rank.order._loaded_ahead[1]]
    assert not any(job.has_come() for job in jobs)
    _wait_for_lanes(rank)


# ------------------------------------------------------------------------- layers


@pytest.fixture
def waits(rank: Rank) -> LayerWaits:
    """Two layers, with a region and a part of the loads each."""
    waits = LayerWaits({"a": 0, "b": 1}, max_decode_tokens=1)
    rank.order = CudaStreams(torch.device("cuda", 0), waits)
    rank.slots.fill_(NEW)
    torch.cuda.synchronize()
    return waits


@pytest.mark.parametrize("launches_long", [False, True])
def test_each_layer_waits_for_its_own_loads(
    rank: Rank, waits: LayerWaits, launches_long: bool
) -> None:
    rank.launches_long = launches_long
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    all_waited = rank.step(
        events[0].record,
        lambda: waits.wait("a"),
        rank.reads(0),
        events[1].record,
        lambda: waits.wait("b"),
        rank.reads(1),
        events[2].record,
        slow=["load"],
        layerwise=True,
        load_slots=[0, 1],
        load_blocks=[0, 1],
    )
    assert all_waited
    torch.cuda.synchronize()
    assert rank.read[:2].tolist() == [NEW, NEW]
    # Half of the loads each.
    first = events[0].elapsed_time(events[1])
    second = events[1].elapsed_time(events[2])
    assert first > 1 and second > 0.3 * first


@pytest.mark.parametrize("launches_long", [False, True])
def test_a_layer_that_did_not_wait_is_told_and_nothing_overtakes_the_loads(
    rank: Rank, waits: LayerWaits, launches_long: bool
) -> None:
    rank.launches_long = launches_long
    plan = {"load_slots": [0, 1], "load_blocks": [0, 1]}
    assert not rank.step(
        lambda: waits.wait("a"), rank.reads(1), slow=["load"], layerwise=True, **plan
    )
    # The next step needs no fence for them.
    assert rank.step(rank.writes(1, OLD), rank.reads(0))
    torch.cuda.synchronize()
    assert rank.read[:2].tolist() == [NEW, OLD]
    assert rank.blocks[:2].tolist() == [NEW, OLD]


# -------------------------------------------------------------------------- times


def test_loads_ahead_are_timed(rank: Rank) -> None:
    started = time.perf_counter()
    rank.step(slow=["ahead"], ahead_slots=[0, 1, 2], ahead_blocks=[0, 1, 2])
    assert rank.order.take_times(0) == ((0, 0.0), (0, 0.0))
    _wait_for_lanes(rank)
    wall = time.perf_counter() - started
    rank.step()
    (blocks, seconds), prefill = rank.order.take_times(0)
    assert blocks == 3 and 0.3 * wall < seconds <= wall
    assert prefill == (0, 0.0)
    rank.step()
    assert rank.order.take_times(0)[0] == (0, 0.0)


def test_prefill_is_timed_on_the_device(rank: Rank) -> None:
    """`HostTier` asks for times between the copies of a step and its compute."""
    order = rank.order
    nothing = Copies(*[lambda after_part: None] * 4)
    started = time.perf_counter()
    order.begin_step(StepPlan(1), nothing, False)
    assert order.take_times(2048) == ((0, 0.0), (0, 0.0))
    sleep()
    order.end_step()
    order.begin_step(StepPlan(2), nothing, False)
    # It runs still, and one at a time is timed.
    assert order.take_times(4096) == ((0, 0.0), (0, 0.0))
    order.end_step()
    torch.cuda.synchronize()
    wall = time.perf_counter() - started
    order.begin_step(StepPlan(3), nothing, False)
    tokens, seconds = order.take_times(0)[1]
    assert tokens == 2048 and 0.5 * wall < seconds <= wall
    order.end_step()
    order.begin_step(StepPlan(4), nothing, False)
    assert order.take_times(0)[1] == (0, 0.0)
    order.end_step()
