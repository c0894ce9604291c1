# SPDX-License-Identifier: Apache-2.0
"""Results of several calls, merged: values by workload, metric and configuration."""

import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .equality import Comparison, compare
from .records import read, read_outputs

Record = dict[str, Any]


class Results:
    """All records of some folders.

    Args:
        folders: each with a `results.jsonl`.

    Raises:
        ValueError: there are none, or they are of different scales or parameters.

    """

    def __init__(self, folders: Iterable[Path]) -> None:
        folders = list(folders)
        self.records = [r for folder in folders for r in read(folder)]
        self.cells = [r for r in self.records if r["status"] == "ok"]
        if not self.cells:
            names = ", ".join(str(folder) for folder in folders)
            raise ValueError(
                f"No finished cell in {names}: run compare.py --out first."
            )
        self._refuse_mixtures()
        self.families = {r["config"]: r["family"] for r in self.records}
        self.configs = list(self.families)

    def _refuse_mixtures(self) -> None:
        kinds: dict[str, set[str]] = {}
        for r in self.cells:
            of_workload = (r["scale"], r["parameters"], r["logprobs"])
            kinds.setdefault(r["workload"], set()).add(_without_path(of_workload))
            kinds.setdefault(r["config"], set()).add(r["settings"])
        for name, found in kinds.items():
            if len(found) > 1:
                raise ValueError(
                    f"{name} was run with different settings, report them apart: "
                    f"{', '.join(sorted(found))}"
                )

    def workloads(self) -> list[str]:
        return list(dict.fromkeys(r["workload"] for r in self.cells))

    def metrics(self, workload: str) -> list[str]:
        """Names of the metrics of a workload."""
        found = (
            m for r in self.cells if r["workload"] == workload for m in r["metrics"]
        )
        return list(dict.fromkeys(found))

    def values(self, workload: str, metric: str, config: str) -> list[float]:
        """One value for every run, in no order."""
        return [
            r["metrics"][metric]
            for r in self.cells
            if (r["workload"], r["config"]) == (workload, config)
            and metric in r["metrics"]
        ]

    def by_run(
        self, workload: str, metric: str, config: str
    ) -> dict[tuple[str, str], float]:
        """The value of each run by folder and cell, which its twins of other
        configurations share; the median, should a cell have been run again."""
        found: dict[tuple[str, str], list[float]] = {}
        for r in self.cells:
            of_config = (r["workload"], r["config"]) == (workload, config)
            if of_config and metric in r["metrics"]:
                run = found.setdefault((r["folder"], r["cell"]), [])
                run.append(r["metrics"][metric])
        return {run: statistics.median(values) for run, values in found.items()}

    def shown(self, workload: str) -> list[str]:
        """The configurations that have run a workload."""
        ran = {r["config"] for r in self.cells if r["workload"] == workload}
        return [config for config in self.configs if config in ran]

    def median(self, workload: str, metric: str, config: str) -> float | None:
        values = self.values(workload, metric, config)
        return statistics.median(values) if values else None

    def of_family(self, family: str) -> list[str]:
        return [c for c in self.configs if self.families[c] == family]

    def best_connector(
        self, workload: str, metric: str, higher: bool = False
    ) -> tuple[str, float] | None:
        """The connector with the best median, and that median."""
        found = [
            (median, config)
            for config in self.of_family("connector")
            if (median := self.median(workload, metric, config)) is not None
        ]
        if not found:
            return None
        median, config = max(found) if higher else min(found)
        return config, median

    def not_done(self) -> Iterator[str]:
        """Cells without a result and why, one line for each reason."""
        done = {(r["config"], r["workload"], r["repeat"]) for r in self.cells}
        missing = {}
        for r in self.records:
            if r["status"] not in ("ok", "started"):
                # What happened last is what counts.
                missing[r["config"], r["workload"], r["repeat"]] = r
        return why_missing(r for cell, r in missing.items() if cell not in done)

    def outputs(
        self, config: str, reference: str, workload: str | None = None
    ) -> tuple[Comparison, list[Record]]:
        """Outputs of `config` against those of `reference` for the same cells.

        Returns:
            The comparison, and the cells for which the reference has no run.

        """
        total = Comparison()
        alone = []
        for cell in self.cells:
            if cell["config"] != config or workload not in (None, cell["workload"]):
                continue
            twins = [
                r
                for r in self.cells
                if r["config"] == reference
                and (r["workload"], r["cell"]) == (cell["workload"], cell["cell"])
                and r is not cell
            ]
            if not twins:
                alone.append(cell)
                continue
            # Of the same call if there is one.
            twin = next((t for t in twins if t["folder"] == cell["folder"]), twins[0])
            total.add(compare(_read(twin), _read(cell)))
        return total, alone


def why_missing(records: Iterable[Record]) -> Iterator[str]:
    """One line for each configuration and reason, from records of missing cells."""
    reasons: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for r in records:
        workloads = reasons.setdefault((r["config"], r["status"], r["reason"]), {})
        workloads.setdefault(r["workload"], []).append(str(r["repeat"]))
    for (config, status, reason), workloads in reasons.items():
        cells = ", ".join(f"{w} {'+'.join(n)}" for w, n in workloads.items())
        yield f"{config}: {status}: {reason}: {cells}"


def _without_path(kind: tuple[str, dict[str, Any], bool]) -> str:
    scale, parameters, logprobs = kind
    same = {k: v for k, v in parameters.items() if k != "path"}
    return f"{scale} {same} logprobs {logprobs}"


def _read(cell: Record) -> Any:
    return read_outputs(Path(cell["folder"]) / cell["outputs"])


def markdown(header: list[str], rows: Iterable[list[str]]) -> str:
    """A markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float) -> str:
    """Three digits that count, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
