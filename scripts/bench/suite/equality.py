# SPDX-License-Identifier: Apache-2.0
"""Are two runs' greedy outputs the same, request by request?"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .records import Output

NEAR_TIE = 0.05
"""Nats between the two best tokens below which rounding alone may choose."""


@dataclass(frozen=True)
class Difference:
    """Where two answers part.

    Attributes:
        position: of the first token that differs.
        gap: between the two best tokens there, the larger one of the two runs, in
            nats; None if no logprobs were asked for.

    """

    key: str
    position: int
    gap: float | None

    @property
    def near_tie(self) -> bool:
        return self.gap is not None and self.gap < NEAR_TIE


@dataclass
class Comparison:
    """Two runs, or several pairs of them, compared."""

    runs: int = 0
    requests: int = 0
    tokens: int = 0
    """Compared: of each request, all up to the first that differs."""
    differences: list[Difference] = field(default_factory=list)

    def add(self, other: "Comparison") -> None:
        self.runs += other.runs
        self.requests += other.requests
        self.tokens += other.tokens
        self.differences += other.differences

    @property
    def near_ties(self) -> int:
        return sum(d.near_tie for d in self.differences)

    @property
    def wrong(self) -> int:
        """Requests that differ although the choice was clear."""
        return sum(d.gap is not None and not d.near_tie for d in self.differences)

    @property
    def unknown(self) -> int:
        """Requests that differ where no logprobs tell why."""
        return sum(d.gap is None for d in self.differences)


def compare(reference: Sequence[Output], run: Sequence[Output]) -> Comparison:
    """Compare answers to the same requests, as far as both go.

    Raises:
        ValueError: they are not the same requests.

    """
    right = {o.key: o for o in reference}
    if right.keys() != {o.key for o in run}:
        raise ValueError("The two runs asked different requests.")
    result = Comparison(runs=1, requests=len(reference))
    for b in run:
        a = right[b.key]
        both = list(zip(a.tokens, b.tokens))
        differs = (i for i, (x, y) in enumerate(both) if x != y)
        position = next(differs, None)
        result.tokens += len(both) if position is None else position + 1
        if position is not None:
            gaps = [o.gaps[position] for o in (a, b) if position < len(o.gaps)]
            gap = max(gaps) if len(gaps) == 2 else None
            result.differences.append(Difference(a.key, position, gap))
    return result
