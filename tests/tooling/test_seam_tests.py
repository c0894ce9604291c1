# SPDX-License-Identifier: Apache-2.0
"""Seams that are taken out of an environment, one at a time, to see a test fail."""

import os
import signal
import sys
from pathlib import Path

import pytest

from patchtool import seams, seamtests
from patchtool.config import Layout, ToolError
from patchtool.seamtests import replaced, seam_tests, without
from patchtool.states import states
from tests.tooling.project import COUNT, TAG, Project
from tests.tooling.test_seams import SEAMS

WITH_ALL = COUNT.replace("return 2\n", "return 22\n")

TESTS = """\
import pytest
from pathlib import Path

TEXT = Path({file!r}).read_text()


def test_two():
    assert "22" in TEXT


def test_three():
    assert "return 3" in TEXT


def test_four():
    assert "5" in TEXT


@pytest.mark.skip
def test_nothing():
    pass
"""


@pytest.fixture
def installed(project: Project, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The patched file in an environment that is as after `make env`."""
    site = project.layout.env(TAG) / "lib" / "python3.12" / "site-packages"
    file = site / "vllm" / "count.py"
    file.parent.mkdir(parents=True)
    python = project.layout.env(TAG) / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    tests = project.layout.root / "tests"
    tests.mkdir()
    (tests / "test_count.py").write_text(TESTS.format(file=str(file)))

    def sync(layout: Layout, tag: str) -> None:
        file.write_text(WITH_ALL)

    monkeypatch.setattr(seamtests, "sync", sync)
    return file


@pytest.mark.parametrize(
    "test, message",
    [
        ("test_two", ""),
        ("test_three", "test_three has passed without it"),
        ("test_four", "test_four is failed with all seams"),
        ("test_nothing", "test_nothing is skipped with all seams"),
        ("test_gone", "test_gone is failed with all seams"),
    ],
)
def test_each_named_test_must_fail(
    project: Project,
    installed: Path,
    capsys: pytest.CaptureFixture[str],
    test: str,
    message: str,
) -> None:
    table = SEAMS.replace("test_two", test)
    (project.layout.patches / seams.TABLE).write_text(table)
    if message:
        with pytest.raises(ToolError, match=message):
            seam_tests(project.layout, TAG)
    else:
        seam_tests(project.layout, TAG)
        assert "the test of each fails without it" in capsys.readouterr().out
    assert installed.read_text() == WITH_ALL


def test_only_some(project: Project, installed: Path) -> None:
    (project.layout.patches / seams.TABLE).write_text(SEAMS)
    seam_tests(project.layout, TAG, "two is")
    with pytest.raises(ToolError, match="no seam with `tests/e2e`"):
        seam_tests(project.layout, TAG, "tests/e2e")


def test_what_remains_without_a_seam(project: Project) -> None:
    (project.layout.patches / seams.TABLE).write_text(SEAMS)
    series = states(project.layout, TAG)
    [seam] = seams.load(project.layout)[0]
    assert without(series, seam) == {"vllm/count.py": COUNT}
    # What later patches change remains.
    last = series[-1].patch
    text = last.text + (
        "--- a/vllm/count.py\n+++ b/vllm/count.py\n@@ -11,4 +11,4 @@\n \n \n"
        " def four():\n-    return 4\n+    return 44\n"
    )
    last.path.write_text(text)
    found = without(states(project.layout, TAG), seam)
    assert found == {"vllm/count.py": COUNT.replace("return 4", "return 44")}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_environment_is_restored_when_interrupted(
    installed: Path, number: signal.Signals
) -> None:
    installed.write_text(WITH_ALL)
    # A shell ignores it for what it runs in the background.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.getsignal(signal.SIGTERM)
    site = installed.parents[1]
    with (
        pytest.raises(KeyboardInterrupt),
        replaced(site, {"vllm/count.py": COUNT}),
    ):
        assert installed.read_text() == COUNT
        os.kill(os.getpid(), number)
    assert installed.read_text() == WITH_ALL
    assert signal.getsignal(signal.SIGTERM) == before
    signal.signal(signal.SIGINT, interrupt)
