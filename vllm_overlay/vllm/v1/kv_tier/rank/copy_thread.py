# SPDX-License-Identifier: Apache-2.0
"""Copies that a thread launches beside the step, on a stream of their own.

A batch of small copies takes the CPU about half a microsecond for each of them, a
long one more than a decoding step has. The driver call runs without the GIL.
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
    """The end of work on a stream, which may not have been launched yet.

    Args:
        look_s: How often to look for the end where the wait for it is bounded.

    """

    def __init__(self, look_s: float = DEFAULT_TUNING.look_s) -> None:
        self._look_s = look_s
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)
        self._launched = threading.Event()

    def record(self, stream: torch.cuda.Stream) -> None:
        """All work that is on `stream` by now."""
        self.event.record(stream)
        self._launched.set()

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Make `stream` wait for the end; the caller for the launch only."""
        self.wait_for_launch()
        stream.wait_event(self.event)

    def wait_for_launch(self, timeout_s: float | None = None) -> bool:
        """Returns whether it came within `timeout_s`."""
        return self._launched.wait(timeout_s)

    def ends_within(self, timeout_s: float) -> bool:
        """Wait on the host, no longer than that. Returns whether the end came."""
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
        copy: What to do.
        after: What must have ended before.
        num_blocks: Size of the copy.

    """

    def __init__(self, copy: Copy, after: Sequence[Done], num_blocks: int) -> None:
        super().__init__()
        self.made = time.monotonic()
        self.copy = copy
        self.after = after
        self.num_blocks = num_blocks
        # Begin and end of what the stream copied without a wait in between.
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._begun: torch.cuda.Event | None = None
        self.is_urgent = False
        """Somebody waits for the launch: no time for gates."""
        self._woken = threading.Event()
        self.before: Job | None = None
        """The job that its thread launches first, if it has not yet."""

    def wait_for_launch(self, timeout_s: float | None = None) -> bool:
        self.hurry()
        return super().wait_for_launch(timeout_s)

    def hurry(self) -> None:
        """Launch it, and what it waits for, without gates and with less pacing."""
        # No recursion: behind a copy that hangs, thousands may have queued up.
        jobs: list[Job] = [self]
        while jobs:
            job = jobs.pop()
            if not job.is_urgent:
                job.is_urgent = True
                job.wake()
                before = (*job.after, job.before)
                jobs.extend(each for each in before if isinstance(each, Job))

    def rest(self, timeout_s: float) -> None:
        """Let its thread sleep so long, or until somebody calls `wake`."""
        self._woken.wait(timeout_s)
        self._woken.clear()

    def wake(self) -> None:
        """Something that its thread may wait for is so now."""
        self._woken.set()

    def forget(self) -> None:
        """It was launched. Without it, jobs would keep all before them."""
        self.copy = lambda between_parts: None
        self.after = ()
        self.before = None

    def record_begin(self, stream: torch.cuda.Stream) -> None:
        """What comes next on `stream` is the copy."""
        self._begun = torch.cuda.Event(enable_timing=True)
        self._begun.record(stream)

    def record_break(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """The copy is interrupted. Returns what has come when it has so far."""
        ended = torch.cuda.Event(enable_timing=True, blocking=True)
        ended.record(stream)
        if self._begun is not None:
            self._spans.append((self._begun, ended))
            self._begun = None
        return ended

    @property
    def seconds(self) -> float:
        """How long the copy took, without the waits at gates between its parts; it
        must have ended. 0: it never began."""
        spans = [*self._spans]
        if self._begun is not None:
            spans.append((self._begun, self.event))
        return sum(begun.elapsed_time(ended) for begun, ended in spans) / 1e3


class Gate:
    """What keeps a thread from launching copies for a while. It is open at first.

    Nobody looks again and again whether it is open: each look would take Python's lock
    from the step whose launch closed the gate.
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
        """Until it is open, or `job` urgent, or so much time is over. One thread."""
        ends = time.monotonic() + timeout_s
        self._waiting = job
        while not (self._is_open or job.is_urgent):
            if (left_s := ends - time.monotonic()) <= 0:
                break
            job.rest(left_s)
        self._waiting = None


class CopyThread:
    """A stream of copies, and the thread that launches them in the order of their jobs.

    Args:
        name: Of the thread.
        device: Where the stream is.
        parts_in_flight: Parts of a copy that are queued on the device at a time:
            enough for it to go on until the thread has Python's lock again. More of
            them would hold up what is more urgent. The thread also waits for what a
            job waits for. None: all is queued at once.
        gate: Called before each part of a job that is not urgent, to wait for what
            comes first.
        priority: Of its kernels; those of a lower number are scheduled first.
        tuning: How patient it is.

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
        # The thread keeps no reference to this. Runs at exit at the latest: a thread
        # that waits for the device then ends the process with an abort.
        weakref.finalize(self, _end, self._jobs, thread, tuning.end_within_s)

    def submit(self, job: Job) -> Job:
        """Let the thread launch `job`."""
        job.before = self._last
        self._last = job
        self._jobs.put(job)
        return job

    def launch(self, job: Job) -> Job:
        """Launch `job` here and now."""
        if self._last is not None:
            self._last.wait_for_launch()
            self._last = None
        self._launcher.launch(job)
        return job

    def close(self) -> None:
        """Launch none of the jobs that are not launched yet, and no other."""
        self._launcher.is_closed = True


class _Launcher:
    """What launches the jobs of a stream, in whichever thread it is called."""

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
                    # What waits on the device fills the launch queue. But somebody may
                    # come to wait for the launch of this job, or of one behind it.
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
            # Others wait for it, come what may.
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
