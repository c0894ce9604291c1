# SPDX-License-Identifier: Apache-2.0
"""A CUDA device without a device, for what runs on streams.

Work is a closure on a queue. No thread executes it: whoever waits on the host does,
as far as it must; how much more is executed, and when, is a matter of luck. So the
order is any that streams and events allow, and mostly one that no GPU would choose.

Events have CUDA's semantics: a wait is one for the last record before it, and waits
for nothing where there was none; a record is reached in the order of its stream.
"""

import faulthandler
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryFile
from typing import Literal

import pytest
import torch

Pace = Literal["late", "random", "eager"]
PACES: tuple[Pace, ...] = ("late", "random", "eager")

# How long a thread of the host may wait for another one.
PATIENCE_S = 5.0

_MANY_QUERIES = 30


class Stuck(BaseException):
    """A thread waited too long. No `Exception`: nothing may take it for a failure
    of what it waited for."""


class Record:
    """One call of `Event.record`."""

    def __init__(self, stream: "Stream") -> None:
        self.stream = stream
        self.reached_ms: float | None = None


class Stream:
    """In place of `torch.cuda.Stream`."""

    def __init__(
        self,
        cuda: "FakeCuda",
        device: torch.device | None = None,
        priority: int = 0,
    ) -> None:
        self.device = device
        self.cuda = cuda
        self.queue: deque[Callable[[], None] | Record] = deque()
        """Closures, records of this stream, and records of others to wait for."""

    def wait_event(self, event: "Event") -> None:
        if event.last is not None:
            self.cuda.enqueue(self, event.last)


class Event:
    """In place of `torch.cuda.Event`."""

    def __init__(
        self, cuda: "FakeCuda", enable_timing: bool = False, blocking: bool = False
    ) -> None:
        self._cuda = cuda
        self._has_times = enable_timing
        self._num_queries = 0
        self.last: Record | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._cuda.current_stream()
        self.last = Record(stream)
        self._cuda.enqueue(stream, self.last)

    def query(self) -> bool:
        self._cuda.progress()
        if self.last is None or self.last.reached_ms is not None:
            return True
        # Whoever asks so often waits for it.
        self._num_queries += 1
        if self._num_queries % _MANY_QUERIES == 0:
            self._cuda.wait(self.last)
        return False

    def synchronize(self) -> None:
        if self.last is not None:
            self._cuda.wait(self.last)

    def elapsed_time(self, end: "Event") -> float:
        for event in (self, end):
            if not event._has_times:
                raise ValueError("The event has no times.")
            if event.last is None or event.last.reached_ms is None:
                raise RuntimeError("The event has not come.")
        return end.last.reached_ms - self.last.reached_ms  # type: ignore


class FakeCuda:
    """The device, and the part of `torch.cuda` that the tier uses.

    Args:
        pace: Work is executed as late as possible, at random, or once it is queued.
        seed: Of the luck; the scheduling of the host's threads is not part of it.

    """

    def __init__(self, pace: Pace, seed: int = 0) -> None:
        self.lock = threading.RLock()
        """Held while work is executed."""
        self.errors: list[BaseException] = []
        """Raised by work, and by threads."""
        self._pace = pace
        self._rng = random.Random(seed)
        self._moved = threading.Condition(self.lock)
        self._streams: list[Stream] = []
        self._default = self._new_stream()
        self._local = threading.local()
        self._host = threading.get_ident()
        self._now_ms = 0.0

    def install(
        self, patch: pytest.MonkeyPatch, patience_s: float = PATIENCE_S
    ) -> None:
        """Become the device, and let no thread wait for another one for ever."""
        patch.setattr(torch.cuda, "Stream", self._new_stream)
        patch.setattr(torch.cuda, "Event", partial(Event, self))
        patch.setattr(torch.cuda, "stream", self.use_stream)
        patch.setattr(torch.cuda, "current_stream", self.current_stream)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(
            threading, "excepthook", lambda args: self.errors.append(args.exc_value)
        )
        # Events, semaphores and queues all wait here.
        wait = threading.Condition.wait

        def wait_a_while(
            self: threading.Condition, timeout: float | None = None
        ) -> bool:
            if timeout is not None:
                return wait(self, timeout)
            if not wait(self, patience_s):
                raise Stuck(_stacks())
            return True

        patch.setattr(threading.Condition, "wait", wait_a_while)

    def check(self) -> None:
        """Raise what went wrong elsewhere."""
        if self.errors:
            raise self.errors[0]

    # -------------------------------------------------------------- torch.cuda

    def _new_stream(
        self, device: torch.device | None = None, priority: int = 0
    ) -> Stream:
        stream = Stream(self, device)
        with self.lock:
            self._streams.append(stream)
        return stream

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return getattr(self._local, "stream", self._default)

    @contextmanager
    def use_stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    # ---------------------------------------------------------------- the device

    def launch(self, work: Callable[[], None]) -> None:
        """Queue `work` on the current stream."""
        self.enqueue(self.current_stream(), work)

    def enqueue(self, stream: Stream, item: Callable[[], None] | Record) -> None:
        with self.lock:
            stream.queue.append(item)
            self.progress()

    def wait(self, record: Record) -> None:
        """The host waits; other threads than the first give the device time."""
        with self.lock:
            self.progress()
            if self._pace != "eager" and threading.get_ident() != self._host:
                self._moved.wait_for(
                    lambda: record.reached_ms is not None,
                    self._rng.choice([0, 0, 0.001]),
                )
            self._reach(record)

    def wait_for_all(self) -> None:
        with self.lock:
            for stream in self._streams:
                while stream.queue:
                    self._run_one(stream)

    def progress(self) -> None:
        """Execute what luck wants."""
        with self.lock:
            if self._pace == "eager":
                self.wait_for_all()
            elif self._pace == "random" and self._rng.random() < 0.5:
                for stream in self._rng.choices(self._streams, k=3):
                    if stream.queue:
                        self._run_one(stream)

    def _reach(self, record: Record) -> None:
        while record.reached_ms is None:
            self._run_one(record.stream)

    def _run_one(self, stream: Stream) -> None:
        item = stream.queue[0]
        if isinstance(item, Record) and item.stream is not stream:
            self._reach(item)
        # Not before: what it waits for does not run at the same time.
        stream.queue.popleft()
        self._now_ms += 1
        if isinstance(item, Record):
            if item.stream is stream:
                item.reached_ms = self._now_ms
        else:
            try:
                item()
            except Exception as error:
                self.errors.append(error)
        self._moved.notify_all()


def pause(rng: random.Random, longest_s: float) -> None:
    """A launch that takes the CPU some time, or another thread that runs first."""
    time.sleep(rng.choice([0, 0, 0, rng.random() * longest_s]))


def _stacks() -> str:
    # Not by frame objects: following those of threads that run can end the process.
    with TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        stacks = file.read().decode()
    for thread in threading.enumerate():
        stacks = stacks.replace(f"0x{thread.ident or 0:016x}", thread.name)
    return f"Threads wait for one another.\n{stacks}"
