# SPDX-License-Identifier: Apache-2.0
"""In which order copies and compute touch memory."""

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from vllm.v1.kv_tier.lane import Copy, Done, Job, Lane
from vllm.v1.kv_tier.layer_waits import LayerWaits
from vllm.v1.kv_tier.plan import StepPlan, Times


@dataclass
class Copies:
    """What the copies of one plan do, in the order of their names."""

    store: Copy
    load: Copy
    load_ahead: Copy
    clean: Copy
    load_parts: Sequence[range] = ()
    """Regions of each part of `load`."""
    load_launches_long: bool = False
    """Whether the launch of `load` takes the CPU as long as that of many layers."""


class CopyHangs(Exception):
    """A copy does not end, and nothing can make it."""


class CopyOrder(ABC):
    """Runs the copies of a plan so that its fences hold."""

    @abstractmethod
    def begin_step(self, plan: StepPlan, copies: Copies, layerwise: bool) -> None:
        """Queue the copies, before this step's compute.

        Args:
            plan: Whose copies to run.
            copies: How.
            layerwise: Let the attention layers wait for the loads, not the step.

        Raises:
            CopyHangs: A copy of this plan or of an earlier one. Nothing but
                `give_up` may be called then, and `end_step`.

        """

    def give_up(self) -> dict[int, list[int]]:
        """Launch no more copies.

        Returns:
            Device blocks that loads may still write to, at any time, by plan.

        """
        return {}

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

    def take_copy_times(self) -> Times:
        """Of the copies, and of the waits for loads, that ended since the last call."""
        return {}


# How long a closed gate holds up one part of a job that nobody waits for, and how
# often it looks whether somebody does.
_GATE_S, _LOOK_S = 0.02, 0.5e-3

# A copy that takes longer never ends. The longest take some seconds, with a slow link
# and memory that is not pinned.
_LIMIT_S = 30.0

# What is older must have ended before a stream is told to wait for it: a stream cannot
# be called back.
_OLD_S = 1.0

# Where nobody waits: how long a copy has that the process was too slow to look after.
_GRACE_S = 5.0

# A thread that launches gets the GIL after so long at most, and so does the step when
# it gave it away for a call of the driver. With Python's own 5 ms the link runs dry.
_SWITCH_INTERVAL_S = 0.5e-3

# Eight milliseconds of a fast link: a thread may be that late under load.
_AHEAD_PARTS_IN_FLIGHT = 6


def _nothing() -> None:
    pass


class InOrder(CopyOrder):
    """For devices without streams: every copy ends before the next begins."""

    def __init__(self) -> None:
        self._times: Times = {}

    def begin_step(self, plan: StepPlan, copies: Copies, layerwise: bool) -> None:
        for kind, copy, num_blocks in (
            ("store", copies.store, len(plan.store_slots)),
            ("load", copies.load, len(plan.load_slots)),
            ("load_ahead", copies.load_ahead, len(plan.ahead_slots)),
            ("clean", copies.clean, len(plan.clean_slots)),
        ):
            begun = time.perf_counter()
            copy(_nothing)
            seconds = time.perf_counter() - begun
            if num_blocks:
                self._times[kind, plan.seq] = num_blocks, seconds
                if kind == "load":
                    self._times["stall", plan.seq] = num_blocks, seconds

    def finish(self) -> None:
        pass

    def take_copy_times(self) -> Times:
        times, self._times = self._times, {}
        return times


class _Wait:
    """A wait of the compute stream for loads, and how long it took."""

    def __init__(self, done: Done) -> None:
        self._done = done
        self._begun: torch.cuda.Event | None = None

    def wait(self, stream: torch.cuda.Stream) -> None:
        self._begun = torch.cuda.Event(enable_timing=True)
        self._begun.record(stream)
        self._done.wait(stream)

    def has_ended(self) -> bool:
        return self._begun is None or (self._done.has_come() and self._begun.query())

    @property
    def seconds(self) -> float:
        """0 if what was waited for had come; it must have ended."""
        if self._begun is None:
            return 0.0
        return max(0.0, self._begun.elapsed_time(self._done.event) / 1e3)


class CudaStreams(CopyOrder):
    """Loads of the step on a stream, the rest on lanes, fences as events.

    Args:
        device: Of the compute stream.
        layer_waits: Where the layers of the model wait, if they do.

    """

    def __init__(self, device: torch.device, layer_waits: LayerWaits | None) -> None:
        self._device = device
        self._layer_waits = layer_waits
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
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

        self._store_lane = Lane(
            "kv-tier-store", device, parts_in_flight=1, gate=wait_for_step
        )

        # Loads of the step come before loads ahead: both want the link.
        def wait_for_load(job: Job) -> None:
            for load in last_load:
                load.wait_on_host()

        self._ahead_lane = Lane(
            "kv-tier-ahead", device, _AHEAD_PARTS_IN_FLIGHT, gate=wait_for_load
        )
        # Layers wait for kernels that load, and have more of their own.
        self._load_lane = Lane(
            "kv-tier-load", device, parts_in_flight=None, priority=-1
        )
        # By seq, oldest first. Each belongs to one stream, which runs in order: the
        # latest up to a fence covers all before it.
        self._begun: OrderedDict[int, Done] = OrderedDict()
        self._stored: OrderedDict[int, Job] = OrderedDict()
        self._cleaned: OrderedDict[int, Job] = OrderedDict()
        self._loaded: OrderedDict[int, Job] = OrderedDict()
        self._loaded_ahead: OrderedDict[int, Job] = OrderedDict()
        self._waits: OrderedDict[int, list[_Wait]] = OrderedDict()
        # Device blocks that loads fill, by seq.
        self._filling: dict[int, list[int]] = {}
        self._jobs = {
            "store": self._stored,
            "clean": self._cleaned,
            "load": self._loaded,
            "load_ahead": self._loaded_ahead,
        }
        # The oldest job of each kind when last looked at, and since when.
        self._oldest: dict[str, tuple[Job | None, float]] = {}
        self._load_times = (0, 0.0)
        self._times: Times = {}
        self._prefill = _StepTimer()

    def begin_step(self, plan: StepPlan, copies: Copies, layerwise: bool) -> None:
        self._gate.clear()
        self._forget_ended()
        self._check_oldest()
        compute = torch.cuda.current_stream(self._device)
        begun = self._begun[plan.seq] = Done()
        begun.record(compute)
        if plan.store_slots:
            job = Job(
                copies.store,
                self._before_stores(plan.store_after_compute, plan.store_after_loads),
                len(plan.store_slots),
            )
            self._stored[plan.seq] = self._store_lane.submit(job)
        load_after_stores = self._stores_up_to(plan.load_after_stores, plan)
        load_after = [
            *self._computed(plan.load_after_compute),
            *load_after_stores,
            *_latest(self._loaded_ahead, plan.load_after_loads),
        ]
        if plan.load_slots or plan.ahead_slots:
            self._check_old(load_after)
            self._filling[plan.seq] = [*plan.load_blocks, *plan.ahead_blocks]
        if plan.load_slots:
            self._load(plan, copies, layerwise, load_after, compute)
        if plan.ahead_slots:
            # A request waits for them.
            for store in load_after_stores:
                store.hurry()
            job = Job(copies.load_ahead, load_after, len(plan.ahead_slots))
            self._loaded_ahead[plan.seq] = self._ahead_lane.submit(job)
        if plan.clean_slots:
            # Loads of the step come first: both want the link.
            job = Job(
                copies.clean,
                self._before_stores(plan.clean_after_compute, plan.clean_after_loads)
                + [*_latest(self._loaded, plan.seq)],
                len(plan.clean_slots),
            )
            self._cleaned[plan.seq] = self._store_lane.submit(job)
        stores = self._stores_up_to(plan.compute_after_stores, plan)
        loads = [*_latest(self._loaded_ahead, plan.compute_after_loads)]
        compute_after = stores + loads
        _check_launched(compute_after)
        self._check_old(compute_after)
        if plan.connector_writes and not all(
            done.ends_within(_LIMIT_S) for done in compute_after
        ):
            raise CopyHangs
        for store in stores:
            store.wait(compute)
        for load in loads:
            self._new_wait(plan, load).wait(compute)

    def _new_wait(self, plan: StepPlan, done: Done) -> _Wait:
        wait = _Wait(done)
        self._waits.setdefault(plan.seq, []).append(wait)
        return wait

    def _before_stores(self, computed: int, loaded: int) -> list[Done]:
        return [
            *self._computed(computed),
            *_latest(self._loaded, loaded),
            *_latest(self._loaded_ahead, loaded),
        ]

    def _stores_up_to(self, seq: int, plan: StepPlan) -> list[Job]:
        """What a fence of `plan` for stores up to `seq` waits for."""
        return [
            *_latest(self._stored, seq),
            *_latest(self._cleaned, min(seq, plan.seq - 1)),
        ]

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
            _check_launched(after)
            self._load_lane.launch(job)
        self._loaded[plan.seq] = job
        # What waits for a lane must not be waited for by one.
        is_free = not any(isinstance(done, Job) for done in after)
        self._last_load[:] = [job] if is_free else []
        if layerwise and self._layer_waits is not None:
            waits = [self._new_wait(plan, end) for end in ends]
            self._layer_waits.arm(copies.load_parts, waits)
        else:
            self._new_wait(plan, job).wait(compute)

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
        for marks in self._jobs.values():
            for job in list(marks.values())[-1:]:
                job.wait_for_launch()
                job.wait_on_host()

    def take_times(
        self, num_tokens: int
    ) -> tuple[tuple[int, float], tuple[int, float]]:
        loads, self._load_times = self._load_times, (0, 0.0)
        return loads, self._prefill.next_step(num_tokens)

    def take_copy_times(self) -> Times:
        times, self._times = self._times, {}
        return times

    def _computed(self, seq: int) -> Iterator[Done]:
        """The end of all forward passes up to `seq`; nothing if it has come."""
        if seq:
            for begun, done in self._begun.items():
                if begun > seq:
                    yield done
                    return

    def give_up(self) -> dict[int, list[int]]:
        # First: what a closed lane drops counts as launched.
        self._forget_ended()
        under_way = {*self._loaded, *self._loaded_ahead}
        for lane in (self._store_lane, self._ahead_lane, self._load_lane):
            lane.close()
        if self._layer_waits is not None:
            self._layer_waits.disarm()
        return {s: blocks for s, blocks in self._filling.items() if s in under_way}

    def _check_oldest(self) -> None:
        """Raises `CopyHangs` if a job has been the next to end for too long."""
        now = time.monotonic()
        for kind, marks in self._jobs.items():
            job = next(iter(marks.values()), None)
            oldest, since = self._oldest.get(kind, (None, 0.0))
            if job is not oldest:
                self._oldest[kind] = job, now
            elif job is not None and now - since > _LIMIT_S:
                if not job.ends_within(_GRACE_S):
                    raise CopyHangs
                self._oldest[kind] = None, now

    @staticmethod
    def _check_old(fences: Iterable[Done]) -> None:
        """Raises `CopyHangs` if what was launched long ago does not end."""
        now = time.monotonic()
        for done in fences:
            is_old = isinstance(done, Job) and now - done.made > _OLD_S
            if is_old and not done.ends_within(_LIMIT_S):
                raise CopyHangs

    def _forget_ended(self) -> None:
        for kind, marks in self._jobs.items():
            for seq, done in list(marks.items()):
                if not done.has_come():
                    break
                del marks[seq]
                self._times[kind, seq] = done.num_blocks, done.seconds
                if kind == "load_ahead":
                    blocks, seconds = self._load_times
                    self._load_times = blocks + done.num_blocks, seconds + done.seconds
        for seq, waits in list(self._waits.items()):
            if not all(wait.has_ended() for wait in waits):
                break
            del self._waits[seq]
            self._times["stall", seq] = len(waits), sum(w.seconds for w in waits)
        for seq in [*self._filling]:
            if seq not in self._loaded and seq not in self._loaded_ahead:
                del self._filling[seq]
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


def _check_launched(fences: Iterable[Done]) -> None:
    """Raises `CopyHangs` if the thread that launches one of them does not."""
    for done in fences:
        if not done.wait_for_launch(_LIMIT_S):
            raise CopyHangs


def _latest(marks: "OrderedDict[int, Job]", seq: int) -> Iterator[Job]:
    """The last of `marks` up to `seq`, unless it has ended."""
    latest: Job | None = None
    if seq:
        for recorded, done in marks.items():
            if recorded > seq:
                break
            latest = done
    if latest is not None:
        yield latest
