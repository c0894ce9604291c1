# SPDX-License-Identifier: Apache-2.0
"""Real engines with as many features at once as go together.

Each is asked for all that requests can have, first computed, then from the host, and
notices a slot that is spoilt. `KV_TIER_PAIRS=all` runs those that take longest.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.unit.stores.servers import Mooncake, Servers, Valkey

from ..settings import with_debug
from .compare import assert_same_answers
from .conftest import run_engine
from .jobs import BLOCK_TOKENS, COMMON, NGRAM, SMALL, Job, connector, device, tier
from .model import make_llama

HIT = 5 * BLOCK_TOKENS
REQUESTS = ["RL", "RT", "PW", "TN", "CA", "NN", "PL"]
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
EMBEDS = {"enable_prompt_embeds": True}
EVENTS = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
# Adapters, embeddings and connectors want whole prompts.
WHOLE = {"max_num_batched_tokens": 2048}
SLOW = connector("SlowConnector", kv_load_failure_policy="recompute")


@dataclass
class Meeting:
    """An engine, and the features that it has."""

    codes: str
    llm: dict[str, Any]
    requests: list[str] = field(default_factory=lambda: REQUESTS)
    kv_heads: int | None = None
    has_stores: bool = False
    is_slow: bool = True

    def param(self, name: str) -> Any:
        marks = [pytest.mark.pairs(*self.codes.split(), *self.requests)]
        if self.is_slow:
            marks.append(
                pytest.mark.skipif(
                    os.environ.get("KV_TIER_PAIRS") != "all",
                    reason="needs KV_TIER_PAIRS=all",
                )
            )
        return pytest.param(self, id=name, marks=marks)


SETTINGS: dict[str, Any] = {"quotas": {"a": 0.25}, "shrink_after_s": 0.5}
MEETINGS = {
    "verify and a connector": Meeting(
        "WT VE QU EL LO LR PE EV PD",
        COMMON
        | device(SMALL)
        | tier(1000, verify=True, store_policy="write_through", **SETTINGS)
        | {**LORA, **EMBEDS, **EVENTS, **WHOLE}
        | {"kv_transfer_config": SLOW},
        [*REQUESTS, "LO", "LR", "PE"],
        is_slow=False,
    ),
    "stores and a connector": Meeting(
        "WB FS RD MC QU EL LO LR PE EV PD",
        COMMON
        | device(SMALL)
        | tier(1000, **SETTINGS)
        | {**LORA, **EMBEDS, **EVENTS, **WHOLE}
        | {"kv_transfer_config": SLOW},
        [*REQUESTS, "LO", "LR", "PE"],
        has_stores=True,
    ),
    "ranks that share": Meeting(
        "WB VE SH QU EL PE EV TP",
        COMMON
        | device(SMALL, 2)
        | tier(1000, verify=True, share_replicas=True, **SETTINGS)
        | {**EMBEDS, **EVENTS, **WHOLE},
        [*REQUESTS, "PE"],
        kv_heads=1,
        is_slow=False,
    ),
    "ranks and stores": Meeting(
        "WT FS RD MC SH QU EL PE EV TP",
        COMMON
        | device(SMALL, 2)
        | tier(1000, share_replicas=True, store_policy="write_through", **SETTINGS)
        | {**EMBEDS, **EVENTS, **WHOLE},
        [*REQUESTS, "PE"],
        kv_heads=1,
        has_stores=True,
    ),
    "verify and stores": Meeting(
        "WB VE FS RD MC",
        COMMON | device(SMALL) | tier(1000, verify=True) | WHOLE,
        has_stores=True,
    ),
    "ngram and quotas": Meeting(
        "WB VE QU EL NG",
        COMMON
        | device(SMALL)
        | tier(1000, verify=True, **SETTINGS)
        | {**WHOLE, "speculative_config": NGRAM},
    ),
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """One of each, for all that the host has."""
    more = {"store_from_use": 1, "deadline_ms": 20_000, "fetch": "always"}
    root = tmp_path_factory.mktemp("stores") / "kv"
    entries: list[dict[str, Any]] = [
        {"type": "fs", "root_dir": str(root), "max_gib": 0.1}
    ]
    servers: list[Servers] = [Valkey(), Mooncake()]
    try:
        for each in servers:
            each.start()
            entries.append(each.entry)
        yield [with_debug(e, **more | e.get("debug", {})) for e in entries]
    finally:
        for each in servers:
            each.close()


@pytest.mark.parametrize("meeting", [m.param(name) for name, m in MEETINGS.items()])
def test_what_was_computed_is_found_on_the_host(
    meeting: Meeting,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    config = dict(meeting.llm["kv_offloading_config"])
    if meeting.has_stores:
        config["secondary_tiers"] = request.getfixturevalue("stores")
    job = Job(meeting.llm | {"kv_offloading_config": config}, ["meet"])
    model = make_llama(tmp_path / "model", kv_heads=meeting.kv_heads)
    result = run_engine("meeting", job, model, tmp_path)["workloads"]["meet"]
    computed, found = result["computed"], result["found"]
    assert found.keys() == computed.keys() - {"LO"}
    assert {*meeting.requests} <= computed.keys()
    # The second sample of a prompt finds the first.
    first = [answer for name, answer in computed.items() if name != "NN"]
    assert not any(answer["cached_tokens"] for answer in first)
    for name, answer in found.items():
        assert_same_answers([answer], [computed[name]])
        # Whoever wants logprobs of a prompt computes all of it, and what is released
        # before it was stored is not stored any more.
        if name == "RL" and not {"WT", "PD"} & {*meeting.codes.split()}:
            continue
        assert answer["cached_tokens"] == (0 if name == "PL" else HIT), name
    counters = result["counters"]
    assert counters["kv_tier_host_hit_tokens"] >= (len(found) - 3) * HIT
    if meeting.has_stores:
        assert counters["kv_tier_secondary_stored_blocks"] > 0
    # Ranks that share slots load each of them once.
    assert any(result["num_spoilt"])
    if "VE" in meeting.codes.split():
        # It was refused, and computed.
        assert_same_answers([result["spoilt"]], [computed["plain"]])
    else:
        with pytest.raises(AssertionError, match="other tokens|off by"):
            assert_same_answers([result["spoilt"]], [computed["plain"]])
