# SPDX-License-Identifier: Apache-2.0
"""Tries the newest series on releases of upstream that have none, and reports.

    PYTHONPATH=scripts python3 ci/new_releases.py [--report FILE]

Works in a copy of the patches under build/, so that nothing is left in the checkout.
Ends with 0 when nothing is to be done: no new release, or the series applies to it as
it is. Ends with 1 when a release needs a hand; the report has the conflicts.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shutil
from pathlib import Path

from patchtool.check import check_tag
from patchtool.config import Layout, ToolError, exit_with, version_key
from patchtool.index import project_files
from patchtool.newtag import new_tag

# Releases only: no candidates, no builds after a release.
SDIST = re.compile(r"vllm-(\d+\.\d+\.\d+)\.tar\.gz")


def new_tags(layout: Layout) -> list[str]:
    """Tags that the index has beyond the newest that is kept here, oldest first."""
    names = (SDIST.fullmatch(file.name) for file in project_files("vllm"))
    found = {f"v{name[1]}" for name in names if name}
    newest = version_key(layout.tags()[-1])
    return sorted((t for t in found if version_key(t) > newest), key=version_key)


def scratch_copy(layout: Layout) -> Layout:
    """A checkout of its own, with the same downloads."""
    root = layout.build / "new-releases"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for path in (layout.patches, layout.overlay):
        shutil.copytree(path, root / path.name)
    return Layout(root, layout.cache)


def attempt(layout: Layout, source: str, tag: str) -> tuple[bool, str]:
    """Whether the series of `source` holds on `tag`, and what was printed."""
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        try:
            new_tag(layout, source, tag, resume=False)
            good = not check_tag(layout, tag)
        except ToolError as error:
            print(f"error: {error}")
            good = False
    return good, log.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, help="a Markdown file to append to")
    options = parser.parse_args()
    layout = Layout.default()
    tags = new_tags(layout)
    source = layout.tags()[-1]
    lines = [] if tags else [f"Nothing is newer than {source}.\n"]
    failed = False
    copy = scratch_copy(layout)
    for tag in tags:
        good, log = attempt(copy, source, tag)
        failed |= not good
        what = "applies" if good else "needs a hand"
        lines.append(f"## {tag}: the series of {source} {what}\n\n```\n{log}```\n")
    report = "\n".join(lines)
    print(report)
    if options.report is not None:
        with options.report.open("a") as out:
            out.write(report)
    return 1 if failed else 0


if __name__ == "__main__":
    exit_with(main)
