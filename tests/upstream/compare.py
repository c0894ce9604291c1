# SPDX-License-Identifier: Apache-2.0
"""Compare two runs of upstream's tests: any difference is a failure.

usage: python -m tests.upstream.compare BASE NEW [--differs FILE]...

BASE and NEW are `.json` files of tests.upstream.run or baseline `.txt` files.
"""

import argparse
import sys
from pathlib import Path

from tests.upstream.results import Outcomes, counts, listed, load

ABSENT = "absent"


def differences(base: Outcomes, new: Outcomes) -> dict[str, tuple[str, str]]:
    """Node id to (outcome in base, outcome in new) where these differ."""
    pairs = {
        node_id: (base.get(node_id, ABSENT), new.get(node_id, ABSENT))
        for node_id in sorted(base.keys() | new.keys())
    }
    return {node_id: pair for node_id, pair in pairs.items() if pair[0] != pair[1]}


def judge(base: Outcomes, new: Outcomes, listed_tests: list[str]) -> list[str]:
    """What speaks against "NEW behaves as BASE", one line each; empty if nothing.

    Args:
        base: Outcomes to compare with.
        new: Outcomes under test.
        listed_tests: Tests that must pass in base and fail in new: node ids, or
            names that stand for all cases of a test. Unknown ones are ignored,
            as one list serves several releases.

    """
    expected = {
        node_id
        for node_id in base
        if node_id in listed_tests or node_id.partition("[")[0] in listed_tests
    }
    complaints = []
    for node_id, (was, now) in differences(base, new).items():
        if node_id in expected and (was, now) == ("passed", "failed"):
            expected.remove(node_id)
        else:
            complaints.append(f"{was} -> {now}: {node_id}")
    complaints += [
        f"listed as different, but is not: {node_id}"
        for node_id in sorted(expected)
        if base[node_id] == new.get(node_id)
    ]
    return complaints


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upstream.compare")
    parser.add_argument("base", type=Path, help="outcomes to compare with")
    parser.add_argument("new", type=Path, help="outcomes under test")
    parser.add_argument(
        "--differs",
        type=Path,
        action="append",
        default=[],
        help="list of tests that must fail in NEW, with the reasons as comments; "
        "can be given more than once",
    )
    args = parser.parse_args(argv)
    base, new = load(args.base), load(args.new)
    listed_tests = [node_id for path in args.differs for node_id in listed(path)]

    print(f"base {args.base}: {counts(base)}")
    print(f"new  {args.new}: {counts(new)}")
    complaints = judge(base, new, listed_tests)
    for complaint in complaints:
        print(complaint)
    if complaints:
        print(f"{len(complaints)} tests differ from what is expected.")
        return 1
    known = len(differences(base, new))
    print("Same results" + (f", but for {known} listed cases." if known else "."))
    return 0


if __name__ == "__main__":
    sys.exit(main())
