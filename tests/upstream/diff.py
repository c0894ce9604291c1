# SPDX-License-Identifier: Apache-2.0
"""Run upstream's tests on the unpatched and the patched build, and compare.

usage: python -m tests.upstream.diff --tag v0.32.0 --python VENV/bin/python \\
           --sdist vllm-0.32.0.tar.gz --out DIR [--suite core]

The patched build runs with the tier off, and, for the parts that build BlockPools,
with the tiered pool swapped in. Ends with 0 only if all results are the same but for
those of swapped_differs.txt. The modes of `tests.upstream.run` say more.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from tests.upstream import run
from tests.upstream.compare import differences, judge
from tests.upstream.results import Outcomes, counts, listed, load
from tests.upstream.unpatched import make_unpatched


def outcomes(args: argparse.Namespace, python: Path, mode: str, out: Path) -> Outcomes:
    """Of one run of the suite."""
    command = ["--tag", args.tag, "--sdist", str(args.sdist), "--suite", args.suite]
    command += ["--python", str(python), "--mode", mode, "--out", str(out)]
    run.main(command)
    return load(out / f"{args.tag}-{args.suite}-{mode}.json")


def table(base: Outcomes, new: Outcomes) -> list[str]:
    """A line for each folder of tests: how many, passed before and now."""
    folders: dict[str, Counter[str]] = {}
    for node_id in base.keys() | new.keys():
        folder = folders.setdefault(node_id.rpartition("/")[0], Counter())
        folder["tests"] += 1
        folder["base"] += base.get(node_id) == "passed"
        folder["new"] += new.get(node_id) == "passed"
    return [
        f"  {name:<50}{c['tests']:6} tests, passed {c['base']:5} -> {c['new']:5}"
        for name, c in sorted(folders.items())
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upstream.diff")
    parser.add_argument("--tag", required=True, help="upstream release, as v0.32.0")
    parser.add_argument(
        "--python", type=Path, required=True, help="Python of the patched build"
    )
    parser.add_argument("--sdist", type=Path, required=True, help="upstream's tarball")
    parser.add_argument("--suite", choices=run.SUITES, default="full")
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    args = parser.parse_args(argv)
    out = args.out.absolute()
    python = args.python.absolute()
    build = run.Build.probe(python, args.tag)
    if not build.patched:
        raise SystemExit(f"--python {python} has the unpatched build. Give the other.")
    unpatched = make_unpatched(
        build.package, args.sdist, python, out / f"unpatched-{args.tag}"
    )
    base = outcomes(args, unpatched, "off", out / "unpatched")
    status = 0
    for mode in ("off", "swapped"):
        new = outcomes(args, python, mode, out)
        lists = [run.HERE / name for name in run.DIFFERS[mode]]
        complaints = judge(base, new, [line for path in lists for line in listed(path)])
        print(f"\n{args.tag}, {args.suite}: unpatched -> patched, {mode}")
        print(*table(base, new), sep="\n")
        print(f"  unpatched: {counts(base)}\n  patched:   {counts(new)}")
        print(*(f"  {complaint}" for complaint in complaints), sep="\n")
        known = len(differences(base, new)) - len(complaints)
        print(f"  {len(complaints)} differences, {known} more that are listed.")
        status |= bool(complaints)
    return status


if __name__ == "__main__":
    sys.exit(main())
