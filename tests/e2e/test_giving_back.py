# SPDX-License-Identifier: Apache-2.0
"""An idle engine gives device memory back, and answers as before."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm.v1.worker import utils

from .conftest import ROOT, environment
from .jobs import BLOCK_BYTES, BLOCK_TOKENS, WITH_RANKS, GiB
from .pipeline_cpu import STAGES
from .release import ENVIRONMENT, TELLS_WHEN_IDLE, cache_bytes
from .server import Server
from .test_http import CORE, server_environment
from .test_http import served as served
from .workloads import text

PROMPT_BLOCKS = 14
WITHIN_S = 60.0


def flags(num_blocks: int, num_ranks: int) -> list[str]:
    return [
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "512"),
        *("--block-size", str(BLOCK_TOKENS), "--max-num-seqs", "4"),
        *cache_bytes(num_blocks * BLOCK_BYTES // num_ranks),
        *("--num-gpu-blocks-override", str(num_blocks)),
        *("--disable-uvicorn-access-log", *CORE),
        *("--kv-offloading-size", repr(num_blocks * BLOCK_BYTES / GiB)),
        *("--kv-offloading-config", json.dumps({"shrink_after_s": 3.0})),
    ]


def resident_bytes(server: Server) -> int:
    """Of all processes of a server."""
    status = "".join(Path(f"/proc/{pid}/status").read_text() for pid in server.pids())
    lines = [line.split() for line in status.splitlines()]
    return sum(int(line[1]) << 10 for line in lines if line[:1] == ["VmRSS:"])


def wait_for(found: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WITHIN_S
    while not found():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


@pytest.mark.parametrize(
    ("num_blocks", "parallel"),
    [
        pytest.param(1024, [], id="one rank"),
        # Half of each layer: a page, which is of 2 MiB of each, has twice the blocks.
        pytest.param(2048, ["-tp", "2"], id="TP=2", marks=WITH_RANKS),
        pytest.param(1024, STAGES, id="PP=2", marks=WITH_RANKS),
    ],
)
def test_memory_goes_and_prefixes_come_back(
    served: Path, tmp_path: Path, num_blocks: int, parallel: list[str]
) -> None:
    num_ranks = 2 if parallel else 1
    num_prompts = num_blocks * 60 // 1024
    prompts = [text(i, PROMPT_BLOCKS * BLOCK_TOKENS + 1) for i in range(num_prompts)]
    environment = server_environment() | ENVIRONMENT
    server = Server(
        served, [*flags(num_blocks, num_ranks), *parallel], environment, tmp_path / "l"
    )

    def ask() -> list[str]:
        answers = [server.complete(p, max_tokens=4, ignore_eos=True) for p in prompts]
        return [answer["choices"][0]["text"] for answer in answers]

    def metric(name: str) -> float:
        return server.metrics("vllm:kv_tier_")[f"vllm:kv_tier_{name}"]

    try:
        before = ask()
        busy = resident_bytes(server)
        total = num_blocks * BLOCK_BYTES
        used = num_prompts * PROMPT_BLOCKS * BLOCK_BYTES
        # Some of what was used lay in the page that stays.
        lacking = 0.9 * (used - total / 8)
        assert wait_for(lambda: busy - resident_bytes(server) > lacking)
        if not TELLS_WHEN_IDLE:
            server.complete(text(num_prompts, BLOCK_TOKENS), max_tokens=1)
        # The page of the block that stands for none stays.
        assert wait_for(lambda: metric("device_unmapped_bytes") == total * 7 / 8)
        assert metric("device_mapped_bytes") == total / 8

        tiers = ("device_hit_tokens_total", "host_hit_tokens_total")
        hits = [metric(tier) for tier in tiers]
        after = ask()
        assert after == before
        on_device, on_host = (metric(t) - n for t, n in zip(tiers, hits, strict=True))
        assert on_device + on_host == num_prompts * PROMPT_BLOCKS * BLOCK_TOKENS
        assert on_device <= num_blocks / 8 * BLOCK_TOKENS
        assert metric("mapped_pages_total") > 0
        assert server.metrics("vllm:")["vllm:num_preemptions_total"] == 0
        assert server.terminate() == 0
    finally:
        server.kill()


@pytest.mark.skipif(
    not hasattr(utils, "new_kv_cache"),
    reason="this release does not make the KV cache in one piece of memory",
)
def test_pages_are_mapped_by_the_scheduler(llama: Path) -> None:
    """As on a GPU: some come when the engine has started, all go when it is idle, and
    nobody touches one that is not mapped, which would end the process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.mapped_pages", str(llama)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    first, *others = found["rounds"]
    assert 0 < found["missing"] < found["pages"]
    for each in found["rounds"]:
        # The page of the block that stands for none stays.
        assert each["unmapped"] == found["pages"] - 1
        assert each["mapped_bytes"] <= 1.5 * found["page_bytes"]
        assert not each["preempted"]
    assert first["host_hit_tokens"] == 0
    for each in others:
        assert each["tokens"] == first["tokens"]
        assert each["host_hit_tokens"] >= 0.9 * found["prompt_tokens"]
