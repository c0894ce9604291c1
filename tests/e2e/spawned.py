# SPDX-License-Identifier: Apache-2.0
"""Engine cores and ranks, which `multiprocessing` would start as new interpreters, are
forks of a process that has imported vLLM: another 10 s of a core for each.

That process is forked from the one that starts them, before this has threads, and does
nothing else. As for a new interpreter, the parent of each is the process that starts
it, whose environment it has, and session and output are the same.
"""

import fcntl
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from ctypes import CDLL
from importlib import import_module
from multiprocessing import util
from threading import Lock
from types import CodeType
from typing import Any

MAX_MESSAGE = 1 << 16
MAX_FDS = 64
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_LIBC = CDLL(None)


def end_with_parent() -> None:
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def fork_what_is_spawned() -> None:
    """From now on, what this process spawns is a fork. Call it before any thread
    starts. Returns in this process, and never in the forks."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        end_with_parent()
        code = _serve(theirs)
        # It may have ranks.
        fork_what_is_spawned()
        exec(code, {"__name__": "__main__"})
        sys.exit()
    theirs.close()
    starts, lock = util.spawnv_passfds, Lock()

    def spawn(path: bytes, args: Sequence[str], passfds: Sequence[int]) -> int:
        if "--multiprocessing-fork" not in args:
            # The tracker of resources, which imports next to nothing.
            return starts(path, args, passfds)
        fds = sorted({*passfds})
        message = json.dumps([args[args.index("-c") + 1], fds, dict(os.environ)])
        with lock:
            # The process in between ends, and the next one up is this.
            _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
            socket.send_fds(ours, [message.encode()], fds)
            pid = int(ours.recv(MAX_MESSAGE))
            _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 0)
        return pid

    util.spawnv_passfds = spawn  # type: ignore[attr-defined]


def _serve(parent: socket.socket) -> CodeType:
    """Fork whenever it is asked. Returns in the forks only."""
    while True:
        message, received, _, _ = socket.recv_fds(parent, MAX_MESSAGE, MAX_FDS)
        if not message:
            os._exit(0)
        reads, writes = os.pipe()
        middle = os.fork()
        if not middle:
            middle = os.getpid()
            pid = os.fork()
            if pid:
                os.write(writes, str(pid).encode())
                os._exit(0)
            os.close(reads)
            os.close(writes)
            parent.close()
            while os.getppid() == middle:
                time.sleep(0.001)
            code, numbers, environment = json.loads(message)
            return _begin(code, numbers, environment, received)
        for number in (writes, *received):
            os.close(number)
        pid_of_fork = os.read(reads, 64)
        os.close(reads)
        os.waitpid(middle, 0)
        parent.send(pid_of_fork)


def _begin(
    code: str, numbers: list[int], environment: dict[str, str], received: list[int]
) -> CodeType:
    """What a new process does, with its files and environment."""
    # Where none of the numbers is.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(numbers) + 1) for fd in received]
    for fd in received:
        os.close(fd)
    for fd, number in zip(high, numbers):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    if "PROMETHEUS_MULTIPROC_DIR" in environment:
        # Read when it was imported.
        values: Any = import_module("prometheus_client.values")
        values.ValueClass = values.get_value_class()
    sys.argv = ["-c", "--multiprocessing-fork"]
    return compile(code, "<spawned>", "exec")
