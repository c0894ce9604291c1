# SPDX-License-Identifier: Apache-2.0
"""How far a configuration is from an ideal and from the best connector, as ratios.

Runs of one turn stand side by side on the machine as it was then, so ratios are taken
run by run, and their spread says whether a difference is one.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from .table import Results, number

IDEAL = "large"
"""No host memory, and a device cache that holds everything."""


@dataclass(frozen=True)
class Ratio:
    """A configuration's figure over another one's.

    Attributes:
        runs: how many pairs of runs there are; 0: no run of one has its twin of the
            other, and the ratio is that of the medians.

    """

    median: float
    low: float
    high: float
    runs: int

    @property
    def is_clear(self) -> bool:
        """Whether all of several runs lie on one side of 1."""
        return self.runs > 1 and (self.low > 1 or self.high < 1)

    def __str__(self) -> str:
        if not self.runs:
            return f"{number(self.median)} (of medians)"
        if self.runs == 1:
            return f"{number(self.median)} (1 run)"
        text = f"{number(self.median)} ({number(self.low)} to {number(self.high)})"
        return f"**{text}**" if self.is_clear else text


def more_is_better(metric: str) -> bool:
    """Whether a higher value of the metric is the better one."""
    return metric.endswith("_per_s") or metric.startswith(("cached", "good_"))


def ratio(
    results: Results, workload: str, metric: str, config: str, other: str
) -> Ratio | None:
    """`config` over `other`; None if one of them was not measured, or `other` has 0."""
    ours = results.by_run(workload, metric, config)
    theirs = results.by_run(workload, metric, other)
    if not ours or not theirs or not all(theirs.values()):
        return None
    found = [ours[run] / theirs[run] for run in ours if run in theirs]
    if not found:
        medians = [statistics.median(values.values()) for values in (ours, theirs)]
        of_medians = medians[0] / medians[1]
        return Ratio(of_medians, of_medians, of_medians, 0)
    return Ratio(statistics.median(found), min(found), max(found), len(found))


def distances(results: Results, workload: str) -> Iterator[list[str]]:
    """Rows of a table: a metric, over what, and the ratio of each configuration.

    The best connector is that with the best median of the metric, of those that ran.
    """
    shown = results.shown(workload)
    for metric in results.metrics(workload):
        if metric.startswith("cached"):
            continue
        best = results.best_connector(workload, metric, more_is_better(metric))
        others = [IDEAL] if IDEAL in shown else []
        others += [best[0]] if best else []
        sign = "↑" if more_is_better(metric) else "↓"
        for other in others:
            row = [f"`{metric}` {sign} / {other}"]
            for config in shown:
                found = ratio(results, workload, metric, config, other)
                is_self = config == other
                row.append("" if is_self or found is None else str(found))
            yield row


def connectors_that_ran(results: Results, workload: str) -> str:
    """Which ones the best is the best of, and which are missing."""
    connectors = results.of_family("connector")
    shown = results.shown(workload)
    ran = [config for config in connectors if config in shown]
    missing = [config for config in connectors if config not in shown]
    text = f"Connectors that ran: {', '.join(ran) or 'none'}."
    return text + (f" Not: {', '.join(missing)}." if missing else "")
