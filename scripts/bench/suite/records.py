# SPDX-License-Identifier: Apache-2.0
"""The files of a run: `results.jsonl` and, for each cell, its outputs."""

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .client import Answer

RESULTS = "results.jsonl"


@dataclass(frozen=True)
class Output:
    """What a request was answered: token ids, and top-2 gaps in nats if known."""

    key: str
    tokens: list[int]
    gaps: list[float]


def append(folder: Path, record: dict[str, Any]) -> None:
    """Add a line to the results of `folder`."""
    with (folder / RESULTS).open("a") as file:
        file.write(json.dumps(record) + "\n")


def read(folder: Path) -> list[dict[str, Any]]:
    """The results of `folder`, oldest first; `folder` is added to every record."""
    path = folder / RESULTS
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [json.loads(line) | {"folder": str(folder)} for line in lines]


def write_outputs(path: Path, answers: Iterable[Answer]) -> None:
    """Keep what the requests were answered."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [[a.key, a.tokens, [round(gap, 5) for gap in a.gaps]] for a in answers]
    with gzip.open(path, "wt") as file:
        json.dump(rows, file)


def read_outputs(path: Path) -> list[Output]:
    """What `write_outputs` kept."""
    with gzip.open(path, "rt") as file:
        return [Output(*row) for row in json.load(file)]
