# SPDX-License-Identifier: Apache-2.0
"""Clients of all manners: patient, streaming, and gone before the answer."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from .questions import Conversation, Question

SALTS = (None, None, "a", "b")
RESET_EVERY_S = 10.0


@dataclass
class Tally:
    """What the clients saw."""

    counts: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Load:
    """Clients of one server, for an `async with` statement.

    Args:
        url: Of the server.
        conversations: With the right answers.
        seed: Of what the clients do.
        resets: Whether the prefix cache is reset now and then.

    """

    def __init__(
        self,
        url: str,
        conversations: Sequence[Conversation],
        seed: int = 0,
        resets: bool = True,
    ) -> None:
        self._resets = resets
        self.tally = Tally()
        self._conversations = conversations
        self._rng = random.Random(seed)
        # A proxy from the environment has no business with a local server.
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=600,
            trust_env=False,
            # A connection for each request: one that is used again may be closed, by
            # the server or by a request of ours that is cancelled, as it is taken.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def __aenter__(self) -> "Load":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.aclose()

    async def run(self, num_clients: int, ends: float) -> None:
        """Talk to the server until `ends` (`time.monotonic()`)."""
        clients = [self._talk(ends) for _ in range(num_clients)]
        if self._resets:
            clients.append(self._reset(ends))
        await asyncio.gather(*clients)

    async def ask_all(self, at_a_time: int = 6, last_first: bool = False) -> None:
        """Ask every question once, in order, or the last conversation first: of that
        one a small cache still has something."""
        places = asyncio.Semaphore(at_a_time)

        async def ask(conversation: Conversation) -> None:
            async with places:
                for question in conversation.questions:
                    await self._guarded(self._ask, question, question.body)

        some = self._conversations[:: -1 if last_first else 1]
        await asyncio.gather(*map(ask, some))

    async def _talk(self, ends: float) -> None:
        rng = self._rng
        manners = [self._ask, self._stream, self._hang_up, self._hang_up_at_once]
        while True:
            conversation = rng.choice(self._conversations)
            salt = rng.choice(SALTS)
            for question in conversation.questions:
                if time.monotonic() > ends:
                    return
                body = question.body | ({"cache_salt": salt} if salt else {})
                (manner,) = rng.choices(manners, [40, 40, 12, 8])
                await self._guarded(manner, question, body)

    async def _guarded(self, manner: Any, question: Question, body: Any) -> None:
        self.tally.counts[manner.__name__.strip("_")] += 1
        try:
            await manner(question, body)
        except (httpx.HTTPError, LookupError, ValueError) as error:
            cause = error.__cause__ or error.__context__
            self.tally.errors.append(
                f"{time.strftime('%H:%M:%S')} {manner.__name__}: {error!r} <- {cause!r}"
            )

    async def _ask(self, question: Question, body: dict[str, Any]) -> None:
        response = await self._http.post(question.path, json=body)
        if response.status_code != 200:
            raise ValueError(f"{response.status_code} {response.text[:500]}")
        (choice,) = response.json()["choices"]
        self._compare(question, choice["token_ids"])

    async def _stream(self, question: Question, body: dict[str, Any]) -> None:
        tokens = []
        async for some in self._tokens(question, body):
            tokens += some
        self._compare(question, tokens)

    async def _hang_up(self, question: Question, body: dict[str, Any]) -> None:
        """In the middle of the answer."""
        last = self._rng.randrange(len(question.tokens))
        tokens = []
        async for some in self._tokens(question, body):
            tokens += some
            if len(tokens) >= last:
                break
        self._compare(question, tokens, is_whole=False)

    async def _hang_up_at_once(self, question: Question, body: dict[str, Any]) -> None:
        """While the request waits, or in the middle of its prefill."""
        patience_s = self._rng.uniform(0, 0.2)
        try:
            await asyncio.wait_for(self._ask(question, body), patience_s)
        except asyncio.TimeoutError:
            self.tally.counts["gone before the answer"] += 1

    async def _tokens(
        self, question: Question, body: dict[str, Any]
    ) -> AsyncIterator[list[int]]:
        body = body | {"stream": True}
        async with self._http.stream("POST", question.path, json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode()[:500]
                raise ValueError(f"{response.status_code} {text}")
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data and data != "[DONE]":
                    for choice in json.loads(data)["choices"]:
                        yield choice.get("token_ids") or []

    def _compare(
        self, question: Question, tokens: list[int], is_whole: bool = True
    ) -> None:
        if not question.is_clear:
            self.tally.counts["not clear"] += 1
            return
        self.tally.counts["compared"] += 1
        expected = question.tokens if is_whole else question.tokens[: len(tokens)]
        if tokens != expected:
            self.tally.wrong.append(
                f"{time.strftime('%H:%M:%S')} {tokens} instead of {expected}: "
                f"{question.body}"
            )

    async def _reset(self, ends: float) -> None:
        """Reset the prefix cache now and then, with and without running requests."""
        for number in range(1 << 30):
            await asyncio.sleep(min(RESET_EVERY_S, max(ends - time.monotonic(), 0)))
            if time.monotonic() > ends:
                return
            restart = str(number % 2 == 0).lower()
            response = await self._http.post(
                f"/reset_prefix_cache?reset_running_requests={restart}"
            )
            if response.status_code != 200:
                self.tally.errors.append(f"reset: {response.status_code}")
            elif response.json()["success"]:
                self.tally.counts["resets"] += 1
            else:
                self.tally.counts["resets refused"] += 1
