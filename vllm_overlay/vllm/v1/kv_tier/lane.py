# SPDX-License-Identifier: Apache-2.0
"""Copies that are launched beside the step, by a thread of their own.

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

logger = init_logger(__name__)

Copy = Callable[[Callable[[], None]], None]
"""Queues copies on the current stream, part by part, and calls its argument after
each part. Never raises: a failure is the business of whoever wrote it."""

# Parts that are queued on the device at a time of a job whose launch somebody waits
# for. More would fill the launch queue (1,024 copies), for which whoever launches next
# waits with the driver's lock.
_URGENT_PARTS_IN_FLIGHT = 10

_END_WITHIN_S = 10.0

# How often the host looks whether a copy has ended that it does not trust to.
_LOOK_S = 1e-3


class Done:
    """The end of work on a stream, which may not have been launched yet."""

    def __init__(self) -> None:
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
            time.sleep(_LOOK_S)
        return True

    def wait_on_host(self) -> None:
        self._launched.wait()
        self.event.synchronize()

    def has_come(self) -> bool:
        return self._launched.is_set() and self.event.query()


class Job(Done):
    """A copy on a lane.

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
        self.begun: torch.cuda.Event | None = None
        self.is_urgent = False
        """Somebody waits for the launch: no time for gates."""
        self.before: Job | None = None
        """The job that its lane launches first, if it has not yet."""

    def wait_for_launch(self, timeout_s: float | None = None) -> bool:
        self.hurry()
        return super().wait_for_launch(timeout_s)

    def hurry(self) -> None:
        """Launch it, and what it waits for, without gates and with less pacing."""
        if not self.is_urgent:
            self.is_urgent = True
            for done in (*self.after, self.before):
                if isinstance(done, Job):
                    done.hurry()

    def forget(self) -> None:
        """It was launched. Without it, jobs would keep all before them."""
        self.copy = lambda after_part: None
        self.after = ()
        self.before = None

    @property
    def seconds(self) -> float:
        """How long the copy took; it must have ended. 0: it never began."""
        return self.begun.elapsed_time(self.event) / 1e3 if self.begun else 0.0


class Lane:
    """A stream of copies. They run in the order of their jobs.

    Args:
        name: Of the thread.
        device: Where the stream is.
        parts_in_flight: Parts of a copy that are queued on the device at a time:
            enough for it to go on until the thread has the GIL again. More of them
            would hold up what is more urgent. The thread also waits for what a job
            waits for. None: all is queued at once.
        gate: Called before each part of a job that is not urgent, to wait for what
            comes first.
        priority: Of its kernels; those of a lower number are scheduled first.

    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        parts_in_flight: int | None = 3,
        gate: Callable[[Job], object] = lambda job: None,
        priority: int = 0,
    ) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._last: Job | None = None
        self._launcher = _Launcher(
            torch.cuda.Stream(device, priority), parts_in_flight, gate
        )
        thread = threading.Thread(
            target=_run, args=(self._jobs, self._launcher), name=name, daemon=True
        )
        thread.start()
        # The thread keeps no reference to the lane. Runs at exit at the latest: a
        # thread that waits for the device then ends the process with an abort.
        weakref.finalize(self, _end, self._jobs, thread)

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
    def __init__(
        self,
        stream: torch.cuda.Stream,
        parts_in_flight: int | None,
        gate: Callable[[Job], object],
    ) -> None:
        self.stream = stream
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
                        time.sleep(_LOOK_S)
                done.wait(self.stream)
            if not job.is_urgent:
                self._gate(job)
            if self.is_closed:
                return
            with torch.inference_mode(), torch.cuda.stream(self.stream):
                job.begun = torch.cuda.Event(enable_timing=True)
                job.begun.record(self.stream)
                job.copy(lambda: self._after_part(job))
        finally:
            # Others wait for it, come what may.
            job.record(self.stream)
            job.forget()
            self._parts.clear()

    def _after_part(self, job: Job) -> None:
        if (limit := self._parts_in_flight) is not None:
            event = torch.cuda.Event(blocking=True)
            event.record(self.stream)
            self._parts.append(event)
            if job.is_urgent:
                limit = _URGENT_PARTS_IN_FLIGHT
            if len(self._parts) > limit:
                self._parts.popleft().synchronize()
        if not job.is_urgent:
            self._gate(job)


def _end(jobs: "queue.SimpleQueue[Job | None]", thread: threading.Thread) -> None:
    jobs.put(None)
    thread.join(timeout=_END_WITHIN_S)


def _run(jobs: "queue.SimpleQueue[Job | None]", launcher: _Launcher) -> None:
    torch.cuda.set_device(launcher.stream.device)
    while (job := jobs.get()) is not None:
        try:
            launcher.launch(job)
        except Exception:
            # Copies report their own failures; this is one of the device.
            logger.exception("KV tier: a thread could not wait for the device.")
        del job
