# SPDX-License-Identifier: Apache-2.0
"""Events of one run, written by each of its processes into a file of its own.

Times are of `CLOCK_MONOTONIC`, which all processes of a machine share.
"""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple

AT_ONCE = 64
"""Events that are written without a pause, so that no step waits long for the GIL."""


class Event(NamedTuple):
    """Something that took some time, or none.

    Attributes:
        process: id of the process that it happened in.
        track: what it is a part of: the scheduler, a rank, a kind of copies.
        begin: in seconds of `time.monotonic`.

    """

    process: int
    track: str
    name: str
    begin: float
    seconds: float
    args: dict[str, Any]

    @property
    def end(self) -> float:
        return self.begin + self.seconds


class Recorder:
    """Keeps events, and writes them down beside what is recorded.

    A forked process writes its own ones to a file of its own. What is lost when a
    process is killed is the last second.

    Args:
        folder: Gets `PROCESS.jsonl` for each process that has events.
        every_s: How often they are written.

    """

    def __init__(self, folder: Path, every_s: float = 1.0) -> None:
        self._folder = folder
        self._every_s = every_s
        self._events: deque[tuple[str, str, float, float, dict[str, Any]]] = deque()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._start_anew)

    def add(self, track: str, name: str, begin: float, end: float, **args: Any) -> None:
        """Something went on from `begin` to `end`."""
        if self._thread is None:
            self._start()
        self._events.append((track, name, begin, end - begin, args))

    def write(self, pause_s: float = 0.0) -> None:
        """Write what there is by now.

        Args:
            pause_s: Given to others after each few events.

        """
        if not self._events:
            return
        path = self._folder / f"{os.getpid()}.jsonl"
        with self._lock, path.open("a") as file:
            left = len(self._events)
            while left:
                some = [self._events.popleft() for _ in range(min(left, AT_ONCE))]
                file.write("".join(f"{json.dumps(event)}\n" for event in some))
                left -= len(some)
                if pause_s:
                    time.sleep(pause_s)

    def _start_anew(self) -> None:
        self._events.clear()
        self._thread = None
        # Of the parent's, nobody knows who holds it.
        self._lock = threading.Lock()

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(
            target=self._run, name="timeline-writer", daemon=True
        )
        self._thread.start()
        # Children of multiprocessing end without `atexit`.
        Finalize(None, self.write, exitpriority=100)

    def _run(self) -> None:
        while True:
            time.sleep(self._every_s)
            self.write(pause_s=0.001)


def read_events(folder: Path) -> Iterator[Event]:
    """What the processes of a run have recorded; a line cut short is left out."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                yield Event(int(path.stem), *json.loads(line))
            except ValueError:
                continue


def wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Let `around(inner, self, ...)` run in place of a method, `inner`, of a class."""
    inner = getattr(owner, name)

    def outer(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(inner, self, *args, **kwargs)

    setattr(owner, name, outer)
