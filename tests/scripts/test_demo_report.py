# SPDX-License-Identifier: Apache-2.0
"""The demo's verdict: it must say no to each of the ways to fall short."""

import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from demo.client import Answer
from demo.report import Comparison
from demo.talk import Exchange

TURNS, CONVERSATIONS = 3, 4
Change = Callable[[Exchange], Exchange]


def exchange(conversation: int, turn: int, tier: bool) -> Exchange:
    prompt = 400 * turn
    host = 400 * (turn - 1) // 32 * 32 if tier else 0
    answer = Answer(
        text="so",
        token_ids=(turn, conversation, 7),
        logprobs=(-1.0, -2.0, -3.0),
        margins=(0.5, 0.25, 0.75),
        prompt_tokens=prompt,
        cached_tokens=host,
        ttft_ms=float(prompt - host) + conversation,
    )
    return Exchange(conversation, turn, answer, 0, host)


def run(tier: bool, change: Change = lambda made: made) -> list[Exchange]:
    return [
        change(exchange(conversation, turn, tier))
        for turn in range(1, TURNS + 1)
        for conversation in range(1, CONVERSATIONS + 1)
    ]


def compare(change: Change = lambda made: made, device: int = 1600) -> Comparison:
    return Comparison(run(False), run(True, change), device, 8000)


def with_hits(device: int, host: int) -> Change:
    def change(made: Exchange) -> Exchange:
        if made.turn == 1:
            return made
        answer = replace(made.answer, cached_tokens=device + host)
        return replace(
            made, answer=answer, device_hit_tokens=device, host_hit_tokens=host
        )

    return change


def change_answer(turn: int, **values: object) -> Change:
    def change(made: Exchange) -> Exchange:
        if made.turn != turn or made.conversation != 2:
            return made
        return replace(made, answer=replace(made.answer, **values))

    return change


def test_a_good_run_has_no_failures() -> None:
    comparison = compare()
    assert comparison.failures() == []
    assert comparison.kv_tokens == CONVERSATIONS * (400 * TURNS + 3)
    row = comparison.rows[1]
    assert (row.turn, row.prompt_tokens, row.host_hit_tokens) == (2, 800, 384)
    assert (row.earlier_tokens, row.earlier_hit_tokens) == (400, 384)
    assert (row.ttft_ms_off, row.ttft_ms_on) == (802.5, 418.5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            change_answer(3, token_ids=(3, 9, 7)),
            "conversation 2, turn 3, token 1: 2 with .* off, 9 with .* by 0.25 nats",
        ),
        (with_hits(0, 300), "turn 2: 75% of the 400 tokens"),
        (with_hits(384, 0), "turn 2: 0 host hits are not most of the hits, 384"),
        (with_hits(192, 192), "turn 3: 192 host hits are not most"),
        (change_answer(2, cached_tokens=416), "count 384 hit tokens, .* says 416"),
    ],
)
def test_falling_short_is_said(change: Change, reason: str) -> None:
    assert any(re.search(reason, text) for text in compare(change).failures())


def test_slower_is_a_failure() -> None:
    slow = Comparison(run(False), run(False), 1600, 0)
    assert any("median time to first token" in text for text in slow.failures())


def test_a_large_device_cache_proves_nothing() -> None:
    failures = compare(device=1700).failures()
    assert failures == [
        "the conversations' 4812 tokens are less than 3 times the device cache's 1700"
    ]


def test_hits_in_the_answer_are_no_hits_in_the_prompt_before() -> None:
    row = compare(with_hits(0, 448)).rows[1]
    assert (row.host_hit_tokens, row.earlier_hit_tokens) == (448, 400)


def test_json_has_the_promised_keys() -> None:
    report = json.loads(json.dumps(compare().as_json()))
    assert report["identical_outputs"] is True
    assert report["device_cache_tokens"] == 1600
    assert report["host_tier_tokens"] == 8000
    promised = {
        "turn": 2,
        "prompt_tokens": 800,
        "device_hit_tokens": 0,
        "host_hit_tokens": 384,
        "ttft_ms_off": 802.5,
        "ttft_ms_on": 418.5,
    }
    assert promised.items() <= report["turns"][1].items()
    assert len(report["requests"]) == TURNS * CONVERSATIONS
