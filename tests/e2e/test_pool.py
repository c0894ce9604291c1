# SPDX-License-Identifier: Apache-2.0
"""Real servers that share the pool of a keeper, and are killed."""

import os
import time
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from random import Random
from threading import Event, Thread

import pytest

from .model import make_llama, make_tokenizer
from .pool import KeeperProcess, ask, keeping, serve
from .secondary import HIT, NEEDS_KEYS, counted, prompts
from .server import Server

pytestmark = NEEDS_KEYS

PROMPTS = prompts(700, 6)
NUM_BLOCKS = 5 * len(PROMPTS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_llama(tmp_path_factory.mktemp("pool") / "model")
    make_tokenizer(folder)
    return folder


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[KeeperProcess]:
    with keeping(tmp_path, size_gib=0.03, num_engines=2) as keeper:
        yield keeper


def answers(server: Server) -> list[tuple[str, int]]:
    found = [ask(server, prompt) for prompt in PROMPTS]
    # What idle steps publish.
    time.sleep(1)
    return found


def test_neighbours_and_successors_hit_what_an_engine_has_computed(
    model: Path, keeper: KeeperProcess, tmp_path: Path
) -> None:
    started: list[Server] = []

    def start(name: str, socket: Path | None) -> Server:
        started.append(serve(model, tmp_path / name, socket))
        return started[-1]

    try:
        one = start("one", keeper.socket)
        first = answers(one)
        assert [cached for _, cached in first] == [0] * len(PROMPTS)
        texts = [text for text, _ in first]
        assert len({*texts}) == len(PROMPTS)
        two = start("two", keeper.socket)
        # At once, with the same answers.
        assert answers(two) == [(text, HIT) for text in texts]
        assert counted(two, "neighbour_blocks") == NUM_BLOCKS
        # Nothing is there twice: what it has taken from the neighbour is not stored.
        stored = counted(two, "stored_blocks")
        assert stored < NUM_BLOCKS
        one.kill()
        heir = start("heir", keeper.socket)
        num_adopted = int(
            heir.log().partition("pool at")[2].split("with ")[1].split()[0]
        )
        assert num_adopted >= NUM_BLOCKS
        assert answers(heir) == [(text, HIT) for text in texts]
        assert counted(heir, "neighbour_blocks") == 0
        # The keeper is not needed any more.
        keeper.end()
        heir.post("/v1/completions", {"model": str(model), "prompt": "a"})
        assert [text for text, _ in answers(two)] == texts
    finally:
        for server in started:
            server.kill()


def test_bytes_come_from_the_pool_and_only_from_there(
    model: Path, keeper: KeeperProcess, tmp_path: Path
) -> None:
    one = serve(model, tmp_path / "one", keeper.socket)
    try:
        texts = [text for text, _ in answers(one)]
    finally:
        one.kill()
    keeper.spoil(seed=1)
    two = serve(model, tmp_path / "two", keeper.socket)
    try:
        found = answers(two)
    finally:
        two.kill()
    assert [cached for _, cached in found] == [HIT] * len(PROMPTS)
    assert [text for text, _ in found] != texts
    alone = serve(model, tmp_path / "alone", None)
    try:
        assert answers(alone) == [(text, 0) for text in texts]
    finally:
        alone.kill()


def test_killed_engines_give_no_wrong_answer(model: Path, tmp_path: Path) -> None:
    """Under load, with a pool that holds half of the prompts, so that slots are reused
    while neighbours read them. `KV_TIER_POOL_KILLS` sets how many are killed."""
    num_kills = int(os.environ.get("KV_TIER_POOL_KILLS", "2"))
    asked, rng = prompts(800, 24), Random(3)
    with keeping(tmp_path, size_gib=4 / 1024, num_engines=2) as keeper:
        alone = serve(model, tmp_path / "alone", None)
        try:
            truth = [ask(alone, prompt)[0] for prompt in asked]
        finally:
            alone.kill()
        servers = [serve(model, tmp_path / f"{i}", keeper.socket) for i in range(2)]
        wrong: list[int] = []
        counts: Counter[str] = Counter()
        is_over = Event()

        def client(seed: int) -> None:
            of_client = Random(seed)
            while not is_over.is_set():
                number = of_client.randrange(len(asked))
                try:
                    text, cached = ask(of_client.choice(servers), asked[number])
                except (OSError, HTTPException):
                    counts["ended"] += 1
                    time.sleep(0.2)
                    continue
                counts["hits"] += cached > 0
                counts["answers"] += 1
                if text != truth[number]:
                    wrong.append(number)

        clients = [Thread(target=client, args=(seed,)) for seed in range(4)]
        for thread in clients:
            thread.start()
        try:
            for i in range(num_kills):
                time.sleep(rng.uniform(5, 10))
                victim = i % 2
                counts["from neighbours"] += int(
                    counted(servers[1 - victim], "neighbour_blocks")
                )
                servers[victim].kill()
                log = tmp_path / f"{victim} after {i}"
                servers[victim] = serve(model, log, keeper.socket)
                assert "of an earlier engine" in servers[victim].log()
            time.sleep(5)
        finally:
            is_over.set()
            for thread in clients:
                thread.join()
            for server in servers:
                server.kill()
        print(dict(counts))
        assert wrong == []
        assert counts["answers"] > 100 and counts["hits"] > 20
        assert counts["from neighbours"]
