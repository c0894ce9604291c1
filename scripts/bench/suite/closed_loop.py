# SPDX-License-Identifier: Apache-2.0
"""Clients that take one conversation of a trace after the other.

A replay at arrival times asks a slow engine for as much as a fast one, whose queue then
never empties. Here the load follows the engine: a client sends the next turn when it
has the answer to the last, and has thought about it.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from .client import Answer
from .workloads import Outcome, decode, summary, tokens, ttft

if TYPE_CHECKING:
    from sizing.trace import Call


@dataclass(frozen=True)
class Turn:
    """One request of a conversation.

    Attributes:
        think_s: from the answer before, or from the client's last conversation, until
            it is sent.

    """

    prompt: list[int]
    output: int
    think_s: float


class Asking(Protocol):
    """What a client does; `suite.client.Client` for one."""

    vocab: int
    max_prompt_tokens: int

    async def ask(
        self,
        key: str,
        prompt: Sequence[int],
        max_tokens: int,
        answer: Answer | None = None,
        conversation: int = 0,
    ) -> Answer:
        """Ask for one answer."""


@dataclass(frozen=True)
class ClosedLoop:
    """Conversations of a trace, `clients` at a time, each as fast as it is answered.

    All configurations are asked the same, and each client takes the next conversation
    that nobody has taken: which one takes which depends on the engine, what is asked
    does not. Prompts have the trace's lengths and equal prefixes, divided by `shrink`.

    Attributes:
        conversations: the first ones of the trace, in order of arrival, that have
            `turns` (least and most; what comes after is left out) and fit the engine.
        think: part of the time between two arrivals of the trace that a client waits
            before it sends a turn. The trace does not say how much of that time the
            answer took.
        max_think_s: no wait is longer.

    """

    clients: int
    conversations: int
    shrink: int = 1
    turns: tuple[int, int] = (2, 6)
    output: int = 48
    think: float = 0.002
    max_think_s: float = 1.0
    name: str = "closed"
    path: str = ""

    async def run(self, client: Asking, repeat: int) -> Outcome:
        talks = self.talks(client.vocab, client.max_prompt_tokens, repeat)
        left = iter(enumerate(talks))
        answers: dict[tuple[int, int], Answer] = {}

        async def talk() -> None:
            # All clients draw from one iterator.
            for i, turns in left:
                for k, turn in enumerate(turns):
                    await asyncio.sleep(turn.think_s)
                    answers[i, k] = await client.ask(
                        f"{i}.{k}", turn.prompt, turn.output, conversation=i
                    )

        started = time.perf_counter()
        await asyncio.gather(*(talk() for _ in range(self.clients)))
        ordered = [answers[key] for key in sorted(answers)]
        later = [answers[i, k] for i, k in sorted(answers) if k]
        first = [answers[i, k] for i, k in sorted(answers) if not k]
        metrics = summary(ordered, started) | decode(ordered)
        metrics |= ttft("later_ttft", later) | ttft("first_ttft", first)
        return Outcome(metrics, ordered)

    def talks(self, vocab: int, max_prompt: int, repeat: int) -> list[list[Turn]]:
        """The conversations, the same for the same arguments.

        Raises:
            ValueError: the trace has too few of them.

        """
        size = id_tokens(self.shrink)

        @cache
        def block(hash_id: int) -> tuple[int, ...]:
            return tuple(tokens(vocab, size, self.name, repeat, hash_id))

        found: list[list[Turn]] = []
        path = Path(self.path)
        for calls in conversations_of(path, self.shrink, self.turns, max_prompt):
            turns = []
            for before, call in zip([calls[0], *calls], calls):
                prompt = [t for hash_id in call.hash_ids for t in block(hash_id)]
                length = max(call.input_tokens // self.shrink, 1)
                output = min(max(call.output_tokens // self.shrink, 1), self.output)
                gap_s = (call.arrival_s - before.arrival_s) * self.think
                think_s = min(gap_s, self.max_think_s)
                turns.append(Turn(prompt[:length], output, think_s))
            found.append(turns)
            if len(found) == self.conversations:
                return found
        raise ValueError(
            f"{self.path} has {len(found)} conversations of {self.turns[0]} turns that "
            f"fit {max_prompt} tokens, not {self.conversations}: set fewer "
            f"({self.name}.conversations)."
        )


def id_tokens(shrink: int) -> int:
    """Tokens that stand for one hash id of a trace."""
    from sizing.trace import ID_TOKENS

    return ID_TOKENS // shrink


def conversations_of(
    path: Path, shrink: int, turns: tuple[int, int], max_prompt: int
) -> Iterator[list["Call"]]:
    """Calls of a trace that belong together and go on from each other.

    Args:
        path: The trace.
        shrink: Lengths are divided by it.
        turns: Least and most; what comes after is left out.
        max_prompt: Tokens of a prompt, after `shrink`.

    """
    # Whoever only merges results does not have this on its path.
    from sizing.trace import conversations, read_trace

    calls = read_trace(path)
    talks: dict[int, list[Call]] = {}
    for call, name in zip(calls, conversations(calls)):
        talk = talks.setdefault(name, [])
        fits = call.input_tokens // shrink <= max_prompt
        if fits and (not talk or goes_on(talk[-1], call)):
            talk.append(call)
    least, most = turns
    for talk in talks.values():
        if len(talk) >= least:
            yield talk[:most]


def goes_on(before: "Call", call: "Call") -> bool:
    """Whether a prompt holds all of an earlier one, whose last id may be a part."""
    whole = before.hash_ids[:-1]
    return (
        call.input_tokens > before.input_tokens and call.hash_ids[: len(whole)] == whole
    )
