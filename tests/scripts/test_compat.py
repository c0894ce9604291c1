# SPDX-License-Identifier: Apache-2.0
"""docs/compatibility.md says what the tests say, and leaves out nothing."""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import compat
import pairs
from patchtool.config import Layout

pytest_plugins = ["pytester"]
VERSIONS = {"vllm": "0.1", "torch": "2", "python": "3.11", "machine": "x86_64"}


def mark(row: str, test: str, section: str = "faults", note: str = "") -> dict:
    return {"section": section, "row": row, "test": test, "note": note}


def record(
    row: str, test: str, outcome: str, tag: str = "v0.1.0", why: str = ""
) -> dict:
    return {**mark(row, test), **VERSIONS, "tag": tag, "outcome": outcome, "why": why}


def need(name: str, *rows: str, why: str = "") -> compat.Need:
    return compat.Need("faults", name, list(rows), why)


def line_of(row: str, text: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {row} |"))
    return [part.strip() for part in line.strip("|").split("|")]


def is_of_the_newest() -> bool:
    tag = "v" + version("vllm").partition("+")[0]
    return tag in Layout.default().newest_tags()


@pytest.mark.skipif(
    not is_of_the_newest(), reason="the document is of the newest releases"
)
def test_the_committed_document() -> None:
    """Run `make compat` when this fails; with a reason in tests/matrix.toml where no
    test can be."""
    python = Path(sys.executable)
    marks, met = compat.collect(python)
    text = compat.DOCUMENT.read_text()
    assert compat.problems(text, marks, compat.needs()) == []
    assert "**fails**" not in text
    table = pairs.make(*pairs.asked(python), met)
    assert table.problems() == []
    assert table.render() == pairs.section(text)


NAMES = {"A": "first", "B": "second", "C": "third"}


def met(*codes: str) -> dict[str, Any]:
    return {"pair": list(codes), "test": "tests/sim/test_some.py::test"}


@pytest.mark.parametrize(
    "refusals, marks, complaints",
    [
        ({("A", "B"): "no"}, [met("C", "A"), met("B", "C")], []),
        (
            {("A", "B"): "no"},
            [met("A", "C")],
            ["B and C: no test runs both, and nothing refuses them"],
        ),
        (
            {("A", "B"): "no"},
            [met("A", "B"), met("A", "C"), met("B", "C")],
            ["A and B: refused, but ['sim/test_some'] run both"],
        ),
        (
            {("A", "B"): "no", ("A", "C"): "no", ("B", "C"): "no"},
            [met("A", "D")],
            ["['D']: unknown features"],
        ),
    ],
)
def test_each_two_features_are_run_or_refused(
    refusals: dict[pairs.Pair, str], marks: list[dict[str, Any]], complaints: list[str]
) -> None:
    assert pairs.make(NAMES, refusals, marks).problems() == complaints


def test_the_table_of_features() -> None:
    table = pairs.make(NAMES, {("A", "B"): "no"}, [met("A", "C"), met("B", "C")])
    lines = table.render()
    assert "| B | 1 |" in lines and "| C | a | a |" in lines
    assert "a `sim/test_some`" in lines and "1. `no`" in lines
    assert "A first, B second, C third" in lines
    assert pairs.section("\n".join(["# Before", "", *lines])) == lines


def test_results_of_several_runs_and_releases() -> None:
    marks = [
        mark("a", "e2e/t.py::1", note="slow"),
        mark("a", "unit/u.py::2"),
        mark("b", "e2e/t.py::3"),
    ]
    records = [
        record("a", "e2e/t.py::1", "failed"),
        record("a", "e2e/t.py::1", "passed"),
        record("a", "unit/u.py::2", "passed"),
        record("a", "e2e/t.py::1", "passed", "v0.10.0"),
        record("b", "e2e/t.py::3", "failed", "v0.10.0"),
        record("b", "e2e/t.py::3", "skipped", why="no GPU"),
    ]
    wanted = [need("c", "none", why="nobody asked"), need("a", "a")]
    text = compat.render(compat.make_rows(marks, wanted), records)
    assert line_of("a", text) == [
        "a",
        "supported",
        "supported (1 of 2 tests not run)",
        "`e2e/t`, `unit/u`",
        "slow",
    ]
    assert line_of("b", text)[1:3] == ["not run: no GPU", "**fails**: 1 of 1 tests"]
    assert line_of("c", text)[1:3] == ["not run: nobody asked"] * 2
    assert compat.problems(text, marks, wanted) == []
    assert "v0.1.0: vLLM 0.1, torch 2, Python 3.11, x86_64, 3 tests" in text


def test_rows_with_the_same_results_are_one_line() -> None:
    marks = [mark("a", "e2e/t.py::1"), mark("b|c", "e2e/t.py::2")]
    records = [record(m["row"], m["test"], "passed") for m in marks]
    text = compat.render(compat.make_rows(marks, []), records)
    assert "| a<br>b\\|c | supported | `e2e/t` |  |" in text.splitlines()
    assert compat.problems(text, marks, []) == []


def test_what_is_refused() -> None:
    row = compat.Row({"e2e/t.py::1"})
    outcomes: dict[str, Any] = {"e2e/t.py::1": {"outcome": "passed", "why": ""}}
    assert compat.cell(row, "refused at start", outcomes) == "refused"


@pytest.mark.parametrize(
    "rows, marks, wanted, complaint",
    [
        ("a b", "a", [], "('faults', 'b'): no test is marked with it"),
        ("a", "a b", [], "('faults', 'b'): not in the document"),
        ("a", "a", [need("x", "b")], "('faults', 'x'): neither a row nor a reason"),
        ("a", "a", [need("x", why="y")], "('faults', 'x'): not in the document"),
        ("a", "a", [need("x", "b", "a")], None),
    ],
)
def test_what_is_wrong_with_a_document(
    rows: str, marks: str, wanted: list[compat.Need], complaint: str | None
) -> None:
    def marked(names: str) -> list[dict[str, str]]:
        return [mark(name, f"e2e/t.py::{name}") for name in names.split()]

    records = [record(name, f"e2e/t.py::{name}", "passed") for name in rows.split()]
    text = compat.render(compat.make_rows(marked(rows), []), records)
    found = compat.problems(text, marked(marks), wanted)
    assert found == ([] if complaint is None else [complaint])


def test_a_run_leaves_a_record(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    conftest = (compat.ROOT / "tests" / "conftest.py").read_text()
    pytester.makeconftest(conftest)
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.compat("faults", "a", note="n")
        @pytest.mark.compat("engine modes", "b")
        @pytest.mark.parametrize("good", [True, False])
        def test_two(good):
            assert good

        @pytest.mark.compat("faults", "c")
        def test_skipped():
            pytest.skip("no GPU")

        @pytest.fixture
        def broken():
            raise RuntimeError

        @pytest.mark.compat("faults", "d")
        def test_broken(broken): ...

        def test_unmarked(): ...
        """
    )
    path = pytester.path / "new" / "record.jsonl"
    monkeypatch.setenv("KV_TIER_COMPAT", str(path))
    monkeypatch.setenv("KV_TIER_TAG", "v0.1.0")
    pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {(each["row"], each["outcome"], each["why"]) for each in lines}
    assert found == {
        ("a", "passed", ""),
        ("b", "passed", ""),
        ("a", "failed", ""),
        ("b", "failed", ""),
        ("c", "skipped", "no GPU"),
        ("d", "failed", ""),
    }
    assert {each["tag"] for each in lines} == {"v0.1.0"}
