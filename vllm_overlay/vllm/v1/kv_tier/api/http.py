# SPDX-License-Identifier: Apache-2.0
"""Hints over HTTP: those of requests, before an endpoint sees them, and those after.

A bad hint is answered before the request is served, also where the answer would be a
stream. Bodies that name no hint are handed on as they came.

All clients share the server's event loop, so a body is not parsed here as a whole: what
is no hint is skipped, and large bodies are read in a thread.
"""

import asyncio
import json
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.logger import init_logger
from vllm.v1.kv_tier.api.afterwards import check, tell_all
from vllm.v1.kv_tier.api.body import fields_in, hints_in
from vllm.v1.kv_tier.api.heard import Heard, heard
from vllm.v1.kv_tier.api.translation import Breakpoint, breakpoints, from_openai, retain
from vllm.v1.kv_tier.hints import KEY, Hints

logger = init_logger(__name__)

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
AFTERWARDS = "/v1/kv_tier/hints"
"""Below /v1, which upstream guards with its API key."""
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", MESSAGES)
WORDS = (b'"kv_transfer_params"', b'"prompt_cache_', b'"cache_control"')
LARGE = 1 << 16
"""Bytes of a body from which on it is read in a thread."""


async def hear_afterwards(request: Request) -> JSONResponse:
    """Say of a conversation that it is over, when its last request has been sent.

    The body has `conversation`, `cache_salt` if its requests had one, and `release`.
    The answer says how many blocks make room now, on how many engines.
    """
    try:
        said = check(msgspec.json.decode(await request.body()))
    except (ValueError, RecursionError) as e:
        return _refusal(AFTERWARDS, str(e))
    return JSONResponse(await tell_all(request.app.state.engine_client, said))


class HintsOfRequests:
    """ASGI middleware that reads the hints of requests.

    Args:
        app: What serves them.

    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, with what it says of its KV in `heard`."""
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
            return await _refusal(path, str(e))(scope, again, send)
        if marks:
            ranges = await self._retained(marks, scope)
            said = Heard({"retain": ranges, **said.hints}, said.checked)
        token = heard.set(said)
        try:
            await self._app(scope, again, send)
        finally:
            heard.reset(token)

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
        """Tokens of the beginning of a message, as the server itself counts them. None
        if it does not tell."""
        sent = list[Message]()
        path = scope["path"].removesuffix(MESSAGES) + COUNT
        headers = [h for h in scope["headers"] if h[0].lower() != b"content-length"]
        inner = {**scope, "path": path, "raw_path": path.encode(), "headers": headers}

        async def send(message: Message) -> None:
            sent.append(message)

        async def never() -> Message:
            # The endpoint waits for its client to hang up, beside its work.
            await asyncio.Event().wait()
            raise AssertionError("nobody sets this event")

        request: Message = {"type": "http.request", "body": body, "more_body": False}
        await self._app(inner, _replay([request], never), send)
        answer = b"".join(message.get("body", b"") for message in sent)
        if sent and sent[0].get("status") == 200:
            return int(json.loads(answer)["input_tokens"]) or None
        logger.warning_once(
            "KV tier: %s does not tell where cache_control ends: all of the prompt is "
            "retained.",
            COUNT,
        )
        return None


def _read(path: str, body: bytes) -> tuple[Heard, list[Breakpoint]]:
    """The hints of a request, and where a message is to be cached.

    Raises:
        ValueError: A hint is not as its API or the schema says.

    """
    found = fields_in(body)
    params = hints_in(found)
    Hints.from_params(params)
    own = params.get(KEY) or {}
    if path == MESSAGES:
        return Heard({**own}, params), breakpoints(found)
    return Heard({**from_openai(found).hints, **own}, params), []


def _replay(messages: list[Message], receive: Receive) -> Receive:
    """What was received, and then what comes."""
    left = iter(messages)

    async def again() -> Message:
        for message in left:
            return message
        return await receive()

    return again


def _refusal(path: str, message: str) -> JSONResponse:
    """As the API at `path` refuses what it does not understand."""
    if path == MESSAGES:
        error = {"type": "invalid_request_error", "message": message}
        return JSONResponse({"type": "error", "error": error}, 400)
    kind = {"type": "BadRequestError", "param": None, "code": 400}
    return JSONResponse({"error": {"message": message, **kind}}, 400)
