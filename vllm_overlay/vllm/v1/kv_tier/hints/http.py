# SPDX-License-Identifier: Apache-2.0
"""Hints over HTTP: a middleware for those of requests, and a route for later ones.

A bad hint is answered before the request is served, even if the answer would be a
stream. Bodies without hints are passed on unchanged. All clients share the server's
event loop, so bodies are parsed only as far as needed, and large ones in a thread.
"""

import asyncio
import json
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.logger import init_logger
from vllm.v1.kv_tier.hints.conversation_api import check, tell_all
from vllm.v1.kv_tier.hints.request_context import RequestContext, request_context
from vllm.v1.kv_tier.hints.schema import KEY, Hints
from vllm.v1.kv_tier.hints.translation import (
    Breakpoint,
    breakpoints,
    fields_in,
    from_openai,
    hints_in,
    retain,
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


class _ConversationHint(msgspec.Struct, forbid_unknown_fields=True):
    conversation: str | None = None
    cache_salt: str | None = None
    release: bool | None = None


async def serve_conversation_hints(request: Request) -> JSONResponse:
    """Handle a hint that a conversation is over.

    The body has `conversation`, `release`, and `cache_salt` if its requests had one.
    The answer has the number of released blocks, and of engines.
    """
    try:
        said = check(_conversation_hint(await request.body()))
    except (ValueError, RecursionError) as e:
        return _refusal(AFTERWARDS, str(e))
    return JSONResponse(await tell_all(request.app.state.engine_client, said))


def _conversation_hint(body: bytes) -> object:
    if len(body) >= LARGE:
        # Stops at the first other value, since parsing 1 MB takes up to half a second.
        try:
            msgspec.json.decode(body, type=_ConversationHint)
        except ValueError as e:
            raise ValueError(
                f"A body of {LARGE} bytes or more must have only strings in "
                f"conversation and cache_salt, and true in release: {str(e)[:200]}."
            ) from None
    return msgspec.json.decode(body)


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
            return await _refusal(path, str(e))(scope, again, send)
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
    return RequestContext({**from_openai(found).hints, **own}, params), []


def _replay(messages: list[Message], receive: Receive) -> Receive:
    """A `receive` that returns `messages` first."""
    left = iter(messages)

    async def again() -> Message:
        for message in left:
            return message
        return await receive()

    return again


def _refusal(path: str, message: str) -> JSONResponse:
    """An error answer in the format of the API at `path`."""
    if path == MESSAGES:
        error = {"type": "invalid_request_error", "message": message}
        return JSONResponse({"type": "error", "error": error}, 400)
    kind = {"type": "BadRequestError", "param": None, "code": 400}
    return JSONResponse({"error": {"message": message, **kind}}, 400)
