# SPDX-License-Identifier: Apache-2.0
"""Failed tests run once more at the end of `make test`."""

import sys
from pathlib import Path

import pytest

from patchtool.config import Layout

sys.path.insert(0, str(Path(__file__).parents[2] / "ci"))
import run_tests  # noqa: E402
from run_tests import Counts, Run  # noqa: E402

TAG = "v1.0.0"

TESTS = """
from pathlib import Path

import pytest

def is_first(name):
    path = Path(__file__).with_name(f"ran-{name}")
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    return path.read_text() == "x"

@pytest.mark.timed
@pytest.mark.parametrize("how", ["[x] y", "b"])
def test_slow(how):
    assert not is_first("slow" + how)

@pytest.mark.timed
def test_wrong():
    assert False

@pytest.mark.timed
def test_other_tokens():
    assert not is_first("tokens"), "answer 0: other tokens"

def test_not_marked():
    assert not is_first("marked")

def test_right():
    is_first("right")
"""


def ran(layout: Layout, *names: str) -> tuple[list[str], Counts]:
    """The tests of these names, and those again that failed."""
    run = Run(layout, TAG, first=True)
    flags = ["-k", " or ".join(names), "-p", "no:cacheprovider"]
    counts = run_tests.pytest(run, "unit", "tests/test_it.py", more_flags=flags)
    failed = run_tests.failures(run.results / f"unit-{TAG}.xml")
    lines, more = run_tests.again(layout, failed)
    return lines, counts + more


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path, tmp_path)
    layout.env(TAG).parent.mkdir(parents=True)
    layout.env(TAG).symlink_to(sys.prefix)
    (layout.build / "test-results").mkdir()
    tests = tmp_path / "tests" / "test_it.py"
    tests.parent.mkdir()
    tests.write_text(TESTS)
    return layout


def test_who_passes_alone_is_unstable(layout: Layout) -> None:
    lines, counts = ran(layout, "slow", "right")
    assert [line.split(" - ")[0] for line in lines] == [
        f"UNSTABLE unit-{TAG} tests/test_it.py::test_slow[[x] y]",
        f"UNSTABLE unit-{TAG} tests/test_it.py::test_slow[b]",
    ]
    assert counts == Counts(passed=3)
    assert (layout.root / "tests" / "ran-right").read_text() == "x"


def test_who_fails_again_has_failed(layout: Layout) -> None:
    lines, counts = ran(layout, "wrong", "right")
    assert lines == [f"FAILED unit-{TAG} tests/test_it.py::test_wrong - assert False"]
    assert counts == Counts(passed=1, failed=1)


def test_a_wrong_answer_does_not_run_again(layout: Layout) -> None:
    lines, counts = ran(layout, "tokens")
    assert len(lines) == 1 and lines[0].startswith("FAILED")
    assert counts == Counts(failed=1)
    assert (layout.root / "tests" / "ran-tokens").read_text() == "x"


def test_who_is_not_marked_does_not_pass_the_second_time(layout: Layout) -> None:
    lines, counts = ran(layout, "marked")
    assert len(lines) == 1 and lines[0].startswith("FAILED")
    assert counts == Counts(failed=1)
    assert (layout.root / "tests" / "ran-marked").read_text() == "x"


def test_many_failures_are_no_accident(layout: Layout) -> None:
    lines, counts = ran(layout, "slow", "wrong", "tokens")
    assert len(lines) == 4 and all(line.startswith("FAILED") for line in lines)
    assert counts == Counts(failed=4)
