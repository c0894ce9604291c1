# SPDX-License-Identifier: Apache-2.0
"""Clients who send what nobody should: `make soak ARGS=--hostile`.

Names and salts that nobody has had before, salts of 1 MiB, prewarms whose clients hang
up, and `odd_requests`: deep JSON, numbers and characters that no message between
processes can carry, bodies of 1 MB that are costly to parse. No request may be answered
with a status of 500 or above where a server without a tier answers otherwise, none may
block the event loop for `MAX_LAG_MS` longer than it does there, and no process may grow
by `GROWTH` more.
"""

import asyncio
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, cycle
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from .loop_lag import PATH as LOOP_LAG
from .odd_requests import (
    HINTS,
    LARGE,
    PATHS,
    SALT,
    MiB,
    Request,
    odd_requests,
    ordinary,
)

MAX_LAG_MS = 20.0
GROWTH = 0.01
"""How much more than without a tier each process may grow. There, too, bodies of 1 MB
leave holes in the memory of an API server that Python's allocator does not give back.
"""
TIMES = 5
"""How often a large body is sent to measure how long it blocks the event loop."""
TIMEOUT_S = 120.0
TOO_LONG_MS = 1000.0
"""A request that blocks the event loop for so long is no part of the load."""
AGAIN = 30
"""How many requests later some come again: not a multiple of `EVERY`."""
EVERY = 7
PAUSE_S = 0.1
"""Between odd requests of a kind, so that others are served."""
TIMED_OUT = "timed out"


@dataclass(frozen=True)
class Look:
    """What one request did in a quiet moment.

    Attributes:
        outcome: Status of the answer, or what came instead.
        median_ms: How long the event loop was blocked at a stretch.
        worst_ms: As above, the worst of some times.

    """

    outcome: int | str
    median_ms: float = 0.0
    worst_ms: float = 0.0

    @property
    def is_broken(self) -> bool:
        """Whether the answer was a failure of the server, or none came."""
        return isinstance(self.outcome, str) or self.outcome >= 500

    @property
    def is_left_out(self) -> bool:
        """Of a load. `worse` judges whether it is the tier's fault."""
        return self.is_broken or self.median_ms > TOO_LONG_MS


class Hostile:
    """Clients of one server. Each request has a connection of its own.

    Args:
        url: Of the server.
        model: Its name there.
        headers: Of each request.

    """

    def __init__(self, url: str, model: str, **headers: str) -> None:
        address = urlsplit(url)
        self._host, self._port = address.hostname, address.port
        self._model = model
        self._headers = [f"{name}: {value}".encode() for name, value in headers.items()]
        first = time.monotonic_ns()
        # Prewarms have numbers, and so names and salts, of their own.
        self._numbers, self._prewarms = count(first), count(-first, -1)
        self._counts: defaultdict[str, Counter[int | str]] = defaultdict(Counter)
        self.broken: Counter[str] = Counter()
        """Requests that were answered with 500 or above, with the status."""

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Requests by kind and status, or by what came instead of an answer."""
        return {
            kind: {str(outcome): counts[outcome] for outcome in sorted(counts, key=str)}
            for kind, counts in sorted(self._counts.items())
        }

    @property
    def served(self) -> int:
        """Requests that were answered with 200."""
        return sum(counts[200] for counts in self._counts.values())

    # ----------------------------------------------------------------- requests

    async def send(self, request: Request) -> int | str:
        """Returns the status of the answer, or what came instead."""
        outcome, _ = await self._ask(request)
        self._counts[request.kind][outcome] += 1
        if isinstance(outcome, int) and outcome >= 500:
            self.broken[f"{request} {outcome}"] += 1
        return outcome

    async def abandon(self, request: Request, after_s: float) -> None:
        """Send a request, and hang up after some time."""
        outcome, _ = await self._ask(request, timeout_s=after_s)
        if outcome == TIMED_OUT:
            outcome = "given up"
        self._counts[request.kind][outcome] += 1

    async def _ask(
        self, request: Request, method: str = "POST", timeout_s: float | None = None
    ) -> tuple[int | str, bytes]:
        """Status and content of the answer, or what came instead. Never raises for what
        a server or a busy machine may do."""
        try:
            return await asyncio.wait_for(
                self._exchange(request, method),
                TIMEOUT_S if timeout_s is None else timeout_s,
            )
        except asyncio.TimeoutError:
            return TIMED_OUT, b""
        except (OSError, EOFError, ValueError, IndexError) as error:
            return f"no answer: {type(error).__name__}", b""

    async def _exchange(self, request: Request, method: str) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            lines = [
                f"{method} {request.path} HTTP/1.1".encode(),
                b"Host: server",
                b"Connection: close",
                b"Content-Length: %d" % len(request.body),
                *self._headers,
                *request.headers,
            ]
            if not any(h.startswith(b"Content-Type") for h in request.headers):
                lines.append(b"Content-Type: application/json")
            writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + request.body)
            # A server may answer before it has read all.
            with suppress(ConnectionError):
                await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            return int(head.split()[1]), await reader.read()
        finally:
            writer.transport.abort()

    async def longest_ms(self) -> float:
        """The longest stretch of the server's event loop since the last call; 0.0 if
        the server does not measure it."""
        request = Request("", "", LOOP_LAG, b"")
        status, content = await self._ask(request, "GET")
        return json.loads(content)["longest_ms"] if status == 200 else 0.0

    # --------------------------------------------------------------------- load

    async def look(self, times: int = TIMES) -> dict[str, Look]:
        """Send each of `odd_requests`, one after another; the large ones some times."""
        found = {}
        for request in odd_requests(self._model):
            longest = []
            for _ in range(times if len(request.body) > LARGE else 1):
                await self.longest_ms()
                outcome = await self.send(request)
                longest.append(await self.longest_ms())
            found[str(request)] = Look(outcome, median(longest), max(longest))
        return found

    async def press(self, ends: float, looks: dict[str, Look] | None = None) -> None:
        """Clients of all kinds until `ends` (`time.monotonic()`).

        Args:
            ends: When to stop.
            looks: What `look` found. Requests that upstream answers with 500, after
                which it keeps their state for ever, or that block it for seconds, are
                left out: they would hide what the tier does.

        """
        kinds: defaultdict[str, list[Request]] = defaultdict(list)
        for request in odd_requests(self._model):
            if not (looks and looks[str(request)].is_left_out):
                kinds[request.kind].append(request)
        clients = [self._be_served(ends) for _ in range(4)]
        clients += [self._prewarm(ends) for _ in range(2)]
        clients += [self._send_all(cycle(some), ends) for some in kinds.values()]
        await asyncio.gather(*clients)

    async def _send_all(self, requests: Iterator[Request], ends: float) -> None:
        for request in requests:
            if time.monotonic() > ends:
                return
            await self.send(request)
            await asyncio.sleep(PAUSE_S)

    async def _be_served(self, ends: float) -> None:
        """Requests, most of them with names and salts that nobody has had before."""
        while time.monotonic() < ends:
            number = next(self._numbers)
            if number % EVERY == 0:
                # Comes again, after the device has evicted it: loads need memory, too.
                number -= AGAIN
            some: list[dict[str, Any]] = [
                {"retain": {"priority": 90, "ttl": 2**53 - 1}},
                {"retain": [{"priority": 1}, {"priority": 99, "end": 40}]},
                {"max_load_tokens": number, "release": True},
                {},
                {},
            ]
            request = self._new("unique names", number, some[number % 5])
            await self.send(request)
            if number % 5 == 4:
                over = {"conversation": self._name(number), "release": True}
                over["cache_salt"] = f"{number}".ljust(MiB if number % 2 else 9, "s")
                body = json.dumps(over).encode()
                await self.send(Request("unique names", "", HINTS, body))

    async def _prewarm(self, ends: float) -> None:
        """Prewarms whose clients hang up at once, or while they are computed."""
        while time.monotonic() < ends:
            number = next(self._prewarms)
            request = self._new("aborted prewarms", number, {"prewarm": True})
            await self.abandon(request, number % 6 * 0.01)

    @staticmethod
    def _name(number: int) -> str:
        return f"{number}".ljust(250, "c")

    def _new(self, kind: str, number: int, hints: dict[str, Any]) -> Request:
        name = self._name(number)
        fields = {
            "cache_salt": f"{number}".ljust(SALT, "s"),
            "kv_transfer_params": {
                "kv_tier": {"conversation": name, "tenant": name[::-1], **hints}
            },
        }
        prompt = " ".join(f"t{300 + (number * 7 + i) % 600}" for i in range(100))
        path = PATHS[number % len(PATHS)]
        body = (
            ordinary(path, self._model, prompt) + b"," + json.dumps(fields)[1:].encode()
        )
        return Request(kind, "", path, body)


def worse(found: dict[str, Look], without: dict[str, Look]) -> list[str]:
    """What a server with a tier answers worse than one without."""
    bad = []
    for name, look in found.items():
        other = without.get(name, Look(0))
        if look.is_broken and look.outcome != other.outcome:
            bad.append(f"{name}: {look.outcome}, without a tier {other.outcome}")
        if look.median_ms > other.median_ms + MAX_LAG_MS:
            bad.append(
                f"{name}: blocked the event loop for {look.median_ms:.0f} ms (median), "
                f"without a tier for {other.median_ms:.0f} ms"
            )
    return bad


def what_failed(
    server: dict[str, Any], without: dict[str, Any], is_long: bool
) -> list[str]:
    """What the report of a server with a tier has that one without does not excuse.

    Args:
        server: Of the server.
        without: Of the server without a tier.
        is_long: Whether memory has had the time to show a leak.

    """
    bad = [
        f"the server {name} served no request"
        for name, report in (("with a tier", server), ("without a tier", without))
        if not report["served"]
    ]
    bad += sorted(server["broken"])
    bad += server["faults"]
    for process, grown in server["growth"].items():
        other = without["growth"][process]
        if is_long and grown > max(other, 0) + GROWTH:
            bad.append(
                f"memory of the {process} grew by {100 * grown:.2f}%, without a tier "
                f"by {100 * other:.2f}%"
            )
    return bad
