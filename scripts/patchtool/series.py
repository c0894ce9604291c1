# SPDX-License-Identifier: Apache-2.0
"""Walks a series patch by patch in a scratch copy, for refresh and for the checks."""

from __future__ import annotations

import datetime
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .config import Layout, Patch, ToolError, read_series, say
from .quilt import quilt
from .tree import touched_files, upstream_tree


@dataclass(frozen=True)
class Step:
    """One patch, applied. refreshed: its text after `quilt refresh`."""

    patch: Patch
    refreshed: str
    stage: Path


def walk(layout: Layout, tag: str, work: Path) -> Iterator[Step]:
    """Push one patch after the other on a copy of the patches and of what they touch.

    work/stage is the tree; the caller reads it between the steps. Nothing outside
    `work` changes.

    Raises:
        ToolError: a patch does not apply with zero fuzz, or leaves files of its own.
    """
    stage, copy = work / "stage", work / "patches"
    for folder in (stage, copy):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    series = read_series(layout, tag)
    for patch in series:
        shutil.copyfile(patch.path, copy / patch.name)
    shutil.copyfile(layout.series(tag), copy / "series")
    for name in touched_files(layout, tag):
        if (source := upstream_tree(layout, tag) / name).is_file():
            (stage / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, stage / name)
    for patch in series:
        result = quilt(layout, tag, stage, "push", patches=copy)
        if result.returncode:
            raise ToolError(f"{patch.name} does not apply:\n{result.stdout.rstrip()}")
        result = quilt(layout, tag, stage, "refresh", patches=copy)
        if result.returncode:
            raise ToolError(f"{patch.name}: quilt refresh:\n{result.stdout.rstrip()}")
        leftovers = [*stage.rglob("*.rej"), *stage.rglob("*.orig")]
        if leftovers:
            names = ", ".join(str(p.relative_to(stage)) for p in leftovers)
            raise ToolError(f"{patch.name} leaves behind: {names}")
        yield Step(patch, (copy / patch.name).read_text(), stage)


def set_date(patch: Patch) -> None:
    """Note in the header that the patch changed today."""
    text = patch.text
    today = datetime.date.today().isoformat()
    header = re.sub(r"(?m)^Last-Update: .*$", f"Last-Update: {today}", patch.header)
    patch.path.write_text(header + text[len(patch.header) :])


def rewrite(layout: Layout, tag: str) -> list[str]:
    """Rewrite every patch of a tag as `quilt refresh` does; the names of those that
    changed."""
    changed = []
    for step in walk(layout, tag, layout.build / "refresh" / tag):
        if step.refreshed != step.patch.text:
            step.patch.path.write_text(step.refreshed)
            changed.append(step.patch.name)
    return changed


def refresh(layout: Layout, tag: str) -> None:
    """Rewrite every patch of a tag as `quilt refresh` does; headers stay."""
    changed = rewrite(layout, tag)
    for name in changed:
        say(f"{tag}: {name} refreshed")
    say(f"{tag}: {len(changed)} of {len(read_series(layout, tag))} patches changed")
