# SPDX-License-Identifier: Apache-2.0
"""Engines that need not import vLLM, which takes 8 s of a core: forks of a process that
has.

They run a module as `python -m` does, in a session of their own. The template has one
thread of Python, and has computed nothing. There is one for each module and
environment. What they spawn is forked, too, see `spawned`.
"""

import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any

from .spawned import end_with_parent, fork_what_is_spawned

IMPORTED_LATE = {
    "vllm.entrypoints.cli.main": ["vllm.entrypoints.openai.api_server"],
    "tests.e2e.driver": [],
}
"""What a module of engines imports when it runs."""
IMPORTED_BY_RANKS = ["vllm.v1.worker.cpu_worker", "vllm.model_executor.models.llama"]
MAX_MESSAGE = 1 << 16
MAX_TEMPLATES = 4
"""Each has 400 MB. More if all have forks that run."""
_lock = Lock()
_templates: dict[tuple[str, frozenset[tuple[str, str]]], "Template"] = {}
"""By what they run. The one that was used last comes last."""


class Forked:
    """A process of a template, with the methods of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._has_ended = Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._has_ended.wait(timeout):
            raise subprocess.TimeoutExpired("a fork of a template", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def end(self, returncode: int) -> None:
        self.returncode = returncode
        self._has_ended.set()


def start(
    module: str, arguments: Sequence[str], env: Mapping[str, str], log: Path
) -> Forked:
    """Run a module in a process of its own, which prints to a file.

    Args:
        module: Has `if __name__ == "__main__":`.
        arguments: Its `sys.argv[1:]`.
        env: All of its environment.
        log: Emptied first.

    """
    # Of this process, and another one in each test.
    env = {k: v for k, v in env.items() if k != "PYTEST_CURRENT_TEST"}
    key = module, frozenset(env.items())
    with _lock:
        if key not in _templates:
            unused = [k for k, template in _templates.items() if not template.running]
            for each in unused[: max(len(_templates) + 1 - MAX_TEMPLATES, 0)]:
                _templates.pop(each).end()
            _templates[key] = Template(module, env)
        template = _templates[key] = _templates.pop(key)
        log.write_bytes(b"")
        return template.fork(arguments, log)


class Template:
    """The process that forks, as this one sees it. Ends with this one."""

    def __init__(self, module: str, env: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        number = theirs.fileno()
        command = [sys.executable, "-m", __name__, str(number), module]
        self._process = subprocess.Popen(
            command, env=env, pass_fds=[number], stdin=subprocess.DEVNULL
        )
        theirs.close()
        self._new: SimpleQueue[Forked | None] = SimpleQueue()
        self.running: dict[int, Forked] = {}
        Thread(target=self._listen, daemon=True).start()

    def fork(self, arguments: Sequence[str], log: Path) -> Forked:
        self._socket.send(json.dumps([*arguments, str(log)]).encode())
        forked = self._new.get()
        if forked is None:
            raise RuntimeError("The template of engines has ended, see its output.")
        return forked

    def end(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()

    def _listen(self) -> None:
        while message := self._socket.recv(MAX_MESSAGE):
            pid, returncode = json.loads(message)
            if returncode is None:
                self.running[pid] = Forked(pid)
                self._new.put(self.running[pid])
            else:
                self.running.pop(pid).end(returncode)
        for forked in self.running.values():
            forked.end(-signal.SIGKILL)
        self._new.put(None)


# ------------------------------------------------------------- in the template itself


def next_arguments(parent: socket.socket) -> list[str]:
    """Fork whenever it is asked, and say who has ended. Returns in the forks only."""
    wakes, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup)

    def say(*message: Any) -> None:
        parent.send(json.dumps(message).encode())

    watched: list[socket.socket | int] = [parent, wakes]
    while True:
        ready, _, _ = select.select(watched, [], [])
        if wakes in ready:
            os.read(wakes, 4096)
            while (ended := ended_child()) is not None:
                say(*ended)
        if parent not in ready:
            continue
        message = parent.recv(MAX_MESSAGE)
        if not message:
            sys.exit()
        pid = os.fork()
        if pid:
            say(pid, None)
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (wakes, wakeup):
            os.close(number)
        parent.close()
        os.setsid()
        # With its template.
        end_with_parent()
        *arguments, log = json.loads(message)
        output = os.open(log, os.O_WRONLY | os.O_APPEND)
        for number in (1, 2):
            os.dup2(output, number)
        os.close(output)
        fork_what_is_spawned()
        return arguments


def ended_child() -> tuple[int, int] | None:
    """Process and exit code of a child that has ended, each once."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


if __name__ == "__main__":
    _, descriptor, name = sys.argv
    import_module(name)
    if name in IMPORTED_LATE:
        for late in [*IMPORTED_LATE[name], *IMPORTED_BY_RANKS]:
            import_module(late)
    with suppress(ImportError):
        # Forks set their titles, which needs the environment as it was at first.
        import_module("setproctitle").getproctitle()
    # It runs once more, as `__main__`.
    sys.modules.pop(name, None)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.argv[1:] = next_arguments(socket.socket(fileno=int(descriptor)))
    runpy.run_module(name, run_name="__main__", alter_sys=True)
