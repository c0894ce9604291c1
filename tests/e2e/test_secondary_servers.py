# SPDX-License-Identifier: Apache-2.0
"""Valkey and Mooncake below the host of a real engine, which is killed.

What each store does when its server fails is in tests/unit/stores/test_servers.py.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from random import Random
from threading import Event, Thread

import pytest

from tests.unit.stores.servers import Mooncake, Servers, Valkey

from ..settings import with_debug
from .model import make_llama, make_tokenizer
from .secondary import (
    HIT,
    NEEDS_KEYS,
    ask,
    counted,
    directory,
    objects,
    prompts,
    serving,
    writes,
)
from .test_http import NUM_SLOTS
from .workloads import text

pytestmark = NEEDS_KEYS

PROMPTS = prompts(600, 6)


@pytest.mark.parametrize("kind", [Valkey, Mooncake])
def test_a_killed_engine_finds_what_the_servers_have(
    kind: type[Servers], tmp_path: Path
) -> None:
    model = make_llama(tmp_path / "model")
    make_tokenizer(model)
    servers = kind()
    try:
        servers.start()
        with serving(model, [servers.entry], tmp_path / "log1") as server:
            texts = [ask(server, prompt)[0] for prompt in PROMPTS]
            writes(server, 5 * len(PROMPTS), before=0)
        assert len(set(texts)) == len(PROMPTS)
        # Files above it: what comes from the servers is written there, too.
        root = tmp_path / "kv"
        with serving(
            model, [directory(root), servers.entry], tmp_path / "log2"
        ) as server:
            found = [ask(server, prompt) for prompt in PROMPTS]
            assert [answer for answer, _ in found] == texts
            assert [hits for _, hits in found] == [HIT] * len(PROMPTS)
            assert counted(server, "secondary_loaded_blocks") >= 5 * len(PROMPTS)
            limit = time.monotonic() + 60
            while not objects(root):
                assert time.monotonic() < limit, "nothing is written above"
                time.sleep(0.05)
            # A server that dies costs time only.
            for name in servers.names:
                servers.kill(name)
            assert ask(server, text(700, HIT))[0]
            assert ask(server, PROMPTS[0])[0] == texts[0]
    finally:
        servers.close()


MANY = prompts(2000, NUM_SLOTS // 5 + 12)
"""More than the host holds."""


HARM = ("stopped", "killed")
MENDED = "works again"
TAKES_MINUTES = pytest.mark.skipif(
    os.environ.get("KV_TIER_STORES") != "all", reason="KV_TIER_STORES=all runs it"
)


def harm(servers: Servers, longest_stop: float, ends: Event, done: list[str]) -> None:
    """Stop each process and let it go on, or kill it and start it anew, on and on."""
    rng = Random(7)
    for i in count():
        if ends.wait(rng.uniform(0.1, 0.6)):
            return
        name = servers.names[i // 3 % len(servers.names)]
        if i % 3 == 2:
            servers.kill(name)
            done.append(f"{name} killed")
            time.sleep(rng.uniform(0, 0.5))
            servers.start()
        else:
            servers.send(name, signal.SIGSTOP)
            done.append(f"{name} stopped")
            time.sleep(rng.uniform(0.05, longest_stop))
            servers.send(name, signal.SIGCONT)


@pytest.mark.parametrize(
    "kind, longest_stop, patience",
    [
        # Shorter and longer than its timeout of 0.7 s.
        (Valkey, 1.2, 60),
        pytest.param(Mooncake, 4, 240, marks=TAKES_MINUTES),
    ],
)
def test_a_server_that_stops_and_dies_in_the_middle_of_gets_and_puts(
    kind: type[Servers], longest_stop: float, patience: float, tmp_path: Path
) -> None:
    model = make_llama(tmp_path / "model")
    make_tokenizer(model)
    servers = kind()
    ends, done = Event(), list[str]()
    all_harm = {f"{name} {how}" for name in servers.names for how in HARM}
    entry = with_debug(servers.entry, deadline_ms=3000)
    try:
        servers.start()
        with serving(model, [entry], tmp_path / "log") as server:

            def answer(i: int) -> str:
                # Other ones of the same length: puts, while what was asked is got.
                new = server.complete(text(3000 + i, HIT), max_tokens=2)
                assert new["choices"][0]["finish_reason"] == "length"
                told = server.complete(MANY[i % len(MANY)], max_tokens=8)
                return told["choices"][0]["text"]

            right = [answer(i) for i in range(len(MANY))]
            writes(server, 1, before=0)
            before = counted(server, "secondary_loaded_blocks")
            harming = Thread(target=harm, args=(servers, longest_stop, ends, done))
            harming.start()
            first, limit = 0, time.monotonic() + 2 * patience
            with ThreadPoolExecutor(4) as clients:
                # Fast machines have asked all of it before a process is killed.
                while not (all_harm <= set(done) and MENDED in server.log()):
                    assert time.monotonic() < limit, (done, server.log())
                    first += len(MANY)
                    numbers = range(first, first + len(MANY))
                    assert list(clients.map(answer, numbers)) == right
            ends.set()
            harming.join()
            assert counted(server, "secondary_loaded_blocks") > before
            # Each change of state is one line, and it is used again at the end.
            log = server.log()
            troubles, mends = log.count("is in trouble"), log.count(MENDED)
            assert 0 < mends <= troubles <= 4 * len(done)
            loaded = counted(server, "secondary_loaded_blocks")
            limit = time.monotonic() + patience
            while counted(server, "secondary_loaded_blocks") == loaded:
                assert time.monotonic() < limit, "it is not used again"
                assert [answer(i) for i in range(len(MANY))] == right
    finally:
        ends.set()
        servers.close()
