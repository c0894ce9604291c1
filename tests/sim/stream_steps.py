# SPDX-License-Identifier: Apache-2.0
"""Single steps on the streams of the simulated device, which runs what it must at last.

So whatever ran was waited for, and what was not waited for has not run.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.tuning import RankTuning
from vllm.v1.kv_tier.worker.copies import Copies, Copy
from vllm.v1.kv_tier.worker.layers import LayerWaits
from vllm.v1.kv_tier.worker.streams import CudaStreams, Done

from .fake_cuda import FakeCuda
from .stream_play import collect_fast as collect_fast
from .stream_play import device

FOR_EVER_S = 60.0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with device("late", 0, monkeypatch) as fake:
        yield fake


class Rank:
    """Steps whose copies and forward passes only tell that they ran."""

    def __init__(
        self, cuda: FakeCuda, waits: LayerWaits | None = None, **tuning: Any
    ) -> None:
        self._cuda = cuda
        self._seq = 0
        self.order = CudaStreams(torch.device("cpu"), waits, RankTuning(**tuning))
        self.ran: list[tuple[str, int]] = []
        self.released = threading.Event()
        """Until then, copies that hang do not get past their launch."""

    def begin(
        self,
        hang: Sequence[str] = (),
        layerwise: bool = False,
        launches_long: bool = False,
        **plan: Any,
    ) -> None:
        self._seq += 1
        kinds = ("store", "load", "ahead", "clean")
        store, load, ahead, clean = (self._copy(k, k in hang) for k in kinds)
        self.order.begin_step(
            StepPlan(self._seq, **plan),
            Copies(store, load, ahead, clean, [range(0, 1)], launches_long),
            layerwise,
        )

    def _copy(self, kind: str, hangs: bool) -> Copy:
        # A thread that held the streams could not end with them.
        cuda, released = self._cuda, self.released
        work = partial(self.ran.append, (kind, self._seq))

        def run(between_parts: Callable[[], None]) -> None:
            if hangs:
                released.wait(5.0)
            cuda.launch(work)

        return run

    def step(self, **plan: Any) -> None:
        self.begin(**plan)
        self.launch("forward", self._seq)
        assert self.order.end_step() is True

    def launch(self, kind: str, seq: int) -> None:
        self._cuda.launch(partial(self.ran.append, (kind, seq)))

    def compute(self) -> None:
        """Wait for the forward passes, and for nothing that they do not wait for."""
        event = torch.cuda.Event()
        event.record()
        event.synchronize()


STORE = {"store_slots": [0], "store_blocks": [0]}
CLEAN = {"clean_slots": [1], "clean_blocks": [1]}
LOAD = {"load_slots": [2], "load_blocks": [2]}
AHEAD = {"ahead_slots": [3], "ahead_blocks": [3]}


def comes(done: Done, within_s: float = 5.0) -> bool:
    """Whether the end comes without anybody who waits for it."""
    limit = time.monotonic() + within_s
    while not done.has_come():
        if time.monotonic() > limit:
            return False
        time.sleep(1e-3)
    return True
