# SPDX-License-Identifier: Apache-2.0
"""What hints do to eviction, on a server whose host tier overflows."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from .conftest import environment
from .jobs import BLOCK_BYTES, BLOCK_TOKENS, SMALL, GiB
from .model import make_tokenizer
from .release import ENVIRONMENT, cache_bytes
from .server import Server
from .workloads import text

NUM_SLOTS = 40
NUM_BLOCKS = 5
"""Full blocks of each prompt. The next one is never full, and never kept."""
ALL = NUM_BLOCKS * BLOCK_TOKENS
CONFIG = json.dumps(
    {"debug": {"store_from_use": 1}, "quotas": {"small": NUM_BLOCKS / NUM_SLOTS}},
)
SERVE = [
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "512"),
    *("--block-size", str(BLOCK_TOKENS), "--max-num-seqs", "4"),
    *cache_bytes(SMALL * BLOCK_BYTES),
    *("--num-gpu-blocks-override", str(SMALL)),
    *("--kv-offloading-backend", "core", "--kv-offloading-config", CONFIG),
    *("--kv-offloading-size", repr(NUM_SLOTS * BLOCK_BYTES / GiB)),
]


class Client:
    """Asks for prompts that nobody has asked for, and for such again."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._numbers = count(1000)
        self._texts: dict[int, str] = {}

    def ask(self, number: int | None = None, **hints: object) -> int:
        """Ask for a prompt, a new one if none is named. Returns its number."""
        if number is None:
            number = next(self._numbers)
        params: dict[str, Any] = {}
        if hints:
            params = {"kv_transfer_params": {"kv_tier": hints}}
        answer = self._server.complete(
            text(number, NUM_BLOCKS * BLOCK_TOKENS + 1),
            max_tokens=4,
            ignore_eos=True,
            **params,
        )["choices"][0]["text"]
        assert self._texts.setdefault(number, answer) == answer
        return number

    def flood(self, num_prompts: int, **hints: object) -> None:
        """Others, who take the device; ten of them take the host, too."""
        for _ in range(num_prompts):
            self.ask(**hints)

    def hits(self, number: int, **hints: object) -> float:
        """Tokens of a prompt that came from device or host."""
        names = ("device_hit_tokens_total", "host_hit_tokens_total")
        before = sum(map(self.metric, names))
        self.ask(number, **hints)
        return sum(map(self.metric, names)) - before

    def metric(self, name: str) -> float:
        return self._server.metrics("vllm:kv_tier_")[f"vllm:kv_tier_{name}"]

    @property
    def num_answers(self) -> int:
        """How many different answers came: few mean a model that says nothing."""
        return len(set(self._texts.values()))


@pytest.fixture(scope="module")
def client(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    make_tokenizer(llama)
    log = tmp_path_factory.mktemp("hints") / "log"
    server = Server(llama, SERVE, environment() | ENVIRONMENT, log)
    client = Client(server)
    yield client
    assert client.num_answers > 50
    assert server.terminate() == 0
    server.kill()


def test_what_is_retained_outlives_a_flood(client: Client) -> None:
    kept = client.ask(retain={"priority": 90, "ttl": 600})
    control = client.ask()
    client.flood(16)
    assert client.hits(kept) == ALL
    assert client.hits(control) == 0
    assert client.metric("retained_blocks_total") >= NUM_BLOCKS


def test_a_range_is_retained_and_not_the_rest(client: Client) -> None:
    kept = client.ask(retain={"priority": 90, "end": 2 * BLOCK_TOKENS})
    client.flood(16)
    assert client.hits(kept) == 2 * BLOCK_TOKENS


def test_what_has_expired_is_like_any_other(client: Client) -> None:
    number = client.ask(retain={"priority": 90, "ttl": 0.01})
    client.flood(16)
    assert client.hits(number) == 0


def test_what_is_not_to_be_stored_is_not(client: Client) -> None:
    hidden, control = client.ask(store=False), client.ask()
    client.flood(5)
    assert client.hits(hidden) == 0
    # The flood has left it on the host, so that the other one was not just evicted.
    assert client.hits(control) == ALL


def test_no_more_is_loaded_than_a_request_wants(client: Client) -> None:
    number = client.ask()
    client.flood(5)
    assert client.hits(number, max_load_tokens=2 * BLOCK_TOKENS) == 2 * BLOCK_TOKENS


def test_a_tenant_within_its_quota_outlives_one_who_floods(client: Client) -> None:
    """Who asks for all of it twice, as if it were used again, and most important."""
    kept, control = client.ask(tenant="small"), client.ask(tenant="other")
    flood = {"tenant": "big", "retain": {"priority": 100}}
    for _ in range(16):
        client.ask(client.ask(**flood), **flood)
    assert client.hits(kept) == ALL
    assert client.hits(control) == 0
