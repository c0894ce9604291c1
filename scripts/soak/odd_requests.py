# SPDX-License-Identifier: Apache-2.0
"""Requests that no client should send, and of which each may come at any time."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

MiB = 1 << 20
LARGE = 800_000
"""Bytes of a body whose time in the event loop is measured."""
SALT = 128
"""Characters of a salt that newer releases take at most."""
HINTS = "/v1/kv_tier/hints"
COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
RESPONSES, BATCH = "/v1/responses", "/v1/chat/completions/batch"
PATHS = (COMPLETIONS, CHAT, MESSAGES, RESPONSES)
"""Endpoints that take hints of requests; `BATCH` and `INVOCATIONS` lead to them."""
INVOCATIONS = "/invocations"

_MARK = b'"cache_control":{"type":"ephemeral"}'
_PARAMS = b'"kv_transfer_params":{"kv_tier":%s}'
_DEEP = b"[" * 300 + b"]" * 300
_DEEPER = b"[" * 100_000 + b"]" * 100_000
_HUGE = b"1" + b"0" * 400


@dataclass(frozen=True)
class Request:
    """A POST request.

    Attributes:
        kind: What the request is counted as.
        name: What it is within that kind.
        path: Its endpoint.
        body: Its content.
        headers: Lines of its head, besides the usual ones.

    """

    kind: str
    name: str
    path: str
    body: bytes
    headers: tuple[bytes, ...] = ()

    def __str__(self) -> str:
        return " ".join(filter(None, (f"{self.kind}:", self.name, self.path)))


WRONG_HINTS = {
    "non-mappings": [b"5", b"[1]", b'"a"', b"true", b'{"retain":5}', b'{"retain":[1]}'],
    "deep JSON": [_DEEP, b'{"retain":%s}' % _DEEP, b'{"retain":%s}' % _DEEPER],
    "surrogates": [b'{"conversation":"\\ud800"}', b'{"tenant":"a\\udfff"}'],
    "huge numbers": [
        b'{"retain":{"priority":80,"ttl":%s}}' % _HUGE,
        b'{"retain":{"priority":80,"ttl":1e300}}',
        b'{"retain":{"priority":80,"ttl":NaN}}',
        b'{"retain":{"priority":80,"ttl":Infinity}}',
        b'{"retain":{"priority":80,"end":9223372036854775808}}',
        b'{"max_load_tokens":%s}' % _HUGE,
        b'{"version":%s}' % _HUGE,
    ],
    "wrong fields": [
        *(b'{"release":1}', b'{"x":1}', b'{"version":9}'),
        b'{"retain":[' + b"{}," * 100_000 + b"{}]}",
    ],
    "1 MiB names": [b'{"conversation":"' + b"c" * MiB + b'"}'],
}
"""Values of `kv_transfer_params.kv_tier` that are refused, by kind."""

_OTHER_FIELDS = {
    "non-mappings": [
        *(b'"kv_transfer_params":5', b'"kv_transfer_params":[]'),
        *(b'"kv_transfer_params":"kv_tier"', b'"kv_transfer_params":[{"kv_tier":1}]'),
        *(b'"kv_transfer_params":{"kv_tier":null}', b'"prompt_cache_options":5'),
        *(b'"prompt_cache_retention":{}', b'"cache_control":[1]'),
        *(b'"vllm_xargs":{"kv_transfer_params":5}', b'"cache_salt":{}'),
        b'"vllm_xargs":{"kv_transfer_params":{"kv_tier":[]}}',
    ],
    "deep JSON": [
        *(b'"kv_transfer_params":%s' % _DEEP, b'"kv_transfer_params":%s' % _DEEPER),
        *(b'"prompt_cache_options":%s' % _DEEP, b'"cache_control":%s' % _DEEPER),
    ],
    "surrogates": [
        *(b'"cache_salt":"\\ud800"', b'"prompt_cache_retention":"\\ud800"'),
        *(b'"kv_transfer_params":{"\\ud800":1}', b'"cache_control":{"type":"\\ud800"}'),
    ],
    "huge numbers": [
        b'"kv_transfer_params":{"max_load_tokens":%s}' % _HUGE,
        b'"kv_transfer_params":{"other":%s}' % _HUGE,
        b'"prompt_cache_options":{"ttl":%s}' % _HUGE,
    ],
    "large salts": [b'"cache_salt":"' + b"s" * MiB + b'"'],
}
"""Other fields of requests that the tier reads, by kind."""

_AFTERWARDS = {
    "non-mappings": [b"[]", b"{", b"5", b'{"release":true}'],
    "surrogates": [
        b'"\\ud800"',
        b'{"release":true,"conversation":"\\ud800"}',
        b'{"release":true,"conversation":"c","cache_salt":"\\udfff"}',
    ],
    "huge numbers": [
        b'{"release":%s,"conversation":"c"}' % _HUGE,
        b'{"release":true,"conversation":1' + b"0" * 5000 + b"}",
    ],
    "deep JSON": [_DEEPER, b'{"release":true,"conversation":%s}' % _DEEPER],
    "large salts": [
        b'{"release":true,"conversation":"c","cache_salt":"' + b"s" * MiB + b'"}'
    ],
    "1 MiB names": [b'{"release":true,"conversation":"' + b"c" * MiB + b'"}'],
}
"""Bodies of hints about a conversation, by kind."""

_HEADERS = [
    b"X-data-parallel-rank: " + _HUGE,
    b"X-data-parallel-rank: \xed\xa0\x80",
    b"X-Request-Id: \xed\xa0\x80",
    b"X-Request-Id: " + b"r" * 30_000,
    b"X-KV-Tier: " + b"{" * 30_000,
    b"Content-Encoding: gzip",
    b"Content-Type: text/plain; charset=\xff",
    b"Content-Type: application/json; charset=utf-16",
]

_LARGE_FIELDS = {
    "small lists": b'"x":[' + b"[]," * 333_000 + b"0]",
    "small objects": b'"x":[' + b'{"a":0},' * 125_000 + b"0]",
    "many fields": b",".join(b'"k%d":0' % i for i in range(90_000)),
    "deep": b'"x":' + b"[" * 500_000 + b"]" * 500_000,
    "blocks": b'"messages":[{"role":"user","content":['
    + b'{"type":"text","text":"a"},' * 37_000
    + b'{"type":"text","text":"b",%s}]}]' % _MARK,
    "breakpoints": b'"messages":[{"role":"user","content":['
    + b'{"type":"text","text":"a",%s},' % _MARK * 14_000
    + b'{"type":"text","text":"b"}]}]',
    "turns": b'"messages":['
    + b"{}," * 320_000
    + b'{"role":"user","content":[{"type":"text","text":"a",%s},{}]}]' % _MARK,
    "large hint": _PARAMS % (b"[" + b"[]," * 333_000 + b"0]"),
}


def ordinary(path: str, model: str, prompt: str = "t9", max_tokens: int = 1) -> bytes:
    """Body of a request that `path` serves, without its last brace."""
    turn = [{"role": "user", "content": prompt}]
    body: dict[str, object] = {"model": model, "max_tokens": max_tokens}
    if path == RESPONSES:
        body = {"model": model, "max_output_tokens": max_tokens, "input": prompt}
    elif path == BATCH:
        body["messages"] = [turn]
    elif path in (CHAT, MESSAGES):
        body["messages"] = turn
    else:
        body["prompt"] = prompt
    return json.dumps(body).encode()[:-1]


def odd_requests(model: str) -> Iterator[Request]:
    """Each request that is not new each time. `model` is its name at the server."""
    numbers = count()
    for kind, hints in WRONG_HINTS.items():
        for number, hint in zip(numbers, hints):
            for path in (*PATHS, BATCH, INVOCATIONS):
                body = b"%s,%s}" % (ordinary(path, model), _PARAMS % hint)
                yield Request(kind, f"hint {number}", path, body)
    for kind, all_fields in _OTHER_FIELDS.items():
        for number, fields in zip(numbers, all_fields):
            for path in PATHS:
                body = b"%s,%s}" % (ordinary(path, model), fields)
                yield Request(kind, f"field {number}", path, body)
    for kind, bodies in _AFTERWARDS.items():
        for number, body in zip(numbers, bodies):
            yield Request(kind, f"afterwards {number}", HINTS, body)
    hint = _PARAMS % b'{"conversation":"c"}'
    for number, header in zip(numbers, _HEADERS):
        for path in PATHS:
            body = b"%s,%s}" % (ordinary(path, model), hint)
            yield Request("headers", f"header {number}", path, body, (header,))
    yield from _large_requests()


def _large_requests() -> Iterator[Request]:
    for what, fields in _LARGE_FIELDS.items():
        # Upstream takes 4 s to say what is wrong with each of so many turns.
        for path in (COMPLETIONS, *[MESSAGES] * (what != "turns")):
            # Never served: the endpoint refuses it when it has parsed it.
            body = b'{"model":"no such model","max_tokens":"x",' + _MARK + b","
            yield Request("1 MB bodies", what, path, body + fields + b"}")
        # The tier refuses it, so that upstream does not parse it.
        body = b'{"kv_transfer_params":{"kv_tier":5},' + _MARK + b"," + fields + b"}"
        yield Request("1 MB bodies", f"{what}, refused", MESSAGES, body)
        body = b'{"release":true,"conversation":"c",' + fields + b"}"
        yield Request("1 MB bodies", what, HINTS, body)
