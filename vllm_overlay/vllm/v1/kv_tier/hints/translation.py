# SPDX-License-Identifier: Apache-2.0
"""Fields of other APIs as hints of the schema, out of bodies that are not parsed as a
whole.

A body of 1 MB has up to half a million JSON values, which take 20 to 130 ms to parse
and 5 ms to skip. Parts that are needed unparsed stay `msgspec.Raw`.

Every `ValueError` names the field and its value, and says what to send instead.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm.v1.kv_tier.hints.request_context import RequestContext
from vllm.v1.kv_tier.hints.schema import CAPS, KEY, VERSION, Hints, shown

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
        if name in found and has_control(found[name]):
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


KEPT = 75
"""Priority of what other APIs ask to keep; they have no levels."""
MINUTE, HOUR = 60, 3600
ACTION = KEY
"""`action_type` of the tier's actions in upstream's `KvHintsEnvelope`."""

_RETENTION = {None: 0, "in_memory": 0, "in-memory": 0, "24h": 24 * HOUR}
_OPTION_TTL = {None: 0, "30m": 30 * MINUTE, "12h": 12 * HOUR}
_MODES = (None, "implicit", "explicit")
_CACHE_CONTROL_TTL = {None: 5 * MINUTE, "5m": 5 * MINUTE, "1h": HOUR}
_COUNTED = (
    *("model", "messages", "system", "tools", "tool_choice"),
    *("thinking", "output_config", "chat_template_kwargs"),
)
"""Fields of a message that determine its prompt."""


def retain(ttl: float, end: int | None = None) -> dict[str, Any]:
    """The hint to keep a prompt, or its first `end` tokens, for `ttl` seconds."""
    return {"priority": KEPT, "ttl": ttl, "end": end}


# ----------------------------------------------------------------------- OpenAI
def from_openai(body: Mapping[str, Any]) -> RequestContext:
    """Translate `prompt_cache_retention` and `prompt_cache_options` of OpenAI's APIs.

    Raises:
        ValueError: OpenAI's API does not allow the value.

    """
    ttl = _one_of(_RETENTION, body, "prompt_cache_retention", "")
    options, where = body.get("prompt_cache_options"), "prompt_cache_options"
    if options is None:
        return RequestContext({"retain": retain(ttl)} if ttl else {})
    if not isinstance(options, Mapping):
        raise ValueError(
            f"{where} must be an object with mode, ttl and prewarm, got "
            f"{shown(options)}."
        )
    ttl = max(ttl, _one_of(_OPTION_TTL, options, "ttl", f"{where}."))
    mode = options.get("mode")
    # JSON values may be unhashable.
    if not (mode is None or isinstance(mode, str) and mode in _MODES):
        raise ValueError(
            f"{where}.mode must be implicit or explicit, got {shown(mode)}."
        )
    prewarm = options.get("prewarm")
    if prewarm is not None and not isinstance(prewarm, bool):
        raise ValueError(
            f"{where}.prewarm must be true or false, got {shown(prewarm)}."
        )
    hints: dict[str, Any] = {"prewarm": True} if prewarm else {}
    if ttl := ttl or (_OPTION_TTL["30m"] if prewarm else 0):
        hints["retain"] = retain(ttl)
    return RequestContext(hints)


def _one_of(
    known: Mapping[Any, int], given: Mapping[str, Any], name: str, where: str
) -> int:
    value = given.get(name)
    # JSON values may be unhashable.
    if value is None or isinstance(value, str) and value in known:
        return known[value]
    names = " or ".join(repr(each) for each in known if each and "-" not in each)
    raise ValueError(
        f"{where}{name} must be {names}, got {shown(value)}. Give other times in "
        "kv_transfer_params.kv_tier.retain."
    )


# -------------------------------------------------------------------- Anthropic
Place = tuple[str, int, int]
"""Position of a block: its field, its index there (in `messages`, that of its message),
and its index in the message's content."""


@dataclass(frozen=True)
class Breakpoint:
    """A cache breakpoint: the last block of a message to be kept for a given time."""

    ttl: int
    """Seconds."""
    prefix: dict[str, Any] | None
    """The message up to that block, for `count_tokens`; None for all of it."""


def breakpoints(body: Mapping[str, Any]) -> list[Breakpoint]:
    """The last `cache_control` of each `ttl` in an Anthropic message, longest last.

    Raises:
        ValueError: Anthropic's API does not allow the value.

    """
    last: dict[int, Place | None] = {}
    for where, control, place in _controls(body):
        field = f"{where}cache_control"
        if not isinstance(control, Mapping) or control.get("type") != "ephemeral":
            raise ValueError(
                f'{field} must be {{"type": "ephemeral"}}, with or without a ttl, got '
                f"{shown(control)}."
            )
        last[_one_of(_CACHE_CONTROL_TTL, control, "ttl", f"{field}.")] = place
    return [
        Breakpoint(ttl, None if (place := last[ttl]) is None else _until(body, place))
        for ttl in sorted(last)
    ]


def _controls(body: Mapping[str, Any]) -> Iterator[tuple[str, object, Place | None]]:
    """Path, value and position of each `cache_control`, in the order of the prompt."""
    for name in ("tools", "system"):
        for i, block in enumerate(_objects(body.get(name))):
            if (control := control_of(block)) is not None:
                yield f"{name}[{i}].", control, (name, i, 0)
    messages = _objects(body.get("messages"))
    for i, message in enumerate(messages):
        if not has_control(message):
            continue
        content = _objects(turn_in(message).get("content"))
        for j, block in enumerate(content):
            if (control := control_of(block)) is None:
                continue
            is_last = i == len(messages) - 1 and j == len(content) - 1
            place = None if is_last else ("messages", i, j)
            yield f"messages[{i}].content[{j}].", control, place
    # At the top level it refers to the last block.
    if (control := control_of(dict(body))) is not None:
        yield "", control, None


def _until(body: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """The message of `body` up to the block at `place`."""
    name, i, j = place
    counted = {each: body[each] for each in _COUNTED if each in body}
    if name == "messages":
        turn = turn_in(body["messages"][i])
        turn = {**turn, "content": turn["content"][: j + 1]}
        return {**counted, "messages": [*body["messages"][:i], turn]}
    if name == "tools":
        counted.pop("system", None)
    # A prompt needs at least one turn.
    asked = {"messages": [{"role": "user", "content": "."}]}
    return {**counted, **asked, name: body[name][: i + 1]}


def _objects(given: object) -> Sequence[Any]:
    """`given` if it is a list of objects; else empty, and upstream rejects it."""
    kinds = dict, msgspec.Raw
    if isinstance(given, list) and all(isinstance(one, kinds) for one in given):
        return given
    return ()


# --------------------------------------------------------------------- envelope
def from_envelope(envelope: Any) -> dict[str, Any]:
    """Hints in upstream's `KvHintsEnvelope`, as fields of the schema.

    The tier's actions have type `ACTION`, and the fields of
    `kv_transfer_params.kv_tier` as payload. Other actions are ignored.

    Raises:
        ValueError: A payload does not match the schema, or has another version.

    """
    hints: dict[str, Any] = {}
    for action in envelope.actions if envelope is not None else ():
        if action.action_type != ACTION:
            continue
        name = action.action_id
        if action.action_version != str(VERSION):
            raise ValueError(
                f"kv_hints: action {shown(name)}: action_version must be '{VERSION}', "
                f"got {shown(action.action_version)}."
            )
        payload = {} if action.payload is None else action.payload
        try:
            Hints.from_params({KEY: payload})
        except ValueError as e:
            raise ValueError(f"kv_hints: action {shown(name)}: {e}") from None
        hints.update(payload)
    return hints
