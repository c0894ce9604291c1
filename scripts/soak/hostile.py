# SPDX-License-Identifier: Apache-2.0
"""Clients who send what nobody should: `make soak ARGS=--hostile`.

Names and salts that nobody has had before, salts of 1 MiB, prewarms whose clients hang
up, deep JSON, numbers and characters that no message between processes can carry, and
bodies of 1 MB that are costly to parse. No request may be answered with a status of 500
or above that a server without a tier answers otherwise, none may hold up the event loop
longer than `MAX_LAG_MS` beyond what it does there, and memory stays as it is.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

import httpx

from .loop_lag import PATH as LOOP_LAG

MAX_LAG_MS = 20.0
GROWTH = 0.01
"""How much more memory each process may have at the end."""
MiB = 1 << 20
LARGE = 100_000
"""Bytes of a body that is sent several times."""
SALT = 128
"""Characters of a salt that newer releases take at most."""
HINTS = "/v1/kv_tier/hints"
COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
PATHS = (COMPLETIONS, CHAT, MESSAGES, "/v1/responses")

_MARK = b'"cache_control":{"type":"ephemeral"}'
_PARAMS = b'"kv_transfer_params":{"kv_tier":%s}'


def odd_hints() -> list[bytes]:
    """Values of `kv_transfer_params.kv_tier` that are refused."""
    deep = b"[" * 300 + b"]" * 300
    return [
        *(b"5", b"[1]", b'"a"', b"true", deep, b'{"release":1}', b'{"x":1}'),
        *(b'{"conversation":"\\ud800"}', b'{"tenant":"a\\udfff"}', b'{"version":9}'),
        b'{"retain":{"priority":80,"ttl":1' + b"0" * 400 + b"}}",
        b'{"retain":{"priority":80,"ttl":1e300}}',
        b'{"retain":{"priority":80,"ttl":NaN}}',
        b'{"retain":{"priority":80,"ttl":Infinity}}',
        b'{"retain":{"priority":80,"end":9223372036854775808}}',
        b'{"max_load_tokens":36893488147419103232}',
        b'{"conversation":"' + b"c" * MiB + b'"}',
        b'{"retain":[' + b"{}," * 100_000 + b"{}]}",
    ]


def odd_bodies(model: str) -> Iterator[tuple[str, str, bytes]]:
    """Name, path and body of requests that nobody should send, but of which each may
    come at any time."""
    name = json.dumps(model).encode()
    begin = b'{"model":%s,"max_tokens":1,"prompt":"t9",' % name
    for i, hint in enumerate(odd_hints()):
        for path in PATHS:
            yield f"hint {i}", path, begin + _PARAMS % hint + b"}"
    for value in (b"5", b"[]", b'"kv_tier"', b'[{"a":1}]', b'{"kv_tier":null}'):
        body = begin + b'"kv_transfer_params":' + value + b"}"
        yield f"params {value!r}", COMPLETIONS, body
        xargs = b'"vllm_xargs":{"kv_transfer_params":' + value + b"}}"
        yield f"xargs {value!r}", COMPLETIONS, begin + xargs
    for value in (b'{"release":true}', b"[]", b"{", b"5", b'"\\ud800"'):
        yield f"afterwards {value!r}", HINTS, value
    told = b'{"release":true,"conversation":%s}'
    for value in (b'"\\ud800"', b"1" + b"0" * 5000, b"[" * 99_999 + b"]" * 99_999):
        yield "afterwards", HINTS, told % value
    large = {
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
        "large hint": _PARAMS % (b"[" + b"[]," * 333_000 + b"0]"),
    }
    for what, fields in large.items():
        for path in (COMPLETIONS, MESSAGES, HINTS):
            # Never served: the endpoint refuses it, when it has parsed it.
            body = b'{"model":"no such model","max_tokens":"x",' + _MARK + b","
            yield f"1 MB: {what}", path, body + fields + b"}"


class Hostile:
    """Clients of one server, for an `async with` statement.

    Args:
        url: Of the server.
        model: Its name there.
        headers: Of each request.

    """

    def __init__(self, url: str, model: str, **headers: str) -> None:
        self._model = model
        self._numbers = count(1)
        self.counts: Counter[str] = Counter()
        """Answers by their status."""
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=300,
            trust_env=False,
            headers={"Content-Type": "application/json", **headers},
        )

    async def __aenter__(self) -> "Hostile":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.aclose()

    async def send(self, path: str, body: bytes) -> int:
        """Returns the status of the answer."""
        answer = await self._http.post(path, content=body)
        self.counts[f"{answer.status_code}"] += 1
        return answer.status_code

    async def _complete(self, body: bytes) -> None:
        self.counts["served"] += await self.send(COMPLETIONS, body) == 200

    async def longest_ms(self) -> float:
        """The longest stretch of the server's event loop since the last call; 0.0 if it
        does not tell."""
        answer = await self._http.get(LOOP_LAG)
        return answer.json()["longest_ms"] if answer.status_code == 200 else 0.0

    async def look(self) -> dict[str, tuple[int, float]]:
        """Send each of `odd_bodies`, one after another. Returns the status, and how
        long the event loop was busy at a stretch, by name and path."""
        found = {}
        for name, path, body in odd_bodies(self._model):
            longest = []
            # What Python's collector of garbage takes is not each time in it.
            for _ in range(3 if len(body) > LARGE else 1):
                await self.longest_ms()
                status = await self.send(path, body)
                longest.append(await self.longest_ms())
            found[f"{name} {path}"] = status, min(longest)
        return found

    async def press(self, ends: float) -> None:
        """Send what is served, from names nobody has had before, until `ends`."""
        while time.monotonic() < ends:
            await asyncio.gather(*(self._press_once() for _ in range(4)))

    async def _press_once(self) -> None:
        number = next(self._numbers)
        # Releases that have a limit refuse the larger ones.
        is_large = number % 8 == 0
        salt = f"{number}".ljust(MiB if is_large else SALT, "s")
        name = f"{number}".ljust(250, "c")
        prompt = " ".join(f"t{300 + (number * 7 + i) % 600}" for i in range(100))
        hints: dict[str, Any] = {"conversation": name, "tenant": name[::-1]}
        body = {"model": self._model, "max_tokens": 1, "cache_salt": salt}
        body |= {"prompt": prompt, "kv_transfer_params": {"kv_tier": hints}}
        kind = number % 5
        if kind == 0:
            hints["prewarm"] = True
        elif kind == 1:
            hints["retain"] = {"priority": 90, "ttl": 2**53 - 1}
        elif kind == 2:
            hints["retain"] = {"priority": 1}
        elif kind == 3:
            hints |= {"max_load_tokens": number, "release": True}
        sent = self._complete(json.dumps(body).encode())
        try:
            # Prewarms are given up at once.
            await asyncio.wait_for(sent, 0.02 if kind == 0 else 300)
        except asyncio.TimeoutError:
            self.counts["given up"] += 1
        if kind == 4:
            over = {"conversation": name, "cache_salt": salt, "release": True}
            await self.send(HINTS, json.dumps(over).encode())


def worse(
    found: dict[str, tuple[int, float]], without: dict[str, tuple[int, float]]
) -> list[str]:
    """What a server with a tier answers worse than one without."""
    bad = []
    for name, (status, lag) in found.items():
        other, other_lag = without.get(name, (0, 0.0))
        if status >= 500 and status != other:
            bad.append(f"{name}: status {status}, without a tier {other}")
        if lag > other_lag + MAX_LAG_MS:
            bad.append(f"{name}: busy for {lag:.0f} ms, without {other_lag:.0f} ms")
    return bad
