# SPDX-License-Identifier: Apache-2.0
"""Changes modules of the overlay, one place at a time, and runs tests on each.

    make mutate FILES='scheduler/*.py' TESTS='tests/unit/test_p*.py' [ARGS='...']

A mutant that no test notices is a survivor: the tests say nothing about that place, or
it does not matter. FILES are paths or patterns below the overlay. TESTS are what pytest
takes, the quickest and most telling first, since a run ends with its first failure.
`--then TEST ...` names others, for mutants that the first do not notice.

vLLM and the tests are imported once. Each mutant is a fork of that process, in which
one function has another body; so what runs when a module is imported is not changed.
Results are appended to OUT/results.jsonl, and a second run goes on where the first
ended, if files and tests are the same. With `--sample N` only N mutants of each file
are run, the same ones each time. Ends with 1 when a mutant survived that `--known FILE`
does not name (a line each, as printed but for its place, and the reason behind a `#`).
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import os
import signal
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import pytest

from mutants import OVERLAY, ROOT, Mutant, changed_tree, mutants_of

CRASHED, SKIPPED = 70, 71
"""Exit statuses that pytest does not have."""


# ------------------------------------------------------------------------- runs


Functions = dict[tuple[str, str, int], list[FunctionType]]
"""By file, name and first line: all that were made of the same text."""


def _functions(modules: Iterable[ModuleType]) -> Functions:
    files = {module.__file__ for module in modules}
    found: Functions = {}
    for each in gc.get_objects():
        # Some objects of torch warn when they are asked for their class.
        if type(each) is FunctionType and each.__code__.co_filename in files:
            code = each.__code__
            key = (code.co_filename, code.co_name, code.co_firstlineno)
            found.setdefault(key, []).append(each)
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _apply(mutant: Mutant, functions: Functions) -> bool:
    """Give the changed function its other body. False: there is none to change."""
    file = _module(mutant.path).__file__
    assert file is not None
    is_changed = False
    tree, first_line = changed_tree(mutant)
    for code in _codes(compile(tree, file, "exec")):
        key = (file, code.co_name, code.co_firstlineno)
        if code.co_firstlineno != first_line:
            continue
        for function in functions.get(key, []):
            old = function.__code__
            if code.co_freevars != old.co_freevars:
                continue
            function.__code__ = code
            is_changed = True
    return is_changed


def _module(path: Path) -> ModuleType:
    parts = path.relative_to(OVERLAY).with_suffix("").parts
    return importlib.import_module(
        ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    )


def _run_tests(tests: Sequence[str]) -> int:
    """Returns pytest's exit status."""
    options = ["-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
    return int(pytest.main([*options, "-W", "ignore", *tests]))


def _in_fork(
    tests: Sequence[str], mutant: Mutant | None, functions: Functions, limit_s: float
) -> str:
    """`survived`, `noticed`, `hung` (which is to be noticed), or `skipped`: the
    function does not exist here."""
    pid = os.fork()
    if pid == 0:
        status = CRASHED
        try:
            os.setpgid(0, 0)
            null = os.open(os.devnull, os.O_WRONLY)
            for number in (1, 2):
                os.dup2(null, number)
            is_there = mutant is None or _apply(mutant, functions)
            status = _run_tests(tests) if is_there else SKIPPED
        finally:
            os._exit(status)
    end = time.monotonic() + limit_s
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > end:
            # Its own group: with it the processes that its tests began.
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hung"
        time.sleep(0.02)
    code = os.waitstatus_to_exitcode(status)
    return {0: "survived", SKIPPED: "skipped"}.get(code, "noticed")


def _warm_up(tests: Sequence[str], files: Iterable[Path]) -> Functions:
    """Import all that is needed."""
    with redirect_stdout(StringIO()):
        status = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *tests])
    if status:
        raise SystemExit(f"The tests cannot be collected: pytest ended with {status}.")
    modules = []
    for path in files:
        modules.append(_module(path))
        file = modules[-1].__file__
        if file is None or Path(file).read_text() != path.read_text():
            raise SystemExit(f"{path.name} is not what is installed: run make sync.")
    functions = _functions(modules)
    gc.freeze()
    return functions


def _files(patterns: Sequence[str]) -> list[Path]:
    found: list[Path] = []
    for pattern in patterns:
        base = OVERLAY / "vllm" / "v1" / "kv_tier"
        below = [*base.glob(pattern)] if not Path(pattern).is_absolute() else []
        paths = sorted(below) or [Path(pattern).resolve()]
        for path in paths:
            if not path.is_file() or not path.is_relative_to(OVERLAY):
                raise SystemExit(f"{pattern}: no file of the overlay.")
            found.append(path)
    return found


def _test_files(tests: Sequence[str]) -> list[Path]:
    paths = [Path(test.split("::")[0]) for test in tests if not test.startswith("-")]
    return sorted(f for p in paths for f in (p.rglob("*.py") if p.is_dir() else [p]))


def _fingerprint(files: Sequence[Path], tests: Sequence[str]) -> str:
    """Results are of these files and tests."""
    digest = hashlib.sha256(" ".join(tests).encode())
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _drawn(mutants: list[Mutant], number: int) -> list[Mutant]:
    """So many (0: all), in their order: which ones, only their names decide."""
    if not number:
        return mutants
    names = sorted(
        (m.name for m in mutants), key=lambda name: zlib.crc32(name.encode())
    )
    chosen = {*names[:number]}
    return [m for m in mutants if m.name in chosen]


def _alone_s(tests: Sequence[str]) -> float:
    """How long they take without any change."""
    begun = time.monotonic()
    if _in_fork(tests, None, {}, 600.0) != "survived":
        raise SystemExit(f"Tests fail without any change: {' '.join(tests)}")
    alone_s = time.monotonic() - begun
    print(f"{' '.join(tests)}: {alone_s:.1f} s", flush=True)
    return alone_s


def _run(
    suites: Sequence[tuple[Sequence[str], float]], mutant: Mutant, functions: Functions
) -> str:
    """What the first tests say that notice it; `later` if the second do."""
    result = "survived"
    for number, (tests, alone_s) in enumerate(suites):
        result = _in_fork(tests, mutant, functions, 10 + 5 * alone_s)
        if result != "survived":
            return "later" if number and result != "skipped" else result
    return result


def _known(path: Path | None) -> set[str]:
    if path is None:
        return set()
    lines = path.read_text().splitlines()
    return {line.rsplit("#", 1)[0].strip() for line in lines} - {""}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--tests", nargs="+", required=True, metavar="TEST")
    parser.add_argument("--then", nargs="+", default=[], metavar="TEST")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutate")
    parser.add_argument("--sample", type=int, default=0, metavar="N")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--known", type=Path, metavar="FILE")
    args = parser.parse_args()
    files = _files(args.files)
    mutants = [m for path in files for m in _drawn(mutants_of(path), args.sample)]
    every_test = [*args.tests, *args.then]
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / "results.jsonl"
    told = results.read_text().splitlines() if results.exists() else []
    key = _fingerprint([*files, *_test_files(every_test)], every_test)
    known_results = {
        row["mutant"]: row["result"]
        for row in map(json.loads, told)
        if row["of"] == key
    }
    print(f"{len(mutants)} mutants, {len(known_results)} run before", flush=True)
    functions = _warm_up(every_test, files)
    suites = [(tests, _alone_s(tests)) for tests in (args.tests, args.then) if tests]
    end = time.monotonic() + 60 * args.minutes
    outcome: dict[str, str] = {}
    with results.open("a") as file:
        for mutant in mutants:
            result = known_results.get(mutant.name)
            if result is None:
                if time.monotonic() > end:
                    print("Out of time; run it again to go on.", flush=True)
                    break
                result = _run(suites, mutant, functions)
                row = {"mutant": mutant.name, "result": result, "of": key}
                file.write(json.dumps(row) + "\n")
                file.flush()
            outcome[mutant.name] = result
            if result == "survived":
                print(f"{mutant.name}    line {mutant.line}", flush=True)
    for path in files:
        below = path.relative_to(OVERLAY).as_posix()
        ends = [end for name, end in outcome.items() if name.startswith(f"{below}: ")]
        print(f"{len(ends):4} of {below}: {dict(Counter(ends))}")
    counts = Counter(outcome.values())
    print(f"{len(outcome)} of {len(mutants)} mutants: {dict(counts)}")
    survivors = {name for name, result in outcome.items() if result == "survived"}
    return 1 if survivors - _known(args.known) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        gc.unfreeze()  # Or nanobind reports leaks when the process ends.
