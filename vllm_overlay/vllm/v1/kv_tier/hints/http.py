# SPDX-License-Identifier: Apache-2.0
"""Hints over HTTP: a middleware for those of requests, and a route for later ones.

A bad hint is answered before the request is served, even if the answer would be a
stream. Bodies without hints are passed on unchanged. Fields of OpenAI's and Anthropic's
APIs that say the same are translated.

All clients share the server's event loop. A body of 1 MB has up to half a million JSON
values, which take 20 to 130 ms to parse and 5 ms to skip. So bodies are parsed only as
far as needed, large ones in a thread, and parts that are needed unparsed stay
`msgspec.Raw`.

Every `ValueError` names the field and its value, and says what to send instead.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.logger import init_logger
from vllm.v1.kv_tier.hints.conversation_api import from_body, tell_all
from vllm.v1.kv_tier.hints.schema import (
    CAPS,
    KEY,
    MAX_HINT,
    Hints,
    RequestContext,
    request_context,
    shown,
)

logger = init_logger(__name__)

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
AFTERWARDS = "/v1/kv_tier/hints"
"""Under /v1, which upstream protects with its API key."""
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", MESSAGES)
WORDS = (b'"kv_transfer_params"', b'"prompt_cache_', b'"cache_control"')
LARGE = 1 << 16
"""Least bytes of a body that is read in a thread."""


# ------------------------------------------------ bodies that are parsed in part

_Part = msgspec.Raw | msgspec.UnsetType
_UNSET = msgspec.UNSET
_PARAMS = "kv_transfer_params"
_SMALL = ("prompt_cache_retention", "prompt_cache_options")
"""Fields that are hints as a whole."""


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


class _TypedEntry(msgspec.Struct, gc=False):
    type: str


class _NamedEntry(msgspec.Struct, gc=False):
    name: str


class _TurnEntry(msgspec.Struct, gc=False):
    role: str


_LISTS = {"tools": _NamedEntry, "system": _TypedEntry, "messages": _TurnEntry}
"""Lists, and what the API demands of each entry."""


def fields_in(body: bytes) -> dict[str, Any]:
    """Fields of the object in `body` that are read here.

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
    for name, entry in _LISTS.items():
        if name in found and has_control(found[name]):
            found[name] = list_in(found[name], entry)
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


def list_in(part: object, entry: type[msgspec.Struct]) -> object:
    """The entries of a list that is still raw; anything else unchanged.

    Args:
        part: What may be such a list.
        entry: What the endpoint demands of each entry. It refuses other lists itself.

    """
    if not isinstance(part, msgspec.Raw):
        return part
    try:
        # First, since this ends at the first wrong entry: to split half a million empty
        # ones would hold the GIL for 20 ms.
        msgspec.json.decode(part, type=list[entry])  # type: ignore[valid-type]
        return msgspec.json.decode(part, type=list[msgspec.Raw])
    except (ValueError, RecursionError):
        return part


def turn_in(message: object) -> Mapping[str, Any]:
    """Role and content of a message; content that is a list becomes a list of `Raw`."""
    if isinstance(message, msgspec.Raw):
        message = _present(message, _Turn)
        if "content" in message:
            message["content"] = list_in(message["content"], _TypedEntry)
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


# ------------------------------------------------------- fields of other APIs

KEPT = 75
"""Priority of what other APIs ask to keep; they have no levels."""
MINUTE, HOUR = 60, 3600

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
def from_openai(body: Mapping[str, Any]) -> dict[str, Any]:
    """Translate `prompt_cache_retention` and `prompt_cache_options` of OpenAI's APIs.

    Raises:
        ValueError: OpenAI's API does not allow the value.

    """
    ttl = _one_of(_RETENTION, body, "prompt_cache_retention", "")
    options, where = body.get("prompt_cache_options"), "prompt_cache_options"
    if options is None:
        return {"retain": retain(ttl)} if ttl else {}
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
    return hints


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


# --------------------------------------------------------------------- serving


async def serve_conversation_hints(request: Request) -> JSONResponse:
    """Handle a hint that a conversation is over.

    The body has `conversation`, `release`, and `cache_salt` if its requests had one.
    The answer has the number of released blocks, and of engines.
    """
    try:
        said = from_body(await request.body())
    except (ValueError, RecursionError) as e:
        return refusal(AFTERWARDS, str(e))
    return JSONResponse(await tell_all(request.app.state.engine_client, said))


class HintsOfRequests:
    """ASGI middleware that reads the hints of requests.

    Args:
        app: The application.

    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request with its hints in `request_context`."""
        path = ""
        if scope["type"] == "http" and scope["method"] == "POST":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path not in PATHS:
            return await self._app(scope, receive, send)
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        body = b"".join(message.get("body", b"") for message in messages)
        again = _replay(messages, receive)
        if not any(word in body for word in WORDS):
            return await self._app(scope, again, send)
        try:
            if len(body) < LARGE:
                said, marks = _read(path, body)
            else:
                said, marks = await asyncio.to_thread(_read, path, body)
        except ValueError as e:
            return await refusal(path, str(e))(scope, again, send)
        if marks:
            ranges = await self._retained(marks, scope)
            said = RequestContext({"retain": ranges, **said.hints}, said.checked)
        token = request_context.set(said)
        try:
            await self._app(scope, again, send)
        finally:
            request_context.reset(token)

    async def _retained(
        self, marks: list[Breakpoint], scope: Scope
    ) -> list[dict[str, Any]]:
        ranges = []
        for mark in marks:
            end = None
            if mark.prefix is not None:
                end = await self._count(msgspec.json.encode(mark.prefix), scope)
            ranges.append(retain(mark.ttl, end))
        return ranges

    async def _count(self, body: bytes, scope: Scope) -> int | None:
        """Count the tokens of a message prefix with the server's own endpoint.

        Returns:
            The number, or None if the endpoint fails.

        """
        sent = list[Message]()
        path = scope["path"].removesuffix(MESSAGES) + COUNT
        headers = [h for h in scope["headers"] if h[0].lower() != b"content-length"]
        inner = {**scope, "path": path, "raw_path": path.encode(), "headers": headers}

        async def send(message: Message) -> None:
            sent.append(message)

        async def never() -> Message:
            # The endpoint also waits for its client to disconnect.
            await asyncio.Event().wait()
            raise AssertionError("this event is never set")

        request: Message = {"type": "http.request", "body": body, "more_body": False}
        await self._app(inner, _replay([request], never), send)
        answer = b"".join(message.get("body", b"") for message in sent)
        if sent and sent[0].get("status") == 200:
            return int(json.loads(answer)["input_tokens"]) or None
        logger.warning_once(
            "KV tier: %s does not say where cache_control ends: all of the prompt is "
            "retained.",
            COUNT,
        )
        return None


def _read(path: str, body: bytes) -> tuple[RequestContext, list[Breakpoint]]:
    """The hints of a request, and the cache breakpoints of a message.

    Raises:
        ValueError: A hint does not match its API or the schema.

    """
    found = fields_in(body)
    params = hints_in(found)
    Hints.from_params(params)
    own = params.get(KEY) or {}
    if path == MESSAGES:
        return RequestContext({**own}, params), breakpoints(found)
    return RequestContext({**from_openai(found), **own}, params), []


def _replay(messages: list[Message], receive: Receive) -> Receive:
    """A `receive` that returns `messages` first."""
    left = iter(messages)

    async def again() -> Message:
        for message in left:
            return message
        return await receive()

    return again


def refusal(path: str, message: str) -> JSONResponse:
    """An error answer in the format of the API at `path`."""
    if path == MESSAGES:
        error = {"type": "invalid_request_error", "message": message}
        return JSONResponse({"type": "error", "error": error}, 400)
    kind = {"type": "BadRequestError", "param": None, "code": 400}
    return JSONResponse({"error": {"message": message, **kind}}, 400)
