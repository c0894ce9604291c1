# SPDX-License-Identifier: Apache-2.0
"""Fences of plans on the streams of a GPU, each with and without it."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from ..stream_rank import NEW, OLD, Rank, needs_gpu, sleep, wait_for_threads
from ..stream_rank import compute_stream as compute_stream
from ..stream_rank import rank as rank

pytestmark = needs_gpu


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
    wait_for_threads(rank)
    assert case.place(rank).item() == case.right


@pytest.mark.parametrize("name", sorted(CASES.keys() - ORDERED_ANYWAY))
def test_without_its_fence_each_case_goes_wrong(rank: Rank, name: str) -> None:
    """Else the test above would prove nothing, and steps would wait for too much."""
    case = CASES[name]
    case.run(rank, {})
    wait_for_threads(rank)
    assert case.place(rank).item() != case.right
