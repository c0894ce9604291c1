# SPDX-License-Identifier: Apache-2.0
"""A thread that launches copies on its own stream, next to the steps.

Launching a copy takes the CPU about half a microsecond for each piece, so a long one
takes longer than a decoding step. The driver call releases the GIL.
"""

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

from vllm.logger import init_logger
from vllm.v1.kv_tier.rank.copy_order import Copy
from vllm.v1.kv_tier.rank.tuning import DEFAULT_TUNING, RankTuning

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
        del job
