# SPDX-License-Identifier: Apache-2.0
"""What clients may say, and what they are told when they say something else."""

from typing import Any

import msgspec
import pytest

from vllm.v1.kv_tier.hints.schema import (
    KEY,
    MAX_NAME,
    MAX_NUMBER,
    MAX_RANGES,
    Hints,
    Retain,
    are_in,
)


def parse(given: object) -> Hints | None:
    return Hints.from_params({"kv_tier": given, "do_remote_prefill": True})


def test_requests_without_hints_have_none() -> None:
    assert Hints.from_params(None) is None
    assert Hints.from_params({}) is None
    assert Hints.from_params({"do_remote_prefill": True}) is None


def test_hints() -> None:
    assert parse({}) == Hints()
    assert parse({"release": True}) == Hints(release=True)
    name = "c" * MAX_NAME
    assert parse({"conversation": name}) == Hints(conversation=name)
    assert parse({"tenant": name, "store": False}) == Hints(tenant=name, store=False)
    assert parse({"version": 1, "retain": None}) == Hints()


def test_ranges_to_retain() -> None:
    assert parse({"retain": {"priority": 0}}) == Hints(retain=(Retain(0),))
    assert parse({"retain": []}) == Hints()
    one = {"priority": 100, "ttl": 0.5, "start": 3, "end": 4, "answer": True}
    parsed = parse({"retain": [one, {"priority": 50, "ttl": None, "end": None}]})
    assert parsed == Hints(retain=(Retain(100, 0.5, 3, 4, True), Retain(50)))
    parsed = parse({"retain": MAX_RANGES * [one]})
    assert parsed is not None and len(parsed.retain) == MAX_RANGES


def test_caps_have_two_places() -> None:
    """Beside `kv_tier` they are upstream's. The lower one counts."""
    inside = Hints(max_load_tokens=5, max_offload_tokens=0)
    caps = {"max_load_tokens": 5, "max_offload_tokens": 0}
    assert parse(caps) == Hints.from_params(caps) == inside
    params = {"max_load_tokens": 7, "kv_tier": caps}
    assert Hints.from_params(params) == inside
    params = {"max_load_tokens": 3, "max_offload_tokens": None, "kv_tier": caps}
    assert Hints.from_params(params) == Hints(max_load_tokens=3, max_offload_tokens=0)
    assert Hints.from_params({"max_load_tokens": None}) is None
    with pytest.raises(ValueError, match="kv_transfer_params.max_load_tokens .*, got "):
        Hints.from_params({"max_load_tokens": True})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("release", ["kv_transfer_params.kv_tier", "object", "'release'"]),
        ({"relase": True}, ["relase", "True", "conversation, release, prewarm"]),
        ({"release": 1}, ["kv_tier.release", "true or false", "1"]),
        ({"release": "yes"}, ["kv_tier.release", "'yes'"]),
        ({"conversation": 7}, ["kv_tier.conversation", "1 to 256", "7"]),
        ({"conversation": ""}, ["kv_tier.conversation", "''"]),
        ({"conversation": "c" * 257}, ["kv_tier.conversation"]),
        ({"tenant": ""}, ["kv_tier.tenant", "1 to 256", "''"]),
        ({"store": None}, ["kv_tier.store", "true or false", "None"]),
        ({"prewarm": 1}, ["kv_tier.prewarm", "true or false", "1"]),
        ({"version": 2}, ["kv_tier.version", "1", "2"]),
        ({"version": True}, ["kv_tier.version", "True"]),
        ({"max_load_tokens": -1}, ["kv_tier.max_load_tokens", "0 to", "-1"]),
        ({"max_offload_tokens": 1.0}, ["kv_tier.max_offload_tokens", "1.0"]),
        ({"max_load_tokens": True}, ["kv_tier.max_load_tokens", "True"]),
        ({"retain": 70}, ["kv_tier.retain", "object with priority, ttl", "8", "70"]),
        ({"retain": "all"}, ["kv_tier.retain", "list", "'all'"]),
        ({"retain": 9 * [{"priority": 9}]}, ["kv_tier.retain", "at most 8", "9"]),
        ({"retain": [7]}, ["kv_tier.retain[0]", "object", "7"]),
        ({"retain": {}}, ["kv_tier.retain.priority", "missing", "0 to 100"]),
        ({"retain": {"prio": 1}}, ["kv_tier.retain", "prio", "priority, ttl"]),
        ({"retain": {"priority": 101}}, ["retain.priority", "0 to 100", "101"]),
        ({"retain": {"priority": -1}}, ["retain.priority", "-1"]),
        ({"retain": {"priority": 60.0}}, ["retain.priority", "60.0"]),
        ({"retain": {"priority": True}}, ["retain.priority", "True"]),
        ({"retain": {"priority": 1, "ttl": 0}}, ["retain.ttl", "above 0", "0"]),
        ({"retain": {"priority": 1, "ttl": "5m"}}, ["retain.ttl", "'5m'"]),
        ({"retain": {"priority": 1, "ttl": float("inf")}}, ["retain.ttl", "inf"]),
        ({"retain": {"priority": 1, "ttl": float("nan")}}, ["retain.ttl", "nan"]),
        ({"retain": {"priority": 1, "ttl": True}}, ["retain.ttl", "True"]),
        ({"retain": {"priority": 1, "start": -1}}, ["retain.start", "-1"]),
        (
            {"retain": [{"priority": 1}, {"priority": 1, "start": 8, "end": 8}]},
            ["retain[1].end", "behind start (8)", "got 8"],
        ),
        ({"retain": {"priority": 1, "answer": 1}}, ["retain.answer", "got 1"]),
    ],
)
def test_what_is_wrong_is_named(given: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        parse(given)
    assert all(word in str(error.value) for word in words), error.value


class Strange(dict[str, Any]):
    """A mapping whose values cannot be printed."""

    def __repr__(self) -> str:
        raise RecursionError


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "params",
    [
        *(5, 0, "", "kv_tier", ["kv_tier"], [{"a": 1}], [], (), b"kv_tier", True, 1.5),
        {KEY: nested(100_000)},
        {KEY: {"conversation": Strange()}},
        {KEY: {5: 6, None: 7, (1, 2): 8}},
        {KEY: {"retain": {"priority": 80, "ttl": 10**400}}},
        {KEY: {"retain": {"priority": 80, "ttl": 10**6000}}},
        {KEY: {"retain": {"priority": 80, "ttl": 2.0**54}}},
        {KEY: {"retain": {"priority": 80, "end": 2**63}}},
        {KEY: {"max_load_tokens": 2**64}},
        {"max_offload_tokens": 2**64},
        {"max_load_tokens": nested(100_000)},
        {KEY: {"conversation": "\ud800"}},
        {KEY: {"tenant": "a\udfffb"}},
        {KEY: {"retain": "x" * 1_000_000}},
        {KEY: {"x" * 1_000_000: 1}},
    ],
    ids=lambda _: "",
)
def test_whatever_is_sent_is_refused_with_a_short_message(params: Any) -> None:
    with pytest.raises(ValueError) as error:
        Hints.from_params(params)
    assert len(str(error.value)) < 600
    str(error.value).encode()


def test_what_is_accepted_can_be_sent_and_added_to_the_time() -> None:
    largest = {"priority": 100, "ttl": MAX_NUMBER, "start": 0, "end": MAX_NUMBER}
    params = {KEY: {"retain": largest, "max_load_tokens": MAX_NUMBER}}
    hints = Hints.from_params(params)
    assert hints is not None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params)) == params
    assert 1e6 + (hints.retain[0].ttl or 0) > MAX_NUMBER


@pytest.mark.parametrize("params", [5, [{"a": 1}], ["kv_tier"], "kv_tier", None])
def test_what_is_no_object_says_nothing(params: Any) -> None:
    assert not are_in(params)
