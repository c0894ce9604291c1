# SPDX-License-Identifier: Apache-2.0
"""Clients of the hostile soak, and what their report counts as a failure."""

import asyncio
import random
import time
from typing import Any

import pytest

from soak import hostile
from soak.hostile import GROWTH, Hostile, Look, what_failed, worse
from soak.odd_requests import COMPLETIONS, Request
from soak.watch import growth

REQUEST = Request("kind", "name", COMPLETIONS, b"{}")
MiB = 1 << 20


async def outcomes(answer: bytes | None, number: int) -> tuple[Hostile, list[Any]]:
    """What clients of a server get that answers so, or never."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await asyncio.sleep(60)
        writer.write(answer or b"")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    clients = Hostile(f"http://{host}:{port}", "model")
    found = await asyncio.gather(*(clients.send(REQUEST) for _ in range(number)))
    server.close()
    return clients, found


def test_more_requests_than_a_pool_has_places_are_all_answered() -> None:
    clients, found = asyncio.run(outcomes(b"HTTP/1.1 200 OK\r\n\r\n{}", 300))
    assert found == [200] * 300
    assert clients.counts == {"kind": {"200": 300}} and clients.served == 300


def test_a_server_that_is_too_slow_is_an_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hostile, "TIMEOUT_S", 0.05)
    clients, _ = asyncio.run(outcomes(None, 2))
    assert clients.counts == {"kind": {"timed out": 2}}


def test_a_server_that_hangs_up_is_an_outcome() -> None:
    clients, found = asyncio.run(outcomes(b"", 1))
    assert found[0].startswith("no answer")
    assert clients.broken == {}


def test_a_server_that_does_not_listen_is_an_outcome() -> None:
    clients = Hostile("http://127.0.0.1:1", "model")
    assert asyncio.run(clients.send(REQUEST)) == "no answer: ConnectionRefusedError"


def test_a_prewarm_is_given_up_at_once() -> None:
    async def abandon() -> Hostile:
        server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        clients = Hostile(f"http://{host}:{port}", "model")
        await clients.abandon(REQUEST, 0.01)
        return clients

    begin = time.monotonic()
    assert asyncio.run(abandon()).counts == {"kind": {"given up": 1}}
    assert time.monotonic() - begin < 5


def test_an_answer_of_500_is_counted_with_its_request() -> None:
    clients, _ = asyncio.run(outcomes(b"HTTP/1.1 503 No\r\n\r\n", 2))
    assert clients.broken == {"kind: name /v1/completions 503": 2}


def sizes(leak: float) -> list[float]:
    """Of a process of 600 MiB that serves large requests, and leaks so much in all."""
    rng = random.Random(0)
    spikes = [40 * MiB * (rng.random() < 0.2) for _ in range(300)]
    return [600 * MiB + spike + leak * i / 300 for i, spike in enumerate(spikes)]


def test_growth_is_that_of_a_leak_and_not_of_requests_being_served() -> None:
    assert growth(sizes(0)) == 0
    assert growth(sizes(12 * MiB)) > GROWTH
    assert 0.005 < growth(sizes(6 * MiB)) < GROWTH


def report(**changed: Any) -> dict[str, Any]:
    return {"served": 9, "broken": {}, "faults": [], "growth": {"it": 0.0}} | changed


def test_what_the_report_of_a_soak_counts_as_a_failure() -> None:
    assert what_failed(report(), report(), True) == []
    broken = report(broken={"a 500": 1})
    assert what_failed(broken, report(), True) == ["a 500"]
    assert what_failed(report(faults=["x fell"]), report(), True) == ["x fell"]
    assert len(what_failed(report(served=0), report(), True)) == 1
    grown = report(growth={"it": 0.011})
    assert what_failed(grown, report(), False) == []
    assert (
        "grew by 1.10%, without a tier by 0.00%"
        in what_failed(grown, report(), True)[0]
    )


def test_what_a_server_answers_worse_than_one_without_a_tier() -> None:
    fine, other = {"a": Look(400, 30, 40)}, {"a": Look(200, 12, 12)}
    assert worse(fine, other) == []
    assert len(worse({"a": Look(400, 33, 40)}, other)) == 1
    assert len(worse({"a": Look(500)}, other)) == 1
    assert worse({"a": Look(500)}, {"a": Look(500)}) == []
    assert len(worse({"a": Look("timed out")}, other)) == 1
