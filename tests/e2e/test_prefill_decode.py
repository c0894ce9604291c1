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
# On GPUs it is the default.
AHEAD = [*TIER, "--async-scheduling"]
FLAGS = {"both sides": (AHEAD, AHEAD), "prefill side": (TIER, PLAIN)}
"""Of the prefill and the decode server by where the tier is."""
ROWS = [
    pytest.param(
        name, marks=pytest.mark.compat("engine modes", f"NixlConnector, tier on {name}")
    )
    for name in FLAGS
]


@pytest.fixture(scope="module", params=ROWS)
def pair(
    request: pytest.FixtureRequest,
    llama: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    make_tokenizer(llama)
    folder = tmp_path_factory.mktemp("pair")
    pair = Pair(llama, *FLAGS[request.param], folder)
    yield pair
    pair.kill()


def all_turns(pair: Pair) -> list[Answer]:
    """Conversations side by side, all of a turn before the next one."""
    answers: list[Answer] = []
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


@pytest.mark.engines("large")
def test_what_waits_to_be_read_keeps_its_bytes(results: Results, pair: Pair) -> None:
    """While other prompts are evicted, stored and loaded around it."""
    answers = results("large")["workloads"]["passed_on"]["answers"]
    expected = answers[len(TURNS[0]) :][: len(TURNS[1])]
    for prompt in TURNS[0]:
        pair.ask(prompt)
    before = counted(pair.prefill, "kv_tier_loaded_blocks_total")
    begun = pair.begin(TURNS[1][0])
    assert_same_answers([pair.ask(p) for p in TURNS[1][1:]], expected[1:])
    assert counted(pair.prefill, "kv_tier_loaded_blocks_total") > before
    assert_same_answers([pair.continue_(TURNS[1][0], begun)], expected[:1])


@pytest.mark.compat(
    "faults", "a decode server that never reads what was computed for it"
)
def test_a_reader_that_never_comes(pair: Pair) -> None:
    """Its blocks are free, and stored, once the lease is over."""
    until_idle(pair.prefill)
    prompt = text(2100, 5 * BLOCK_TOKENS + 1)
    expired = counted(pair.prefill, "nixl_num_kv_expired_reqs_total")
    pair.begin(prompt)
    assert counted(pair.prefill, "kv_cache_usage_perc") > IDLE_USAGE
    begun = time.monotonic()
    while counted(pair.prefill, "nixl_num_kv_expired_reqs_total") == expired:
        assert time.monotonic() - begun < 3 * LEASE_S
        # Upstream looks at leases in the steps of others.
        pair.ask(text(2101, 9))
    until_idle(pair.prefill)
    for others in range(4):
        pair.ask(text(2110 + others, 7 * BLOCK_TOKENS))
    hits = counted(pair.prefill, "kv_tier_host_hit_tokens_total")
    pair.ask(prompt)
    found = counted(pair.prefill, "kv_tier_host_hit_tokens_total") - hits
    assert found == 5 * BLOCK_TOKENS


def test_released_conversations_of_both(pair: Pair) -> None:
    """Hints go by the proxy to both, beside the fields of the connector."""
    for i in range(3):
        prompt = text(2200 + i, 3 * BLOCK_TOKENS + 1)
        pair.ask(prompt, conversation=f"c{i}", release=True)
    for server in pair.servers:
        if "--kv-offloading-backend" in server.flags:
            assert counted(server, "kv_tier_released_blocks_total") > 0


@pytest.mark.engines("large")
def test_slots_that_are_spoilt_on_either_side_are_noticed(
    results: Results, pair: Pair
) -> None:
    """The negative control: what either side has on its host is in the answers."""
    expected = results("large")["workloads"]["passed_on"]["answers"]
    for server in pair.servers:
        if "--kv-offloading-backend" not in server.flags:
            continue
        forget(*pair.servers)
        assert_same_answers(all_turns(pair), expected)
        # What the other one has is not asked for.
        forget(*(other for other in pair.servers if other is not server))
        server.post("/collective_rpc", {"method": "spoil_all_slots", "args": [0]})
        with pytest.raises(AssertionError, match="other tokens|off by"):
            assert_same_answers(all_turns(pair), expected)


@pytest.mark.engines("large")
@pytest.mark.compat("faults", "a prefill server that is killed before it is read")
def test_a_prefill_server_that_is_gone(results: Results, pair: Pair) -> None:
    """The decode server computes what it cannot read, and ends as it should."""
    forget(*pair.servers)
    expected = results("large")["workloads"]["passed_on"]["answers"]
    begun = [pair.begin(prompt) for prompt in TURNS[0][:2]]
    assert_same_answers([pair.continue_(TURNS[0][0], begun[0])], expected[:1])
    pair.prefill.kill()
    assert_same_answers([pair.continue_(TURNS[0][1], begun[1])], expected[1:2])
    assert pair.decode.terminate() == 0
    assert pair.decode.leftover_processes() == []
    assert pair.decode.stranded_shared_memory() == set()
