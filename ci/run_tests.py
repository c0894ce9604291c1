# SPDX-License-Identifier: Apache-2.0
"""Runs the stages of `make test`, and adds them up in one last line.

    PYTHONPATH=scripts python3 ci/run_tests.py [--tags v0.32.0,v0.33.0|all] [STAGE ...]

A stage goes on after a failure, so that one run shows all of them. Stages of one
process run two at a time, and print at their end. Results are in build/test-results/.
At the end up to three failed tests that are marked `timed` run again, alone. Those that
pass then are `UNSTABLE` in the last lines, and no failures. Ends with 0 only if nothing
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TextIO

from patchtool.config import Layout, ToolError, exit_with, load_pins
from patchtool.index import fetch

START = time.monotonic()
LIMIT_S = 60 * 60
"""No command of a stage takes that long unless it hangs, on a busy machine either."""


def say(text: str) -> None:
    seconds = time.monotonic() - START
    print(f"[{time.strftime('%H:%M:%S')} {seconds:5.0f} s] {text}", flush=True)


RUNNING: set[int] = set()
"""Process groups of commands that have not ended."""


def kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


@dataclass
class Counts:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.passed + other.passed,
            self.failed + other.failed,
            self.skipped + other.skipped,
        )

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


@dataclass
class Run:
    """One tag's part of a stage."""

    layout: Layout
    tag: str
    first: bool
    """Whether what does not depend on the tag is due."""
    mode: str = ""
    """Which of the `MODES` of the stage."""
    output: TextIO | None = None
    """Where commands print; by default, where this program does."""

    @property
    def is_new(self) -> bool:
        """Whether it is one of the releases that are tested when none is named."""
        return self.tag in self.layout.newest_tags()

    @property
    def results(self) -> Path:
        return self.layout.build / "test-results"

    @property
    def python(self) -> str:
        return str(self.layout.env(self.tag) / "bin" / "python")

    def command(self, command: Sequence[str | Path], **environment: str) -> int:
        """Exit status of a command; its own process group is gone afterwards.

        Args:
            command: The program and its arguments.
            environment: Variables that only this command has.

        """
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=self.layout.root,
            env=self.environment() | environment,
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.output and subprocess.STDOUT,
            start_new_session=True,
        )
        RUNNING.add(process.pid)
        try:
            return process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            say(f"stopped after {LIMIT_S} s: {command[0]} …")
            return -1
        finally:
            RUNNING.discard(process.pid)
            kill_group(process.pid)
            process.wait()

    def environment(self) -> dict[str, str]:
        env = dict(os.environ, KV_TIER_TAG=self.tag)
        # What `make compat` reads.
        record = self.layout.build / "compat" / f"{self.tag}.jsonl"
        env.setdefault("KV_TIER_COMPAT", str(record))
        env["PATH"] = f"{self.layout.env(self.tag) / 'bin'}{os.pathsep}{env['PATH']}"
        # An engine start takes twice as long without it.
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        return env

    def simple(self, *command: str | Path) -> Counts:
        """One check that holds or does not."""
        return Counts(failed=1) if self.command(command) else Counts(passed=1)

    def patchtool(self, *command: str) -> Counts:
        return self.simple(sys.executable, "-m", "patchtool", *command)


def junit_counts(path: Path) -> Counts:
    total = Counts()
    for suite in ElementTree.parse(path).getroot().iter("testsuite"):
        tests, failures, errors, skipped = (
            int(suite.get(name, 0))
            for name in ("tests", "failures", "errors", "skipped")
        )
        failed = failures + errors
        total += Counts(tests - failed - skipped, failed, skipped)
    return total


@dataclass
class Failure:
    """A test that failed, and the first line of the reason."""

    stage: str
    test: str
    reason: str

    def __str__(self) -> str:
        return f"{self.stage} {self.test} - {self.reason}"


def failures(path: Path) -> list[Failure]:
    """The tests that failed in a stage, by its results."""
    found: dict[str, Failure] = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        for each in case:
            if each.tag not in ("failure", "error"):
                continue
            test = (
                f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            )
            reason = "".join((each.get("message") or "").splitlines()[:1])
            found.setdefault(test, Failure(path.stem, test, reason))
    return [*found.values()]


BY_FILE = ["--dist", "loadfile", "--no-loadscope-reorder"]
"""A file is played whole by one process: tests of the simulator add up what the tests
before them did, and tests of engines share these. Files come in the order given."""
SIDE_BY_SIDE = ["-n", str(min(os.cpu_count() or 1, 8)), *BY_FILE]
"""For tests of one process each."""
LONGEST = {
    "unit": "stores/contract stores/disk_quota stores/file_processes "
    "worker/sharing_ranks memory/buffer worker/rank_slots stores/servers",
    "sim": "shared_pool events streams elastic state_machine secondary hangs opening "
    "meeting pairs what_ends planted_bugs uncomputed overwritten",
    "e2e": "pool answers shutdown meeting kinds secondary secondary_end parallel "
    "hint_doors seen secondary_servers http pairs secondary_ranks giving_back",
}
"""Tests that come first, so that no core waits for the last of them."""


def pytest(
    run: Run,
    name: str,
    *paths: str,
    more_flags: Sequence[str] = (),
    **environment: str,
) -> Counts:
    """Run some files or folders of tests. If they yield no test, that is a failure.

    A folder that is not there is none: not every checkout has every kind.
    """
    if not any((run.layout.root / path.split("::")[0]).exists() for path in paths):
        say(f"{', '.join(paths)} does not exist")
        return Counts()
    xml = run.results / f"{name}-{run.tag}.xml"
    xml.unlink(missing_ok=True)
    flags = ["-q", "--tb=short", "--durations=5", f"--junitxml={xml}"]
    flags += more_flags
    command = [run.python, "-m", "pytest", *flags, *paths]
    code = run.command(command, **environment)
    counts = junit_counts(xml) if xml.is_file() else Counts()
    if code == 5:
        say(f"{', '.join(paths)}: no tests")
    if code and not counts.failed:
        counts += Counts(failed=1)
    return counts


def lint(run: Run) -> Counts:
    bin_ = run.layout.env(run.tag) / "bin"
    cache = run.layout.build / ".mypy_cache" / run.tag
    what = ["vllm_overlay"]
    counts = Counts()
    if run.first:
        counts += run.simple(bin_ / "ruff", "check", "--quiet", ".")
        counts += run.simple(bin_ / "ruff", "format", "--quiet", "--check", ".")
        what += ["scripts", "ci", "tests"]
    if not run.is_new:
        say("types are those of the newest releases: mypy asks for no others")
        return counts + Counts(skipped=1)
    return counts + run.simple(bin_ / "mypy", f"--cache-dir={cache}", *what)


def docs(run: Run) -> Counts:
    """The pages build, and no link or anchor within them is broken."""
    if not run.first:
        return Counts()
    mkdocs = run.layout.env(run.tag) / "bin" / "mkdocs"
    return run.simple(mkdocs, "build", "--quiet")


def env(run: Run) -> Counts:
    return run.patchtool("env", run.tag)


def patches(run: Run) -> Counts:
    return run.patchtool("check", run.tag)


def tooling(run: Run) -> Counts:
    return pytest(run, "tooling", "tests/tooling") if run.first else Counts()


def scripts(run: Run) -> Counts:
    return pytest(run, "scripts", "tests/scripts") if run.first else Counts()


def field(run: Run) -> Counts:
    return pytest(run, "field", "tests/field") if run.first else Counts()


OF_RANKS = {
    "unit": "copying/dma_engines eviction/adaptive_slru keeper/keeper keeper/partition "
    "keeper/succession memory/buffer memory/opener memory/pages stores/contract "
    "stores/disk_quota stores/file_processes stores/servers worker/rank_slots "
    "worker/sharing_ranks",
    "sim": "missed_fences sharing_streams streams",
}
"""Tests of the own code of ranks, stores and the keeper, which take minutes and find
the same on any release: they call nothing of upstream. Run on the first release."""


def files_of(run: Run, name: str) -> list[str]:
    """What a stage runs, the longest first, without `OF_RANKS` where another release
    runs them. pytest keeps the order of files, not that of files and a folder."""

    def paths(names: str) -> list[str]:
        files = [Path("tests", name, each) for each in names.split()]
        return [str(path.with_name(f"test_{path.name}.py")) for path in files]

    root, left_out = run.layout.root, set()
    if not run.first:
        left_out = {*paths(OF_RANKS.get(name, ""))}
    found = sorted((root / "tests" / name).rglob("test_*.py"))
    files = [*paths(LONGEST[name]), *(str(path.relative_to(root)) for path in found)]
    return [path for path in dict.fromkeys(files) if path not in left_out]


def unit(run: Run) -> Counts:
    return pytest(run, "unit", *files_of(run, "unit"), more_flags=SIDE_BY_SIDE)


FAST = [
    "tests/tooling/test_tidy.py",
    "tests/unit/scheduler/test_pool*.py",
    "tests/unit/scheduler/test_prefetch*.py",
    "tests/unit/eviction/test_*.py",
    "tests/unit/test_plan*.py",
    "tests/unit/scheduler/test_waiting*.py",
    "tests/unit/scheduler/test_costs*.py",
    "tests/unit/scheduler/test_slots*.py",
    "tests/unit/scheduler/test_admission*.py",
    "tests/unit/test_recovery*.py",
]
"""What a change of the scheduler's side breaks first: pool, policies, plan, waiting."""


def fast(run: Run) -> Counts:
    """In less than a minute; a part of `unit` and `tooling`."""
    root = run.layout.root
    found = {pattern: sorted(root.glob(pattern)) for pattern in FAST}
    if gone := [pattern for pattern, paths in found.items() if not paths]:
        say(f"FAST in {__file__} names {gone}, which match nothing")
        return Counts(failed=1)
    paths = [str(p.relative_to(root)) for some in found.values() for p in some]
    return pytest(run, "fast", *paths)


def sim(run: Run) -> Counts:
    """All scripts on the first release. On the others a part of them, and of planted
    bugs those of `test_planted_bugs` only: the checks are the same on each."""
    fewer, flags = {}, SIDE_BY_SIDE
    if not run.first:
        fewer["KV_TIER_SIM_EXAMPLES"] = os.environ.get("KV_TIER_SIM_EXAMPLES", "75")
        flags = [*flags, "-m", "not plants"]
    return pytest(run, "sim", *files_of(run, "sim"), more_flags=flags, **fewer)


TWO_ENGINES = ["-n", "2", *BY_FILE]
"""For tests of engines: one that starts leaves a core to another one."""


def e2e(run: Run) -> Counts:
    return pytest(run, "e2e", *files_of(run, "e2e"), more_flags=TWO_ENGINES)


TURN = ["tests/e2e/test_answers.py", "tests/e2e/test_faults.py"]
"""What runs on one older release in each submission: minutes, not the whole hour."""


def turn(layout: Layout) -> str:
    """The older release whose turn it is, by the number of commits; newest first."""
    newest = layout.newest_tags()
    older = [tag for tag in layout.tags() if tag not in newest][::-1]
    command = ["git", "-C", str(layout.root), "rev-list", "--count", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True)
    return older[int(result.stdout or 0) % len(older)]


def run_of_turn(run: Run) -> Run | None:
    """None except for the first of the newest releases, since each run tests one."""
    if run.tag != run.layout.newest_tags()[0]:
        return None
    tag = turn(run.layout)
    say(f"the turn of {tag}")
    return replace(run, tag=tag, first=False)


def older_env(run: Run) -> Counts:
    """Whether vLLM starts on one older release, by turns, and each prefix of its series
    imports: a module of the overlay may need what only newer releases have."""
    if (other := run_of_turn(run)) is None:
        return Counts()
    counts = env(other)
    return counts if counts.failed else counts + patches(other)


def older(run: Run) -> Counts:
    """One older release end to end, by turns, in part. What to note in ci/tested.toml
    is printed at the end."""
    if (other := run_of_turn(run)) is None:
        return Counts()
    counts = env(other)
    if not counts.failed:
        ran = pytest(other, "older", *TURN, more_flags=TWO_ENGINES)
        today = time.strftime("%Y-%m-%d")
        say(f'ci/tested.toml, ["{other.tag}"]: turn = "{today}: {ran}"')
        counts += ran
    return counts


def upstream(run: Run) -> Counts:
    """Upstream's own tests in one mode: same results as unpatched, which are kept."""
    folder = Path("tests") / "upstream"
    if not (run.layout.root / folder / "run.py").is_file():
        say(f"{folder} does not exist")
        return Counts()
    base = folder / "baseline" / f"{run.tag}-core.txt"
    if not base.is_file() and not run.is_new:
        say(f"{base} does not exist; `make upstream-diff TAG={run.tag}` needs none")
        return Counts(skipped=1)
    sdist = fetch(run.layout, load_pins(run.layout, run.tag).sdist)
    out = run.layout.build / "upstream-tests"
    command = [sys.executable, "-m", "tests.upstream.run", "--tag", run.tag]
    command += ["--python", run.python, "--sdist", str(sdist), "--out", str(out)]
    command += ["--suite", "core", "--mode", run.mode, "--check"]
    result = out / f"{run.tag}-core-{run.mode}.json"
    result.unlink(missing_ok=True)
    failed = bool(run.command(command)) or not result.is_file()
    counts = Counts(failed=1) if failed else Counts(passed=1)
    if result.is_file():
        outcomes = list(json.loads(result.read_text()).values())
        passed = outcomes.count("passed")
        # Those that fail unpatched as well are upstream's business.
        counts += Counts(passed=passed, skipped=len(outcomes) - passed)
    return counts


def upstream_diff(run: Run) -> Counts:
    """Upstream's tests on both builds; not a part of `make test`."""
    sdist = fetch(run.layout, load_pins(run.layout, run.tag).sdist)
    out = run.layout.build / "upstream-tests"
    command = [sys.executable, "-m", "tests.upstream.diff", "--tag", run.tag]
    command += ["--python", run.python, "--sdist", str(sdist), "--out", str(out)]
    return Counts(failed=1) if run.command(command) else Counts(passed=1)


def has_engine(layout: Layout, tag: str) -> bool:
    """Whether there is a CPU build of the tag itself."""
    cpu = load_pins(layout, tag).cpu
    return cpu is not None and not cpu.extensions_only


STAGES: dict[str, Callable[[Run], Counts]] = {
    "env": env,
    "scripts": scripts,
    "tooling": tooling,
    "upstream": upstream,
    "lint": lint,
    "patches": patches,
    "older-env": older_env,
    "field": field,
    "docs": docs,
    "unit": unit,
    "sim": sim,
    "e2e": e2e,
}
"""In their order: of those of one process the longest begin, so that both cores end at
the same time."""
ONE_PROCESS = [*STAGES][1:-3]
"""Stages that leave a core to another one of them. They share nothing that one of them
writes: a tag's source tree and environment are locked by who changes them."""
EXTRA: dict[str, Callable[[Run], Counts]] = {
    "fast": fast,
    "older": older,
    "upstream-diff": upstream_diff,
}
"""Stages that run when they are asked for."""
MODES = {"upstream": ("off", "swapped", "pressed")}
"""Ways to run a stage, each by itself; see `tests.upstream.run`."""


Work = tuple[str, Run]
"""A stage by its name, and what it is run with."""


def run_all(
    work: Sequence[Work], stages: dict[str, Callable[[Run], Counts]]
) -> Iterator[tuple[str, Counts]]:
    """A line for each stage, and its counts."""

    def play(item: Work) -> tuple[str, Counts]:
        name, run = item
        what = f"{name} {run.mode}".strip()
        start = time.monotonic()
        try:
            counts = stages[name](run)
        except ToolError as error:
            say(f"error: {error}")
            counts = Counts(failed=1)
        seconds = time.monotonic() - start
        return f"{what:<17}{run.tag:<10}{seconds:6.0f} s  {counts}", counts

    def play_quietly(item: Work) -> tuple[str, Counts]:
        name, run = item
        log = run.results / f"{name}{run.mode}-{run.tag}.log"
        with log.open("w") as run.output:
            line, counts = play(item)
        shown = log.read_text().splitlines()[-1000 if counts.failed else -8 :]
        say("\n".join([line, *shown, f"All of it: {log}"]))
        return line, counts

    for is_one_process, items in groupby(work, lambda item: item[0] in ONE_PROCESS):
        if is_one_process:
            with two_workers() as workers:
                yield from workers.map(play_quietly, items)
            continue
        for item in items:
            say(f"== {item[0]} {item[1].tag}")
            line, counts = play(item)
            say(line)
            yield line, counts


MAX_AGAIN = 3
"""More failures than that are no accident."""
NEVER_AGAIN = ("answer ", "Violation")
"""Reasons that no slow machine gives, in a test that is marked as well: an answer of
other tokens, and what the simulator found in memory."""


def again(layout: Layout, failed: Sequence[Failure]) -> tuple[list[str], Counts]:
    """Run failed tests that are marked `timed` once more, each alone: a machine that
    others share stands still at times. All others have failed, whatever the reason.

    Returns:
        A line for each failure, and what is to be added to the counts.

    """
    lines, counts = [], Counts()
    for number, failure in enumerate(failed):
        stage, _, tag = failure.stage.partition("-")
        final = len(failed) > MAX_AGAIN or any(r in failure.reason for r in NEVER_AGAIN)
        if not final:
            say(f"== again {failure.test}")
            run = Run(layout, tag, first=False)
            name, flags = f"again-{number}-{stage}", ["-m", "timed"]
            ran = pytest(run, name, failure.test, more_flags=flags)
            final = ran.failed > 0 or not ran.passed
        if not final:
            counts += Counts(passed=1, failed=-1)
        lines.append(f"{'FAILED' if final else 'UNSTABLE'} {failure}")
    return lines, counts


@contextmanager
def two_workers() -> Iterator[ThreadPoolExecutor]:
    """Two and no more: tests with limits of time count on a core for each."""
    with ThreadPoolExecutor(2) as workers:
        try:
            yield workers
        except BaseException:
            # Stopped by hand: what runs in a session of its own does not notice.
            workers.shutdown(wait=False, cancel_futures=True)
            for pid in [*RUNNING]:
                kill_group(pid)
            raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tags",
        default="",
        help="separated by commas, or `all`; the newest two if empty",
    )
    parser.add_argument(
        "stages", nargs="*", metavar="STAGE", help=", ".join(STAGES | EXTRA)
    )
    options = parser.parse_args()
    known = STAGES | EXTRA
    if unknown := set(options.stages) - known.keys():
        parser.error(f"unknown stages {sorted(unknown)}; there are {list(known)}")
    layout = Layout.default()
    tags = layout.newest_tags()
    if options.tags:
        named = re.split(r"[, ]+", options.tags)
        tags = layout.tags() if named == ["all"] else named
    shutil.rmtree(layout.build / "test-results", ignore_errors=True)
    (layout.build / "test-results").mkdir(parents=True)

    work = [
        (name, Run(layout, tag, tag == tags[0], mode))
        for name in options.stages or STAGES
        for tag in tags
        for mode in MODES.get(name, [""])
        # Engines of a release are tested where that release has a CPU build.
        if options.stages or name != "e2e" or has_engine(layout, tag)
    ]
    lines, total = [], Counts()
    for line, counts in run_all(work, known):
        lines.append(line)
        total += counts
    results = sorted((layout.build / "test-results").glob("*.xml"))
    failed = [failure for path in results for failure in failures(path)]
    # At the end, which is what is kept of a long log.
    of_failures, difference = again(layout, failed)
    total += difference
    print("", *lines, *of_failures, total, sep="\n", flush=True)
    return 1 if total.failed or not total.passed else 0


if __name__ == "__main__":
    exit_with(main)
