# SPDX-License-Identifier: Apache-2.0
"""The picture of a comparison: what the wait was, and where the KV came from."""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .report import Comparison

OFF, ON = "#9aa5b1", "#1f77b4"
DEVICE, HOST, COMPUTED = "#2a9d8f", "#1f77b4", "#d9dee4"


def draw(comparison: Comparison, title: str, path: Path) -> None:
    """Writes a PNG: times to first token on the left, prompt tokens on the right."""
    matplotlib.use("Agg")
    figure = Figure(figsize=(11, 4.6), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=11)
    left, right = figure.subplots(1, 2)
    _draw_ttft(left, comparison)
    _draw_hits(right, comparison)
    for axes in (left, right):
        axes.set_xlabel("turn of the conversation")
        axes.set_xticks([row.turn for row in comparison.rows])
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(axis="y", color="#e6e9ed")
    figure.savefig(path)


def _draw_ttft(axes: Axes, comparison: Comparison) -> None:
    axes.set_title("Time to first token, ms (bar: median, dot: one request)", size=10)
    rows = comparison.rows
    runs = (
        (-0.2, OFF, "tier off", comparison.off, [row.ttft_ms_off for row in rows]),
        (0.2, ON, "tier on", comparison.on, [row.ttft_ms_on for row in rows]),
    )
    # Above the highest dot, where nothing is in the way.
    room = max(exchange.answer.ttft_ms for exchange in comparison.off) / 40
    for shift, color, label, run, medians in runs:
        at = [row.turn + shift for row in rows]
        axes.bar(at, medians, 0.38, color=color, label=label)
        for row, x, height in zip(rows, at, medians):
            times = [e.answer.ttft_ms for e in run if e.turn == row.turn]
            axes.text(x, max(times) + room, f"{height:.0f}", ha="center", fontsize=8)
        axes.plot(
            [exchange.turn + shift for exchange in run],
            [exchange.answer.ttft_ms for exchange in run],
            ".",
            color="#222222",
            markersize=3,
        )
    axes.margins(y=0.1)
    axes.legend(frameon=False, loc="upper left")


def _draw_hits(axes: Axes, comparison: Comparison) -> None:
    axes.set_title("Prompt tokens with the tier on, mean of a request", size=10)
    rows = comparison.rows
    device = [row.device_hit_tokens for row in rows]
    host = [row.host_hit_tokens for row in rows]
    cached = [sum(pair) for pair in zip(device, host)]
    computed = [row.prompt_tokens - hits for row, hits in zip(rows, cached)]
    at = [row.turn for row in rows]
    # A number needs some room to be read.
    shown = max(row.prompt_tokens for row in rows) / 25
    stacks = (
        (device, [0] * len(rows), DEVICE, "hit on the device", "white"),
        (host, device, HOST, "hit in host memory", "white"),
        (computed, cached, COMPUTED, "computed", "#333333"),
    )
    for heights, bottoms, color, label, ink in stacks:
        bars = axes.bar(at, heights, 0.6, bottoms, color=color, label=label)
        numbers = [f"{height}" if height > shown else "" for height in heights]
        axes.bar_label(bars, numbers, label_type="center", fontsize=8, color=ink)
    axes.legend(frameon=False, loc="upper left")
