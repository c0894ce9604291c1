# SPDX-License-Identifier: Apache-2.0
"""Hints over HTTP: those of requests, before an endpoint sees them, and those after.

A bad hint is answered before the request is served, also where the answer would be a
stream. Bodies that name no hint are handed on as they came.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.logger import init_logger
from vllm.v1.kv_tier.api.afterwards import check, tell_all
from vllm.v1.kv_tier.api.heard import Heard, heard
from vllm.v1.kv_tier.api.translation import breakpoints, from_openai, retain
from vllm.v1.kv_tier.hints import KEY, Hints

logger = init_logger(__name__)

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
AFTERWARDS = "/v1/kv_tier/hints"
"""Below /v1, which upstream guards with its API key."""
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", MESSAGES)
WORDS = (b'"kv_transfer_params"', b'"prompt_cache_', b'"cache_control"')


async def hear_afterwards(request: Request) -> JSONResponse:
    """Say of a conversation that it is over, when its last request has been sent.

    The body has `conversation`, `cache_salt` if its requests had one, and `release`.
    The answer says how many blocks make room now, on how many engines.
    """
    try:
        said = check(json.loads(await request.body()))
    except ValueError as e:
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
            said = await self._hear(path, _parse(body), scope)
        except ValueError as e:
            return await _refusal(path, str(e))(scope, again, send)
        token = heard.set(said)
        try:
            await self._app(scope, again, send)
        finally:
            heard.reset(token)

    async def _hear(self, path: str, body: Mapping[str, Any], scope: Scope) -> Heard:
        """Raises ValueError if a hint is not as its API or the schema says."""
        params = body.get("kv_transfer_params")
        own: Mapping[str, Any] = {}
        if isinstance(params, Mapping) and Hints.from_params(params) is not None:
            own = params.get(KEY) or {}
        if path == MESSAGES:
            said = Heard(await self._retained(body, scope))
        else:
            said = from_openai(body)
        return Heard({**said.hints, **own})

    async def _retained(self, body: Mapping[str, Any], scope: Scope) -> dict[str, Any]:
        ranges = []
        for each in breakpoints(body):
            end = None
            if each.prefix is not None:
                end = await self._count(each.prefix, scope)
            ranges.append(retain(each.ttl, end))
        return {"retain": ranges} if ranges else {}

    async def _count(self, prefix: dict[str, Any], scope: Scope) -> int | None:
        """Tokens of the beginning of a message, as the server itself counts them. None
        if it does not tell."""
        body, sent = json.dumps(prefix).encode(), list[Message]()
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


def _replay(messages: list[Message], receive: Receive) -> Receive:
    """What was received, and then what comes."""
    left = iter(messages)

    async def again() -> Message:
        for message in left:
            return message
        return await receive()

    return again


def _parse(body: bytes) -> Mapping[str, Any]:
    """The object in `body`; an empty one if there is none, and the endpoint says so."""
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, Mapping) else {}


def _refusal(path: str, message: str) -> JSONResponse:
    """As the API at `path` refuses what it does not understand."""
    if path == MESSAGES:
        error = {"type": "invalid_request_error", "message": message}
        return JSONResponse({"type": "error", "error": error}, 400)
    kind = {"type": "BadRequestError", "param": None, "code": 400}
    return JSONResponse({"error": {"message": message, **kind}}, 400)
