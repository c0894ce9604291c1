# SPDX-License-Identifier: Apache-2.0
"""Conversations that arrive at a rising rate, whether the engine keeps up or not.

What an operator asks of an engine: how many turns are answered in time at which rate.
Goodput is that of DistServe (Zhong et al., OSDI 2024): a turn is good if its first
token and the mean of its further ones come within limits.
"""

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .client import Answer
from .closed_loop import Asking, conversations_of
from .workloads import Metrics, Outcome, summary, tokens

GOOD_PART = 0.95
"""Of the turns at a rate that an engine is said to bear."""
ANSWER_S = 0.02
"""Seconds for each token of an answer, in the plan of when its user goes on."""


@dataclass(frozen=True)
class PlannedTurn:
    """One request of a conversation, and when it is due, in seconds from the start."""

    at_s: float
    prompt: list[int]
    output: int


@dataclass(frozen=True)
class OpenLoop:
    """Conversations of a trace that begin at random, each time more of them a second.

    All configurations are asked the same. A turn is sent when it is due, or when the
    answer to the last one is there if that is later: users wait for answers, and new
    users come all the same. Turns that are due after the last phase are left out. Of
    conversations that began before the first phase, the last prompt so far is computed
    before the clock starts.

    Attributes:
        rates: conversations that begin in a second (Poisson), one phase for each.
        phase_s: how long a phase lasts.
        lead_s: conversations began so long before the first phase, at its rate.
        shrink: lengths of the trace are divided by it.
        turns: least and most turns of a conversation.
        max_prompt: conversations with longer prompts are left out, in tokens.
        think_s: mean time from an answer to the next turn (exponential).
        systems: system prompts, of which each conversation has one.
        system_tokens: tokens of each.
        good_ttft_s: a good turn's first token comes within this.
        good_token_s: its further tokens come within this each, on average.

    """

    rates: tuple[float, ...]
    phase_s: float
    lead_s: float
    shrink: int = 2
    turns: tuple[int, int] = (2, 8)
    max_prompt: int = 8192
    think_s: float = 30.0
    systems: int = 8
    system_tokens: int = 1024
    good_ttft_s: float = 0.5
    good_token_s: float = 0.03
    name: str = "goodput"
    path: str = ""

    async def run(self, client: Asking, repeat: int) -> Outcome:
        talks = self.talks(client.vocab, client.max_prompt_tokens, repeat)
        answers: dict[tuple[int, int], Answer] = {}
        histories = (
            client.ask("history", past[-1].prompt, 1, conversation=i)
            for i, turns in enumerate(talks)
            if (past := [turn for turn in turns if turn.at_s < 0])
        )
        await asyncio.gather(*histories)
        started = time.perf_counter()

        async def talk(i: int, turns: list[PlannedTurn]) -> None:
            for k, turn in enumerate(turns):
                if turn.at_s < 0:
                    continue
                await asyncio.sleep(started + turn.at_s - time.perf_counter())
                answers[i, k] = await client.ask(
                    f"{i}.{k}", turn.prompt, turn.output, conversation=i
                )

        await asyncio.gather(*(talk(i, turns) for i, turns in enumerate(talks)))
        ordered = [answers[key] for key in sorted(answers)]
        metrics = summary(ordered, started)
        counted = [answer for key, answer in sorted(answers.items()) if key[1]]
        metrics["cached_of_later_turns"] = sum(a.cached_tokens for a in counted) / max(
            sum(a.prompt_tokens for a in counted), 1
        )
        phases: dict[float, list[Answer]] = {rate: [] for rate in self.rates}
        for (i, k), answer in sorted(answers.items()):
            phases[self.rates[self._phase(talks[i][k].at_s)]].append(answer)
        return Outcome(metrics | self.measured(phases), ordered)

    def measured(self, phases: dict[float, list[Answer]]) -> Metrics:
        """Good turns and times, by the rate at which the turns were due."""
        every = [answer for answers in phases.values() for answer in answers]
        good = {
            rate: sum(self.is_good(a) for a in answers) / len(answers)
            for rate, answers in phases.items()
            if answers
        }
        metrics: Metrics = {
            "good_turns": sum(self.is_good(a) for a in every) / len(every),
            "good_rate_per_s": crossing(list(good), list(good.values()), GOOD_PART),
        }
        for rate, part in good.items():
            metrics[f"good_turns.{rate:g}"] = part
            ttfts = [a.ttft_s * 1e3 for a in phases[rate]]
            metrics[f"ttft_ms.{rate:g}.mean"] = float(np.mean(ttfts))
            metrics[f"ttft_ms.{rate:g}.p90"] = float(np.percentile(ttfts, 90))
            each = [token_s(a) * 1e3 for a in phases[rate] if len(a.times) > 1]
            metrics[f"token_ms.{rate:g}.mean"] = float(np.mean(each or [0.0]))
        return metrics

    def is_good(self, answer: Answer) -> bool:
        """Whether the turn was answered in time."""
        in_time = answer.ttft_s <= self.good_ttft_s
        return in_time and token_s(answer) <= self.good_token_s

    def talks(
        self, vocab: int, max_prompt: int, repeat: int
    ) -> list[list[PlannedTurn]]:
        """The conversations in order of arrival, the same for the same arguments.

        Raises:
            ValueError: no conversation of the trace fits.

        """
        longest = min(self.max_prompt, max_prompt - self.system_tokens)
        known = list(
            conversations_of(Path(self.path), self.shrink, self.turns, longest)
        )
        if not known:
            raise ValueError(
                f"{self.path} has no conversation of {self.turns[0]} turns that fits "
                f"{longest} tokens: raise {self.name}.max_prompt or {self.name}.shrink."
            )
        luck = random.Random(f"{self.name} {repeat}")
        systems = [
            tokens(vocab, self.system_tokens, self.name, "system", repeat, n)
            for n in range(self.systems)
        ]
        ends = self.phase_s * len(self.rates)
        talks: list[list[PlannedTurn]] = []
        at_s = luck.expovariate(self.rates[0]) - self.lead_s
        while at_s < ends:
            calls = luck.choice(known)
            lengths = [max(call.input_tokens // self.shrink, 1) for call in calls]
            text = tokens(vocab, lengths[-1], self.name, repeat, len(talks))
            system = luck.choice(systems)
            turns = []
            due = at_s
            for length, call in zip(lengths, calls):
                output = max(call.output_tokens // self.shrink, 1)
                if due < ends:
                    turns.append(PlannedTurn(due, system + text[:length], output))
                due += output * ANSWER_S + luck.expovariate(1 / self.think_s)
            # A conversation that has ended before the clock starts is of no use.
            if turns[-1].at_s >= 0:
                talks.append(turns)
            at_s += luck.expovariate(self.rates[self._phase(at_s)])
        return talks

    def _phase(self, at_s: float) -> int:
        """Which phase a time is in; the first before it has begun."""
        return max(math.floor(at_s / self.phase_s), 0)


def token_s(answer: Answer) -> float:
    """Mean time from token to token after the first, in seconds; 0 for one token."""
    if len(answer.times) < 2:
        return 0.0
    return (answer.times[-1] - answer.times[0]) / (len(answer.times) - 1)


def crossing(at: Sequence[float], values: Sequence[float], level: float) -> float:
    """Where a curve falls below `level` for the first time, linearly interpolated.

    The last place if it never does; the first, in proportion, if it begins below.
    """
    for n, value in enumerate(values):
        if value >= level:
            continue
        if n == 0:
            return at[0] * value / level
        part = (values[n - 1] - level) / (values[n - 1] - value)
        return at[n - 1] + part * (at[n] - at[n - 1])
    return at[-1]
