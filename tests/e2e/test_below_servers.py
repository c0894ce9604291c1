# SPDX-License-Identifier: Apache-2.0
"""Valkey and Mooncake below the host of a real engine, which is killed.

What each store does when its server fails is in tests/unit/test_store_servers.py.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit.store_servers import Mooncake, Servers, Valkey
from vllm.v1.kv_tier.scheduling.below import keys_are_bytes

from .jobs import BLOCK_TOKENS
from .model import make_llama, make_tokenizer
from .server import Server
from .test_below import ask, counted, writes
from .test_http import CORE, SERVE, SIZE, server_environment
from .workloads import text

pytestmark = pytest.mark.skipif(
    not keys_are_bytes(), reason="refused: hashes are numbers of a process"
)

PROMPTS = [text(600 + i, 5 * BLOCK_TOKENS + 1) for i in range(6)]
HIT = 5 * BLOCK_TOKENS


@contextmanager
def serving(model: Path, entries: list[dict[str, Any]], log: Path) -> Iterator[Server]:
    # Slow machines are no part of this test.
    more = {"store_from_use": 1, "deadline_ms": 20_000}
    options = json.dumps({"secondary_tiers": [entry | more for entry in entries]})
    flags = [*SERVE, *CORE, *SIZE, "--kv-offloading-config", options]
    env = server_environment() | {"PYTHONHASHSEED": "0"}
    server = Server(model, flags, env, log)
    try:
        yield server
    finally:
        server.kill()


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
        files = {"type": "fs", "root_dir": str(root), "max_gib": 0.1}
        with serving(model, [files, servers.entry], tmp_path / "log2") as server:
            found = [ask(server, prompt) for prompt in PROMPTS]
            assert [answer for answer, _ in found] == texts
            assert [hits for _, hits in found] == [HIT] * len(PROMPTS)
            assert counted(server, "secondary_loaded_blocks") >= 5 * len(PROMPTS)
            # A server that dies costs time only.
            for name in servers.names:
                servers.kill(name)
            assert ask(server, text(700, HIT))[0]
            assert ask(server, PROMPTS[0])[0] == texts[0]
        assert any(root.rglob("*.kv"))
    finally:
        servers.close()
