# SPDX-License-Identifier: Apache-2.0
"""Copies and compute on a GPU: fences of plans as waits of streams, threads that launch
copies while steps run, and the times that all of it takes.
"""

import math
import queue
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack

import torch

from vllm.logger import init_logger
from vllm.v1.kv_tier.gil import fast_switching
from vllm.v1.kv_tier.plan import CopyTime, PrefillTime, StepPlan, Times
from vllm.v1.kv_tier.tuning import DEFAULT_TUNING, RankTuning
from vllm.v1.kv_tier.worker.copies import Copies, Copy, CopyHangs, CopyOrder
from vllm.v1.kv_tier.worker.layers import LayerWaits
from vllm.v1.kv_tier.worker.sharing import Peers

logger = init_logger(__name__)


class Done:
    """The end of work on a stream, possibly not launched yet.

    Args:
        look_s: Seconds between polls in `ends_within`.

    """

    def __init__(self, look_s: float = DEFAULT_TUNING.look_s) -> None:
        self._look_s = look_s
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)
        self._launched = threading.Event()

    def record(self, stream: torch.cuda.Stream) -> None:
        """Record the end of all work on `stream` so far."""
        self.event.record(stream)
        self._launched.set()

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Make `stream` wait for the end. The caller waits for the launch only."""
        self.wait_for_launch()
        stream.wait_event(self.event)

    def wait_for_launch(self, timeout_s: float | None = None) -> bool:
        """Wait for the launch. Returns whether it came within `timeout_s`."""
        return self._launched.wait(timeout_s)

    def ends_within(self, timeout_s: float) -> bool:
        """Wait on the host for the end. Returns whether it came within `timeout_s`."""
        limit = time.monotonic() + timeout_s
        if not self.wait_for_launch(timeout_s):
            return False
        while not self.event.query():
            if time.monotonic() > limit:
                return False
            time.sleep(self._look_s)
        return True

    def wait_on_host(self) -> None:
        self._launched.wait()
        self.event.synchronize()

    def has_come(self) -> bool:
        return self._launched.is_set() and self.event.query()


class Job(Done):
    """A copy that a `CopyThread` launches.

    Args:
        copy: Queues the copy.
        after: What must have ended before.
        num_blocks: Size of the copy.

    """

    def __init__(self, copy: Copy, after: Sequence[Done], num_blocks: int) -> None:
        super().__init__()
        self.made = time.monotonic()
        self.copy = copy
        self.after = after
        self.num_blocks = num_blocks
        # Begin and end of each stretch of copying without a wait.
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._begun: torch.cuda.Event | None = None
        self.is_urgent = False
        """Whether the launch is waited for, so that gates are skipped."""
        self._woken = threading.Event()
        self.before: Job | None = None
        """The previous job of the same thread, until this one is launched."""
        self.turns = ExitStack()
        """Closed once a thread has launched it: lets threads take turns until then."""

    def wait_for_launch(self, timeout_s: float | None = None) -> bool:
        self.hurry()
        return super().wait_for_launch(timeout_s)

    def hurry(self) -> None:
        """Launch this job and those it depends on without gates, less paced."""
        # Not recursive: thousands of jobs may be queued after a copy that hangs.
        jobs: list[Job] = [self]
        while jobs:
            job = jobs.pop()
            if not job.is_urgent:
                job.is_urgent = True
                job.wake()
                before = (*job.after, job.before)
                jobs.extend(each for each in before if isinstance(each, Job))

    def rest(self, timeout_s: float) -> None:
        """Let the launching thread sleep until `wake`, or for `timeout_s`."""
        self._woken.wait(timeout_s)
        self._woken.clear()

    def wake(self) -> None:
        """Wake the launching thread, since its condition may hold now."""
        self._woken.set()

    def forget(self) -> None:
        """Drop references after the launch. They would keep all earlier jobs alive."""
        self.copy = lambda between_parts: None
        self.after = ()
        self.before = None

    def record_begin(self, stream: torch.cuda.Stream) -> None:
        """Record that the copy starts or continues on `stream`."""
        self._begun = torch.cuda.Event(enable_timing=True)
        self._begun.record(stream)

    def record_break(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Record a break of the copy. Returns an event for its end so far."""
        ended = torch.cuda.Event(enable_timing=True, blocking=True)
        ended.record(stream)
        if self._begun is not None:
            self._spans.append((self._begun, ended))
            self._begun = None
        return ended

    @property
    def seconds(self) -> float:
        """Seconds of copying, without waits between parts; 0 if it never began.

        The job must have ended.
        """
        spans = [*self._spans]
        if self._begun is not None:
            spans.append((self._begun, self.event))
        return sum(begun.elapsed_time(ended) for begun, ended in spans) / 1e3


class Gate:
    """Keeps a thread from launching copies for a while. Initially open.

    The thread sleeps instead of polling: each poll would take the GIL from the step
    whose launch closed the gate.
    """

    def __init__(self) -> None:
        self._is_open = True
        self._waiting: Job | None = None

    def close(self) -> None:
        self._is_open = False

    def open(self) -> None:
        self._is_open = True
        if (job := self._waiting) is not None:
            job.wake()

    def wait(self, job: Job, timeout_s: float) -> None:
        """Wait until the gate is open, `job` is urgent, or `timeout_s` has passed.

        For one thread only.
        """
        ends = time.monotonic() + timeout_s
        self._waiting = job
        while not (self._is_open or job.is_urgent):
            if (left_s := ends - time.monotonic()) <= 0:
                break
            job.rest(left_s)
        self._waiting = None


class CopyThread:
    """A stream of copies, and the thread that launches them in the order of submission.

    Args:
        name: Name of the thread.
        device: Device of the stream.
        parts_in_flight: Parts of a copy that are queued on the device at a time: enough
            to keep it busy until the thread gets the GIL again, but few enough not to
            hold up more urgent work. The thread also waits for a job's dependencies.
            None: queue all at once.
        gate: Called before each part of a job that is not urgent, to wait for work with
            precedence.
        priority: Stream priority; lower numbers are scheduled first.
        tuning: Timeouts and limits.

    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        parts_in_flight: int | None = 3,
        gate: Callable[[Job], object] = lambda job: None,
        priority: int = 0,
        tuning: RankTuning = DEFAULT_TUNING,
    ) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._last: Job | None = None
        self._switch_interval_s = tuning.switch_interval_s
        self._launcher = _Launcher(
            torch.cuda.Stream(device, priority), parts_in_flight, gate, tuning
        )
        thread = threading.Thread(
            target=_run, args=(self._jobs, self._launcher), name=name, daemon=True
        )
        thread.start()
        # The thread holds no reference to this object, so this runs at exit at the
        # latest. A thread that still waits for the device then would abort the process.
        weakref.finalize(self, _end, self._jobs, thread, tuning.end_within_s)

    def submit(self, job: Job) -> Job:
        """Let the thread launch `job`."""
        # Only as long as there is one: a step without copies should not be interrupted
        # more often than without the tier.
        job.turns.enter_context(fast_switching(self._switch_interval_s))
        job.before = self._last
        self._last = job
        self._jobs.put(job)
        return job

    def launch(self, job: Job) -> Job:
        """Launch `job` in the calling thread."""
        if self._last is not None:
            self._last.wait_for_launch()
            self._last = None
        self._launcher.launch(job)
        return job

    def close(self) -> None:
        """Launch no more jobs, including those that are queued."""
        self._launcher.is_closed = True


class _Launcher:
    """Launches the jobs of a stream, from any thread."""

    def __init__(
        self,
        stream: torch.cuda.Stream,
        parts_in_flight: int | None,
        gate: Callable[[Job], object],
        tuning: RankTuning,
    ) -> None:
        self.stream = stream
        self._tuning = tuning
        self._parts_in_flight = parts_in_flight
        self._gate = gate
        self._parts: deque[torch.cuda.Event] = deque()
        self.is_closed = False

    def launch(self, job: Job) -> None:
        try:
            if self.is_closed:
                return
            for done in job.after:
                if self._parts_in_flight is not None:
                    # Jobs that wait on the device fill the launch queue. The thread
                    # stops waiting when this job, or a later one, becomes urgent.
                    while not (job.is_urgent or done.has_come()):
                        job.rest(self._tuning.fence_look_s)
                done.wait(self.stream)
            if not job.is_urgent:
                self._gate(job)
            if self.is_closed:
                return
            with torch.inference_mode(), torch.cuda.stream(self.stream):
                job.record_begin(self.stream)
                job.copy(lambda: self._between_parts(job))
        finally:
            # Others wait for the job, even if it failed.
            job.record(self.stream)
            job.forget()
            self._parts.clear()

    def _between_parts(self, job: Job) -> None:
        if (limit := self._parts_in_flight) is None:
            return
        self._parts.append(job.record_break(self.stream))
        if job.is_urgent:
            limit = self._tuning.urgent_parts_in_flight
        if len(self._parts) > limit:
            self._parts.popleft().synchronize()
        if not job.is_urgent:
            self._gate(job)
        job.record_begin(self.stream)


def _end(
    jobs: "queue.SimpleQueue[Job | None]", thread: threading.Thread, within_s: float
) -> None:
    jobs.put(None)
    thread.join(timeout=within_s)


def _run(jobs: "queue.SimpleQueue[Job | None]", launcher: _Launcher) -> None:
    torch.cuda.set_device(launcher.stream.device)
    while (job := jobs.get()) is not None:
        try:
            launcher.launch(job)
        except Exception:
            # Copies report their own failures; this is one of the device.
            logger.exception("KV tier: a thread could not wait for the device.")
        finally:
            job.turns.close()
        del job


# Measures how long steps take, and how long they wait for their loads.


class PrefillTimer:
    """Times forward passes on the device, one at a time."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._begun, self._ended = Done(), Done()
        self._is_open = False

    def next_step(self, num_tokens: int) -> PrefillTime:
        """Start a step. Returns the time of one that ended since the last call.

        Args:
            num_tokens: Tokens of the step, or 0 not to time it.

        """
        time_taken = PrefillTime(0, 0.0)
        if self._num_tokens and self._ended.has_come():
            milliseconds = self._begun.event.elapsed_time(self._ended.event)
            time_taken = PrefillTime(self._num_tokens, milliseconds / 1e3)
            self._num_tokens = 0
        if num_tokens and not self._num_tokens:
            self._num_tokens = num_tokens
            self._begun, self._ended = Done(), Done()
            self._begun.record(torch.cuda.current_stream())
            self._is_open = True
        return time_taken

    def end_step(self) -> None:
        if self._is_open:
            self._is_open = False
            self._ended.record(torch.cuda.current_stream())


class LoadWait:
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
        """Seconds of the wait, 0 if the loads had ended before. It must have ended."""
        if self._begun is None:
            return 0.0
        return max(0.0, self._begun.elapsed_time(self._done.event) / 1e3)


Jobs = OrderedDict[int, Job]
"""Jobs of one stream by the `seq` of their plan, oldest first. A stream runs in order,
so the latest job up to a fence covers all earlier ones."""


class CudaStreams(CopyOrder):
    """Runs each kind of copy on its own stream, with a thread that launches it.

    The step itself launches its loads, unless that takes long. Stores are launched
    while no step is being launched, and loads ahead while no step waits for loads, so
    that driver lock and link have one user at a time.

    Args:
        device: Device of the compute stream.
        layer_waits: Waits of the layers, if layers wait for their own loads.
        tuning: Queue lengths and timeouts.
        peers: The ranks that share the slots, if any.

    """

    def __init__(
        self,
        device: torch.device,
        layer_waits: LayerWaits | None,
        tuning: RankTuning = DEFAULT_TUNING,
        peers: Peers | None = None,
    ) -> None:
        self._device = device
        self._peers = peers
        self._layer_waits = layer_waits
        self._tuning = tuning
        # Open while no step is being launched.
        self._gate = Gate()
        # Loads of the newest step, if loads ahead may wait for them.
        self._last_load = list[Job]()
        self._store_thread = CopyThread(
            "kv-tier-store",
            device,
            tuning.store_parts_in_flight,
            gate=_step_first(self._gate, tuning),
            tuning=tuning,
        )
        self._ahead_thread = CopyThread(
            "kv-tier-ahead",
            device,
            tuning.ahead_parts_in_flight,
            gate=_loads_first(self._last_load),
            tuning=tuning,
        )
        # High priority, since layers wait for the kernels that load.
        self._load_thread = CopyThread(
            "kv-tier-load", device, parts_in_flight=None, priority=-1, tuning=tuning
        )
        # Position of the compute stream at the begin of each step.
        self._begun: OrderedDict[int, Done] = OrderedDict()
        self._stored, self._cleaned = Jobs(), Jobs()
        self._loaded, self._loaded_ahead = Jobs(), Jobs()
        self._jobs: dict[str, Jobs] = {
            "store": self._stored,
            "clean": self._cleaned,
            "load": self._loaded,
            "load_ahead": self._loaded_ahead,
        }
        # The loads that layers of the newest step wait for.
        self._armed: Job | None = None
        # Device blocks that loads fill, by seq.
        self._filling: dict[int, list[int]] = {}
        # The oldest job of each kind at the last check, and since when it is the
        # oldest.
        self._oldest: dict[str, tuple[Job | None, float]] = {}
        self._waits: OrderedDict[int, list[LoadWait]] = OrderedDict()
        self._times: Times = {}
        self._prefill = PrefillTimer()

    # ------------------------------------------------------------------ a step

    def begin_step(self, plan: StepPlan, copies: Copies, layerwise: bool) -> None:
        self._gate.close()
        self._forget_ended()
        self._check_oldest()
        compute = torch.cuda.current_stream(self._device)
        begun = self._begun[plan.seq] = Done()
        begun.record(compute)
        if plan.store_slots:
            self._stored[plan.seq] = self._store_thread.submit(
                Job(
                    copies.store,
                    self._before_stores(
                        plan.store_after_compute, plan.store_after_loads
                    ),
                    len(plan.store_slots),
                )
            )
        if plan.load_slots or plan.ahead_slots:
            self._queue_loads(plan, copies, layerwise, compute)
        if plan.clean_slots:
            # Loads of the step come first, since both use the link.
            after = [
                *self._before_stores(plan.clean_after_compute, plan.clean_after_loads),
                *_latest(self._loaded, plan.seq),
            ]
            self._cleaned[plan.seq] = self._store_thread.submit(
                Job(copies.clean, after, len(plan.clean_slots))
            )
        if self._peers is not None:
            jobs = {kind: each.get(plan.seq) for kind, each in self._jobs.items()}
            self._peers.watch(plan, jobs, self._device)
        self._fence_compute(plan, compute)

    def end_step(self) -> bool:
        self._gate.open()
        self._prefill.end_step()
        loads, self._armed = self._armed, None
        if loads is None or self._layer_waits is None:
            return True
        all_waited = self._layer_waits.disarm()
        # Later work on the compute stream then needs no wait. A load that waits for a
        # thread must be launched before the next one is queued behind it. If it has
        # ended, it may already be forgotten.
        loads.wait(torch.cuda.current_stream(self._device))
        return all_waited

    def have_ended(self, stores: int, loads: int) -> bool:
        self._forget_ended()
        return not (
            _first(self._stored) <= stores
            or _first(self._cleaned) <= stores
            or _first(self._loaded) <= loads
            or _first(self._loaded_ahead) <= loads
        )

    def finish(self) -> None:
        for jobs in self._jobs.values():
            for job in list(jobs.values())[-1:]:
                job.wait_for_launch()
                job.wait_on_host()

    def _queue_loads(
        self,
        plan: StepPlan,
        copies: Copies,
        layerwise: bool,
        compute: torch.cuda.Stream,
    ) -> None:
        """Queue the loads of the step, and loads ahead."""
        after_stores = self._stores_up_to(plan.load_after_stores, plan)
        after = [
            *self._computed(plan.load_after_compute),
            *after_stores,
            *_latest(self._loaded_ahead, plan.load_after_loads),
        ]
        self._check_old(after)
        self._filling[plan.seq] = [*plan.load_blocks, *plan.ahead_blocks]
        if plan.load_slots:
            self._load(plan, copies, layerwise, after, compute)
        if plan.ahead_slots:
            # A request waits for these loads.
            for store in after_stores:
                store.hurry()
            self._loaded_ahead[plan.seq] = self._ahead_thread.submit(
                Job(copies.load_ahead, after, len(plan.ahead_slots))
            )

    def _load(
        self,
        plan: StepPlan,
        copies: Copies,
        layerwise: bool,
        after: list[Done],
        compute: torch.cuda.Stream,
    ) -> None:
        """Queue loads that the step, or each of its layers, waits for."""
        ends = [Done() for _ in copies.load_parts]
        job = Job(self._telling(copies.load, ends), after, len(plan.load_slots))
        if copies.load_launches_long:
            self._load_thread.submit(job)
        else:
            self._check_launched(after)
            self._load_thread.launch(job)
        self._loaded[plan.seq] = job
        # A thread must not wait for a load that waits for a thread itself.
        is_free = not any(isinstance(done, Job) for done in after)
        self._last_load[:] = [job] if is_free else []
        if layerwise and self._layer_waits is not None:
            waits = [self._new_wait(plan, end) for end in ends]
            self._layer_waits.arm(copies.load_parts, waits)
            self._armed = job
        else:
            self._new_wait(plan, job).wait(compute)

    def _telling(self, copy: Copy, ends: list[Done]) -> Copy:
        """Wrap `copy` to record the end of each of its parts."""

        def run(between_parts: Callable[[], None]) -> None:
            stream = torch.cuda.current_stream(self._device)
            left = iter(ends)
            copy(lambda: next(left).record(stream))
            # The last part, or the parts that a failed load left out.
            for end in left:
                end.record(stream)

        return run

    def _fence_compute(self, plan: StepPlan, compute: torch.cuda.Stream) -> None:
        """Make the forward pass wait for the plan's fences."""
        stores = self._stores_up_to(plan.compute_after_stores, plan)
        loads = [*_latest(self._loaded_ahead, plan.compute_after_loads)]
        after = stores + loads
        self._check_launched(after)
        self._check_old(after)
        if plan.connector_writes and not all(
            done.ends_within(self._tuning.limit_s) for done in after
        ):
            raise CopyHangs
        for store in stores:
            store.wait(compute)
        for load in loads:
            self._new_wait(plan, load).wait(compute)

    def _new_wait(self, plan: StepPlan, done: Done) -> LoadWait:
        wait = LoadWait(done)
        self._waits.setdefault(plan.seq, []).append(wait)
        return wait

    # ------------------------------------------------------------------ fences

    def _computed(self, seq: int) -> Iterator[Done]:
        """The end of all forward passes up to `seq`; nothing if they have ended."""
        if seq:
            for begun, done in self._begun.items():
                if begun > seq:
                    yield done
                    return

    def _before_stores(self, computed: int, loaded: int) -> list[Done]:
        """What fences on forward passes and loads up to these plans wait for."""
        return [
            *self._computed(computed),
            *_latest(self._loaded, loaded),
            *_latest(self._loaded_ahead, loaded),
        ]

    def _stores_up_to(self, seq: int, plan: StepPlan) -> list[Job]:
        """What a fence of `plan` on stores up to `seq` waits for."""
        return [
            *_latest(self._stored, seq),
            *_latest(self._cleaned, min(seq, plan.seq - 1)),
        ]

    # ------------------------------------------------------------------ hangs

    def give_up(self) -> dict[int, list[int]]:
        # First, since jobs that a closed thread drops count as launched.
        self._forget_ended()
        under_way = {*self._loaded, *self._loaded_ahead}
        for thread in (self._store_thread, self._ahead_thread, self._load_thread):
            thread.close()
        self._armed = None
        if self._layer_waits is not None:
            self._layer_waits.disarm()
        return {s: blocks for s, blocks in self._filling.items() if s in under_way}

    def _check_oldest(self) -> None:
        """Check the oldest job of each kind.

        Raises:
            CopyHangs: One has been the oldest for too long.

        """
        now = time.monotonic()
        for kind, jobs in self._jobs.items():
            job = next(iter(jobs.values()), None)
            oldest, since = self._oldest.get(kind, (None, 0.0))
            if job is not oldest:
                self._oldest[kind] = job, now
            elif job is not None and now - since > self._tuning.limit_s:
                if not job.ends_within(self._tuning.grace_s):
                    raise CopyHangs
                self._oldest[kind] = None, now

    def _check_old(self, fences: Iterable[Done]) -> None:
        """Check jobs that were queued long ago.

        Raises:
            CopyHangs: One does not end.

        """
        now = time.monotonic()
        for done in fences:
            is_old = isinstance(done, Job) and now - done.made > self._tuning.old_s
            if is_old and not done.ends_within(self._tuning.limit_s):
                raise CopyHangs

    def _check_launched(self, fences: Iterable[Done]) -> None:
        """Wait until the jobs are launched.

        Raises:
            CopyHangs: The thread that launches one of them does not.

        """
        for done in fences:
            if not done.wait_for_launch(self._tuning.limit_s):
                raise CopyHangs

    # ------------------------------------------------------------------ times

    def take_prefill_time(self, num_tokens: int) -> PrefillTime:
        return self._prefill.next_step(num_tokens)

    def take_copy_times(self) -> Times:
        times, self._times = self._times, {}
        return times

    def _forget_ended(self) -> None:
        for kind, jobs in self._jobs.items():
            for seq, job in list(jobs.items()):
                if not job.has_come():
                    break
                del jobs[seq]
                self._times[kind, seq] = CopyTime(job.num_blocks, job.seconds)
        for seq, waits in list(self._waits.items()):
            if not all(wait.has_ended() for wait in waits):
                break
            del self._waits[seq]
            seconds = sum(wait.seconds for wait in waits)
            self._times["stall", seq] = CopyTime(len(waits), seconds)
        for seq in [*self._filling]:
            if seq not in self._loaded and seq not in self._loaded_ahead:
                del self._filling[seq]
        # Keep the last one that has ended, which covers all earlier ones.
        come = [seq for seq, done in self._begun.items() if done.has_come()]
        for seq in come[:-1]:
            del self._begun[seq]


# Threads outlive the streams, so their gates must not reference them.
def _step_first(gate: Gate, tuning: RankTuning) -> Callable[[Job], None]:
    """A gate that lets launches of steps go before those of stores.

    Both use the driver.
    """
    return lambda job: gate.wait(job, tuning.gate_s)


def _loads_first(last_load: list[Job]) -> Callable[[Job], None]:
    """A gate that lets loads of a step go before loads ahead.

    Both use the link.
    """

    def wait_for_load(job: Job) -> None:
        for load in last_load:
            load.wait_on_host()

    return wait_for_load


def _first(jobs: Jobs) -> float:
    """The plan of the oldest job that has not ended; infinite if there is none."""
    return next(iter(jobs), math.inf)


def _latest(jobs: Jobs, seq: int) -> Iterator[Job]:
    """The last of `jobs` up to `seq`, unless it has ended."""
    latest: Job | None = None
    if seq:
        for recorded, job in jobs.items():
            if recorded > seq:
                break
            latest = job
    if latest is not None:
        yield latest
