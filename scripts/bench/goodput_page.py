# SPDX-License-Identifier: Apache-2.0
"""README's table and picture, and those of docs/benchmarks.md, from runs of `goodput`.

python scripts/bench/goodput_page.py             from docs/goodput/results.jsonl
python scripts/bench/goodput_page.py DIR [DIR]   from these runs, which are kept there

"""

import argparse
import json
import sys
from pathlib import Path

from suite.goodput import WORKLOAD, between, draw, spread, table
from suite.records import RESULTS, read
from suite.table import Results

ROOT = Path(__file__).parents[2]
DATA = Path("docs/goodput")
PAGES = {
    Path("README.md"): "docs/goodput/goodput.svg",
    Path("docs/benchmarks.md"): "goodput/goodput.svg",
}
NOT_KEPT = ("folder", "outputs", "counted", "began")


def keep(folders: list[Path], root: Path) -> None:
    """Copy the finished runs of the workload to the project's data.

    A configuration that lacks a run which the tier has is left out, and so are runs
    that the tier lacks: a median of other conversations is not comparable.
    """
    cells = [r for r in Results(folders).cells if r["workload"] == WORKLOAD]
    ran: dict[str, set[str]] = {}
    for r in cells:
        ran.setdefault(r["config"], set()).add(r["cell"])
    common = set.union(*(ran[r["config"]] for r in cells if r["family"] == "core"))
    lines = []
    for r in cells:
        if r["cell"] in common and common <= ran[r["config"]]:
            r["parameters"]["path"] = Path(r["parameters"]["path"]).name
            lines.append(json.dumps({k: v for k, v in r.items() if k not in NOT_KEPT}))
    left_out = [config for config, of in ran.items() if not common <= of]
    print(*(f"{config} lacks runs: left out" for config in left_out), sep="\n")
    (root / DATA).mkdir(parents=True, exist_ok=True)
    (root / DATA / RESULTS).write_text("\n".join(lines) + "\n")


def pages(root: Path) -> dict[Path, str]:
    """The pages with the tables of the data in them."""
    results = Results([root / DATA])
    made = {}
    for page, picture in PAGES.items():
        text = (root / page).read_text()
        content = f"{table(results)}\n\n![Good turns over the rate]({picture})"
        text = between(text, WORKLOAD, content)
        if page.name == "benchmarks.md":
            text = between(text, f"{WORKLOAD} spread", spread(results))
        made[page] = text
    return made


def page_text(page: Path) -> str:
    return (ROOT / page).read_text()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="*", metavar="DIR")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    try:
        if args.check:
            old = [page for page, t in pages(ROOT).items() if page_text(page) != t]
            print(
                *(f"{page} is old: run `make goodput-page`" for page in old), sep="\n"
            )
            return int(bool(old))
        if args.folders:
            keep(args.folders, ROOT)
        for page, text in pages(ROOT).items():
            (ROOT / page).write_text(text)
    except ValueError as error:
        sys.exit(str(error))
    draw(Results([ROOT / DATA]), ROOT / DATA / "goodput.svg")
    print(f"{len(read(ROOT / DATA))} runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
