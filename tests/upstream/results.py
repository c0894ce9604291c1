# SPDX-License-Identifier: Apache-2.0
"""Outcomes of a run: `{node id: outcome}`, as JSON or as a baseline file.

Outcomes are pytest's: passed, failed, error, skipped, xfailed, xpassed.
"""

import json
from collections import Counter
from pathlib import Path

Outcomes = dict[str, str]


def load(path: Path) -> Outcomes:
    """Read a run's `.json` or a baseline `.txt` (lines `outcome node-id`).

    Raises:
        SystemExit: The file is missing or is neither.

    """
    if not path.is_file():
        raise SystemExit(
            f"{path} does not exist. Make it with `python -m tests.upstream.run` "
            "(a baseline: with --rebase)."
        )
    text = path.read_text()
    if path.suffix == ".json":
        return json.loads(text)
    outcomes = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            outcome, _, node_id = line.partition(" ")
            outcomes[node_id] = outcome
    if not outcomes:
        raise SystemExit(f"{path} holds no outcomes: it is not a baseline.")
    return outcomes


def save_baseline(path: Path, outcomes: Outcomes, header: list[str]) -> None:
    """Write a baseline: the header as comments, then one test a line, sorted."""
    lines = [f"# {line}" for line in header]
    lines += [f"{outcomes[node_id]} {node_id}" for node_id in sorted(outcomes)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def counts(outcomes: Outcomes) -> str:
    """`987 passed, 1 skipped`: the most frequent outcome first."""
    tally = Counter(outcomes.values())
    return ", ".join(f"{n} {outcome}" for outcome, n in tally.most_common()) or "none"


def listed(path: Path) -> list[str]:
    """Entries of a list file: lines without blank ones and `#` comments."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]
