# SPDX-License-Identifier: Apache-2.0
"""Hints of HTTP requests, before the endpoints that serve them."""

import asyncio
import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from starlette.types import Message

from vllm.v1.kv_tier.api.heard import NOTHING, heard
from vllm.v1.kv_tier.api.http import (
    AFTERWARDS,
    COUNT,
    MESSAGES,
    PATHS,
    HintsOfRequests,
    hear_afterwards,
)

CHAT = "/v1/chat/completions"


async def answer(request: Request) -> StreamingResponse:
    """Streams what it was sent and what the context says, from another task."""
    body = (await request.body()).decode()

    async def stream() -> Any:
        said = heard.get()
        yield json.dumps([body, said.hints])

    return StreamingResponse(stream())


async def count(request: Request) -> JSONResponse:
    return JSONResponse({"input_tokens": len(await request.body())})


class Engines:
    """The client of two engines, of which the second knows the conversation."""

    core_engines = (0, 1)

    def __init__(self) -> None:
        self.engine_core = self
        self.told: list[Any] = []

    async def _call_utility_async(
        self, method: str, said: Any, engine: int
    ) -> dict[str, int]:
        self.told.append((method, engine, said))
        return {"released_blocks": 5 * engine, "running_requests": 0}


def make_app(*more: Route) -> Starlette:
    routes = [Route(path, answer, methods=["POST"]) for path in (*PATHS, "/other")]
    routes += [Route(AFTERWARDS, hear_afterwards, methods=["POST"]), *more]
    app = Starlette(routes=routes)
    app.add_middleware(HintsOfRequests)
    return app


def post(app: Starlette, path: str, body: bytes, parts: int = 1) -> tuple[int, Any]:
    """Status and answer to a body that comes in parts."""
    size = -(-len(body) // parts)
    left = [body[i : i + size] for i in range(0, len(body), size)]
    sent: list[Message] = []

    async def receive() -> Message:
        if not left:
            # The client waits for its answer.
            await asyncio.Event().wait()
        part = left.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-length", str(len(body)).encode())],
        "app": app,
    }
    asyncio.run(app(scope, receive, send))
    text = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], json.loads(text)


def ask(app: Starlette, path: str, parts: int = 1, **body: Any) -> tuple[int, Any]:
    return post(app, path, json.dumps(body).encode(), parts)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("path", PATHS)
def test_an_endpoint_gets_the_body_and_what_it_says(path: str, parts: int) -> None:
    body = {"prompt": "é", "kv_transfer_params": {"kv_tier": {"release": True}}}
    status, (sent, hints) = ask(make_app(), path, parts, **body)
    assert status == 200
    assert json.loads(sent) == body
    assert hints == {"release": True}
    assert heard.get() is NOTHING


@pytest.mark.parametrize(
    "body", [b'{"prompt": "cache_control"}', b"[", b'["prompt_cache_retention"]']
)
def test_what_names_no_hint_is_handed_on(body: bytes) -> None:
    assert post(make_app(), CHAT, body) == (200, [body.decode(), {}])


def test_other_paths_are_left_alone() -> None:
    wrong = {"kv_transfer_params": {"kv_tier": {"relase": True}}}
    assert ask(make_app(), "/other", **wrong)[1][1:] == [{}]


@pytest.mark.parametrize("path", PATHS)
def test_a_bad_hint_is_refused_in_the_words_of_the_api(path: str) -> None:
    wrong = {"kv_transfer_params": {"kv_tier": {"relase": True}}, "stream": True}
    status, found = ask(make_app(), path, **wrong)
    assert status == 400
    assert "unknown field 'relase' (value True)" in found["error"]["message"]
    if path == MESSAGES:
        assert found["type"] == "error"
        assert found["error"]["type"] == "invalid_request_error"
    else:
        assert found["error"]["code"] == 400


def test_own_words_count_more_than_fields_of_other_apis() -> None:
    own = {"kv_transfer_params": {"kv_tier": {"tenant": "t"}}}
    fields = {"prompt_cache_retention": "24h"}
    _, (_, hints) = ask(make_app(), CHAT, **own, **fields)
    kept = {"priority": 75, "ttl": 86400, "end": None}
    assert hints == {"retain": kept, "tenant": "t"}


MESSAGE: dict[str, Any] = {
    "model": "m",
    "messages": [
        {
            "role": "user",
            "content": [
                {"text": "a", "cache_control": {"type": "ephemeral"}},
                {"text": "b"},
            ],
        }
    ],
}


def test_the_server_itself_counts_what_comes_before_a_breakpoint() -> None:
    counted = make_app(Route(COUNT, count, methods=["POST"]))
    prefix = json.loads(json.dumps(MESSAGE))
    prefix["messages"][0]["content"].pop()
    end = len(json.dumps(prefix))
    _, (_, hints) = ask(counted, MESSAGES, **MESSAGE)
    assert hints == {"retain": [{"priority": 75, "ttl": 300, "end": end}]}


def test_where_nobody_counts_all_of_a_message_is_retained() -> None:
    _, (_, hints) = ask(make_app(), MESSAGES, **MESSAGE)
    assert hints == {"retain": [{"priority": 75, "ttl": 300, "end": None}]}


def test_every_engine_is_told_afterwards() -> None:
    app = make_app()
    app.state.engine_client = engines = Engines()
    given = {"conversation": "c", "release": True, "cache_salt": "s"}
    status, found = ask(app, AFTERWARDS, **given)
    assert status == 200
    assert found == {"engines": 2, "released_blocks": 5, "running_requests": 0}
    said = {"conversation": "c", "cache_salt": "s"}
    assert engines.told == [("hint_kv_tier", engine, said) for engine in (0, 1)]
    status, found = ask(app, AFTERWARDS, conversation="c", release=1)
    assert (status, "release must be" in found["error"]["message"]) == (400, True)
    assert post(app, AFTERWARDS, b"{")[0] == 400
    assert len(engines.told) == 2
