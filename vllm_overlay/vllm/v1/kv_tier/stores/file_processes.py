# SPDX-License-Identifier: Apache-2.0
"""Starts and uses the processes that read and write files of a rank (`file_process`).

A process that fails or does not answer in time is killed before its requests count as
failed, so that it cannot write to rows later. Another one replaces it.
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
# Seconds for a killed process to end, and for a process to accept a request.
END_S = 5.0


class NoProcesses(RuntimeError):
    """Processes cannot be started, or all have ended. The message is the reason."""


class FileProcesses:
    """Processes that share the work of one rank.

    One thread may write while another one reads.

    Args:
        place: Where the objects are.
        memory: Memory that contains all rows.
        file: The file that starts with `memory`. The caller keeps and closes it.
        num_processes: Number of processes.
        num_threads: Reading threads in each process, and as many writing ones.
        grace_s: Seconds after a deadline in which a process may still answer.
        put_s: Seconds that a process may take for its part of a `put`.
        least_life_s: A process that ends sooner is not replaced.

    Raises:
        NoProcesses: A process did not start.

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
            # The process cannot unpickle the class yet.
            "place": tuple(place),
            "num_threads": num_threads,
            "fd": self._fd,
            "num_bytes": memory.nbytes,
            "quiet_at": file.quiet_at,
        }
        self._lock = threading.Lock()
        self._processes: list[_Process] = []
        try:
            # Start all before waiting for the first.
            for _ in range(num_processes):
                self._processes.append(_Process(self._told))
            for process in self._processes:
                if not process.await_start(_START_S):
                    raise OSError("one did not start")
        except OSError as e:
            self.close()
            raise NoProcesses(str(e)) from e

    def put(
        self, keys: Sequence[bytes], rows: Sequence[memoryview], may_write: bool
    ) -> Written:
        """As `Files.put`.

        Raises:
            NoProcesses: All processes have ended.

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
            NoProcesses: All processes have ended.

        """
        done = [False] * len(keys)
        until = deadline + self._grace_s
        for places, moved in self._shared("get", keys, rows, deadline, until=until):
            done[places] = moved
        return done

    def close(self) -> None:
        """End all processes."""
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
        """Let each process do a part of a batch.

        Returns:
            For each process that answered, its slice of the batch, and the answer.

        """
        processes = self._started(until)
        starts = [_address(row) - self._address for row in rows]
        spans = [(start, start + len(row)) for start, row in zip(starts, rows)]
        asked: list[tuple[slice, _Process]] = []
        answers = []
        try:
            for i, process in enumerate(processes[: len(keys)]):
                places = slice(i, None, len(processes))
                asked.append((places, process))
                process.ask(kind, (keys[places], spans[places], *rest))
        finally:
            # Even after an error, no process may move bytes once this returns.
            for places, process in asked:
                if (answer := process.answer(kind, until)) is not None:
                    answers.append((places, answer))
        return answers

    def _started(self, until: float) -> "list[_Process]":
        """Running processes. If there are none, wait for one that is starting.

        Raises:
            NoProcesses: All processes have ended.

        """
        while True:
            with self._lock:
                for i, process in enumerate(self._processes):
                    if process.has_ended and process.lived_s >= self._least_life_s:
                        with suppress(OSError):
                            self._processes[i] = _Process(self._told)
                started = [each for each in self._processes if each.await_start()]
                if all(each.has_ended for each in self._processes):
                    raise NoProcesses("all have ended")
            if started or time.monotonic() >= until:
                return started
            time.sleep(0.005)


class _Process:
    """One process.

    Args:
        told: First message to the process, see `file_process`.

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
            # Without its folder in the path: modules there could shadow others.
            [sys.executable, "-I", "-S", file_process.__file__, *map(str, fds)],
            stdin=subprocess.DEVNULL,
            pass_fds=[told["fd"], *fds],
        )
        for end in theirs.values():
            end.close()
        self.ask("put", told)

    def await_start(self, wait_s: float = 0.0) -> bool:
        """Whether the process is ready for requests. Not thread-safe.

        Args:
            wait_s: Seconds to wait for that.

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
        """Send a request. `answer` receives the result."""
        try:
            self._ends[kind].send(batch)
        except OSError:
            # It has ended or is stuck. `answer` finds out.
            pass
        except BaseException:
            self.end("could not be sent its request")
            raise

    def answer(self, kind: str, until: float) -> Any:
        """Receive the answer to a request. None: the process has ended or was killed.

        Args:
            kind: Kind of the request.
            until: Deadline in seconds of `time.monotonic`. A process that misses it is
                killed.

        """
        end, reason = self._ends[kind], ENDED
        with suppress(EOFError, OSError):
            if end.poll(max(0.0, until - time.monotonic())):
                return end.recv()
            reason = "did not answer in time"
        self.end(reason)
        if kind == "get":
            # A read may still be in the kernel, which writes to the rows until it ends.
            self._process.wait()
        return None

    def end(self, reason: str | None = None) -> None:
        """Kill the process and wait until it has ended.

        The kernel may keep it alive, stuck in a system call. Then it renames no more
        files, but may still fill the rows of a `get`.

        Args:
            reason: For the log, if this was not intended.

        """
        with self._lock:
            if self.has_ended:
                return
            self.has_ended, self.lived_s = True, time.monotonic() - self._began
            if reason == ENDED:
                # Its own exit status says more than that of the kill.
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
                "it was killed. The slots that it reads into are not reused until it "
                "ends. Check that disk or its file server.",
                self._process.pid,
                self._root,
            )
        elif reason is not None:
            logger.warning(
                "KV tier: a process that reads and writes %s %s (status %d). Its "
                "requests count as failed, and their blocks are computed.",
                self._root,
                reason,
                status,
            )


def _give_time(connection: Connection, seconds: float) -> None:
    """Make calls fail if the other end does not respond for so many seconds."""
    whole = int(seconds)
    timeval = struct.pack("@ll", whole, int((seconds - whole) * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as each:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            each.setsockopt(socket.SOL_SOCKET, option, timeval)


def _address(row: memoryview) -> int:
    return np.frombuffer(row, np.uint8).__array_interface__["data"][0]
