# SPDX-License-Identifier: Apache-2.0
"""Prefill on one server, decode on another, NixlConnector between them, and the tier.

With `KV_TIER_PARALLEL=nixl` only, since NIXL is installed for it. On CPUs, UCX moves
the blocks through memory that both processes reach, or over TCP.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .compare import assert_same_answers
from .conftest import Results
from .connector_workloads import TURNS
from .engine import Answer
from .jobs import ASKED, BLOCK_TOKENS
from .model import make_tokenizer
from .pairs import LEASE_S, Pair
from .server import Server
from .test_http import CORE, IDLE_USAGE, SERVE, SIZE
from .test_parallel import SPOIL
from .workloads import text

pytestmark = pytest.mark.skipif("nixl" not in ASKED, reason="KV_TIER_PARALLEL=nixl")

PLAIN = [*SERVE, *SPOIL]
TIER = [*PLAIN, *CORE, *SIZE]
DECODE = {"both sides": TIER, "prefill side": PLAIN}
"""Flags of the decode server by where the tier is."""
ROWS = [
    pytest.param(
        name, marks=pytest.mark.compat("engine modes", f"NixlConnector, tier on {name}")
    )
    for name in DECODE
]


@pytest.fixture(scope="module", params=ROWS)
def pair(
    request: pytest.FixtureRequest, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    make_tokenizer(llama)
    folder = tmp_path_factory.mktemp("pair")
    pair = Pair(llama, TIER, DECODE[request.param], folder)
    yield pair
    pair.kill()


def all_turns(pair: Pair) -> list[Answer]:
    """Conversations side by side, all of a turn before the next one."""
    answers = []
    with ThreadPoolExecutor(3) as clients:
        for turn in TURNS:
            answers += clients.map(pair.ask, turn)
    return answers


def counted(server: Server, name: str) -> float:
    return server.metrics("vllm:").get(f"vllm:{name}", 0)


def forget(*servers: Server) -> None:
    """Empty their caches, once nobody reads blocks any more."""
    for server in servers:
        until_idle(server)
        server.post("/reset_prefix_cache", {})


def until_idle(server: Server, timeout_s: float = 60) -> None:
    """Wait until no block is in use, for a request or for who has not read it yet."""
    deadline = time.monotonic() + timeout_s
    while counted(server, "kv_cache_usage_perc") > IDLE_USAGE:
        assert time.monotonic() < deadline, "blocks are still held"
        time.sleep(0.2)


@pytest.mark.engines("large")
def test_same_answers_as_one_engine(results: Results, pair: Pair) -> None:
    expected = results("large")["workloads"]["passed_on"]["answers"]
    assert_same_answers(all_turns(pair), expected)
    # Once more: whatever is left anywhere serves it.
    assert_same_answers(all_turns(pair), expected)


def test_tier_and_connector_both_did_their_part(pair: Pair) -> None:
    """After the test before: half of what was asked was there, on the host mostly."""
    asked = 2 * sum(len(prompt) for turn in TURNS for prompt in turn)
    for server in pair.servers:
        if "--kv-offloading-backend" in server.flags:
            assert counted(server, "kv_tier_host_hit_tokens_total") > asked / 2
            assert counted(server, "kv_tier_loaded_blocks_total") > 0
            assert counted(server, "kv_tier_failures_total") == 0
    # All that the decode server did not have.
    here = counted(pair.decode, "prefix_cache_hits_total")
    passed_on = counted(pair.decode, "external_prefix_cache_hits_total")
    assert here + passed_on == asked
    assert passed_on > 0
    assert counted(pair.decode, "nixl_bytes_transferred_sum") > 0
    for name in ("failed_transfers", "failed_notifications", "kv_expired_reqs"):
        for server in pair.servers:
            assert counted(server, f"nixl_num_{name}_total") == 0
