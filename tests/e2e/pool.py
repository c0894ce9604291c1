# SPDX-License-Identifier: Apache-2.0
"""A keeper as a process, and servers that share its memory."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Protocol

from ..settings import options
from .server import Server
from .test_http import CORE, SERVE, SIZE, server_environment


class Process(Protocol):
    """What is asked of a process."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


class KeeperProcess:
    """`python -m vllm.v1.kv_tier.keeper`."""

    def __init__(self, folder: Path, size_gib: float, num_engines: int) -> None:
        self.socket = folder / "keeper.sock"
        self.process = self._start(
            "--size", str(size_gib), "--engines", str(num_engines)
        )

    def _start(self, *flags: str) -> Process:
        # Each has a log of its own.
        file, name = tempfile.mkstemp(".log", "keeper-", self.socket.parent)
        process = self._run([*flags, "--socket", str(self.socket)], file)
        os.close(file)
        log, limit = Path(name), time.monotonic() + 120
        while "partitions of" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < limit
            time.sleep(0.01)
        return process

    def _run(self, flags: list[str], log: int) -> Process:
        command = [sys.executable, "-m", "vllm.v1.kv_tier.keeper", *flags]
        return subprocess.Popen(command, stdout=log, stderr=log)

    def succeed(self) -> None:
        """Let another process take over."""
        before, self.process = self.process, self._start("--succeed")
        assert before.wait(30) == 0

    def spoil(self, seed: int, part: slice = slice(None)) -> None:
        """Overwrite all slots, or a part of each of two partitions."""
        (path,) = filter(_is_pool, Path(f"/proc/{self.process.pid}/fd").iterdir())
        with path.open("r+b") as file:
            each = os.fstat(file.fileno()).st_size // 2
            start, end, _ = part.indices(each)
            for offset in (0, each):
                file.seek(offset + start)
                noise = Random(seed).randbytes(1 << 20)
                file.write((noise * (each >> 20))[: end - start])

    def end(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(30)


def _is_pool(descriptor: Path) -> bool:
    """Whether a file of a process is the pool's memory."""
    try:
        return "kv-tier-pool" in os.readlink(descriptor)
    except FileNotFoundError:
        # The keeper has closed it by now: the connection of an engine that has ended.
        return False


@contextmanager
def keeping(folder: Path, size_gib: float, num_engines: int) -> Iterator[KeeperProcess]:
    keeper = KeeperProcess(folder, size_gib, num_engines)
    try:
        yield keeper
    finally:
        if keeper.process.poll() is None:
            keeper.end()


def serve(
    model: Path, log: Path, socket: Path | None, *flags: str, **more: Any
) -> Server:
    """A server of the pool at `socket`, or with a tier of its own; `more` settings."""
    settings = {"store_policy": "write_through", "store_from_use": 1, **more}
    given = options(**settings, **({} if socket is None else {"pool": str(socket)}))
    size = SIZE if socket is None else []
    config = ["--kv-offloading-config", json.dumps(given)]
    env = server_environment() | {"PYTHONHASHSEED": "0"}
    return Server(model, [*SERVE, *CORE, *size, *config, *flags], env, log)


def ask(server: Server, prompt: list[int], **params: Any) -> tuple[str, int]:
    """Its answer, and how many tokens of the prompt were cached."""
    answer = server.complete(prompt, max_tokens=8, ignore_eos=True, **params)
    details = answer["usage"]["prompt_tokens_details"] or {}
    return answer["choices"][0]["text"], details.get("cached_tokens") or 0
