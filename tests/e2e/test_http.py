# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with the host tier, as its users meet it."""

import json
import socket
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm.v1.core.block_pool import BlockPool

from .conftest import environment
from .jobs import BLOCK_BYTES, BLOCK_TOKENS, SMALL, GiB
from .model import make_tokenizer
from .release import COMPLETIONS_TELL_HITS, ENVIRONMENT, cache_bytes
from .server import Server, refused
from .workloads import text

NUM_SLOTS = 100
SERVE = [
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "512"),
    *("--block-size", str(BLOCK_TOKENS), "--max-num-seqs", "4"),
    *cache_bytes(SMALL * BLOCK_BYTES),
    *("--num-gpu-blocks-override", str(SMALL)),
    *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
]
IDLE_USAGE = BlockPool(SMALL, True, hash_block_size=BLOCK_TOKENS).get_usage()
"""Some releases count the block that stands for none."""
CORE = ["--kv-offloading-backend", "core"]
SIZE = ["--kv-offloading-size", repr(NUM_SLOTS * BLOCK_BYTES / GiB)]


@pytest.fixture(scope="module")
def served(llama: Path) -> Path:
    make_tokenizer(llama)
    return llama


def server_environment() -> dict[str, str]:
    return environment() | ENVIRONMENT


@pytest.fixture
def server(served: Path, tmp_path: Path) -> Iterator[Server]:
    server = Server(
        served, [*SERVE, *CORE, *SIZE], server_environment(), tmp_path / "log"
    )
    yield server
    server.kill()


def hang_up(server: Server, prompts: list[list[int]]) -> None:
    """Clients that are gone before their prompt is computed."""
    for i in range(20):
        body = {"model": server.model, "prompt": prompts[i % len(prompts)]}
        data = json.dumps(body | {"max_tokens": 200, "ignore_eos": True}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\n"
                + f"Content-Length: {len(data)}\r\n\r\n".encode()
                + data
            )
            time.sleep(0.01 * (i % 4))


def wait_until_idle(server: Server, timeout_s: float = 60) -> float:
    """Requests that run or wait still, and blocks in use."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = server.metrics("vllm:")
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        found["vllm:kv_cache_usage_perc"] -= IDLE_USAGE
        busy = sum(found[f"vllm:{name}"] for name in names)
        if not busy or time.monotonic() > deadline:
            return busy
        time.sleep(0.2)


@pytest.mark.compat("faults", "clients that hang up in the middle of their prefill")
def test_a_server_with_a_host_tier(server: Server) -> None:
    prompts = [text(i, 5 * BLOCK_TOKENS + 1) for i in range(8)]
    rounds = [
        [server.complete(p, max_tokens=8, ignore_eos=True) for p in prompts]
        for _ in range(2)
    ]
    texts = [[answer["choices"][0]["text"] for answer in r] for r in rounds]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == len(prompts)

    details = [[a["usage"]["prompt_tokens_details"] for a in r] for r in rounds]
    cached = [sum((d or {}).get("cached_tokens") or 0 for d in r) for r in details]
    hit = len(prompts) * 5 * BLOCK_TOKENS
    if COMPLETIONS_TELL_HITS:
        assert cached == [0, hit]

    found = server.metrics("vllm:kv_tier_")
    assert found["vllm:kv_tier_host_slots"] == NUM_SLOTS
    assert found["vllm:kv_tier_slot_bytes"] == BLOCK_BYTES
    # 8 prompts of 5 full blocks against 23 blocks: all were evicted in turn.
    assert found["vllm:kv_tier_host_hit_tokens_total"] == hit
    assert found["vllm:kv_tier_device_hit_tokens_total"] == 0
    assert found["vllm:kv_tier_loaded_blocks_total"] == hit / BLOCK_TOKENS
    assert found["vllm:kv_tier_stored_blocks_total"] == hit / BLOCK_TOKENS
    assert found["vllm:kv_tier_slots_used"] == hit / BLOCK_TOKENS
    assert found["vllm:kv_tier_evicted_slots_total"] == 0
    assert f"KV tier: {NUM_SLOTS} host slots" in server.log()

    hang_up(server, prompts)
    answer = server.complete(prompts[0], max_tokens=8, ignore_eos=True)
    assert answer["choices"][0]["text"] == texts[0][0]
    assert wait_until_idle(server) == 0

    assert server.terminate() == 0
    assert server.leftover_processes() == []
    assert server.stranded_shared_memory() == set()


def test_a_released_conversation_makes_room_first(server: Server) -> None:
    """The last one that came goes first, and is not stored; the others stay."""
    prompts = [text(100 + i, 5 * BLOCK_TOKENS + 1) for i in range(12)]
    over = len(prompts) - 1

    def ask(i: int, **hints: object) -> str:
        params = {"kv_tier": {"conversation": f"c{i}", **hints}}
        answer = server.complete(
            prompts[i], max_tokens=8, ignore_eos=True, kv_transfer_params=params
        )
        return answer["choices"][0]["text"]

    def hit_tokens() -> float:
        found = server.metrics("vllm:kv_tier_")
        tiers = ("device", "host")
        return sum(found[f"vllm:kv_tier_{tier}_hit_tokens_total"] for tier in tiers)

    texts = [ask(i, release=i == over) for i in range(len(prompts))]
    # Others take the device.
    for i in range(6):
        server.complete(
            text(200 + i, 5 * BLOCK_TOKENS + 1), max_tokens=8, ignore_eos=True
        )
    for i, expected in ((over, 0), (over - 1, 5 * BLOCK_TOKENS), (0, 5 * BLOCK_TOKENS)):
        before = hit_tokens()
        assert ask(i) == texts[i]
        assert hit_tokens() - before == expected
    found = server.metrics("vllm:kv_tier_")
    assert found["vllm:kv_tier_released_blocks_total"] == 5
    assert found["vllm:kv_tier_refused_hints_total"] == 0
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.complete(
            prompts[0], kv_transfer_params={"kv_tier": {"relase": True}}, stream=True
        )
    assert refused.value.code == 400
    assert "unknown field 'relase' (value True)" in refused.value.read().decode()


WRONG = {
    "no size": (CORE, ["--kv-offloading-size", "got None", "Give a size"]),
    "size 0": (
        [*CORE, "--kv-offloading-size", "0"],
        ["--kv-offloading-size", "got 0", "Give a size"],
    ),
    "more than the machine has": (
        [*CORE, "--kv-offloading-size", "1000000"],
        ["--kv-offloading-size 1e+06", "larger than the memory", "Lower it"],
    ),
    "an unknown key": (
        [*CORE, *SIZE, "--kv-offloading-config", '{"evict": "arc"}'],
        [
            "--kv-offloading-config",
            "unknown key 'evict'",
            "Known keys: secondary_tiers",
        ],
    ),
    "less than a block": (
        [*CORE, "--kv-offloading-size", "0.00001"],
        ["--kv-offloading-size", "not enough for one KV block", "Set it to"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_command_line(served: Path, tmp_path: Path, name: str) -> None:
    flags, parts = WRONG[name]
    env = server_environment()
    output = refused(served, *SERVE, *flags, env=env, log=tmp_path / "log")
    for part in parts:
        assert part in output
