# SPDX-License-Identifier: Apache-2.0
"""Hints about a conversation after its requests, for example that it is over.

They go to every engine, since only the engine that served the conversation knows it.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from vllm.v1.kv_tier.hints.schema import KEY, MAX_HINT, Hints, is_text, shown

UTILITY = "hint_kv_tier"
"""Method of upstream's `EngineCore` that receives them."""
FIELDS = ("conversation", "cache_salt", "release")


class _LargeBody(msgspec.Struct, forbid_unknown_fields=True):
    """What a body of any length may have. A salt has any length."""

    conversation: str | None = None
    cache_salt: str | None = None
    release: bool | None = None


def from_body(body: bytes) -> dict[str, Any]:
    """As `check`, for the JSON body of a request.

    All clients share the event loop, and other types in a body of 1 MB take half a
    second to parse.
    """
    if len(body) > MAX_HINT:
        try:
            msgspec.json.decode(body, type=_LargeBody)
        except msgspec.ValidationError as e:
            raise ValueError(
                f"The body must be an object with {_names()} where it has more than "
                f"{MAX_HINT} bytes, got {len(body)} bytes: {shown(str(e))}."
            ) from None
    return check(msgspec.json.decode(body))


def check(given: object) -> dict[str, Any]:
    """Check the body of a hint about a conversation.

    Returns:
        What to send to the engines.

    Raises:
        ValueError: It is not an object with `FIELDS`. The message has field, value and
            fix.

    """
    if not isinstance(given, Mapping):
        raise ValueError(
            f"The body must be an object with {_names()}, got {shown(given)}."
        )
    for name in given:
        if name not in FIELDS:
            raise ValueError(
                f"unknown field {shown(name)} (value {shown(given[name])}). Use "
                f"{_names()}."
            )
    salt = given.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and is_text(salt)):
        raise ValueError(
            "cache_salt must be that of the conversation's requests, a string that "
            f"UTF-8 can encode, got {shown(salt)}."
        )
    try:
        of_request = {n: given[n] for n in given if n != "cache_salt"}
        hints = Hints.from_params({KEY: of_request})
    except ValueError as e:
        text = str(e).replace(f"kv_transfer_params.{KEY}.", "")
        raise ValueError(f"Hints after requests: {text}") from None
    assert hints is not None
    if hints.conversation is None:
        raise ValueError(
            "conversation is missing: give the name that its requests had, got "
            f"{shown(dict(given))}."
        )
    if not hints.release:
        raise ValueError(
            "release must be true, since it is the only hint about a conversation "
            f"after its requests, got {shown(given.get('release'))}."
        )
    return {"conversation": hints.conversation, "cache_salt": salt}


def _names() -> str:
    return ", ".join(FIELDS)


async def tell_all(client: Any, said: dict[str, Any]) -> dict[str, int]:
    """Send a hint to every engine of an `AsyncLLM`.

    Returns the sums of their answers.
    """
    core = client.engine_core
    # `call_utility_async` returns only the first engine's answer.
    return _sum(
        await asyncio.gather(
            *(
                core._call_utility_async(UTILITY, said, engine=engine)
                for engine in core.core_engines
            )
        )
    )


def tell_one(client: Any, said: dict[str, Any]) -> dict[str, int]:
    """Send a hint to the engine of an `LLMEngine`."""
    from vllm.v1.engine.core_client import InprocClient

    core = client.engine_core
    # An engine in this process is called directly.
    if isinstance(core, InprocClient):
        return _sum([core.engine_core.hint_kv_tier(said)])
    return _sum([core.call_utility(UTILITY, said)])


def _sum(answers: list[dict[str, int]]) -> dict[str, int]:
    total = {"engines": len(answers)}
    for answer in answers:
        for name, number in answer.items():
            total[name] = total.get(name, 0) + number
    return total
