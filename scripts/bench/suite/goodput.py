# SPDX-License-Identifier: Apache-2.0
"""Good turns over the rate of arrivals: a picture and a table of some runs."""

import re
from collections.abc import Iterator
from pathlib import Path

from matplotlib.axes import Axes

from .style import figure, tidy
from .table import Results, markdown, number

WORKLOAD = "goodput"
COLUMNS = {
    "KVTier": ("core-write_back",),
    "OffloadingConnector": ("offloading", "offloading-sync"),
    "SimpleCPUOffload": ("simple-eager", "simple-lazy"),
    "LMCache": ("lmcache",),
    "no host memory": ("none",),
    "60 GiB on the device": ("device",),
}
"""Columns of the table and lines of the picture; the better mode stands for both."""
COLORS = ("#1f77b4", "#f4a261", "#e76f51", "#8d5a97", "#9aa5b1", "#2a9d8f")


def modes(results: Results) -> dict[str, str]:
    """The configuration that stands for each column: that with more good turns."""
    found = {}
    for column, configs in COLUMNS.items():
        of = {c: results.median(WORKLOAD, "good_turns", c) for c in configs}
        ran = {c: value for c, value in of.items() if value is not None}
        if ran:
            found[column] = max(ran, key=lambda c: ran[c])
    return found


def rates(results: Results) -> list[str]:
    """The rates of the phases, as metrics name them, in order."""
    names = results.metrics(WORKLOAD)
    found = [
        m.removeprefix("good_turns.") for m in names if m.startswith("good_turns.")
    ]
    return sorted(found, key=float)


def table(results: Results) -> str:
    """Rows of what a user feels, a column for each engine; the best is bold."""
    top = rates(results)[-1]
    rows = {
        "conversations/s with 95% good turns": ("good_rate_per_s", 1.0, True),
        "good turns, all rates, %": ("good_turns", 100.0, True),
        f"TTFT at {top}/s, mean, ms": (f"ttft_ms.{top}.mean", 1.0, False),
        f"TTFT at {top}/s, 90th percentile, ms": (f"ttft_ms.{top}.p90", 1.0, False),
        f"time per token at {top}/s, ms": (f"token_ms.{top}.mean", 1.0, False),
    }
    shown = modes(results)
    lines = [
        [text, *_row(results, shown, metric, scale, higher)]
        for text, (metric, scale, higher) in rows.items()
    ]
    return markdown(["", *shown], lines)


def _row(
    results: Results, shown: dict[str, str], metric: str, scale: float, higher: bool
) -> Iterator[str]:
    medians = {}
    for config in shown.values():
        median = results.median(WORKLOAD, metric, config)
        assert median is not None
        medians[config] = median * scale
    best = max(medians.values()) if higher else min(medians.values())
    for config in shown.values():
        text = number(medians[config])
        yield f"**{text}**" if text == number(best) else text


def spread(results: Results) -> str:
    """All modes and rates, with the least and the most of the runs."""
    configs = results.shown(WORKLOAD)
    lines = []
    for rate in rates(results):
        for text, name, scale in (
            ("good turns, %", "good_turns.{}", 100.0),
            ("TTFT, mean, ms", "ttft_ms.{}.mean", 1.0),
            ("time per token, ms", "token_ms.{}.mean", 1.0),
        ):
            row = [f"{rate}/s: {text}"]
            for config in configs:
                values = results.values(WORKLOAD, name.format(rate), config)
                found = sorted(value * scale for value in values)
                median = results.median(WORKLOAD, name.format(rate), config)
                span = f"{number(found[0])} to {number(found[-1])}"
                row.append(f"{number((median or 0.0) * scale)} ({span})")
            lines.append(row)
    return markdown(["", *configs], lines)


def draw(results: Results, path: Path) -> None:
    """A line for each engine: the median, and a band from the least to the most."""
    made = figure(7, 3.6)
    axes = made.subplots()
    at = rates(results)
    for (column, config), color in zip(modes(results).items(), COLORS):
        runs = [results.values(WORKLOAD, f"good_turns.{rate}", config) for rate in at]
        middle = [results.median(WORKLOAD, f"good_turns.{rate}", config) for rate in at]
        x = [float(rate) for rate in at]
        axes.plot(
            x, [100 * (m or 0.0) for m in middle], "o-", color=color, label=column
        )
        low, high = ([100 * end(v) for v in runs] for end in (min, max))
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    _label(axes)
    made.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _label(axes: Axes) -> None:
    axes.axhline(95, color="#5c6770", linewidth=0.8, linestyle=":")
    axes.set_ylim(0, 102)
    axes.set_ylabel("good turns, %")
    axes.set_xlabel("conversations that begin in a second")
    tidy(axes)
    axes.legend(frameon=False, fontsize=8)


def between(text: str, name: str, content: str) -> str:
    """A page with another content between the two comments of that name.

    Raises:
        ValueError: it does not have both.

    """
    start, end = f"<!-- {name}: made by `make goodput-page` -->", f"<!-- {name} end -->"
    pattern = re.escape(start) + ".*?" + re.escape(end)
    new = f"{start}\n\n{content}\n\n{end}"
    changed, count = re.subn(pattern, lambda _: new, text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"no {start} and {end} in the page")
    return changed
