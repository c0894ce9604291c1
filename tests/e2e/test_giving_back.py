# SPDX-License-Identifier: Apache-2.0
"""An idle server gives device memory back to the machine, and answers as before."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from .jobs import BLOCK_BYTES, BLOCK_TOKENS, GiB
from .release import ENVIRONMENT, cache_bytes
from .server import Server
from .test_http import CORE, server_environment
from .test_http import served as served
from .workloads import text

NUM_BLOCKS = 1024
NUM_PROMPTS, PROMPT_BLOCKS = 60, 14
WITHIN_S = 60.0
FLAGS = [
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "512"),
    *("--block-size", str(BLOCK_TOKENS), "--max-num-seqs", "4"),
    *cache_bytes(NUM_BLOCKS * BLOCK_BYTES),
    *("--num-gpu-blocks-override", str(NUM_BLOCKS)),
    *("--disable-uvicorn-access-log", *CORE),
    *("--kv-offloading-size", repr(NUM_BLOCKS * BLOCK_BYTES / GiB)),
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


def test_memory_goes_and_prefixes_come_back(served: Path, tmp_path: Path) -> None:
    prompts = [text(i, PROMPT_BLOCKS * BLOCK_TOKENS + 1) for i in range(NUM_PROMPTS)]
    config = json.dumps({"shrink_after_s": 3.0})
    environment = server_environment() | ENVIRONMENT
    server = Server(
        served, [*FLAGS, "--kv-offloading-config", config], environment, tmp_path / "l"
    )

    def ask() -> list[str]:
        answers = [server.complete(p, max_tokens=4, ignore_eos=True) for p in prompts]
        return [answer["choices"][0]["text"] for answer in answers]

    def metric(name: str) -> float:
        return server.metrics("vllm:kv_tier_")[f"vllm:kv_tier_{name}"]

    try:
        before = ask()
        busy = resident_bytes(server)
        total = NUM_BLOCKS * BLOCK_BYTES
        # The page of the block that stands for none stays.
        assert wait_for(lambda: metric("device_unmapped_bytes") == total * 7 / 8)
        assert metric("device_mapped_bytes") == total / 8
        used = NUM_PROMPTS * PROMPT_BLOCKS * BLOCK_BYTES
        # Some of what was used lay in the page that stays.
        assert busy - resident_bytes(server) > 0.9 * (used - total / 8)

        tiers = ("device_hit_tokens_total", "host_hit_tokens_total")
        hits = [metric(tier) for tier in tiers]
        after = ask()
        assert after == before
        on_device, on_host = (metric(t) - n for t, n in zip(tiers, hits, strict=True))
        assert on_device + on_host == NUM_PROMPTS * PROMPT_BLOCKS * BLOCK_TOKENS
        assert on_device <= NUM_BLOCKS / 8 * BLOCK_TOKENS
        assert metric("mapped_pages_total") > 0
        assert server.metrics("vllm:")["vllm:num_preemptions_total"] == 0
        assert server.terminate() == 0
    finally:
        server.kill()
