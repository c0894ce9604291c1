# SPDX-License-Identifier: Apache-2.0
"""In which order copies and compute touch memory."""

import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from vllm.v1.kv_tier.lane import Copy, Done, Job, Lane
from vllm.v1.kv_tier.layer_waits import LayerWaits
from vllm.v1.kv_tier.plan import StepPlan


@dataclass
class Copies:
    """What the copies of one plan do, in the order of their names."""

    store: Copy
    load: Copy
    load_ahead: Copy
    load_parts: Sequence[range] = ()
    """Regions of each part of `load`."""
    load_launches_long: bool = False
    """Whether the launch of `load` takes the CPU as long as that of many layers."""


class CopyOrder(ABC):
    """Runs the copies of a plan so that its fences hold."""

    @abstractmethod
    def begin_step(self, plan: StepPlan, copies: Copies, layerwise: bool) -> None:
        """Queue the copies, before this step's compute.

        Args:
            plan: Whose copies to run.
            copies: How.
            layerwise: Let the attention layers wait for the loads, not the step.

        """

    def end_step(self) -> bool:
        """The step's compute is queued.

        Returns:
            Whether all layers waited for what they had to.

        """
        return True

    @abstractmethod
    def finish(self) -> None:
        """Wait for the end of all copies that were queued."""

    def take_times(
        self, num_tokens: int
    ) -> tuple[tuple[int, float], tuple[int, float]]:
        """What was measured since the last call.

        Args:
            num_tokens: Of this step, if it is one that says what prefill costs.

        Returns:
            Blocks of loads ahead that ended, and the seconds that they took; tokens
            of a step that ended, and the seconds that it took.

        """
        return (0, 0.0), (0, 0.0)


# How long a closed gate holds up one part of a job that nobody waits for, and how
# often it looks whether somebody does.
_GATE_S, _LOOK_S = 0.02, 0.5e-3


def _nothing() -> None:
    pass


class InOrder(CopyOrder):
    """For devices without streams: every copy ends before the next begins."""

    def begin_step(self, plan: StepPlan, copies: Copies, layerwise: bool) -> None:
        copies.store(_nothing)
        copies.load(_nothing)
        copies.load_ahead(_nothing)

    def finish(self) -> None:
        pass


class CudaStreams(CopyOrder):
    """Loads of the step on a stream, the rest on lanes, fences as events.

    Args:
        device: Of the compute stream.
        layer_waits: Where the layers of the model wait, if they do.

    """

    def __init__(self, device: torch.device, layer_waits: LayerWaits | None) -> None:
        self._device = device
        self._layer_waits = layer_waits
        # Open while no step is being launched.
        gate = self._gate = threading.Event()
        gate.set()
        last_load = self._last_load = list[Job]()

        # The lanes outlive `self`, so their gates must not hold it. Launches of the
        # step come before those of stores: both want the driver.
        def wait_for_step(job: Job) -> None:
            ends = time.monotonic() + _GATE_S
            while not (job.is_urgent or gate.wait(_LOOK_S)) and time.monotonic() < ends:
                pass

        self._store_lane = Lane("kv-tier-store", device, gate=wait_for_step)

        # Loads of the step come before loads ahead: both want the link.
        def wait_for_load(job: Job) -> None:
            for load in last_load:
                load.wait_on_host()

        self._ahead_lane = Lane("kv-tier-ahead", device, gate=wait_for_load)
        self._load_lane = Lane("kv-tier-load", device, paced=False)
        # By seq, oldest first. Each belongs to one stream, which runs in order: the
        # latest up to a fence covers all before it.
        self._begun: OrderedDict[int, Done] = OrderedDict()
        self._stored: OrderedDict[int, Job] = OrderedDict()
        self._loaded: OrderedDict[int, Job] = OrderedDict()
        self._loaded_ahead: OrderedDict[int, Job] = OrderedDict()
        self._load_times = (0, 0.0)
        self._prefill = _StepTimer()

    def begin_step(self, plan: StepPlan, copies: Copies, layerwise: bool) -> None:
        self._gate.clear()
        self._forget_ended()
        compute = torch.cuda.current_stream(self._device)
        begun = self._begun[plan.seq] = Done()
        begun.record(compute)
        # Loads come first where they may.
        stores_first = max(plan.load_after_stores, plan.compute_after_stores)
        if stores_first == plan.seq:
            self._store(plan, copies)
        load_after = [
            *self._computed(plan.load_after_compute),
            *_latest(self._stored, plan.load_after_stores),
            *_latest(self._loaded_ahead, plan.load_after_loads),
        ]
        if plan.load_slots:
            self._load(plan, copies, layerwise, load_after, compute)
        if plan.ahead_slots:
            job = Job(copies.load_ahead, load_after, len(plan.ahead_slots))
            self._loaded_ahead[plan.seq] = self._ahead_lane.submit(job)
        if stores_first < plan.seq:
            self._store(plan, copies, *_latest(self._loaded, plan.seq))
        for done in _latest(self._stored, plan.compute_after_stores):
            done.wait(compute)
        for done in _latest(self._loaded_ahead, plan.compute_after_loads):
            done.wait(compute)

    def _store(self, plan: StepPlan, copies: Copies, *after: Done) -> None:
        if not plan.store_slots:
            return
        fences = [
            *self._computed(plan.store_after_compute),
            *_latest(self._loaded, plan.store_after_loads),
            *_latest(self._loaded_ahead, plan.store_after_loads),
        ]
        job = Job(copies.store, [*after, *fences], len(plan.store_slots))
        self._stored[plan.seq] = self._store_lane.submit(job)

    def _load(
        self,
        plan: StepPlan,
        copies: Copies,
        layerwise: bool,
        after: list[Done],
        compute: torch.cuda.Stream,
    ) -> None:
        ends = [Done() for _ in copies.load_parts]

        def load(after_part: Callable[[], None]) -> None:
            stream = torch.cuda.current_stream(self._device)
            left = iter(ends)
            copies.load(lambda: next(left).record(stream))
            for end in left:  # of a load that failed
                end.record(stream)

        job = Job(load, after, len(plan.load_slots))
        if copies.load_launches_long:
            self._load_lane.submit(job)
        else:
            self._load_lane.launch(job)
        self._loaded[plan.seq] = job
        # What waits for a lane must not be waited for by one.
        is_free = not any(isinstance(done, Job) for done in after)
        self._last_load[:] = [job] if is_free else []
        if layerwise and self._layer_waits is not None:
            self._layer_waits.arm(copies.load_parts, ends)
        else:
            job.wait(compute)

    def end_step(self) -> bool:
        self._gate.set()
        self._prefill.end_step()
        if self._layer_waits is None or not self._layer_waits.is_armed:
            return True
        all_waited = self._layer_waits.disarm()
        # What follows on the compute stream need not ask. And a load that waits for
        # a lane must be launched before the next one can be queued behind it.
        next(reversed(self._loaded.values())).wait(
            torch.cuda.current_stream(self._device)
        )
        return all_waited

    def finish(self) -> None:
        for marks in (self._stored, self._loaded, self._loaded_ahead):
            for job in list(marks.values())[-1:]:
                job.wait_for_launch()
                job.wait_on_host()

    def take_times(
        self, num_tokens: int
    ) -> tuple[tuple[int, float], tuple[int, float]]:
        loads, self._load_times = self._load_times, (0, 0.0)
        return loads, self._prefill.next_step(num_tokens)

    def _computed(self, seq: int) -> Iterator[Done]:
        """The end of all forward passes up to `seq`; nothing if it has come."""
        if seq:
            for begun, done in self._begun.items():
                if begun > seq:
                    yield done
                    return

    def _forget_ended(self) -> None:
        for marks in (self._stored, self._loaded, self._loaded_ahead):
            for seq, done in list(marks.items()):
                if not done.has_come():
                    break
                del marks[seq]
                if marks is self._loaded_ahead:
                    blocks, seconds = self._load_times
                    self._load_times = blocks + done.num_blocks, seconds + done.seconds
        # The last one that has come stands for all before it.
        come = [seq for seq, done in self._begun.items() if done.has_come()]
        for seq in come[:-1]:
            del self._begun[seq]


class _StepTimer:
    """How long forward passes take on the device, one of them at a time."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._begun, self._ended = Done(), Done()
        self._is_open = False

    def next_step(self, num_tokens: int) -> tuple[int, float]:
        """A step begins. Returns (tokens, seconds) of one that ended.

        Args:
            num_tokens: Of the step, or 0 if it is of no interest.

        """
        times = 0, 0.0
        if self._num_tokens and self._ended.has_come():
            milliseconds = self._begun.event.elapsed_time(self._ended.event)
            times = self._num_tokens, milliseconds / 1e3
            self._num_tokens = 0
        if num_tokens and not self._num_tokens:
            self._num_tokens = num_tokens
            self._begun, self._ended = Done(), Done()
            self._begun.record(torch.cuda.current_stream())
            self._is_open = True
        return times

    def end_step(self) -> None:
        if self._is_open:
            self._is_open = False
            self._ended.record(torch.cuda.current_stream())


def _latest(marks: "OrderedDict[int, Job]", seq: int) -> Iterator[Done]:
    """The last of `marks` up to `seq`, unless it has ended."""
    latest: Done | None = None
    if seq:
        for recorded, done in marks.items():
            if recorded > seq:
                break
            latest = done
    if latest is not None:
        yield latest
