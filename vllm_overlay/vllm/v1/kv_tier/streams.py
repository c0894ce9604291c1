# SPDX-License-Identifier: Apache-2.0
"""In which order copies and compute touch memory."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable

import torch

from vllm.v1.kv_tier.plan import StepPlan

Copy = Callable[[], None]


class CopyOrder(ABC):
    """Runs the copies of a plan so that its fences hold."""

    @abstractmethod
    def run(self, plan: StepPlan, store: Copy, load: Copy) -> None:
        """Queue the stores, then the loads, before this step's compute."""


class InOrder(CopyOrder):
    """For devices without streams: every copy ends before the next begins."""

    def run(self, plan: StepPlan, store: Copy, load: Copy) -> None:
        store()
        load()


class CudaStreams(CopyOrder):
    """Stores and loads on streams of their own, fences as events.

    Stores wait for the compute that wrote their blocks; compute waits for the
    loads of its step, and for those stores only whose blocks it overwrites.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._store_stream = torch.cuda.Stream(device)
        self._load_stream = torch.cuda.Stream(device)
        # By seq, oldest first. A stream runs in order, so the latest event not
        # above a fence covers all before it.
        self._stored: OrderedDict[int, torch.cuda.Event] = OrderedDict()
        self._loaded: OrderedDict[int, torch.cuda.Event] = OrderedDict()

    def run(self, plan: StepPlan, store: Copy, load: Copy) -> None:
        compute = torch.cuda.current_stream(self._device)
        if plan.store_slots:
            self._store_stream.wait_stream(compute)
            self._wait(self._store_stream, self._loaded, plan.store_after_loads)
            with torch.cuda.stream(self._store_stream):
                store()
            self._stored[plan.seq] = self._store_stream.record_event()
        if plan.load_slots:
            # Earlier steps may still read the blocks that the loads overwrite.
            self._load_stream.wait_stream(compute)
            self._wait(self._load_stream, self._stored, plan.load_after_stores)
            with torch.cuda.stream(self._load_stream):
                load()
            self._loaded[plan.seq] = self._load_stream.record_event()
            compute.wait_stream(self._load_stream)
        self._wait(compute, self._stored, plan.compute_after_stores)

    @staticmethod
    def _wait(
        stream: torch.cuda.Stream,
        events: "OrderedDict[int, torch.cuda.Event]",
        seq: int,
    ) -> None:
        latest = None
        for recorded, event in list(events.items()):
            if event.query():
                del events[recorded]
            elif recorded <= seq:
                latest = event
        if latest is not None:
            stream.wait_event(latest)
