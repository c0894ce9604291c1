# SPDX-License-Identifier: Apache-2.0
"""Extracts hints from a request's body without parsing all of it.

A body of 1 MB has up to half a million JSON values, which take 20 to 130 ms to parse
and 5 ms to skip. Parts that are needed unparsed stay `msgspec.Raw`.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from vllm.v1.kv_tier.hints import CAPS, KEY

MAX_HINT = 1 << 16
"""Most bytes of a hint, about ten times as many as the schema allows."""

_Part = msgspec.Raw | msgspec.UnsetType
_UNSET = msgspec.UNSET
_PARAMS = "kv_transfer_params"
_SMALL = ("prompt_cache_retention", "prompt_cache_options")
"""Fields that are hints as a whole."""
_LISTS = ("tools", "system", "messages")


class _Body(msgspec.Struct):
    kv_transfer_params: _Part = _UNSET
    prompt_cache_retention: _Part = _UNSET
    prompt_cache_options: _Part = _UNSET
    cache_control: _Part = _UNSET
    model: _Part = _UNSET
    messages: _Part = _UNSET
    system: _Part = _UNSET
    tools: _Part = _UNSET
    tool_choice: _Part = _UNSET
    thinking: _Part = _UNSET
    output_config: _Part = _UNSET
    chat_template_kwargs: _Part = _UNSET


class _Params(msgspec.Struct):
    kv_tier: _Part = _UNSET
    max_load_tokens: _Part = _UNSET
    max_offload_tokens: _Part = _UNSET


class _Turn(msgspec.Struct):
    role: _Part = _UNSET
    content: _Part = _UNSET


class _Block(msgspec.Struct):
    cache_control: _Part = _UNSET


def fields_in(body: bytes) -> dict[str, Any]:
    """Fields of the object in `body` that `translation` and `hints_in` use.

    Returns:
        Lists of `Raw`, values of hints, and other fields as `Raw`. Empty if `body` is
        not a JSON object or nested too deeply: the endpoint answers that itself.

    Raises:
        ValueError: A hint is too large.

    """
    found = _present(body, _Body)
    for name in _SMALL:
        if name in found:
            found[name] = _value(found[name], name)
    for name in _LISTS:
        if name in found:
            found[name] = list_in(found[name])
    return found


def hints_in(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The tier's fields of `kv_transfer_params`.

    Raises:
        ValueError: A hint is too large.

    """
    params = fields.get(_PARAMS)
    if params is None:
        return {}
    return {
        name: _value(part, f"{_PARAMS}.{name}")
        for name, part in _present(params, _Params).items()
        if name == KEY or name in CAPS
    }


def list_in(part: object) -> object:
    """The entries of a list that is still raw; anything else unchanged."""
    if not isinstance(part, msgspec.Raw):
        return part
    try:
        return msgspec.json.decode(part, type=list[msgspec.Raw])
    except (ValueError, RecursionError):
        return part


def turn_in(message: object) -> Mapping[str, Any]:
    """Role and content of a message; content that is a list becomes a list of `Raw`."""
    if isinstance(message, msgspec.Raw):
        message = _present(message, _Turn)
        if "content" in message:
            message["content"] = list_in(message["content"])
    return message if isinstance(message, Mapping) else {}


def has_control(part: object) -> bool:
    """Whether `part` may contain a `cache_control`; only looks for the text."""
    return not isinstance(part, msgspec.Raw) or b'"cache_control"' in bytes(part)


def control_of(block: dict[str, Any] | msgspec.Raw) -> object:
    """The `cache_control` of a block, or None.

    Raises:
        ValueError: It is too large.

    """
    if not isinstance(block, dict):
        if not has_control(block):
            return None
        block = _present(block, _Block)
    control = block.get("cache_control")
    if isinstance(control, msgspec.Raw):
        return _value(control, "cache_control")
    return control


def _present(raw: bytes | msgspec.Raw, schema: type[msgspec.Struct]) -> dict[str, Any]:
    """Fields of a JSON object that are present; empty if it is not an object."""
    try:
        found = msgspec.json.decode(raw, type=schema)
    except (ValueError, RecursionError):
        return {}
    every = msgspec.structs.asdict(found)
    return {name: value for name, value in every.items() if value is not _UNSET}


def _value(part: msgspec.Raw, where: str) -> Any:
    if (size := len(bytes(part))) > MAX_HINT:
        raise ValueError(
            f"{where} must have at most {MAX_HINT} bytes, got {size}. Leave out what "
            "is not a hint."
        )
    try:
        return json.loads(bytes(part))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{where} cannot be read: {e}.") from None
