# SPDX-License-Identifier: Apache-2.0
"""The picture of a sizing run."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.ticker import PercentFormatter

from bench.suite.style import COMPUTED, LINE, figure, tidy

from .replay import Outcome

GiB = 1 << 30
COLORS = ("#1f77b4", "#e76f51", "#2a9d8f", "#8d5a97", "#b5651d", "#264653")
LINES = {"write_back": "-", "write_through": "--"}


def draw(outcomes: Sequence[Outcome], unbounded: float, title: str, path: Path) -> None:
    """Write a PNG: hit rate over host size, a line for each pair of policies."""
    made = figure(8.5, 5)
    axes = made.subplots()
    axes.set_title(title, size=10)
    tiers = [outcome.tier for outcome in outcomes]
    sizes = sorted({tier.host_bytes for tier in tiers})
    none = next((o for o in outcomes if not o.tier.host_bytes), None)
    if none is not None:
        axes.axhspan(0, none.hit_rate, color=COMPUTED, label="without a tier")
    axes.axhline(unbounded, color=LINE, linestyle=":", label="unbounded cache")
    colors: dict[tuple, str] = {}
    for label in dict.fromkeys(tier.label for tier in tiers if tier.host_bytes):
        line = [o for o in outcomes if o.tier.label == label]
        points = [
            (o.tier.host_bytes / GiB, o.hit_rate)
            for o in (*line, *([none] if none else []))
        ]
        first = line[0].tier
        kind = first.eviction_policy, first.below
        color = colors.setdefault(kind, COLORS[len(colors) % len(COLORS)])
        style = LINES[first.store_policy]
        axes.plot(*zip(*sorted(points)), style, color=color, marker=".", label=label)
    # Where sizes double, 0 and the first stand as far apart as the others.
    linear = next((size for size in sizes if size), GiB) / GiB
    axes.set_xscale("symlog", base=2, linthresh=linear, linscale=0.5)
    axes.set_xticks([s / GiB for s in sizes], [f"{s / GiB:g}" for s in sizes])
    axes.minorticks_off()
    axes.set_xlabel("host memory, GiB")
    axes.set_ylabel("prompt blocks that were hits")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(0, 1.12 * unbounded)
    tidy(axes, "both")
    axes.legend(frameon=False, fontsize=8)
    made.savefig(path)
