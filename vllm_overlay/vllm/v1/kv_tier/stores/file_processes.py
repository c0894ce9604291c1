# SPDX-License-Identifier: Apache-2.0
"""Processes that read and write the objects of a rank, see `file_process`.

A process that ends, or that does not answer, is gone before anybody is told that its
part has failed: it writes to no row any more. Another one takes its place.
"""

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from vllm.logger import init_logger
from vllm.v1.kv_tier.stores import file_process
from vllm.v1.kv_tier.stores.base import MemoryFile
from vllm.v1.kv_tier.stores.files import Place, Written

logger = init_logger(__name__)

MAX_PROCESSES = 16
KINDS = ("put", "get")
ENDED = "ended"
_START_S = 30.0
_LAST_S = 0.5
# How long a process may take to end once it was killed, and to take a question.
END_S = 5.0


class NoProcesses(RuntimeError):
    """Processes cannot be had, or are no more. The message is the reason."""


class FileProcesses:
    """Processes that share the work of one rank.

    Two threads may call it, one that writes and one that reads.

    Args:
        place: Where the objects are.
        memory: In which all rows lie.
        file: Which it is the beginning of. It is the caller's.
        num_processes: How many.
        num_threads: That read in each, and as many that write.
        grace_s: How long beyond a deadline one may answer, for what it had begun.
        put_s: How long it may take to write a part of a batch.
        least_life_s: One that ends sooner would do so again, and is not replaced.

    Raises:
        NoProcesses: One did not start.

    """

    def __init__(
        self,
        place: Place,
        memory: memoryview,
        file: MemoryFile,
        num_processes: int,
        num_threads: int,
        grace_s: float = 2.0,
        put_s: float = 60.0,
        least_life_s: float = 5.0,
    ) -> None:
        self._grace_s, self._put_s, self._least_life_s = grace_s, put_s, least_life_s
        self._address = _address(memory)
        self._fd = os.dup(file.fd)
        self._told = {
            "path": sys.path,
            # It cannot know the class yet.
            "place": tuple(place),
            "num_threads": num_threads,
            "fd": self._fd,
            "num_bytes": memory.nbytes,
            "quiet_at": file.quiet_at,
        }
        self._lock = threading.Lock()
        self._processes: list[_Process] = []
        try:
            # All of them begin before the first one is waited for.
            for _ in range(num_processes):
                self._processes.append(_Process(self._told))
            for process in self._processes:
                if not process.has_started(_START_S):
                    raise OSError("one did not start")
        except OSError as e:
            self.close()
            raise NoProcesses(str(e)) from e

    def put(
        self, keys: Sequence[bytes], rows: Sequence[memoryview], may_write: bool
    ) -> Written:
        """As `Files.put`.

        Raises:
            NoProcesses: All have ended.

        """
        done = [False] * len(keys)
        parts: list[Written] = []
        until = time.monotonic() + self._put_s
        for places, written in self._shared("put", keys, rows, may_write, until=until):
            done[places] = written.done
            parts.append(written)
        return Written(
            done,
            sum(part.num_new for part in parts),
            sum(part.evicted_bytes for part in parts),
            next((part.error for part in parts if part.error is not None), None),
        )

    def get(
        self, keys: Sequence[bytes], rows: Sequence[memoryview], deadline: float
    ) -> list[bool]:
        """As `Files.get`.

        Raises:
            NoProcesses: All have ended.

        """
        done = [False] * len(keys)
        until = deadline + self._grace_s
        for places, moved in self._shared("get", keys, rows, deadline, until=until):
            done[places] = moved
        return done

    def close(self) -> None:
        """End all of them."""
        with self._lock:
            for process in self._processes:
                process.end()
            self._processes.clear()
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _shared(
        self,
        kind: str,
        keys: Sequence[bytes],
        rows: Sequence[memoryview],
        *rest: object,
        until: float,
    ) -> list[tuple[slice, Any]]:
        """Have each process do a part of a batch.

        Returns:
            Which places each had, and what it answers. Those that end answer nothing.

        """
        processes = self._started(until)
        starts = [_address(row) - self._address for row in rows]
        asked: list[tuple[slice, _Process]] = []
        answers = []
        try:
            for i, process in enumerate(processes[: len(keys)]):
                places = slice(i, None, len(processes))
                asked.append((places, process))
                process.ask(kind, (keys[places], starts[places], *rest))
        finally:
            # Whatever happens here, nobody moves anything afterwards.
            for places, process in asked:
                if (answer := process.answer(kind, until)) is not None:
                    answers.append((places, answer))
        return answers

    def _started(self, until: float) -> "list[_Process]":
        """Those that can be asked. Where there are none, one that is being started is
        waited for.

        Raises:
            NoProcesses: All have ended.

        """
        while True:
            with self._lock:
                for i, process in enumerate(self._processes):
                    if process.has_ended and process.lived_s >= self._least_life_s:
                        with suppress(OSError):
                            self._processes[i] = _Process(self._told)
                started = [each for each in self._processes if each.has_started()]
                if all(each.has_ended for each in self._processes):
                    raise NoProcesses("all have ended")
            if started or time.monotonic() >= until:
                return started
            time.sleep(0.005)


class _Process:
    """One of them.

    Args:
        told: What it is to do, see `file_process`.

    Raises:
        OSError: It cannot be started.

    """

    def __init__(self, told: dict[str, Any]) -> None:
        self._began, self.lived_s = time.monotonic(), 0.0
        self.has_ended = False
        self._root = Place(*told["place"]).root_dir
        self._lock = threading.Lock()
        self._starting = list(KINDS)
        self._ends: dict[str, Connection] = {}
        theirs: dict[str, Connection] = {}
        for kind in KINDS:
            self._ends[kind], theirs[kind] = Pipe()
            _give_time(self._ends[kind], END_S)
        fds = [end.fileno() for end in theirs.values()]
        self._process = subprocess.Popen(
            # Not with its folder in the path: names of modules there are others' too.
            [sys.executable, "-I", "-S", file_process.__file__, *map(str, fds)],
            stdin=subprocess.DEVNULL,
            pass_fds=[told["fd"], *fds],
        )
        for end in theirs.values():
            end.close()
        self.ask("put", told)

    def has_started(self, wait_s: float = 0.0) -> bool:
        """Whether it can be asked. Called by one thread at a time.

        Args:
            wait_s: How long to wait for that.

        """
        until = time.monotonic() + wait_s
        while self._starting and not self.has_ended:
            left_s = until - time.monotonic()
            if not self._ends[self._starting[0]].poll(max(0.0, left_s)):
                if time.monotonic() >= self._began + _START_S:
                    self.end("did not start in time")
                    self.lived_s = 0.0
                return False
            self.answer(self._starting.pop(0), until)
        return not self.has_ended

    def ask(self, kind: str, batch: object) -> None:
        """Have it move a batch. `answer` tells whether it has."""
        try:
            self._ends[kind].send(batch)
        except OSError:
            # It has ended, or stands still.
            pass
        except BaseException:
            self.end("was not asked as it should be")
            raise

    def answer(self, kind: str, until: float) -> Any:
        """What became of it; None: the process is gone, or has been ended.

        Args:
            kind: What was asked for.
            until: Who has not answered by then is ended, in seconds of
                `time.monotonic`.

        """
        end, reason = self._ends[kind], ENDED
        with suppress(EOFError, OSError):
            if end.poll(max(0.0, until - time.monotonic())):
                return end.recv()
            reason = "did not answer in time"
        self.end(reason)
        if kind == "get":
            # It may be in the kernel still, which writes to rows. So long they are
            # nobody's.
            self._process.wait()
        return None

    def end(self, reason: str | None = None) -> None:
        """Have it gone when this returns, unless the kernel does not let it go: then it
        renames no file any more, but may still fill the rows of a `get`.

        Args:
            reason: For the log, where it is not to end.

        """
        with self._lock:
            if self.has_ended:
                return
            self.has_ended, self.lived_s = True, time.monotonic() - self._began
            if reason == ENDED:
                # Its own status says more.
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_LAST_S)
            self._process.kill()
            try:
                status: int | None = self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                status = None
        if status is None:
            logger.error(
                "KV tier: process %d, which reads and writes %s, does not end although "
                "it was killed. The slots that it reads into are given to nobody until "
                "it does. Look after that disk or its server.",
                self._process.pid,
                self._root,
            )
        elif reason is not None:
            logger.warning(
                "KV tier: a process that reads and writes %s %s (status %d). What it "
                "was asked for counts as not done, and is computed.",
                self._root,
                reason,
                status,
            )


def _give_time(connection: Connection, seconds: float) -> None:
    """Have its calls fail where the other end stands still for so long."""
    whole = int(seconds)
    timeval = struct.pack("@ll", whole, int((seconds - whole) * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as each:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            each.setsockopt(socket.SOL_SOCKET, option, timeval)


def _address(row: memoryview) -> int:
    return np.frombuffer(row, np.uint8).__array_interface__["data"][0]
