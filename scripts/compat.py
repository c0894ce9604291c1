# SPDX-License-Identifier: Apache-2.0
"""Writes docs/compatibility.md from the results of marked tests.

    python3 scripts/compat.py --python build/env/v0.32.0/bin/python RECORD.jsonl ...

Records are what `tests/conftest.py` appends with KV_TIER_COMPAT; of several results of
a test on a release the last one counts. tests/matrix.toml has the rows that must be
there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pairs

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "compatibility.md"
MATRIX = ROOT / "tests" / "matrix.toml"
FOLDERS = ["tests/unit", "tests/sim", "tests/e2e"]
SECTIONS = ["model kinds", "engine modes", "faults", "refused at start"]
ALL_TESTS = {
    "KV_TIER_KINDS": "all",
    "KV_TIER_PARALLEL": "all,ray,nixl",
    "KV_TIER_PAIRS": "all",
}
"""Settings with which no test is left out."""

Key = tuple[str, str]
"""Section and row."""


@dataclass
class Row:
    """A row of the document."""

    tests: set[str] = field(default_factory=set)
    """Node ids of the tests that are marked with it."""
    notes: list[str] = field(default_factory=list)
    why: str = ""
    """Why no test is."""

    @property
    def modules(self) -> list[str]:
        return sorted({pairs.module_of(test) for test in self.tests})


@dataclass
class Need:
    """What the matrix must say something about."""

    section: str
    need: str
    rows: list[str] = field(default_factory=list)
    """Rows that do, any of them."""
    why: str = ""
    """Without rows: why there are none."""


def collect(python: Path) -> tuple[list[dict[str, str]], list[dict[str, Any]]]:
    """The marks of all tests: section, row, note and node id of rows, and pair and node
    id of features that meet.

    Raises:
        SystemExit: The tests cannot be collected.

    """
    with tempfile.TemporaryDirectory() as folder:
        rows, met = Path(folder) / "rows.jsonl", Path(folder) / "pairs.jsonl"
        env = {**os.environ, **ALL_TESTS, "KV_TIER_COMPAT_ROWS": str(rows)}
        env["KV_TIER_COMPAT_PAIRS"] = str(met)
        env.pop("KV_TIER_COMPAT", None)
        flags = ["-q", "--collect-only", "-p", "no:cacheprovider"]
        command = [str(python), "-m", "pytest", *flags, *FOLDERS]
        run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        if run.returncode:
            raise SystemExit(f"tests cannot be collected:\n{run.stdout[-3000:]}")
        return read([rows]), read([met])


def read(paths: Iterable[Path]) -> list[dict[str, str]]:
    return [
        json.loads(line) for path in paths for line in path.read_text().splitlines()
    ]


def needs(path: Path = MATRIX) -> list[Need]:
    found = tomllib.loads(path.read_text())
    return [Need(section, **need) for section in found for need in found[section]]


def make_rows(marks: list[dict[str, str]], wanted: list[Need]) -> dict[Key, Row]:
    """Marked rows, and those that no test proves, in the order of the document."""
    rows: dict[Key, Row] = {}
    for mark in marks:
        row = rows.setdefault((mark["section"], mark["row"]), Row())
        row.tests.add(mark["test"])
        if mark["note"] and mark["note"] not in row.notes:
            row.notes.append(mark["note"])
    for need in wanted:
        if need.why and not any((need.section, r) in rows for r in need.rows):
            rows[need.section, need.need] = Row(why=need.why)
    return dict(sorted(rows.items(), key=lambda item: SECTIONS.index(item[0][0])))


def cell(row: Row, section: str, outcomes: dict[str, dict[str, str]]) -> str:
    """What was found on one release.

    Args:
        row: Of the document.
        section: Of the row.
        outcomes: Last result of each test on the release.

    """
    if not row.tests:
        return f"not run: {row.why}"
    found = [outcomes[test] for test in row.tests if test in outcomes]
    counts = {
        name: sum(each["outcome"] == name for each in found)
        for name in ("passed", "failed", "skipped")
    }
    if counts["failed"]:
        return f"**fails**: {counts['failed']} of {len(found)} tests"
    if not counts["passed"]:
        reasons = sorted({each["why"] for each in found if each["why"]})
        return f"not run: {', '.join(reasons) or 'not in the run of this record'}"
    done = "refused" if section == "refused at start" else "supported"
    missing = len(row.tests) - counts["passed"]
    return done + (f" ({missing} of {len(row.tests)} tests not run)" if missing else "")


def render(
    rows: dict[Key, Row], records: list[dict[str, str]], met: pairs.Table | None = None
) -> str:
    """The document."""
    tags = sorted({record["tag"] for record in records}, key=_version)
    outcomes: dict[str, dict[str, dict[str, str]]] = {tag: {} for tag in tags}
    for record in records:
        outcomes[record["tag"]][record["test"]] = record
    lines = ["# Compatibility", "", _INTRODUCTION, ""]
    for tag in tags:
        last = list(outcomes[tag].values())[-1] if outcomes[tag] else {}
        ran = (
            f"vLLM {last['vllm']}, torch {last['torch']}, Python {last['python']}, "
            f"{last['machine']}, {len(outcomes[tag])} tests"
        )
        lines.append(f"- {tag}: {ran}")
    for section in SECTIONS:
        lines += ["", f"## {section.capitalize()}", ""]
        lines += [
            f"| | {' | '.join(tags)} | tests | |",
            f"|---|{'---|' * len(tags)}---|---|",
        ]
        alike: dict[tuple[str, ...], list[str]] = {}
        for (of, name), row in rows.items():
            if of == section:
                cells = [cell(row, section, outcomes[tag]) for tag in tags]
                modules = ", ".join(f"`{module}`" for module in row.modules)
                key = (*cells, modules, "; ".join(row.notes))
                alike.setdefault(key, []).append(name)
        for key, names in alike.items():
            line = [part.replace("|", "\\|") for part in (_AND.join(names), *key)]
            lines.append(f"| {' | '.join(line)} |")
    if met is not None:
        lines += ["", *met.render()]
    return "\n".join(lines) + "\n"


_AND = "<br>"
"""Between the names of rows of which all is the same."""

_INTRODUCTION = """\
Generated by `make compat` from the results of [marked tests](testing.md#the-matrix).
*Supported* means that answers are equal with and without the tier, that blocks were
loaded from the host, and that a test of the same kind detects wrong bytes. All tests
ran on a CPU, on:"""


def _version(tag: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", tag)]


def rows_in(document: str) -> set[Key]:
    """Section and row of each line of the tables."""
    found, section = set(), ""
    for line in document.partition(f"## {pairs.TITLE}")[0].splitlines():
        if line.startswith("## "):
            section = line[3:].lower()
        elif line.startswith("| ") and not line.startswith("| | "):
            name = re.split(r"(?<!\\)\|", line)[1]
            names = name.strip().replace("\\|", "|").split(_AND)
            found |= {(section, each) for each in names}
    return found


def problems(
    document: str, marks: list[dict[str, str]], wanted: list[Need]
) -> list[str]:
    """What is wrong with the document, one line each."""
    there, rows = rows_in(document), make_rows(marks, wanted)
    found = [f"{key}: no test is marked with it" for key in sorted(there - rows.keys())]
    found += [f"{key}: not in the document" for key in sorted(rows.keys() - there)]
    found += [
        f"{(need.section, need.need)}: neither a row nor a reason"
        for need in wanted
        if not need.why and not any((need.section, row) in rows for row in need.rows)
    ]
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", type=Path, required=True, help="of `make env`")
    parser.add_argument("--out", type=Path, default=DOCUMENT)
    parser.add_argument("records", type=Path, nargs="+")
    args = parser.parse_args(argv)
    records: list[dict[str, Any]] = read(args.records)
    if not records:
        raise SystemExit("The records are empty: run tests with KV_TIER_COMPAT=FILE.")
    python = args.python.absolute()
    (marks, met), wanted = collect(python), needs()
    table = pairs.make(*pairs.asked(python), met)
    text = render(make_rows(marks, wanted), records, table)
    args.out.write_text(text)
    print(f"{args.out}: {len(rows_in(text))} rows, {len(records)} results")
    complaints = problems(text, marks, wanted) + table.problems()
    print(*complaints, sep="\n")
    return 1 if complaints or "**fails**" in text else 0


if __name__ == "__main__":
    sys.exit(main())
