# SPDX-License-Identifier: Apache-2.0
"""What the engine is asked, and what is measured of it.

A workload is a dataclass of its parameters. `run` does it once; `repeat` seeds its
prompts, so that a repeat finds nothing of another in the caches. No prompt depends on
an answer: one flipped token would change everything after it.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from zlib import crc32

import numpy as np

from .client import Answer, Client

Metrics = dict[str, float]


@dataclass
class Outcome:
    """What one run measured, and its answers, in an order that does not vary."""

    metrics: Metrics
    answers: list[Answer]


def tokens(vocab: int, n: int, *seed: int | str) -> list[int]:
    """`n` random token ids, the same for the same seed."""
    numbers = [crc32(s.encode()) if isinstance(s, str) else s for s in seed]
    return list(np.random.default_rng(numbers).integers(3, vocab, n).tolist())


def spread(low: int, high: int, n: int) -> list[int]:
    """`n` lengths evenly from `low` to `high`, in no order of size."""
    even = [low + (high - low) * i // max(n - 1, 1) for i in range(n)]
    return random.Random(0).sample(even, n)


def summary(answers: Sequence[Answer], started: float) -> Metrics:
    """Times of requests that were under way together, from `started` on."""
    makespan = max(a.times[-1] for a in answers) - started
    prompt_tokens = sum(a.prompt_tokens for a in answers)
    return {
        "makespan_s": makespan,
        "output_tokens_per_s": sum(len(a.tokens) for a in answers) / makespan,
        "requests_per_s": len(answers) / makespan,
        "cached_fraction": sum(a.cached_tokens for a in answers) / prompt_tokens,
    }


def ttft(name: str, answers: Sequence[Answer]) -> Metrics:
    """Mean, median and 99th percentile of the times to first token, in ms."""
    times = [a.ttft_s * 1e3 for a in answers]
    return {
        f"{name}_ms.mean": float(np.mean(times)),
        f"{name}_ms.p50": float(np.percentile(times, 50)),
        f"{name}_ms.p99": float(np.percentile(times, 99)),
    }


def decode(answers: Sequence[Answer]) -> Metrics:
    """Mean time from token to token, in ms; nothing if all answers have one token."""
    times = [b - a for x in answers for a, b in zip(x.times, x.times[1:])]
    return {"decode_ms.mean": 1e3 * float(np.mean(times))} if times else {}


PREWARM = {"prewarm": True, "retain": {"priority": 75, "ttl": 2.0}}
"""Hints of who will be back at once: what was loaded ahead is held for that time."""


def fillers(client: Client, *seed: int | str) -> list[list[int]]:
    """More unrelated prompts than the device cache has room for."""
    size = min(8192, client.max_prompt_tokens // 2)
    count = round(1.15 * client.device_tokens / size) + 1
    return [tokens(client.vocab, size, "filler", i, *seed) for i in range(count)]


async def evict(client: Client, *seed: int | str) -> None:
    """Ask for all of these at once."""
    prompts = enumerate(fillers(client, *seed))
    asked = (client.ask("filler", p, 1, conversation=i) for i, p in prompts)
    await asyncio.gather(*asked)


@dataclass(frozen=True)
class Sessions:
    """Conversations that arrive together and go on as soon as they are answered.

    Attributes:
        first: shortest and longest first prompt, in tokens.
        more: tokens that every later turn adds.
        contexts_first: the first prompts are asked for before the time is taken,
            and a turn of `more` tokens follows at once.
        think_s: from an answer to the next turn, as an agent's tool takes: half of it
            to half more, the same in every run of a seed.
        runs_a_seed: so many runs in a row have the same prompts.
        prewarm_s: so long before a turn the agent, who sees its tool end, asks for the
            history (`Client.hints`); 0: it does not.
        at_once: requests that run at a time, of all conversations in turns; 0: all.
            The others are not sent yet: a time to first token is of the engine alone.

    """

    sessions: int
    turns: int
    first: tuple[int, int]
    more: int
    output: int
    contexts_first: bool = False
    think_s: float = 0.0
    prewarm_s: float = 0.0
    runs_a_seed: int = 1
    at_once: int = 0
    name: str = "multiturn"

    async def run(self, client: Client, repeat: int) -> Outcome:
        vocab = client.vocab
        lengths = spread(*self.first, self.sessions)
        seed = repeat // self.runs_a_seed

        def prompts_of(i: int) -> list[list[int]]:
            prompts = [tokens(vocab, lengths[i], self.name, seed, i)]
            for turn in range(1, self.turns):
                new = tokens(vocab, self.more, self.name, seed, i, turn)
                prompts.append(prompts[-1] + new)
            return prompts

        # Nobody waits for them, but none outlasts the run.
        prewarms: list[asyncio.Future[Answer]] = []
        # Who has waited longest is next.
        turns = asyncio.Semaphore(self.at_once or self.sessions)

        async def talk(i: int, prompts: list[list[int]]) -> list[Answer]:
            answers = []
            for turn, prompt in enumerate(prompts, start=self.turns - len(prompts)):
                if turn and self.think_s:
                    luck = random.Random(f"{self.name} {seed} {i} {turn}")
                    pause_s = self.think_s * luck.uniform(0.5, 1.5)
                    prewarms.extend(await self._pause(client, pause_s, i, prompt))
                last = turn == self.turns - 1
                async with turns:
                    answer = await client.ask(
                        f"{i}.{turn}",
                        prompt,
                        self.output,
                        conversation=i,
                        hints={"release": True} if last else {},
                    )
                answers.append(answer)
            return answers

        all_prompts = [prompts_of(i) for i in range(self.sessions)]
        if self.contexts_first:
            contexts = (
                client.ask("context", p.pop(0), 1, conversation=i, hints={})
                for i, p in enumerate(all_prompts)
            )
            await asyncio.gather(*contexts)
        started = time.perf_counter()
        talks = await asyncio.gather(*(talk(i, p) for i, p in enumerate(all_prompts)))
        await asyncio.gather(*prewarms)
        answers = [answer for talk in talks for answer in talk]
        metrics = summary(answers, started) | decode(answers)
        later = [a for talk in talks for a in talk[0 if self.contexts_first else 1 :]]
        if later:
            metrics |= ttft("later_ttft", later)
        if not self.contexts_first:
            metrics |= ttft("first_ttft", [talk[0] for talk in talks])
        return Outcome(metrics, answers)

    async def _pause(
        self, client: Client, pause_s: float, i: int, prompt: list[int]
    ) -> list[asyncio.Future[Answer]]:
        """Wait for a tool; the history, which is there before, is asked for ahead.

        Returns:
            The request for it, if there is one, which goes on.

        """
        if not (client.hints and self.prewarm_s):
            await asyncio.sleep(pause_s)
            return []
        await asyncio.sleep(max(pause_s - self.prewarm_s, 0.0))
        history = prompt[: -self.more]
        ask = client.ask("prewarm", history, 1, conversation=i, hints=PREWARM)
        prewarm = asyncio.ensure_future(ask)
        await asyncio.sleep(min(pause_s, self.prewarm_s))
        return [prewarm]


@dataclass(frozen=True)
class NoReuse:
    """Prompts that have nothing in common, all at once."""

    prompts: int
    length: int
    output: int

    async def run(self, client: Client, repeat: int) -> Outcome:
        prompts = [
            tokens(client.vocab, self.length, "no_reuse", repeat, i)
            for i in range(self.prompts)
        ]
        started = time.perf_counter()
        asked = (
            client.ask(str(i), p, self.output, conversation=i)
            for i, p in enumerate(prompts)
        )
        answers = list(await asyncio.gather(*asked))
        return Outcome(summary(answers, started) | ttft("ttft", answers), answers)


@dataclass(frozen=True)
class Request:
    """A request of a trace, scaled down."""

    at_s: float
    prompt: list[int]
    output: int
    tree: int


@dataclass(frozen=True)
class Trace:
    """Replay of the prefix structure of a trace, at its arrival times.

    One conversation tree in `one_of` is kept, so that the kept part has the reuse of
    the whole. Token counts are divided by `shrink`, and the arrivals are pressed into
    `seconds`.

    The file has one JSON object a line: `timestamp`, `input_length`,
    `output_length` and `hash_ids`, one id for each 512 tokens of the prompt.
    """

    one_of: int
    shrink: int
    seconds: float
    max_output: int = 64
    limit: int = 100_000
    path: str = ""

    async def run(self, client: Client, repeat: int) -> Outcome:
        requests = self.requests(client.vocab, client.max_prompt_tokens, repeat)
        started = time.perf_counter()

        async def ask(i: int, request: Request) -> Answer:
            await asyncio.sleep(started + request.at_s - time.perf_counter())
            return await client.ask(
                str(i), request.prompt, request.output, conversation=request.tree
            )

        asked = (ask(i, request) for i, request in enumerate(requests))
        answers = list(await asyncio.gather(*asked))
        return Outcome(summary(answers, started) | ttft("ttft", answers), answers)

    def requests(self, vocab: int, max_prompt: int, repeat: int) -> list[Request]:
        """The kept requests, in the order of their arrival."""
        size = 512 // self.shrink

        @cache
        def block(hash_id: int) -> tuple[int, ...]:
            return tuple(tokens(vocab, size, "trace", repeat, hash_id))

        lines = [json.loads(line) for line in Path(self.path).read_text().splitlines()]
        scale = self.seconds * 1e3 / max(line["timestamp"] for line in lines)
        kept = []
        for i, line in enumerate(lines):
            ids = line["hash_ids"]
            # The first block is the same for nearly all of them.
            tree = ids[min(1, len(ids) - 1)]
            if crc32(str(tree).encode()) % self.one_of:
                continue
            prompt = [t for hash_id in ids for t in block(hash_id)]
            length = min(max(line["input_length"] // self.shrink, 1), max_prompt)
            output = line["output_length"] // self.shrink
            kept.append(
                Request(
                    line["timestamp"] * scale / 1e3,
                    prompt[:length],
                    min(max(output, 1), self.max_output),
                    tree,
                )
            )
        return kept[: self.limit]


@dataclass(frozen=True)
class Interfere:
    """What decoding requests feel of another one that arrives.

    The gaps between their tokens, from its arrival to half a second after its first
    token: first for prefixes that are in host memory only, then for unseen prompts.

    Attributes:
        decoding: requests that decode all the time.
        decode_tokens: they must last until the end, or the run fails.
        spacing_s: at least, from arrival to arrival.

    """

    decoding: int
    decode_prompt: int
    decode_tokens: int
    length: int
    loads: int
    unseen: int
    tail: int = 64
    spacing_s: float = 0.65
    after_s: float = 0.5

    async def run(self, client: Client, repeat: int) -> Outcome:
        def some(n: int, *seed: int | str) -> list[int]:
            return tokens(client.vocab, n, "interfere", repeat, *seed)

        prefixes = [some(self.length, "prefix", i) for i in range(self.loads)]
        for prefix in prefixes:
            await client.ask("prefill", prefix, 1)
        await evict(client, "interfere", repeat)
        decoding = [
            Answer(f"decode-{i}", self.decode_prompt) for i in range(self.decoding)
        ]
        tasks = [
            asyncio.create_task(
                client.ask(
                    a.key, some(self.decode_prompt, a.key), self.decode_tokens, a
                )
            )
            for a in decoding
        ]
        try:
            return await self._probe(client, prefixes, some, decoding, tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe(
        self,
        client: Client,
        prefixes: list[list[int]],
        some: Callable[..., list[int]],
        decoding: list[Answer],
        tasks: list[asyncio.Task[Answer]],
    ) -> Outcome:
        while min(len(a.times) for a in decoding) < 8:
            await asyncio.sleep(0.01)
            for task in tasks:
                if task.done():
                    task.result()  # raises what went wrong
        calm = time.perf_counter()
        await asyncio.sleep(self.spacing_s)
        windows = {"calm": [(calm, time.perf_counter())]}
        prompts = [("host", prefix) for prefix in prefixes]
        unseen = (some(self.length, "unseen", i) for i in range(self.unseen))
        prompts += [("unseen", prompt) for prompt in unseen]
        probes: dict[str, list[Answer]] = {}
        for i, (kind, prompt) in enumerate(prompts):
            tail = some(self.tail, "tail", i)
            answer = await client.ask(f"{kind}-{i}", prompt + tail, 1)
            probes.setdefault(kind, []).append(answer)
            until = answer.times[0] + self.after_s
            windows.setdefault(kind, []).append((answer.sent, until))
            next_at = max(until, answer.sent + self.spacing_s)
            await asyncio.sleep(next_at - time.perf_counter())
        if any(task.done() for task in tasks):
            raise RuntimeError(
                f"A decoding request ended before the last probe did: decode_tokens "
                f"{self.decode_tokens} is too low, raise it."
            )
        metrics: Metrics = {}
        for kind, spans in windows.items():
            found = gaps_ms(decoding, spans)
            metrics[f"itl_ms.{kind}.p50"] = float(np.percentile(found, 50))
            metrics[f"itl_ms.{kind}.p99"] = float(np.percentile(found, 99))
            metrics[f"itl_ms.{kind}.max"] = max(found)
        for kind, answers in probes.items():
            metrics |= ttft(f"{kind}_ttft", answers)
            cached = sum(a.cached_tokens for a in answers)
            metrics[f"cached.{kind}"] = cached / (self.length * len(answers))
        asked = [answer for answers in probes.values() for answer in answers]
        return Outcome(metrics, decoding + asked)


def gaps_ms(
    answers: Sequence[Answer], spans: Sequence[tuple[float, float]]
) -> list[float]:
    """Times from token to token that end within one of the spans (seconds)."""
    return [
        (after - before) * 1e3
        for answer in answers
        for before, after in zip(answer.times, answer.times[1:])
        if any(start <= after <= end for start, end in spans)
    ]
