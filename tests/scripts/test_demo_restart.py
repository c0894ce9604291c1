# SPDX-License-Identifier: Apache-2.0
"""The demo's restart: it must say no when the turn did not come from files."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from demo.client import Answer
from demo.restart import Restart, restarted
from demo.talk import Exchange, last_turn

SERVED = Answer("so", (1, 2), (-1.0, -2.0), (0.5, 0.5), 400, 384, 20.0)
COMPUTED = replace(SERVED, cached_tokens=0, ttft_ms=200.0)
GOOD = Restart(before=SERVED, served=SERVED, computed=COMPUTED, loaded_tokens=384)


def test_a_turn_from_files_is_no_failure() -> None:
    assert GOOD.failures() == []
    assert json.loads(json.dumps(GOOD.as_json())) == {
        "prompt_tokens": 400,
        "cached_tokens": 384,
        "loaded_tokens": 384,
        "ttft_ms_from_files": 20.0,
        "ttft_ms_computed": 200.0,
        "identical": True,
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"loaded_tokens": 300}, "300 of 400 prompt tokens came from files"),
        ({"served": replace(SERVED, cached_tokens=0)}, "0 of 400 .* were hits"),
        ({"computed": SERVED}, "384 tokens .* it was to be computed"),
        ({"before": replace(SERVED, token_ids=(1, 3))}, "before it was 'so'"),
        ({"computed": replace(COMPUTED, token_ids=(1, 3))}, "computed it was 'so'"),
    ],
)
def test_falling_short_is_said(change: dict[str, Any], reason: str) -> None:
    (failure,) = replace(GOOD, **change).failures()
    assert re.search(reason, failure)


EXCHANGES = [
    Exchange(c, t, replace(SERVED, text=f"a{c}{t}"), 0, 0)
    for t in (1, 2)
    for c in (1, 2)
]


def test_the_last_turn_has_what_was_said_before() -> None:
    messages, last = last_turn(["one", "two"], EXCHANGES, 2)
    assert [m["content"] for m in messages] == ["one", "a21", "two"]
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    assert last.answer.text == "a22"


class Client:
    """A new server: what it is asked, and tokens that came from files meanwhile."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def ask(self, messages: Any, max_tokens: int, salt: str = "") -> Answer:
        self.asked.append((messages[-1]["content"], salt))
        return replace(COMPUTED if salt else SERVED, text=salt)

    def metrics(self) -> "Client":
        return self

    def value(self, name: str) -> int:
        assert name == "vllm:kv_tier_secondary_loaded_tokens_total"
        return 7 + 384 * any(salt == "" for _, salt in self.asked)


def test_nothing_is_shared_but_the_turn() -> None:
    client: Any = Client()
    found = restarted(client, "hello", ["one", "two"], EXCHANGES)
    assert client.asked == [("hello", "warm-up"), ("two", ""), ("two", "computed")]
    assert found.loaded_tokens == 384 and found.failures() == []
    assert found.before.text == "a12"
