# SPDX-License-Identifier: Apache-2.0
"""The table of combinations of features, for docs/compatibility.md.

Of each two features of `tests/pairs/features.py` it says by which tests they are run
together, or with which message they are refused. `scripts/compat.py` asks for both.
"""

import json
import os
import subprocess
import tempfile
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from string import ascii_letters

ROOT = Path(__file__).parents[1]
TITLE = "Combinations of features"

Pair = tuple[str, str]


@dataclass
class Table:
    """What is known of all pairs."""

    names: Mapping[str, str]
    """Of the features, by code, in the order of the table."""
    tests: Mapping[Pair, set[str]]
    """Modules with tests that run a pair."""
    refusals: Mapping[Pair, str]

    def problems(self) -> list[str]:
        """One line each."""
        found = []
        for pair in combinations(self.names, 2):
            a, b = pair
            if pair not in self.refusals and not self.tests.get(pair):
                found.append(
                    f"{a} and {b}: no test runs both, and nothing refuses them"
                )
            if pair in self.refusals and self.tests.get(pair):
                found.append(
                    f"{a} and {b}: refused, but {sorted(self.tests[pair])} run both"
                )
        if unknown := {c for pair in self.tests for c in pair} - self.names.keys():
            found.append(f"{sorted(unknown)}: unknown features")
        return found

    def render(self) -> list[str]:
        """The lines of the section."""
        modules = sorted({module for some in self.tests.values() for module in some})
        letters = dict(zip(modules, ascii_letters, strict=False))
        messages = sorted(set(self.refusals.values()))
        numbers = {message: i for i, message in enumerate(messages, 1)}
        codes = list(self.names)
        lines = [f"## {TITLE}", "", *_INTRODUCTION.splitlines(), ""]
        lines += _wrapped(f"{code} {name}" for code, name in self.names.items())
        lines += ["", f"| | {' | '.join(codes[:-1])} |", "|---" * len(codes) + "|"]
        for i, code in enumerate(codes[1:], 1):
            cells = []
            for other in codes[:i]:
                pair = (other, code)
                ran = "".join(letters[m] for m in sorted(self.tests.get(pair, ())))
                refused = self.refusals.get(pair)
                cells.append(ran if refused is None else str(numbers[refused]))
            lines.append(f"| {code} | {' | '.join(cells)} |")
        lines += ["", "Tests:"]
        lines += _wrapped(f"{letter} `{module}`" for module, letter in letters.items())
        lines += ["", "Refused at start:", ""]
        lines += [f"{number}. `{text}`" for text, number in numbers.items()]
        return lines


_INTRODUCTION = """\
Each cell is for two features: letters are tests that run both, numbers are messages
that refuse the combination at start. `sim/test_pairs` runs upstream's scheduler with a
simulated model and one simulated store for all three types; `unit/stores/test_contract`
tests the real stores."""


def _wrapped(entries: Iterable[str]) -> list[str]:
    """A paragraph that lists them."""
    text = ", ".join(entries).replace(" ", "\0").replace(",\0", ", ")
    lines = textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def section(document: str) -> list[str]:
    """Its lines in a document."""
    _, title, rest = document.partition(f"## {TITLE}\n")
    return (title + rest).splitlines()


def asked(python: Path) -> tuple[dict[str, str], dict[Pair, str]]:
    """The names of all features, and what is refused with which message.

    Raises:
        SystemExit: The checks cannot be run.

    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "refusals.json"
        command = [str(python), "-m", "tests.pairs.refusals", str(result)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        if run.returncode:
            raise SystemExit(f"the checks cannot be run:\n{run.stderr[-3000:]}")
        found = json.loads(result.read_text())
    refusals = {tuple(pair.split()): text for pair, text in found["messages"].items()}
    return found["names"], refusals  # type: ignore[return-value]


def module_of(test: str) -> str:
    """The test module of a node id, as pages name it."""
    return test.partition("::")[0].removeprefix("tests/").removesuffix(".py")


def make(
    names: Mapping[str, str], refusals: Mapping[Pair, str], marks: Sequence[dict]
) -> Table:
    """A table.

    Args:
        names: Of the features, by code.
        refusals: As `asked`.
        marks: Pairs of tests, as collected.

    """
    order = [
        *names,
        *sorted({c for mark in marks for c in mark["pair"]} - names.keys()),
    ]
    tests: dict[Pair, set[str]] = {}
    for mark in marks:
        a, b = sorted(mark["pair"], key=order.index)
        tests.setdefault((a, b), set()).add(module_of(mark["test"]))
    return Table(names, tests, refusals)
