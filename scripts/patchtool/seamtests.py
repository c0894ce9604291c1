# SPDX-License-Identifier: Apache-2.0
"""`make seam-tests`: whether the test that the table of seams names for one fails when
that seam is not there."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from . import seams
from .config import Layout, ToolError, say
from .env import site_packages, sync
from .hunks import apply, parse
from .merge import merge
from .seams import Seam
from .states import State, states
from .tree import locked

LIMIT_S = 15 * 60
"""A test that takes longer hangs, which is one way to fail."""


def without(series: list[State], seam: Seam) -> dict[str, str]:
    """The files of a release that its series leaves otherwise when the edits of a seam
    are left out; later patches are placed anew."""
    files = dict(series[0].before)
    for state in series:
        edits = parse(state.patch)
        if state.patch.name.startswith(seam.patch):
            kept = [e for e in edits if e.file not in seam.file or not seam.matches(e)]
            files = apply(files, kept)
        elif files == state.before:
            files = dict(state.after)
        else:
            files = dict(merge(state.before, state.after, files).after)
    last = series[-1].after
    return {name: text for name, text in files.items() if text and text != last[name]}


@contextmanager
def replaced(site: Path, files: dict[str, str]) -> Iterator[None]:
    """Have other files in an environment for a while, and in any case not longer."""
    kept = {site / name: (site / name).read_bytes() for name in files}
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for name, text in files.items():
            (site / name).write_text(text)
        yield
    finally:
        for path, data in kept.items():
            path.write_bytes(data)
        signal.signal(signal.SIGTERM, before)


@dataclass
class Runner:
    """Runs tests in the environment of a release. work: for logs and results."""

    layout: Layout
    tag: str
    work: Path
    passing: dict[str, str] = field(default_factory=dict)
    """How the tests end that ran with all seams."""

    def run(self, test: str, log: str) -> str:
        """How a test ends: passed, failed, or skipped. What neither passes nor is
        skipped fails: it does not import, or hangs."""
        folder = self.layout.env(self.tag) / "bin"
        xml = self.work / f"{log}.xml"
        xml.unlink(missing_ok=True)
        command = [str(folder / "python"), "-m", "pytest", "-q", "-x", "--tb=short"]
        command += [f"--junitxml={xml}", test]
        env = dict(os.environ, KV_TIER_TAG=self.tag)
        env["PATH"] = f"{folder}{os.pathsep}{env['PATH']}"
        with (self.work / f"{log}.log").open("w") as out:
            # A group of its own: engines of a spoilt test do not end with it.
            process = subprocess.Popen(
                command,
                cwd=self.layout.root,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                if process.wait(LIMIT_S):
                    return "failed"
            except subprocess.TimeoutExpired:
                return "failed"
            finally:
                _end(process)
        suites = list(ElementTree.parse(xml).getroot().iter("testsuite"))
        counts = [int(s.get("tests", 0)) - int(s.get("skipped", 0)) for s in suites]
        return "passed" if sum(counts) else "skipped"

    def result(self, seam: Seam, files: dict[str, str]) -> str:
        """What is wrong with the test of a seam; empty if it fails without it."""
        if seam.test not in self.passing:
            log = f"all-{len(self.passing)}"
            self.passing[seam.test] = self.run(seam.test, log)
        if (ends := self.passing[seam.test]) != "passed":
            return f"{seam.test} is {ends} with all seams"
        with replaced(site_packages(self.layout.env(self.tag)), files):
            ends = self.run(seam.test, seam.name.replace(" ", "-"))
        return "" if ends == "failed" else f"{seam.test} has {ends} without it"


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def seam_tests(layout: Layout, tag: str, only: str = "") -> None:
    """Take out each seam that has `only` in its name, patch or test, and run the test.

    Raises:
        ToolError: a test does not fail; the environment is as before in any case.
    """
    found = [seam for seam in seams.load(layout)[0] if seam.is_in(tag)]
    found = [s for s in found if only in f"{s.name} {s.patch} {s.test}"]
    if not found:
        raise ToolError(f"{tag} has no seam with `{only}` in name, patch or test")
    # Restores also what a run that was killed has left.
    sync(layout, tag)
    series = states(layout, tag)
    work = layout.build / "seam-tests" / tag
    missed = []
    with locked(work):
        runner = Runner(layout, tag, work)
        for seam in found:
            start = time.monotonic()
            if not (files := without(series, seam)):
                raise ToolError(f"{tag} has no edit of the seam `{seam.name}`")
            wrong = runner.result(seam, files)
            seconds = time.monotonic() - start
            say(f"{'FAIL' if wrong else 'ok  '}  {seam.name} ({seconds:.0f} s) {wrong}")
            if wrong:
                missed.append(f"{seam.name}: {wrong}")
    if missed:
        lines = "\n  ".join(missed)
        raise ToolError(f"{tag}: of {len(found)} seams, not noticed:\n  {lines}")
    say(f"{tag}: {len(found)} seams, the test of each fails without it")
