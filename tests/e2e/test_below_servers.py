# SPDX-License-Identifier: Apache-2.0
"""Valkey and Mooncake below the host of a real engine, which is killed.

What each store does when its server fails is in tests/unit/test_store_servers.py.
"""

from pathlib import Path

import pytest

from tests.unit.store_servers import Mooncake, Servers, Valkey

from .below import (
    HIT,
    NEEDS_KEYS,
    ask,
    counted,
    directory,
    objects,
    prompts,
    serving,
    writes,
)
from .model import make_llama, make_tokenizer
from .workloads import text

pytestmark = NEEDS_KEYS

PROMPTS = prompts(600, 6)


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
        with serving(
            model, [directory(root), servers.entry], tmp_path / "log2"
        ) as server:
            found = [ask(server, prompt) for prompt in PROMPTS]
            assert [answer for answer, _ in found] == texts
            assert [hits for _, hits in found] == [HIT] * len(PROMPTS)
            assert counted(server, "secondary_loaded_blocks") >= 5 * len(PROMPTS)
            # A server that dies costs time only.
            for name in servers.names:
                servers.kill(name)
            assert ask(server, text(700, HIT))[0]
            assert ask(server, PROMPTS[0])[0] == texts[0]
        assert objects(root)
    finally:
        servers.close()
