# SPDX-License-Identifier: Apache-2.0
"""Fields of other APIs, as hints of the schema."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm.sampling_params import SamplingParams
from vllm.v1.kv_tier import frontend
from vllm.v1.kv_tier.frontend import from_envelope
from vllm.v1.kv_tier.hints.conversation_api import check
from vllm.v1.kv_tier.hints.http import (
    Breakpoint,
    breakpoints,
    from_openai,
    retain,
)
from vllm.v1.kv_tier.hints.schema import KEY, Hints, RequestContext, request_context
from vllm.v1.kv_tier.releases import VLLMValidationError

DAY = 86400
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, {}),
        (
            {"prompt_cache_retention": "in_memory", "prompt_cache_key": "k"},
            {},
        ),
        ({"prompt_cache_retention": "in-memory"}, {}),
        ({"prompt_cache_retention": "24h"}, {"retain": retain(DAY)}),
        ({"prompt_cache_options": None}, {}),
        ({"prompt_cache_options": {"mode": "explicit"}}, {}),
        (
            {"prompt_cache_options": {"ttl": "30m"}},
            {"retain": retain(1800)},
        ),
        (
            {"prompt_cache_options": {"ttl": "12h"}},
            {"retain": retain(DAY / 2)},
        ),
        (
            {"prompt_cache_options": {"prewarm": True}},
            {"prewarm": True, "retain": retain(1800)},
        ),
        (
            {
                "prompt_cache_options": {"ttl": "30m", "prewarm": False},
                "prompt_cache_retention": "24h",
            },
            {"retain": retain(DAY)},
        ),
    ],
)
def test_fields_of_openai(body: dict[str, Any], expected: dict[str, Any]) -> None:
    found = from_openai(body)
    assert found == expected
    Hints.from_params({KEY: found})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            {"prompt_cache_retention": "48h"},
            "prompt_cache_retention must be 'in_memory' or '24h', got '48h'.",
        ),
        ({"prompt_cache_retention": ["24h"]}, "prompt_cache_retention must be"),
        ({"prompt_cache_options": "30m"}, "prompt_cache_options must be an object"),
        (
            {"prompt_cache_options": {"ttl": 1800}},
            "prompt_cache_options.ttl must be '30m' or '12h', got 1800.",
        ),
        ({"prompt_cache_options": {"mode": "x"}}, "prompt_cache_options.mode"),
        ({"prompt_cache_options": {"prewarm": 1}}, "prompt_cache_options.prewarm"),
    ],
)
def test_what_openai_does_not_have(body: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as found:
        from_openai(body)
    assert words in str(found.value)


def message(**more: Any) -> dict[str, Any]:
    """Two turns after a system prompt and tools, with no breakpoint of their own."""
    return {
        "model": "m",
        "max_tokens": 5,
        "tools": [{"name": "a"}, {"name": "b"}],
        "system": [{"type": "text", "text": "s"}, {"type": "text", "text": "t"}],
        "messages": [
            {"role": "user", "content": [{"text": "1"}, {"text": "2"}]},
            {"role": "assistant", "content": "3"},
            {"role": "user", "content": [{"text": "4"}, {"text": "5"}]},
        ],
        **more,
    }


def test_without_cache_control_there_is_no_breakpoint() -> None:
    assert breakpoints(message()) == []
    assert breakpoints({"messages": "wrong", "system": 5, "tools": [3]}) == []


def test_a_breakpoint_has_what_comes_before_it() -> None:
    body = message()
    body["messages"][0]["content"][0] |= HOUR
    (found,) = breakpoints(body)
    assert found.ttl == 3600
    turn = {"role": "user", "content": [{"text": "1", **HOUR}]}
    assert found.prefix == {
        "model": "m",
        "tools": body["tools"],
        "system": body["system"],
        "messages": [turn],
    }


@pytest.mark.parametrize(("where", "left"), [("tools", 1), ("system", 1)])
def test_breakpoints_before_the_first_turn(where: str, left: int) -> None:
    body = message()
    body[where][0] |= EPHEMERAL
    (found,) = breakpoints(body)
    assert found.ttl == 300
    assert found.prefix is not None
    assert found.prefix[where] == body[where][:left]
    assert ("system" in found.prefix) == (where == "system")
    assert len(found.prefix["messages"]) == 1


def test_the_last_block_is_all_of_it() -> None:
    body = message()
    body["messages"][2]["content"][1] |= EPHEMERAL
    assert breakpoints(body) == [Breakpoint(300, None)]
    assert breakpoints(message(**HOUR)) == [Breakpoint(3600, None)]


def test_of_each_time_the_last_one_counts() -> None:
    """What lasts longest comes last, since the last of ranges that overlap counts."""
    body = message()
    body["tools"][1] |= HOUR
    body["system"][1] |= HOUR
    body["messages"][0]["content"][1] |= EPHEMERAL
    body["messages"][2]["content"][1] |= EPHEMERAL
    short, long = breakpoints(body)
    assert short == Breakpoint(300, None)
    assert long.prefix is not None and long.prefix["system"] == body["system"]


@pytest.mark.parametrize(
    ("control", "words"),
    [
        ({"type": "ephemeral", "ttl": "2h"}, ".ttl must be '5m' or '1h', got '2h'."),
        ({"type": "persistent"}, ' must be {"type": "ephemeral"}'),
        ("5m", ' must be {"type": "ephemeral"}'),
    ],
)
def test_what_anthropic_does_not_have(control: object, words: str) -> None:
    body = message()
    body["messages"][2]["content"][0]["cache_control"] = control
    with pytest.raises(ValueError) as found:
        breakpoints(body)
    assert f"messages[2].content[0].cache_control{words}" in str(found.value)


def envelope(payload: object, kind: str = "kv_tier", version: str = "1") -> Any:
    action = SimpleNamespace(
        action_id="a1", action_type=kind, action_version=version, payload=payload
    )
    return SimpleNamespace(actions=[action])


def test_actions_of_an_envelope() -> None:
    assert from_envelope(None) == {}
    assert from_envelope(envelope({"release": True})) == {"release": True}
    assert from_envelope(envelope({"relase": True}, kind="kvcr.evict")) == {}
    for wrong, words in (
        (envelope({"relase": True}), "kv_hints: action 'a1': .*'relase'"),
        (envelope({}, version="2"), "kv_hints: action 'a1': action_version .* '2'"),
    ):
        with pytest.raises(ValueError, match=words):
            from_envelope(wrong)


def config(backend: str = "core") -> Any:
    return SimpleNamespace(cache_config=SimpleNamespace(kv_offloading_backend=backend))


def params(given: Any = None, **more: Any) -> SamplingParams:
    extra = None if given is None else {"kv_transfer_params": given}
    return SamplingParams(extra_args=extra, max_tokens=9, min_tokens=2)


def test_off_means_off() -> None:
    bad = params({"kv_tier": {"relase": True}})
    assert frontend.with_hints(config("native"), bad) is bad
    frontend.add_hint_routes(None, SimpleNamespace(kv_offloading_backend="native"))
    with pytest.raises(ValueError, match="Hints need --kv-offloading-backend core"):
        engine = SimpleNamespace(vllm_config=config("native"))
        frontend.send_hints(SimpleNamespace(llm_engine=engine), {})


def test_requests_that_say_nothing_are_left_alone() -> None:
    for given in (params(), params({"do_remote_prefill": True})):
        assert frontend.with_hints(config(), given) is given


def test_a_bad_hint_ends_the_request() -> None:
    with pytest.raises(ValueError, match="'relase'"):
        frontend.with_hints(config(), params({"kv_tier": {"relase": True}}))


@pytest.mark.parametrize("given", [5, [], "kv_tier", {"kv_tier": {"release": 1}}])
def test_a_bad_hint_is_the_clients_fault(given: Any) -> None:
    """Newer releases answer a plain ValueError of an engine with a status of 500."""
    with pytest.raises(VLLMValidationError) as error:
        frontend.with_hints(config(), params(given))
    assert isinstance(error.value, ValueError)
    with pytest.raises(VLLMValidationError, match="action 'a1'"):
        frontend.with_hints(config(), params(), envelope({"release": 1}))


def test_the_clients_own_words_count_most() -> None:
    own = params({"kv_tier": {"retain": {"priority": 1}}, "do_remote_prefill": True})
    said = {"retain": retain(5), "tenant": "t", "store": False, "prewarm": True}
    token = request_context.set(RequestContext(said))
    try:
        found = frontend.with_hints(config(), own, envelope({"tenant": "u"}))
    finally:
        request_context.reset(token)
    assert found.extra_args["kv_transfer_params"] == {
        "kv_tier": {
            "retain": {"priority": 1},
            "tenant": "u",
            "store": False,
            "prewarm": True,
        },
        "do_remote_prefill": True,
    }
    assert (found.max_tokens, found.min_tokens) == (1, 0)
    assert own.extra_args == {
        "kv_transfer_params": {
            "kv_tier": {"retain": {"priority": 1}},
            "do_remote_prefill": True,
        }
    }
    assert (own.max_tokens, own.min_tokens) == (9, 2)


def test_what_is_said_afterwards() -> None:
    given = {"conversation": "c", "release": True}
    assert check(given) == {"conversation": "c", "cache_salt": None}
    assert check({**given, "cache_salt": "s"})["cache_salt"] == "s"
    for wrong, words in (
        ({**given, "cache_salt": 5}, "cache_salt must be .*, got 5"),
        ({**given, "retain": {"priority": 5}}, "unknown field 'retain'"),
        ({"conversation": ""}, "^Hints after requests: conversation must be a string"),
        ({"release": True}, "conversation is missing"),
        ({"conversation": "c", "release": False}, "release must be true, .*False"),
    ):
        with pytest.raises(ValueError, match=words):
            check(wrong)
