# SPDX-License-Identifier: Apache-2.0
"""Pictures of the results."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.ticker import LogLocator, NullFormatter

from . import goodput
from .style import INK, figure, tidy
from .table import Results

PLAIN = ("#9aa5b1", "#c9d0d6", "#5c6770")
OURS = ("#1f77b4", "#2a9d8f", "#264653")
THEIRS = ("#e9c46a", "#f4a261", "#e76f51", "#b5651d", "#8d5a97")

SESSIONS = ("output_tokens_per_s", "later_ttft_ms.mean", "later_ttft_ms.p99")
BARS = {
    "multiturn": SESSIONS,
    "agent": SESSIONS,
    "agent_tools": SESSIONS,
    "rotate": ("makespan_s", "later_ttft_ms.mean", "decode_ms.mean"),
    "overfull": ("makespan_s", "later_ttft_ms.mean", "decode_ms.mean"),
    "closed_8": ("makespan_s", "later_ttft_ms.mean", "decode_ms.mean"),
    "closed_16": ("makespan_s", "later_ttft_ms.mean", "decode_ms.mean"),
    "trace": ("output_tokens_per_s", "ttft_ms.mean", "ttft_ms.p99"),
    "no_reuse": ("makespan_s",),
    "fits": ("makespan_s",),
    "interfere": ("itl_ms.host.p50", "itl_ms.host.p99", "itl_ms.host.max"),
}


def draw(results: Results, folder: Path) -> Iterator[Path]:
    """Write a PNG for each workload that has a picture; yields their paths."""
    for workload in results.workloads():
        path = folder / f"{workload}.png"
        if workload == "latency":
            _draw_latency(results, path)
        elif workload == goodput.WORKLOAD:
            goodput.draw(results, path)
        elif workload in BARS:
            _draw_bars(results, workload, BARS[workload], path)
        else:
            continue
        yield path


def _colors(results: Results) -> dict[str, str]:
    palettes = {"plain": PLAIN, "connector": THEIRS, "core": OURS}
    colors = {}
    for family, palette in palettes.items():
        for i, config in enumerate(results.of_family(family)):
            colors[config] = palette[i % len(palette)]
    return colors


def _draw_latency(results: Results, path: Path) -> None:
    made = figure(9, 5)
    axes = made.subplots()
    axes.set_title(
        "Idle engine: time to first token of an evicted prefix, ms "
        "(median, bars: least and most)",
        size=10,
    )
    found = results.metrics("latency")
    prefix = "ttft_ms.host."
    lengths = sorted(int(m[len(prefix) :]) for m in found if m.startswith(prefix))
    for config, color in _colors(results).items():
        points = [
            (n, values)
            for n in lengths
            if (values := results.values("latency", f"{prefix}{n}", config))
        ]
        if not points:
            continue
        medians = [results.median("latency", f"{prefix}{n}", config) for n, _ in points]
        low = [m - min(v) for m, (_, v) in zip(medians, points) if m is not None]
        high = [max(v) - m for m, (_, v) in zip(medians, points) if m is not None]
        axes.errorbar(
            [n for n, _ in points],
            [m for m in medians if m is not None],
            yerr=[low, high],
            color=color,
            label=config,
            marker="o",
            markersize=4,
            capsize=2,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axes.set_xlabel("tokens of the prefix")
    tidy(axes)
    axes.legend(frameon=False, fontsize=8)
    made.savefig(path)


def _draw_bars(
    results: Results, workload: str, metrics: Sequence[str], path: Path
) -> None:
    made = figure(4.2 * len(metrics), 4.4)
    made.suptitle(f"{workload} (bar: median, dot: one run)", fontsize=11)
    colors = _colors(results)
    panels = made.subplots(1, len(metrics), squeeze=False)[0]
    for axes, metric in zip(panels, metrics):
        axes.set_title(metric, size=10)
        shown = [c for c in colors if results.values(workload, metric, c)]
        for at, config in enumerate(shown):
            values = results.values(workload, metric, config)
            median = results.median(workload, metric, config)
            axes.bar(at, median, 0.7, color=colors[config])
            axes.plot([at] * len(values), values, ".", color=INK, markersize=4)
        axes.set_xticks(range(len(shown)), shown, rotation=40, ha="right", fontsize=8)
        tidy(axes)
    made.savefig(path)
