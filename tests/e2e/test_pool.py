# SPDX-License-Identifier: Apache-2.0
"""Real servers that share the pool of a keeper, and are killed."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm.distributed.kv_events import BlockStored
from vllm.v1.kv_tier.releases import describes_hits

from ..follower import Subscriber
from ..settings import with_debug
from .jobs import NGRAM, WITH_RANKS, connector
from .model import make_llama, make_lora, make_tokenizer
from .pipeline_cpu import STAGES
from .pool import KeeperProcess, ask, keeping, serve
from .secondary import (
    HIT,
    NEEDS_KEYS,
    counted,
    directory,
    objects,
    prompts,
    writes,
)
from .server import Server
from .test_http import server_environment

pytestmark = NEEDS_KEYS

PROMPTS = prompts(700, 6)
NUM_BLOCKS = 5 * len(PROMPTS)
HALF = 7 << 20
"""Bytes of the first of two ranks in a partition of `keeper`."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_llama(tmp_path_factory.mktemp("pool") / "model")
    make_tokenizer(folder)
    return folder


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[KeeperProcess]:
    with keeping(tmp_path, size_gib=0.03, num_engines=2) as keeper:
        yield keeper


def answers(server: Server, **params: Any) -> list[tuple[str, int]]:
    found = [ask(server, prompt, **params) for prompt in PROMPTS]
    # What idle steps publish.
    time.sleep(1)
    return found


def ever_stored(subscriber: Subscriber, stored: set[tuple[str, Any]]) -> Counter[str]:
    """Blocks that were on each medium, by all events that have come.

    Args:
        subscriber: Receives them.
        stored: Those of earlier calls; takes the others.

    """
    while (events := subscriber.receive(timeout_s=1)) is not None:
        for event in events:
            if isinstance(event, BlockStored):
                stored.update((str(event.medium), each) for each in event.block_hashes)
    return Counter(medium for medium, _ in stored)


def with_features(folder: Path) -> list[str]:
    """Flags of drafts, an adapter `a` and a connector."""
    adapter = make_lora(folder / "adapter", seed=1)
    # It has nothing that the pool lacks.
    transfer = connector("SlowConnector") | {
        "kv_connector_extra_config": {"storage": str(folder)}
    }
    return [
        *("--max-num-batched-tokens", "2048"),
        *("--speculative-config", json.dumps(NGRAM)),
        *("--kv-transfer-config", json.dumps(transfer)),
        *("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"a={adapter}"),
    ]


@pytest.mark.pairs("OP", "QU", "LO", "LR", "NG", "PD", "EV")
@pytest.mark.compat("engine modes", "engines that share a pool", "DP=2, TP=2, PP=2")
def test_neighbours_and_successors_hit_what_an_engine_has_computed(
    model: Path,
    keeper: KeeperProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    flags, quotas = with_features(tmp_path), {"a": 0.5}
    started: list[Server] = []
    streams: dict[str, tuple[Subscriber, set[tuple[str, Any]]]] = {}

    def start(name: str) -> Server:
        log, socket = tmp_path / name, keeper.socket
        more = list(flags)
        if describes_hits():
            endpoint = f"ipc://{tmp_path}/{name}.events"
            events = {"enable_kv_cache_events": True, "endpoint": endpoint}
            more += ["--kv-events-config", json.dumps(events | {"publisher": "zmq"})]
            streams[name] = Subscriber(endpoint), set()
        started.append(serve(model, log, socket, *more, quotas=quotas))
        return started[-1]

    def are_known(name: str, *media: str) -> bool:
        """Whether events have told of all blocks of the prompts."""
        known = ever_stored(*streams[name]) if name in streams else None
        return known is None or all(known[each] >= 2 * NUM_BLOCKS for each in media)

    def ask_all(server: Server) -> list[tuple[str, int]]:
        return answers(server) + answers(server, model="a")

    try:
        one = start("one")
        first = ask_all(one)
        assert [cached for _, cached in first] == [0] * len(first)
        texts = [text for text, _ in first]
        assert len({*texts}) == len(first)
        two = start("two")
        # At once, with the same answers.
        assert ask_all(two) == [(text, HIT) for text in texts]
        assert counted(two, "neighbour_blocks") == 2 * NUM_BLOCKS
        assert are_known("one", "GPU", "CPU") and are_known("two", "GPU")
        # Nothing is there twice: what it has taken from the neighbour is not stored.
        assert counted(two, "stored_blocks") < NUM_BLOCKS
        one.kill()
        heir = start("heir")
        num_adopted = int(
            heir.log().partition("pool at")[2].split("with ")[1].split()[0]
        )
        assert num_adopted >= 2 * NUM_BLOCKS
        assert ask_all(heir) == [(text, HIT) for text in texts]
        assert counted(heir, "neighbour_blocks") == 0
        assert are_known("heir", "GPU", "CPU")
        # The same adapter by name and path, but other weights.
        path = str(make_lora(tmp_path / "adapter", seed=2))
        load = {"lora_name": "a", "lora_path": path, "load_inplace": True}
        heir.post("/v1/load_lora_adapter", load)
        others = answers(heir, model="a")
        assert [cached for _, cached in others] == [0] * len(PROMPTS)
        assert {*texts}.isdisjoint(text for text, _ in others)
        # The keeper is not needed any more.
        keeper.end()
        assert [text for text, _ in ask_all(two)] == texts
        assert [text for text, _ in answers(heir)] == texts[: len(PROMPTS)]
    finally:
        for server in started:
            server.kill()
        for subscriber, _ in streams.values():
            subscriber.close()


@pytest.mark.pairs("DP", "OP")
@pytest.mark.compat("engine modes", "engines that share a pool", "DP=2, TP=2, PP=2")
def test_engines_of_one_server_are_neighbours(
    model: Path, keeper: KeeperProcess, tmp_path: Path
) -> None:
    server = serve(model, tmp_path / "log", keeper.socket, "--data-parallel-size", "2")
    try:
        # Requests alternate between both.
        first = answers(server)
        texts = [text for text, _ in first]
        for _ in range(3):
            assert [text for text, _ in answers(server)] == texts
        assert counted(server, "neighbour_blocks")
    finally:
        server.kill()


@pytest.mark.pairs("FS", "OP")
def test_files_are_below_the_pool_once(model: Path, tmp_path: Path) -> None:
    """What a neighbour has is neither written nor read again, also what it has read."""
    entry = directory(tmp_path / "kv")
    # Slow machines are no part of this test.
    entry = with_debug(entry, store_from_use=1, deadline_ms=20_000, fetch="always")
    read = "secondary_loaded_blocks"

    def both(name: str, keeper: KeeperProcess) -> list[Server]:
        logs = [tmp_path / f"{name}{i}" for i in range(2)]
        tiers = {"secondary_tiers": [entry]}
        return [serve(model, log, keeper.socket, **tiers) for log in logs]

    started: list[Server] = []
    try:
        with keeping(tmp_path, size_gib=0.03, num_engines=2) as keeper:
            started += (servers := both("first", keeper))
            texts = [text for text, _ in answers(servers[0])]
            writes(servers[0], NUM_BLOCKS, before=0)
            num_files = len(objects(tmp_path / "kv"))
            assert answers(servers[1]) == [(text, HIT) for text in texts]
            assert counted(servers[1], read) == 0
            assert counted(servers[1], "neighbour_blocks") == NUM_BLOCKS
            assert len(objects(tmp_path / "kv")) == num_files
            for server in servers:
                server.kill()
        with keeping(tmp_path, size_gib=0.03, num_engines=2) as keeper:
            started += (servers := both("second", keeper))
            assert answers(servers[0]) == [(text, HIT) for text in texts]
            assert counted(servers[0], read) == NUM_BLOCKS
            assert answers(servers[1]) == [(text, HIT) for text in texts]
            assert counted(servers[1], read) == 0
            assert counted(servers[1], "neighbour_blocks") == NUM_BLOCKS
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


@pytest.mark.pairs("OP", "VE")
def test_blocks_of_a_neighbour_that_have_changed_are_computed(
    model: Path, keeper: KeeperProcess, tmp_path: Path
) -> None:
    started: list[Server] = []

    def start(name: str) -> Server:
        log, socket = tmp_path / name, keeper.socket
        started.append(serve(model, log, socket, verify=True))
        return started[-1]

    try:
        texts = [text for text, _ in answers(start("one"))]
        two = start("two")
        assert ask(two, PROMPTS[0]) == (texts[0], HIT)
        keeper.spoil(seed=1)
        found = answers(two)
        assert [text for text, _ in found] == texts
        assert [cached for _, cached in found[1:]] == [0] * (len(PROMPTS) - 1)
        # After some failures it asks for a while only what the device has.
        assert 1 < counted(two, "failures") < len(PROMPTS)
        assert [text for text, _ in answers(two)] == texts
    finally:
        for server in started:
            server.kill()


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            ["--tensor-parallel-size", "2"],
            id="tensor",
            marks=pytest.mark.pairs("TP", "OP"),
        ),
        pytest.param(
            STAGES, id="pipeline", marks=[WITH_RANKS, pytest.mark.pairs("PP", "OP")]
        ),
    ],
)
@pytest.mark.compat("engine modes", "engines that share a pool", "DP=2, TP=2, PP=2")
def test_ranks_load_from_the_same_rank_of_a_neighbour(
    model: Path, keeper: KeeperProcess, tmp_path: Path, flags: list[str]
) -> None:
    started: list[Server] = []

    def start(name: str) -> Server:
        started.append(serve(model, tmp_path / name, keeper.socket, *flags))
        return started[-1]

    try:
        one = start("one")
        texts = [text for text, _ in answers(one)]
        assert len({*texts}) == len(PROMPTS)
        two = start("two")
        assert answers(two) == [(text, HIT) for text in texts]
        assert counted(two, "neighbour_blocks") == NUM_BLOCKS
        one.kill()
        # What the second rank has left: the second half of each partition.
        keeper.spoil(1, slice(HALF, None))
        found = answers(start("heir"))
        assert [cached for _, cached in found] == [HIT] * len(PROMPTS)
        assert [text for text, _ in found] != texts
    finally:
        for server in started:
            server.kill()


@pytest.mark.compat("faults", "SIGKILL of engines that share a pool")
def test_kills_of_engines_ranks_and_keeper_give_no_wrong_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a pool that holds less than all prompts, so that slots are reused while
    neighbours read them. `KV_TIER_POOL_KILLS` sets how many processes are killed."""
    num_kills = os.environ.get("KV_TIER_POOL_KILLS", "7")
    command = [sys.executable, "-m", "tests.e2e.pool_crowd", str(tmp_path)]
    command += ["--kills", num_kills, "--ranks", "1", "1", "2"]
    done = subprocess.run(
        command, env=server_environment(), capture_output=True, text=True
    )
    logs = "".join(path.read_text()[-4000:] for path in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    counts = json.loads(done.stdout)
    with capsys.disabled():
        print(counts)
    some = ["answers", "hits", "from neighbours", "adopted", "wrong when spoilt"]
    for event in (*some, "kills of a engine", "kills of a keeper", "refused"):
        assert counts[event], event
    assert counts["seconds"]["upgrade of the keeper"]["times"]
