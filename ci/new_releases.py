# SPDX-License-Identifier: Apache-2.0
"""Carries series to releases of upstream that have none, and reports.

    PYTHONPATH=scripts python3 ci/new_releases.py [--report FILE] [--keep]

Tries releases newer than all that are kept, and those between two kept ones from
`--since` on. Works in a copy of the patches under build/, so that nothing is left in
the checkout; with --keep the series that nothing stopped are copied into it. Ends with
0 when nothing stopped, with 1 when a release needs a hand; the report has the stops and
every question that is open.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from patchtool.check import check_tag
from patchtool.config import Layout, ToolError, exit_with, version_key
from patchtool.index import project_files
from patchtool.newtag import new_tag

# Releases only: no candidates, no builds after a release.
SDIST = re.compile(r"vllm-(\d+\.\d+\.\d+)\.tar\.gz")
SINCE = "v0.28.0"
"""Older releases in between are carried when somebody asks for one."""


@dataclass(frozen=True)
class Attempt:
    """What became of one release. open: questions that somebody must answer."""

    tag: str
    stopped: bool
    log: str
    report: str = ""
    open: int = 0

    def __str__(self) -> str:
        what = "applies"
        if self.stopped:
            what = "needs a hand"
        elif self.open:
            what = f"applies, {self.open} questions are open"
        shown = f"```\n{self.log}```\n\n```\n{self.report}```"
        return f"## {self.tag}: a series {what}\n\n{shown}\n"


def missing_tags(layout: Layout, since: str) -> list[str]:
    """Tags that the index has and nobody keeps, from `since` on, oldest first."""
    names = (SDIST.fullmatch(file.name) for file in project_files("vllm"))
    found = {f"v{name[1]}" for name in names if name} - set(layout.tags())
    first = version_key(since)
    return sorted((t for t in found if version_key(t) > first), key=version_key)


def scratch_copy(layout: Layout) -> Layout:
    """A checkout of its own, with the same downloads."""
    root = layout.build / "new-releases"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for path in (layout.patches, layout.overlay):
        shutil.copytree(path, root / path.name)
    shutil.copyfile(layout.root / "VERSION", root / "VERSION")
    return Layout(root, layout.cache)


def attempt(layout: Layout, tag: str) -> Attempt:
    """Carry the series that fits best."""
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        try:
            new_tag(layout, None, tag, resume=False)
        except ToolError as error:
            print(f"error: {error}")
            return Attempt(tag, True, log.getvalue())
        path = layout.patches / tag / "differs"
        kept = path.read_text()
        # All else must hold; the answers are for the pull request.
        number = itertools.count()
        path.write_text(re.sub(r"(?m)^= \?$", lambda _: f"= {next(number)}", kept))
        errors = check_tag(layout, tag)
        path.write_text(kept)
    return Attempt(tag, bool(errors), log.getvalue(), kept, kept.count("\n= ?\n"))


def keep(layout: Layout, copy: Layout, tag: str) -> None:
    """Copy a series into the checkout."""
    shutil.copytree(copy.patches / tag, layout.patches / tag)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, help="a Markdown file to append to")
    parser.add_argument("--since", default=SINCE, help="a tag; not older ones")
    parser.add_argument(
        "--keep", action="store_true", help="in the checkout's patches/"
    )
    options = parser.parse_args()
    layout = Layout.default()
    tags = missing_tags(layout, options.since)
    copy = scratch_copy(layout)
    attempts = [attempt(copy, tag) for tag in tags]
    if options.keep:
        for each in attempts:
            if not each.stopped:
                keep(layout, copy, each.tag)
    report = "\n".join(str(each) for each in attempts)
    report = report or f"No release after {options.since} is without a series.\n"
    print(report)
    if options.report is not None:
        with options.report.open("a") as out:
            out.write(report)
    return 1 if any(each.stopped for each in attempts) else 0


if __name__ == "__main__":
    exit_with(main)
