# SPDX-License-Identifier: Apache-2.0
"""Servers with a host tier that are told to end, or whose processes die.

Each is busy storing and loading then, on two ranks. Three ways by default, all of
them with `KV_TIER_PARALLEL=all`, and also without the tier: that is what they must be
like.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

import pytest

from vllm.engine.arg_utils import EngineArgs

from .jobs import ASKED, BLOCK_BYTES, BLOCK_TOKENS, SMALL, GiB
from .model import make_tokenizer
from .release import NAMES_PROCESSES, cache_bytes
from .server import UPSTREAMS_OWN, Server
from .test_http import CORE, SERVE, server_environment
from .workloads import text

END_TIMEOUT_S = 120
"""After a signal. Upstream waits some seconds for each kind of process in turn."""
CLIENT_TIMEOUT_S = 60
HAS_DRAIN = hasattr(EngineArgs, "shutdown_timeout")
"""Older releases give running requests no time to end."""
HOST_GIB = 0.25
TIER = [*CORE, "--kv-offloading-size", str(HOST_GIB)]
DRAIN = ("--shutdown-timeout", str(END_TIMEOUT_S)) if HAS_DRAIN else ()
RANKS = [
    *("--tensor-parallel-size", "2"),
    *cache_bytes(SMALL * BLOCK_BYTES // 2),
]
NUM_TOKENS = 24
NUM_CLIENTS = 4
PROMPTS = [text(i, 5 * BLOCK_TOKENS + 1) for i in range(8)]


@dataclass
class Way:
    """Who gets which signal."""

    process: str
    signal: int
    exit_codes: tuple[int, ...]
    """Of the API server."""
    flags: tuple[str, ...] = ()


WAYS = {
    "SIGTERM": Way("APIServer", signal.SIGTERM, (0,), DRAIN),
    "SIGKILL of a worker": Way("Worker_TP1", signal.SIGKILL, (0, 1)),
    "SIGKILL of the API server": Way("APIServer", signal.SIGKILL, (-signal.SIGKILL,)),
}
TIERS = {"with the tier": TIER}
if "all" in ASKED:
    WAYS |= {
        # Upstream kills the engine at once and leaves requests without an answer; the
        # API server ends when the clients have given up.
        "SIGTERM without time to drain": Way("APIServer", signal.SIGTERM, (0,)),
        "SIGINT": Way("APIServer", signal.SIGINT, (0, -signal.SIGINT)),
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
    errors: list[tuple[float, Exception]] = field(default_factory=list)
    """When a request that failed was sent, and how it failed."""
    two_rounds: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._threads = [
            threading.Thread(target=self._ask, args=(first,), daemon=True)
            for first in range(NUM_CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, first: int) -> None:
        while True:
            for i in range(first, len(PROMPTS), NUM_CLIENTS):
                sent = time.monotonic()
                try:
                    found = complete(self.server, i)
                except (OSError, HTTPException, ValueError) as error:
                    self.errors.append((sent, error))
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
    if "error" in answer:
        # Some releases say so with status 200.
        raise ValueError(answer["error"])
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


@pytest.fixture
def server(llama: Path, tmp_path: Path, tier: str, name: str) -> Iterator[Server]:
    make_tokenizer(llama)
    server = Server(
        llama,
        [*SERVE, *RANKS, *TIERS[tier], *WAYS[name].flags],
        server_environment(),
        tmp_path / "log",
        CLIENT_TIMEOUT_S,
    )
    yield server
    server.kill()


@pytest.mark.skipif(
    not NAMES_PROCESSES, reason="processes of this release have no names"
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.compat("faults", name)) for name in WAYS],
)
@pytest.mark.parametrize("tier", TIERS)
def test_a_busy_server_ends(server: Server, tier: str, name: str) -> None:
    way = WAYS[name]
    expected = [complete(server, i) for i in range(len(PROMPTS))]
    assert len(set(expected)) == len(PROMPTS)
    clients = Clients(server, expected)
    assert clients.two_rounds.wait(END_TIMEOUT_S)
    if TIERS[tier]:
        check_the_tier(server)
    assert not clients.errors

    pid = server.pid_of(way.process)
    signalled = time.monotonic()
    os.kill(pid, way.signal)

    assert server.process.wait(END_TIMEOUT_S) in way.exit_codes, server.log()[-3000:]
    if way.signal == signal.SIGKILL and way.process == "APIServer":
        # The engine core outlives it, with the tier or without (upstream #55510), and
        # with it all memory: whoever kills the one must end the other.
        os.kill(server.pid_of("EngineCore"), signal.SIGTERM)
    # No client is left without an answer, and no answer is wrong.
    assert clients.join(END_TIMEOUT_S) == 0
    assert len(clients.errors) == NUM_CLIENTS
    assert not clients.wrong
    if "--shutdown-timeout" in way.flags:
        # What was running got its answer; a request takes time to get there.
        assert all(sent > signalled - 1 for sent, _ in clients.errors), clients.errors
    # Memory that belongs to a process only is gone with it.
    assert server.leftover_processes(END_TIMEOUT_S) == []
    left = server.stranded_shared_memory()
    assert {name for name in left if not UPSTREAMS_OWN.fullmatch(name)} == set()


def check_the_tier(server: Server) -> None:
    """It is in use, and its memory is that of the workers alone."""
    found = server.metrics("vllm:kv_tier_")
    assert found["vllm:kv_tier_loaded_blocks_total"] > 0
    assert found["vllm:kv_tier_stored_blocks_total"] > 0
    for rank in range(2):
        anonymous, shared = rss(server.pid_of(f"Worker_TP{rank}"))
        assert anonymous > HOST_GIB / 2 * GiB > shared
