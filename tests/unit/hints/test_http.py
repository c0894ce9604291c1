# SPDX-License-Identifier: Apache-2.0
"""Hints of HTTP requests, before the endpoints that serve them."""

import asyncio
import json
from time import process_time, thread_time
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from starlette.types import Message

from vllm.v1.kv_tier.hints.http import (
    AFTERWARDS,
    COUNT,
    MESSAGES,
    PATHS,
    HintsOfRequests,
    breakpoints,
    serve_conversation_hints,
)
from vllm.v1.kv_tier.hints.schema import NOTHING, request_context

CHAT = "/v1/chat/completions"


async def answer(request: Request) -> StreamingResponse:
    """Streams what it was sent and what the context says, from another task."""
    body = (await request.body()).decode()

    async def stream() -> Any:
        said = request_context.get()
        yield json.dumps([body, said.hints])

    return StreamingResponse(stream())


async def count(request: Request) -> JSONResponse:
    return JSONResponse({"input_tokens": len(json.dumps(await request.json()))})


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
    routes += [Route(AFTERWARDS, serve_conversation_hints, methods=["POST"]), *more]
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
    assert request_context.get() is NOTHING


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
                {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "b"},
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


def refused(path: str, body: bytes) -> str:
    status, found = post(make_app(), path, body)
    assert status == 400
    message: str = found["error"]["message"]
    assert len(message) < 500
    return message


@pytest.mark.parametrize(
    "value",
    [
        *("5", "[1]", '"a"', "[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]", "[true]"),
        *('{"release": "%s"}' % ("x" * 50_000), '{"%s": 1}' % ("y" * 50_000)),
        *('{"conversation": ["a", {}]}', '{"retain": {"priority": 1e999}}'),
        '{"retain": {"priority": 80, "ttl": 1%s}}' % ("0" * 400),
        '{"retain": {"priority": 80, "ttl": 1%s}}' % ("0" * 5000),
        '{"retain": {"priority": 80, "ttl": 9007199254740993}}',
        '{"retain": {"priority": 80, "ttl": true}}',
        '{"retain": {"priority": true}}',
        '{"retain": {"priority": 80, "end": 9223372036854775808}}',
        '{"max_load_tokens": 18446744073709551616}',
        '{"tenant": "%s"}' % ("z" * 70_000),
    ],
)
def test_whatever_a_hint_is_the_answer_is_a_short_refusal(value: str) -> None:
    for path in PATHS:
        body = f'{{"kv_transfer_params": {{"kv_tier": {value}}}, "prompt": "é"}}'
        assert "kv_t" in refused(path, body.encode())


def test_what_no_parser_of_ours_reads_is_left_to_the_endpoint() -> None:
    """Its hints are checked again where the request's parameters are."""
    hint = b'"kv_transfer_params": {"kv_tier": {"release": 1}}'
    for odd in (b"NaN", b'"\\ud800"', b"[" * 100_000 + b"]" * 100_000, b"}"):
        body = b'{"x": ' + odd + b", " + hint + b"}"
        assert post(make_app(), CHAT, body) == (200, [body.decode(), {}])


@pytest.mark.parametrize(
    "body",
    [
        *(b'"x"', b"[]", b"{", b'{"conversation": "\\ud800", "release": true}'),
        b'{"conversation": "c", "release": true, "cache_salt": "\\ud83d"}',
        b'{"conversation": ' + b"[" * 500_000 + b"]" * 500_000 + b"}",
        b'{"conversation": "c", "release": NaN}',
        b'{"conversation": 1' + b"0" * 5000 + b', "release": true}',
        b'{"conversation": "c", "release": true, "cache_salt": ' + b"1" * 400 + b"}",
        b'{"conversation": "c", "release": true, "%s": 1}' % (b"k" * 100_000),
    ],
)
def test_what_is_said_afterwards_is_refused_before_an_engine_hears_it(
    body: bytes,
) -> None:
    app = make_app()
    app.state.engine_client = engines = Engines()
    status, found = post(app, AFTERWARDS, body)
    assert status == 400 and len(found["error"]["message"]) < 500
    assert not engines.told


_MARK = b'"cache_control":{"type":"ephemeral"}'
_TURN = b'{"role":"user","content":'
LARGE_BODIES = {
    "small lists": b'"x":[' + b"[]," * 333_000 + b"0]",
    "small objects": b'"x":[' + b'{"a":0},' * 125_000 + b"0]",
    "integers": b'"x":[' + b"1," * 500_000 + b"0]",
    "many fields": b",".join(b'"k%d":0' % i for i in range(90_000)),
    "many blocks": b'"messages":[%s[' % _TURN
    + b'{"type":"text","text":"a"},' * 37_000
    + b'{"type":"text",%s},{"type":"text"}]}]' % _MARK,
    "many turns": b'"messages":['
    + b'%s"a"},' % _TURN * 33_000
    + b'%s[{"type":"text",%s},{"type":"text"}]}]' % (_TURN, _MARK),
    "many breakpoints": b'"messages":[%s[' % _TURN
    + b'{"type":"text",%s},' % _MARK * 19_000
    + b'{"type":"text"}]}]',
    "integers as turns": b'"messages":[' + b"1," * 500_000 + b"{%s}]" % _MARK,
    "no fields as turns": b'"messages":[' + b"{}," * 333_000 + b"{%s}]" % _MARK,
    "short turns": b'"messages":['
    + b'{"role":""},' * 83_000
    + b"%s[{%s}]}]" % (_TURN, _MARK),
    "integers as tools": b'"tools":[' + b"1," * 500_000 + b"{%s}]" % _MARK,
    "short tools": b'"tools":[' + b'{"name":""},' * 83_000 + b'{"name":"",%s}]' % _MARK,
    "integers as blocks": b'"messages":[%s[' % _TURN
    + b"1," * 500_000
    + b"{%s}]}]" % _MARK,
    "short blocks": b'"messages":[%s[' % _TURN
    + b'{"type":""},' * 83_000
    + b'{"type":"",%s}]}]' % _MARK,
    "large hint": b'"kv_transfer_params":{"kv_tier":{"conversation":['
    + b"[]," * 333_000
    + b"0]}}",
    "other connectors": b'"kv_transfer_params":{"ids":[' + b"1," * 500_000 + b"0]}",
}


def longest_hold(app: Starlette, path: str, body: bytes) -> tuple[int, float]:
    """Status of an answer, and how long other clients of the event loop had to wait.

    That is CPU time of all threads, since the loop needs the GIL, which a parser in
    another thread may hold; but other processes of this machine do not count.
    """
    longest = 0.0

    async def others() -> None:
        nonlocal longest
        while True:
            begin = process_time()
            await asyncio.sleep(0)
            longest = max(longest, process_time() - begin)

    tasks = []

    async def among_others(scope: Any, receive: Any, send: Any) -> None:
        tasks.append(asyncio.create_task(others()))
        # Otherwise they do not begin, or do not end, around what never waits.
        await asyncio.sleep(0)
        await app(scope, receive, send)
        await asyncio.sleep(0)

    status, _ = post(among_others, path, body)  # type: ignore[arg-type]
    return status, longest


@pytest.mark.parametrize("name", LARGE_BODIES)
def test_no_body_holds_up_the_event_loop(name: str) -> None:
    """Another client of the loop waits for no more than a small part of a second."""
    body = b'{"kv_transfer_params":{},' + LARGE_BODIES[name] + b"," + _MARK + b"}"

    async def served(request: Request) -> JSONResponse:
        return JSONResponse(request_context.get().hints)

    app = Starlette(routes=[Route(MESSAGES, served, methods=["POST"])])
    app.add_middleware(HintsOfRequests)
    # Python's garbage collector does not run in each of them.
    found = [longest_hold(app, MESSAGES, body) for _ in range(3)]
    assert {status for status, _ in found} < {200, 400}
    assert min(held for _, held in found) < 0.02


@pytest.mark.parametrize(
    "body",
    [
        *(b"[" + part * (1_000_000 // len(part)) + b"0]" for part in (b"0,", b"[],")),
        b"{" + b",".join(b'"k%d":0' % i for i in range(90_000)) + b"}",
        *(
            b'{"%s":[' % field + b"[]," * 333_000 + b"0]}"
            for field in (b"conversation", b"cache_salt", b"release", b"x")
        ),
        b'{"conversation":"c",' + b'"release":0,' * 83_000 + b'"release":true}',
    ],
    ids=lambda body: body[:14].decode(),
)
def test_no_hint_after_requests_holds_up_the_event_loop(body: bytes) -> None:
    app = make_app()
    app.state.engine_client = Engines()
    found = [longest_hold(app, AFTERWARDS, body) for _ in range(3)]
    assert {status for status, _ in found} < {200, 400}
    assert min(held for _, held in found) < 0.02


def test_a_hint_after_requests_may_have_a_large_salt() -> None:
    app = make_app()
    app.state.engine_client = engines = Engines()
    given = {"conversation": "c", "release": True, "cache_salt": "s" * 1_000_000}
    assert ask(app, AFTERWARDS, **given)[0] == 200
    assert engines.told[0][2]["cache_salt"] == given["cache_salt"]


def test_a_breakpoint_far_back_costs_no_more_than_one_at_the_end() -> None:
    """The prefix is made once for each time, not for each block."""

    def blocks(num: int) -> float:
        content = [{"type": "text", "text": "a"} for _ in range(num)]
        content[-2]["cache_control"] = {"type": "ephemeral"}  # type: ignore[assignment]
        body = {"messages": [{"role": "user", "content": content}]}
        begin = thread_time()
        (found,) = breakpoints(body)
        assert found.prefix is not None
        assert len(found.prefix["messages"][0]["content"]) == num - 1
        return thread_time() - begin

    blocks(100)
    assert blocks(32_000) < 100 * blocks(2_000)
