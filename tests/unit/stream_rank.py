# SPDX-License-Identifier: Apache-2.0
"""A rank's copies on the streams of a GPU, a block per cell.

Whatever must be waited for takes tens of milliseconds, and what must wait does not,
so that a missing fence shows.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.worker.copies import Copies
from vllm.v1.kv_tier.worker.layers import LayerWaits
from vllm.v1.kv_tier.worker.streams import CudaStreams

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

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

            def run(between_parts: Callable[[], None]) -> None:
                for i, (source, target) in enumerate(pairs):
                    if i:
                        between_parts()
                    if kind in slow:
                        sleep()
                    to[target].copy_(from_[source])

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


def wait_for_threads(rank: Rank) -> None:
    """For what no fence asked the compute stream to wait for."""
    for marks in rank.order._jobs.values():
        for job in marks.values():
            job.wait_on_host()
    torch.cuda.synchronize()
