# SPDX-License-Identifier: Apache-2.0
"""The rows of `copy_rate.py`, and the bars that they are held against."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Row:
    piece_kib: int
    engine: str
    equal: bool | None
    """None: made of engines that were checked."""
    rates: tuple[float, float, float]
    plain: tuple[float, float, float]

    def record(self) -> dict[str, Any]:
        names = "load", "store", "both"
        return {
            "piece_kib": self.piece_kib,
            "engine": self.engine,
            "equal": self.equal,
            **{f"{n}_gb_s": round(r / 1e9, 2) for n, r in zip(names, self.rates)},
            **{f"plain_{n}_gb_s": round(r / 1e9, 2) for n, r in zip(names, self.plain)},
        }

    def markdown(self) -> str:
        cells = [
            f"{rate / 1e9:.1f} ({rate / plain:.0%})"
            for rate, plain in zip(self.rates, self.plain)
        ]
        plain = " / ".join(f"{rate / 1e9:.1f}" for rate in self.plain)
        cells = [f"{self.piece_kib}", self.engine, *cells, plain]
        equal = {True: "yes", False: "**NO**", None: ""}[self.equal]
        return f"| {' | '.join(cells)} | {equal} |"


HEADER = """\
| piece, KiB | engine | load, GB/s | store, GB/s | both, GB/s | plain copies | equal |
|---|---|---|---|---|---|---|"""


def bars(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """(bar, the lowest that was measured) over the best engines and for `auto`."""

    def worst(auto: bool, sizes: Callable[[int], bool], i: int, share: bool) -> str:
        best: dict[int, float] = {}
        for row in rows:
            if sizes(row.piece_kib) and (row.engine == "auto" or not auto):
                rate = row.rates[i] / (row.plain[i] if share else 1e9)
                best[row.piece_kib] = max(best.get(row.piece_kib, 0.0), rate)
        if not best:
            return "not measured"
        return (
            f"{min(best.values()):.0%}" if share else f"{min(best.values()):.1f} GB/s"
        )

    for auto in (False, True):
        of = "auto" if auto else "the best engine"
        for i, name in enumerate(("load", "store")):
            text = f"{name} of {of}, share of a plain copy"
            yield f"{text}, from 32 KiB: ≥ 95%", worst(auto, lambda k: k >= 32, i, True)
            yield f"{text}, at 8 KiB: ≥ 80%", worst(auto, lambda k: k == 8, i, True)
        text = f"both at once of {of}, from 32 KiB: ≥ 80 GB/s"
        yield text, worst(auto, lambda k: k >= 32, 2, False)
