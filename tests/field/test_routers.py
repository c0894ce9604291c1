# SPDX-License-Identifier: Apache-2.0
"""Routers know from KV events what the server serves from its two tiers.

A real server behind the real vllm-router, with the real indexer of NVIDIA Dynamo beside
it: before each request both say how much of its prompt the server has; the server's
`cached_tokens` must be the same. docs/routing.md has the command lines.
"""

import json
import os
import random
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.e2e.conftest import llama  # noqa: F401
from tests.e2e.jobs import BLOCK_BYTES, BLOCK_TOKENS, GiB
from tests.e2e.server import Server
from tests.e2e.test_http import CORE, SERVE, served, server_environment  # noqa: F401
from tests.e2e.workloads import text

from .routers import Indexer, Router, free_port, post

pytestmark = pytest.mark.skipif(
    os.environ.get("KV_TIER_FIELD") != "all",
    reason="KV_TIER_FIELD=all: installs and starts routers, three minutes",
)

NUM_REQUESTS = 240
RESETS = (60, 150)
RESTART = 110
NUM_CONVERSATIONS = 14
MAX_TOKENS = 14 * BLOCK_TOKENS
NUM_SLOTS = 60
SETTLE_S = 0.15
"""Until events have arrived: vllm-router looks for them each 10 ms."""


@dataclass
class Run:
    """What was said of each request."""

    cached: list[int] = field(default_factory=list)
    indexer: list[int] = field(default_factory=list)
    router: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


class Neighbourhood:
    """A server with the tier, and the routers that follow it.

    Args:
        model: Its folder.
        folder: For logs.
        buffer_steps: Batches of events that the server keeps for replays.

    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        buffer_steps: int = 10_000,
    ) -> None:
        port, self._replay_port = free_port(), free_port()
        self._events, self._replay = (
            f"tcp://127.0.0.1:{p}" for p in (port, self._replay_port)
        )
        self._folder, self._model = folder, str(model)
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{port}",
            "replay_endpoint": f"tcp://*:{self._replay_port}",
            "topic": "",
            "buffer_steps": buffer_steps,
        }
        flags = [
            *SERVE,
            *CORE,
            *("--kv-offloading-size", repr(NUM_SLOTS * BLOCK_BYTES / GiB)),
            *("--kv-events-config", json.dumps(events)),
        ]
        env = server_environment() | {"VLLM_SERVER_DEV_MODE": "1"}
        self.server = Server(model, flags, env, folder / "server.log")
        self._credited: list[int] = []
        self._nudges: list[int] = []
        try:
            self.start_routers()
        except BaseException:
            self.server.kill()
            raise

    def start_routers(self) -> None:
        """Whoever comes late asks for a replay of what was published until then."""
        endpoints = self._model, self._events, self._replay, BLOCK_TOKENS
        num = len(list(self._folder.glob("indexer*.log")))
        self.indexer = Indexer(*endpoints, self._folder / f"indexer{num}.log")
        self.router = Router(
            self.server.url, *endpoints, self._folder / f"router{num}.log"
        )

    def stop_routers(self) -> None:
        self._credited += self.router.prefixes()
        self.indexer.stop()
        self.router.stop()

    def credited(self) -> list[int]:
        return self._credited + self.router.prefixes()

    def compared(self) -> list[int]:
        """What the router credited, but for nudges."""
        return [n for i, n in enumerate(self.credited()) if i not in self._nudges]

    def reset(self) -> None:
        url = f"{self.server.url}/reset_prefix_cache"
        urllib.request.urlopen(urllib.request.Request(url, method="POST")).close()

    def ask(self, tokens: list[int], num_tokens: int) -> tuple[int, list[int]]:
        """Cached tokens of a prompt, and the answer to it, through the router."""
        # No `return_token_ids`: vllm-router 0.1.17 then credits nothing.
        body = {"model": self._model, "prompt": tokens, "max_tokens": num_tokens}
        more = {"temperature": 0, "ignore_eos": True}
        answer = post(f"{self.router.url}/v1/completions", body | more)
        details = answer["usage"]["prompt_tokens_details"] or {}
        # Words are "t3" and the like; special tokens have none.
        words = re.findall(r"t(\d+)", answer["choices"][0]["text"])
        return details.get("cached_tokens") or 0, list(map(int, words))

    def nudge(self, seed: int) -> None:
        """Ask for something that nobody knows.

        A step is what publishes events, and an event is what tells a router that it
        has missed some.
        """
        self.ask(text(seed, 2 * BLOCK_TOKENS + 1), 1)
        self._nudges.append(len(self.credited()) - 1)
        time.sleep(1)

    def close(self) -> None:
        self.indexer.stop()
        self.router.stop()
        self.server.kill()


def talk(
    around: Neighbourhood,
    num_requests: int = NUM_REQUESTS,
    restart: int = RESTART,
    resets: Sequence[int] = RESETS,
) -> Run:
    """Conversations, some of them busier than others, that grow turn by turn.

    Args:
        around: Where.
        num_requests: In all.
        restart: Both routers are killed before this request, and others take their
            place.
        resets: Before these the prefix cache is reset.

    """
    run, rng = Run(), random.Random(7)
    histories = [text(i, 3 * BLOCK_TOKENS) for i in range(NUM_CONVERSATIONS)]
    busy = [1 / (i + 1) for i in range(NUM_CONVERSATIONS)]
    for i in range(num_requests):
        if i in resets:
            around.reset()
            around.nudge(2000 + i)
        if i == restart:
            around.stop_routers()
            around.start_routers()
            around.nudge(2000 + i)
        (n,) = rng.choices(range(NUM_CONVERSATIONS), busy)
        history = histories[n]
        if len(history) > MAX_TOKENS:
            history = histories[n] = text(100 + i, 3 * BLOCK_TOKENS)
        history += text(1000 + i, rng.randrange(1, 2 * BLOCK_TOKENS))
        # The last token is always computed, so a full block of it would be, too.
        prompt = history[: (len(history) - 1) // BLOCK_TOKENS * BLOCK_TOKENS + 1]
        time.sleep(SETTLE_S)
        run.indexer.append(around.indexer.prefix(prompt))
        cached, answer = around.ask(prompt, rng.choice((1, 4, BLOCK_TOKENS)))
        run.cached.append(cached)
        histories[n] = prompt + answer
    run.router = around.compared()
    run.metrics = around.server.metrics("vllm:kv_tier_")
    return run


@pytest.fixture(scope="module")
def run(
    served: Path,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Run]:
    around = Neighbourhood(served, tmp_path_factory.mktemp("routers"))
    try:
        yield talk(around)
    finally:
        around.close()


def differing(ours: list[int], theirs: list[int]) -> Counter[tuple[int, int]]:
    """Pairs of numbers that are not equal, and how often they occur."""
    return Counter((a, b) for a, b in zip(ours, theirs, strict=True) if a != b)


def test_there_was_something_to_know(run: Run) -> None:
    assert run.metrics["vllm:kv_tier_evicted_slots_total"] > 50
    assert run.metrics["vllm:kv_tier_host_hit_tokens_total"] > 100 * BLOCK_TOKENS
    assert run.metrics["vllm:kv_tier_device_hit_tokens_total"] > 100 * BLOCK_TOKENS
    assert len(set(run.cached)) > 5


def test_the_indexer_of_dynamo_knows_what_is_cached(run: Run) -> None:
    assert len(run.cached) == NUM_REQUESTS
    assert not differing(run.cached, run.indexer)


def test_vllm_router_knows_what_is_cached(run: Run) -> None:
    assert not differing(run.cached, run.router)


def test_routers_that_come_too_late_for_a_replay_are_told_all_anew(
    served: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The server keeps 20 batches, and has published more than a hundred."""
    around = Neighbourhood(served, tmp_path, buffer_steps=20)
    try:
        run = talk(around, num_requests=120, restart=70, resets=())
    finally:
        around.close()
    assert sum(run.cached[70:]) > 100 * BLOCK_TOKENS
    assert not differing(run.cached, run.indexer)
    assert not differing(run.cached, run.router)
