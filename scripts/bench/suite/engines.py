# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of their own, and prefill and decode on two of them."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .client import Answer
from .jobs import cause

LOOK_S = 0.1
LONGEST_LINE = 64 << 20
PLANTS = "KV_BENCH_PLANTS"
"""Variable with names of functions of `suite.plants`, for processes with an engine."""
LAST_WORD_S = 0.5
TRANSFER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""`kv_transfer_params` by which a prefill engine knows that another one decodes."""


@dataclass(frozen=True)
class Job:
    """What a process of `suite.engine_server` is to serve, and where.

    Attributes:
        llm: arguments of `AsyncEngineArgs`.
        socket: path of a Unix socket.

    """

    llm: dict[str, Any]
    socket: str


class Engine:
    """A process of `suite.engine_server`.

    Args:
        name: Of its log and job, in `folder`.
        llm: Arguments of the engine.
        env: Variables beside those of this process.
        folder: Must be there.
        sockets: The same, with a short path.

    """

    def __init__(
        self,
        name: str,
        llm: dict[str, Any],
        env: Mapping[str, str],
        folder: Path,
        sockets: Path,
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._socket = sockets / name
        job = Job(llm, str(self._socket))
        path = folder / f"job-{name}.json"
        path.write_text(json.dumps(asdict(job)))
        command = [sys.executable, "-m", "suite.engine_server", str(path)]
        self._began = time.monotonic()
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                env=os.environ | environment() | dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self, ends: float) -> float:
        """Until it is ready; the seconds that took.

        Raises:
            RuntimeError: It ended, or it is `ends` by the clock of `time.monotonic`.

        """
        while not self._socket.exists():
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} did not start: {cause(self.log)}")
            if time.monotonic() > ends:
                raise RuntimeError(f"{self.name} did not start in time")
            time.sleep(LOOK_S)
        return time.monotonic() - self._began

    def pause(self) -> None:
        """Let it stand still, with all that it started: NIXL keeps a core busy even
        if there is nothing to do, and the engines that are asked may lack it."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def end(self) -> None:
        """End it and all that it started, at once."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    async def ask(
        self,
        answer: Answer,
        prompt: list[int],
        max_tokens: int,
        transfer: dict[str, Any] | None = None,
    ) -> dict[str, Any] | None:
        """Add tokens and their times to `answer`; what the connector says of it."""
        request = {"do": "ask", "prompt": prompt, "max_tokens": max_tokens}
        last: dict[str, Any] = {}
        async for last in self._lines(request | {"transfer": transfer}):
            answer.times += [time.perf_counter()] * len(last["tokens"])
            answer.tokens += last["tokens"]
        if len(answer.tokens) != max_tokens:
            raise RuntimeError(f"{self.name} left {answer.key} without an answer")
        answer.cached_tokens = last["cached"]
        return last["transfer"]

    async def count(self) -> dict[str, float]:
        """What its metrics say; see `suite.engine_server`."""
        return [told async for told in self._lines({"do": "count"})][-1]

    async def _lines(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        reader, writer = await asyncio.open_unix_connection(
            str(self._socket), limit=LONGEST_LINE
        )
        try:
            writer.write(json.dumps(request).encode() + b"\n")
            while line := await reader.readline():
                told = json.loads(line)
                if "error" in told:
                    raise RuntimeError(f"{self.name}: {told['error']}")
                yield told
        finally:
            writer.close()


class Asked:
    """Engines that are asked together; they stand still while others are.

    Args:
        engines: Ready.

    """

    def __init__(self, *engines: Engine) -> None:
        self.engines = engines

    async def ask(self, key: str, prompt: list[int], max_tokens: int) -> Answer:
        """A greedy answer, with its times."""
        raise NotImplementedError

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """These engines run meanwhile."""
        for engine in self.engines:
            engine.go_on()
        try:
            yield
            # A decode engine's last word to the prefill engine may be under way.
            await asyncio.sleep(LAST_WORD_S)
        finally:
            self.pause()

    def pause(self) -> None:
        for engine in self.engines:
            engine.pause()


class Alone(Asked):
    """One engine that does all."""

    async def ask(self, key: str, prompt: list[int], max_tokens: int) -> Answer:
        answer = Answer(key, len(prompt), time.perf_counter())
        await self.engines[0].ask(answer, prompt, max_tokens)
        return answer


class Pair(Asked):
    """A prefill engine and a decode engine, as a proxy puts them together."""

    async def ask(self, key: str, prompt: list[int], max_tokens: int) -> Answer:
        """The answer of the decode engine, timed from asking the prefill engine."""
        prefill, decode = self.engines
        first = Answer(key, len(prompt), time.perf_counter())
        transfer = await prefill.ask(first, prompt, 1, TRANSFER)
        answer = Answer(key, len(prompt), first.sent)
        await decode.ask(answer, prompt, max_tokens, transfer)
        # What no forward pass computed: all else was, on the prefill engine.
        answer.cached_tokens = first.cached_tokens
        return answer


def environment() -> dict[str, str]:
    """Of a process of the suite that starts an engine."""
    bench = Path(__file__).parents[1]
    path = [str(bench), str(bench.parent), os.getenv("PYTHONPATH")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        # Nothing may depend on a network, and nothing may report to one.
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
