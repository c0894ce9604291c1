# SPDX-License-Identifier: Apache-2.0
"""What clients may say, and what they are told when they say something else."""

from typing import Any

import pytest

from vllm.v1.kv_tier.hints import MAX_NAME, Hints


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


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("release", ["kv_transfer_params.kv_tier", "object", "'release'"]),
        ({"relase": True}, ["relase", "True", "conversation, release"]),
        ({"release": 1}, ["kv_tier.release", "true or false", "1"]),
        ({"release": "yes"}, ["kv_tier.release", "'yes'"]),
        ({"conversation": 7}, ["kv_tier.conversation", "1 to 256", "7"]),
        ({"conversation": ""}, ["kv_tier.conversation", "''"]),
        ({"conversation": "c" * 257}, ["kv_tier.conversation"]),
    ],
)
def test_what_is_wrong_is_named(given: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        parse(given)
    assert all(word in str(error.value) for word in words), error.value
