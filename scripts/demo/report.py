# SPDX-License-Identifier: Apache-2.0
"""What two runs of the same conversations, tier off and tier on, say together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from statistics import fmean, median
from typing import Any

from .talk import Exchange

MIN_REUSE = 0.8
MIN_KV_RATIO = 3.0


@dataclass(frozen=True)
class TurnRow:
    """One turn, over all conversations: means, and medians of the times.

    Attributes:
        earlier_tokens: prompt tokens of the same conversations' turn before.
        earlier_hit_tokens: how many of those were hits, with the tier on.

    """

    turn: int
    prompt_tokens: int
    device_hit_tokens: int
    host_hit_tokens: int
    ttft_ms_off: float
    ttft_ms_on: float
    earlier_tokens: int
    earlier_hit_tokens: int


@dataclass(frozen=True)
class Comparison:
    """Two runs, each in the order it was talked.

    Attributes:
        device_cache_tokens: that the device KV cache has room for.
        host_tier_tokens: that the host tier has room for.

    """

    off: Sequence[Exchange]
    on: Sequence[Exchange]
    device_cache_tokens: int
    host_tier_tokens: int

    @property
    def pairs(self) -> list[tuple[Exchange, Exchange]]:
        """The same turn of the same conversation, off and on."""
        return list(zip(self.off, self.on, strict=True))

    @cached_property
    def rows(self) -> list[TurnRow]:
        """The table, a row for each turn."""
        before: dict[int, int] = {}
        rows = []
        for turn, group in groupby(self.pairs, key=lambda pair: pair[1].turn):
            offs, ons = zip(*group)
            earlier = [before.get(on.conversation, 0) for on in ons]
            hits = [on.device_hit_tokens + on.host_hit_tokens for on in ons]
            rows.append(
                TurnRow(
                    turn=turn,
                    prompt_tokens=_mean(on.answer.prompt_tokens for on in ons),
                    device_hit_tokens=_mean(on.device_hit_tokens for on in ons),
                    host_hit_tokens=_mean(on.host_hit_tokens for on in ons),
                    ttft_ms_off=median(off.answer.ttft_ms for off in offs),
                    ttft_ms_on=median(on.answer.ttft_ms for on in ons),
                    earlier_tokens=_mean(earlier),
                    # A hit is a prefix: what is longer than the prompt before
                    # belongs to the answer that followed it.
                    earlier_hit_tokens=_mean(map(min, hits, earlier)),
                )
            )
            before |= {on.conversation: on.answer.prompt_tokens for on in ons}
        return rows

    @property
    def identical_outputs(self) -> bool:
        """Whether every token of every answer is the same in both runs."""
        return self.first_difference is None

    @cached_property
    def first_difference(self) -> str | None:
        """Where the answers part, and how close the choice was."""
        for off, on in self.pairs:
            ids = zip(off.answer.token_ids, on.answer.token_ids, strict=True)
            for position, (token_off, token_on) in enumerate(ids):
                if token_off != token_on:
                    return (
                        f"conversation {on.conversation}, turn {on.turn}, token "
                        f"{position}: {token_off} with the tier off, {token_on} with "
                        f"it on; off, it beat the second best by "
                        f"{off.answer.margins[position]:.2g} nats"
                    )
        return None

    @property
    def median_ttft_ms(self) -> tuple[float, float]:
        """The median over all requests: off, on."""
        off, on = (
            median(exchange.answer.ttft_ms for exchange in run)
            for run in (self.off, self.on)
        )
        return off, on

    @property
    def kv_tokens(self) -> int:
        """Tokens of all conversations at their end."""
        last = {exchange.conversation: exchange.answer for exchange in self.on}
        return sum(a.prompt_tokens + len(a.token_ids) for a in last.values())

    def failures(self) -> list[str]:
        """What the run fell short of; nothing if it was a success."""
        found = []
        if self.first_difference:
            found.append(f"the outputs are not identical: {self.first_difference}")
        if self.kv_tokens < MIN_KV_RATIO * self.device_cache_tokens:
            found.append(
                f"the conversations' {self.kv_tokens} tokens are less than "
                f"{MIN_KV_RATIO:g} times the device cache's {self.device_cache_tokens}"
            )
        for row in self.rows[1:]:
            reuse = row.earlier_hit_tokens / row.earlier_tokens
            if reuse < MIN_REUSE:
                found.append(
                    f"turn {row.turn}: {reuse:.0%} of the {row.earlier_tokens} tokens "
                    f"of the prompt before were hits, expected {MIN_REUSE:.0%}"
                )
            if row.host_hit_tokens <= row.device_hit_tokens:
                found.append(
                    f"turn {row.turn}: {row.host_hit_tokens} host hits are not most "
                    f"of the hits, {row.device_hit_tokens} were on the device"
                )
        off, on = self.median_ttft_ms
        if on >= off:
            found.append(
                f"the median time to first token is {on:.0f} ms with the tier on, "
                f"not below the {off:.0f} ms with it off"
            )
        for exchange in self.on:
            counted = exchange.device_hit_tokens + exchange.host_hit_tokens
            if counted != exchange.answer.cached_tokens:
                found.append(
                    f"conversation {exchange.conversation}, turn {exchange.turn}: the "
                    f"metrics count {counted} hit tokens, the usage record says "
                    f"{exchange.answer.cached_tokens}"
                )
        return found

    def table(self) -> str:
        """The rows as text."""
        count = len({exchange.conversation for exchange in self.on})
        lines = [
            f"Mean of {count} conversations; of the times, the median.",
            "turn  prompt  device    host  reused  TTFT off   TTFT on",
            "      tokens    hits    hits                ms        ms",
        ]
        for row in self.rows:
            reuse = "-"
            if row.earlier_tokens:
                reuse = f"{row.earlier_hit_tokens / row.earlier_tokens:.0%}"
            lines.append(
                f"{row.turn:>4}{row.prompt_tokens:>8}{row.device_hit_tokens:>8}"
                f"{row.host_hit_tokens:>8}{reuse:>8}"
                f"{row.ttft_ms_off:>10.0f}{row.ttft_ms_on:>10.0f}"
            )
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The part of `report.json` that the two runs give."""
        off, on = self.median_ttft_ms
        return {
            "device_cache_tokens": self.device_cache_tokens,
            "host_tier_tokens": self.host_tier_tokens,
            "conversation_tokens": self.kv_tokens,
            "identical_outputs": self.identical_outputs,
            "max_logprob_difference": max(
                abs(x - y)
                for off, on in self.pairs
                for x, y in zip(off.answer.logprobs, on.answer.logprobs)
            ),
            "smallest_margin": min(min(e.answer.margins) for e in self.off),
            "median_ttft_ms_off": round(off, 1),
            "median_ttft_ms_on": round(on, 1),
            "turns": [
                {
                    "turn": row.turn,
                    "prompt_tokens": row.prompt_tokens,
                    "device_hit_tokens": row.device_hit_tokens,
                    "host_hit_tokens": row.host_hit_tokens,
                    "ttft_ms_off": round(row.ttft_ms_off, 1),
                    "ttft_ms_on": round(row.ttft_ms_on, 1),
                    "earlier_tokens": row.earlier_tokens,
                    "earlier_hit_tokens": row.earlier_hit_tokens,
                }
                for row in self.rows
            ],
            "requests": [
                {
                    "conversation": on.conversation,
                    "turn": on.turn,
                    "prompt_tokens": on.answer.prompt_tokens,
                    "device_hit_tokens": on.device_hit_tokens,
                    "host_hit_tokens": on.host_hit_tokens,
                    "device_hit_tokens_off": off.device_hit_tokens,
                    "stored_bytes": on.stored_bytes,
                    "loaded_bytes": on.loaded_bytes,
                    "ttft_ms_off": round(off.answer.ttft_ms, 1),
                    "ttft_ms_on": round(on.answer.ttft_ms, 1),
                    "identical": off.answer.token_ids == on.answer.token_ids,
                    "text": on.answer.text,
                }
                for off, on in self.pairs
            ],
        }


def _mean(values: Iterable[int]) -> int:
    return round(fmean(values))
