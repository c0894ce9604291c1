# SPDX-License-Identifier: Apache-2.0
"""Workloads that ask for prefixes one by one, on the idle engine."""

import asyncio
import random
from dataclasses import dataclass

from .client import Answer, Client
from .workloads import PREWARM, Outcome, evict, fillers, tokens


@dataclass(frozen=True)
class Latency:
    """Time to first token on the idle engine.

    Of a prefix that is in host memory only, of the same prefix now that the device
    has it, and of a prompt that nothing has, each with a fresh tail. Where the client
    sends hints, also of another prefix in host memory that it has asked to prewarm.
    """

    lengths: tuple[int, ...]
    tail: int = 64
    pause_s: float = 0.3

    async def run(self, client: Client, repeat: int) -> Outcome:
        def some(n: int, *seed: int | str) -> list[int]:
            return tokens(client.vocab, n, "latency", repeat, n, *seed)

        prefixes = {n: some(n, "prefix") for n in self.lengths}
        others = {n: some(n, "other") for n in self.lengths if client.hints}
        for n, prefix in (*prefixes.items(), *others.items()):
            await client.ask(f"prefill-{n}", prefix, 1)
        await evict(client, "latency", repeat)
        asked: dict[tuple[str, int], Answer] = {}
        order = list(self.lengths)
        random.Random(repeat).shuffle(order)
        for n in order:
            prompts = {
                "host": prefixes[n] + some(self.tail, n, "first tail"),
                "device": prefixes[n] + some(self.tail, n, "second tail"),
                "unseen": some(n, "unseen") + some(self.tail, n, "last tail"),
            }
            if n in others:
                prompts["prewarmed"] = others[n] + some(self.tail, n, "other tail")
            for kind, prompt in prompts.items():
                if kind == "prewarmed":
                    await client.ask(f"prewarm-{n}", others[n], 1, hints=PREWARM)
                await asyncio.sleep(self.pause_s)
                asked[kind, n] = await client.ask(f"{kind}-{n}", prompt, 1)
        cells = [(kind, n) for kind in prompts for n in self.lengths]
        metrics = {f"ttft_ms.{k}.{n}": asked[k, n].ttft_s * 1e3 for k, n in cells}
        metrics |= {f"cached.{k}.{n}": asked[k, n].cached_tokens / n for k, n in cells}
        return Outcome(metrics, [asked[cell] for cell in cells])


@dataclass(frozen=True)
class Below:
    """Time to first token on the idle engine of a prefix that is below the host only,
    and of a prompt that nothing has, each with a fresh tail.

    Attributes:
        evictions: how often as much as the device has room for is asked for between,
            so that host memory, which has room for as much, forgets the prefixes.
        settle_s: seconds behind each of their prompts in which nothing is asked: what
            is computed without a pause is more than a disk can be given.

    """

    lengths: tuple[int, ...]
    evictions: int = 2
    tail: int = 64
    pause_s: float = 0.3
    settle_s: float = 0.4

    async def run(self, client: Client, repeat: int) -> Outcome:
        def some(n: int, *seed: int | str) -> list[int]:
            return tokens(client.vocab, n, "below", repeat, n, *seed)

        for n in self.lengths:
            await client.ask(f"prefill-{n}", some(n, "prefix"), 1)
        for i in range(self.evictions):
            for filler in fillers(client, "below", repeat, i):
                await client.ask("filler", filler, 1)
                await asyncio.sleep(self.settle_s)
        asked: dict[tuple[str, int], Answer] = {}
        for n in random.Random(repeat).sample(self.lengths, len(self.lengths)):
            for kind, seed in (("below", "prefix"), ("unseen", "unseen")):
                await asyncio.sleep(self.pause_s)
                prompt = some(n, seed) + some(self.tail, n, kind, "tail")
                asked[kind, n] = await client.ask(f"{kind}-{n}", prompt, 1)
        metrics = {f"ttft_ms.{k}.{n}": a.ttft_s * 1e3 for (k, n), a in asked.items()}
        metrics |= {
            f"cached.{k}.{n}": a.cached_tokens / n for (k, n), a in asked.items()
        }
        return Outcome(metrics, [asked[cell] for cell in sorted(asked)])
