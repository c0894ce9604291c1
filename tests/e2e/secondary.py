# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with stores below the host, for the tests of all of them."""

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vllm.v1.kv_tier.releases import keys_are_bytes

from ..settings import options, with_debug
from .jobs import BLOCK_TOKENS
from .server import Server
from .test_http import CORE, SERVE, SIZE, server_environment
from .workloads import text

NEEDS_KEYS = pytest.mark.skipif(
    not keys_are_bytes(), reason="refused: hashes are numbers of a process"
)
HIT = 5 * BLOCK_TOKENS
"""Tokens of a prompt's full blocks, see `prompts`."""
MAX_GIB = 0.1


def prompts(first: int, number: int) -> list[list[int]]:
    """Prompts of five full blocks and a token."""
    return [text(first + i, HIT + 1) for i in range(number)]


def directory(root: Path) -> dict[str, Any]:
    """The entry of a directory."""
    return {"type": "fs", "root_dir": str(root), "max_gib": MAX_GIB}


@contextmanager
def serving(
    model: Path,
    entries: Sequence[dict[str, Any]],
    log: Path,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    **settings: Any,
) -> Iterator[Server]:
    """A server, which is killed.

    Args:
        model: To serve.
        entries: Of `secondary_tiers`, which get all that the host has, unless they
            say otherwise.
        log: Of the server.
        flags: Further ones.
        env: Further variables.
        settings: Further ones of the tier.

    """
    # Slow machines are no part of these tests, and small models computed fast.
    more = {"store_from_use": 1, "deadline_ms": 20_000, "fetch": "always"}
    tiers = [with_debug(e, **more | e.get("debug", {})) for e in entries]
    given = options(secondary_tiers=tiers, **{"store_from_use": 1} | settings)
    config = ["--kv-offloading-config", json.dumps(given)]
    server = Server(
        model,
        [*SERVE, *CORE, *SIZE, *config, *flags],
        server_environment() | {"PYTHONHASHSEED": "0"} | dict(env or {}),
        log,
    )
    try:
        yield server
    finally:
        server.kill()


def ask(server: Server, prompt: list[int]) -> tuple[str, float]:
    """Its answer, and the tokens of it that came from the host."""
    before = hit_tokens(server)
    answer = server.complete(prompt, max_tokens=8, ignore_eos=True)
    return answer["choices"][0]["text"], hit_tokens(server) - before


def hit_tokens(server: Server) -> float:
    return counted(server, "host_hit_tokens")


def counted(server: Server, name: str) -> float:
    return server.metrics("vllm:kv_tier_")[f"vllm:kv_tier_{name}_total"]


def writes(server: Server, num_blocks: int, before: float | None = None) -> None:
    """Other requests, until that many blocks more have been written: they make the
    device evict what it holds, and their steps begin what is due."""
    if before is None:
        before = counted(server, "secondary_stored_blocks")
    limit = time.monotonic() + 60
    for i in itertools.count():
        if counted(server, "secondary_stored_blocks") >= before + num_blocks:
            return
        assert time.monotonic() < limit, "not all is written"
        ask(server, text(900 + i % 4, 5 * BLOCK_TOKENS))


def objects(root: Path) -> list[Path]:
    return sorted(root.rglob("*.kv"))
