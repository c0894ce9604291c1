# SPDX-License-Identifier: Apache-2.0
"""Tables, bars and pictures of some runs."""

from collections.abc import Iterator
from pathlib import Path

from . import goodput
from .bars import Bar, bars
from .distances import IDEAL, connectors_that_ran, distances
from .equality import NEAR_TIE
from .plots import draw
from .table import Results, markdown, number


def report(
    folders: list[Path], to: Path, reference: str, h2d_gb_s: float | None
) -> str:
    """Merge the results of `folders`; write `report.md` and PNGs to `to`.

    Returns:
        The text of the report.

    Raises:
        ValueError: there is nothing to report, or it does not fit together.

    """
    results = Results(folders)
    to.mkdir(parents=True, exist_ok=True)
    parts = [*_machines(results), *_tables(results)]
    parts += ["## Outputs", _outputs(results, reference)]
    found = list(bars(results, h2d_gb_s, reference))
    if found:
        parts += ["## Bars", _bars(found)]
    missing = [f"- {line}" for line in results.not_done()]
    parts += ["## Not measured", "\n".join(missing) or "Everything asked for was run."]
    for picture in draw(results, to):
        parts.append(f"![{picture.stem}]({picture.name})")
    text = "\n\n".join(parts) + "\n"
    (to / "report.md").write_text(text)
    return text


def _machines(results: Results) -> Iterator[str]:
    cells = results.cells
    seen = {tuple(r["machine"].items()) for r in cells}
    for machine in seen:
        yield ", ".join(f"{key} {value}" for key, value in machine)
    scales = ", ".join(sorted({r["scale"] for r in cells}))
    blocks = ", ".join(
        f"{c} {r}" for c, r in sorted({(r["config"], r["block_size"]) for r in cells})
    )
    yield f"Scale {scales}, block sizes: {blocks}. Values: median (min to max; runs)."


def _tables(results: Results) -> Iterator[str]:
    for workload in results.workloads():
        yield f"## {workload}"
        yield "`" + str(_parameters(results, workload)) + "`"
        rows = []
        shown = results.shown(workload)
        for metric in results.metrics(workload):
            row = [f"`{metric}`"]
            for config in shown:
                values = results.values(workload, metric, config)
                median = results.median(workload, metric, config)
                if median is None:
                    row.append("")
                    continue
                span = f"{number(min(values))} to {number(max(values))}"
                row.append(f"{number(median)} ({span}; {len(values)})")
            rows.append(row)
        yield markdown(["", *shown], rows)
        if workload == goodput.WORKLOAD and goodput.modes(results):
            yield goodput.table(results)
        if ratios := list(distances(results, workload)):
            yield (
                f"Over `{IDEAL}`, and over the best connector of each row; run by run, "
                "median (min to max). ↓: less is better. Bold: all of several runs lie "
                f"on one side of 1. {connectors_that_ran(results, workload)}"
            )
            yield markdown(["", *shown], ratios)


def _parameters(results: Results, workload: str) -> dict[str, object]:
    cell = next(r for r in results.cells if r["workload"] == workload)
    parameters = dict(cell["parameters"])
    # Where it lay on the machine is of no interest.
    if "path" in parameters:
        parameters["path"] = Path(parameters["path"]).name
    return parameters


def _outputs(results: Results, reference: str) -> str:
    header = ["", "runs", "requests", "equal", "near ties", "wrong", "no logprobs"]
    header += ["near ties / 10,000 tokens", "of these, gap and position"]
    rows = []
    for workload in results.workloads():
        for config in results.configs:
            total, alone = results.outputs(config, reference, workload)
            if config != reference and alone:
                rows.append(
                    [f"{config}, {workload}", f"{len(alone)} without reference"]
                )
                rows[-1] += [""] * (len(header) - 2)
            if not total.runs:
                continue
            different = total.differences
            worst = sorted(different, key=lambda d: -(d.gap or 0))[:3]
            rows.append(
                [
                    f"{config}, {workload}",
                    str(total.runs),
                    str(total.requests),
                    str(total.requests - len(different)),
                    str(total.near_ties),
                    str(total.wrong),
                    str(total.unknown),
                    number(1e4 * total.near_ties / max(total.tokens, 1)),
                    ", ".join(
                        f"{'?' if d.gap is None else f'{d.gap:.3f}'} at {d.position}"
                        for d in worst
                    ),
                ]
            )
    text = (
        f"Against `{reference}`, request by request. A near tie: the two best tokens "
        f"are less than {NEAR_TIE} nats apart at the first token that differs, in both "
        "runs. Tokens are counted up to there."
    )
    return f"{text}\n\n{markdown(header, rows)}"


def _bars(found: list[Bar]) -> str:
    header = ["bar", "configuration", "value", "limit", "", "medians"]
    return markdown(header, [bar.row() for bar in found])
