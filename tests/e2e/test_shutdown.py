# SPDX-License-Identifier: Apache-2.0
"""Servers with a host tier that are told to end, or whose processes die.

Each is busy storing and loading then, on two ranks. Three ways by default, all of
them with `KV_TIER_PARALLEL=all`, and also without the tier, which shows what of it is
upstream's.
"""

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

import pytest

from .jobs import BLOCK_BYTES, BLOCK_TOKENS, SMALL, GiB
from .model import make_tokenizer
from .server import Server
from .test_http import CORE, SERVE, server_environment
from .workloads import text

END_TIMEOUT_S = 120
"""After a signal. Upstream waits some seconds for each kind of process in turn."""
HOST_GIB = 0.25
TIER = [*CORE, "--kv-offloading-size", str(HOST_GIB)]
RANKS = [
    *("--tensor-parallel-size", "2"),
    *("--kv-cache-memory-bytes", str(SMALL * BLOCK_BYTES // 2)),
]
NUM_TOKENS = 24
PROMPTS = [text(i, 5 * BLOCK_TOKENS + 1) for i in range(8)]


@dataclass
class Way:
    """Who gets which signal."""

    process: str
    signal: int
    exit_codes: tuple[int, ...]
    """Of the API server."""


WAYS = {
    "SIGTERM": Way("APIServer", signal.SIGTERM, (0,)),
    "SIGKILL of a worker": Way("Worker_TP1", signal.SIGKILL, (0, 1)),
    "SIGKILL of the API server": Way("APIServer", signal.SIGKILL, (-9,)),
}
TIERS = {"with the tier": TIER}
if os.environ.get("KV_TIER_PARALLEL") == "all":
    WAYS |= {
        "SIGINT": Way("APIServer", signal.SIGINT, (0, -2, 130)),
        "SIGKILL of the engine core": Way("EngineCore", signal.SIGKILL, (0, 1)),
    }
    TIERS |= {"without": []}


@dataclass
class Clients:
    """Ask for the same prompts again and again, until an answer fails."""

    server: Server
    expected: list[str]
    num_answers: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    two_rounds: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._threads = [
            threading.Thread(target=self._ask, args=(first,), daemon=True)
            for first in range(4)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, first: int) -> None:
        while True:
            for i in range(first, len(PROMPTS), 4):
                try:
                    found = complete(self.server, i)
                except (OSError, HTTPException, ValueError) as error:
                    self.errors.append(error)
                    return
                self.num_answers += 1
                if found != self.expected[i]:
                    self.wrong.append(found)
                if self.num_answers >= 2 * len(PROMPTS):
                    self.two_rounds.set()

    def join(self, timeout_s: float) -> int:
        """How many still wait for an answer after `timeout_s`."""
        for thread in self._threads:
            thread.join(timeout_s)
        return sum(thread.is_alive() for thread in self._threads)


def complete(server: Server, i: int) -> str:
    answer = server.complete(PROMPTS[i], max_tokens=NUM_TOKENS, ignore_eos=True)
    (choice,) = answer["choices"]
    if choice["finish_reason"] != "length":
        # What upstream gives to requests that it aborts.
        raise ValueError(choice["finish_reason"])
    return choice["text"]


def rss(pid: int) -> tuple[int, int]:
    """Anonymous and shared bytes of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    anonymous, shared = (int(status[k].split()[0]) for k in ("RssAnon", "RssShmem"))
    return anonymous << 10, shared << 10


@pytest.fixture(params=TIERS)
def server(
    request: pytest.FixtureRequest, llama: Path, tmp_path: Path
) -> Iterator[Server]:
    make_tokenizer(llama)
    flags = [*SERVE, *RANKS, *TIERS[request.param]]
    server = Server(llama, flags, server_environment(), tmp_path / "log")
    yield server
    server.kill()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.compat("faults", name)) for name in WAYS],
)
def test_a_busy_server_ends(server: Server, name: str) -> None:
    way = WAYS[name]
    has_tier = "core" in server.flags
    expected = [complete(server, i) for i in range(len(PROMPTS))]
    assert len(set(expected)) == len(PROMPTS)
    clients = Clients(server, expected)
    assert clients.two_rounds.wait(END_TIMEOUT_S)
    found = server.metrics("vllm:kv_tier_")
    workers = [server.pid_of(f"Worker_TP{rank}") for rank in range(2)]
    if has_tier:
        assert found["vllm:kv_tier_loaded_blocks_total"] > 0
        assert found["vllm:kv_tier_stored_blocks_total"] > 0
        for pid in workers:
            anonymous, shared = rss(pid)
            assert anonymous > HOST_GIB / 2 * GiB > shared
    assert not clients.errors

    os.kill(server.pid_of(way.process), way.signal)

    assert server.process.wait(END_TIMEOUT_S) in way.exit_codes, server.log()[-3000:]
    assert clients.join(END_TIMEOUT_S) == 0
    assert len(clients.errors) == 4
    assert not clients.wrong
    # Memory that belongs to a process only is gone with it.
    assert server.leftover_processes(END_TIMEOUT_S) == []
    assert server.stranded_shared_memory() == set()
