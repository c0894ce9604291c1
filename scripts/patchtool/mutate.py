# SPDX-License-Identifier: Apache-2.0
"""`make mutate-series`: spoils each edit of a series, one at a time.

Each edit is taken out, moved one line past either neighbour, and made twice; which of
the checks of `make check-patches` says so is counted.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from . import places, seams
from .carrying import State, carry, states
from .config import Layout, ToolError, say
from .hunks import Edit, Files, apply, diff, parse

KINDS = ("removed", "moved up", "moved down", "twice")


def _spoilt(state: State, number: int, kind: str) -> Files | None:
    """The files behind a patch of which one edit is spoilt; None where it cannot be."""
    edits = parse(state.patch)
    edit = edits[number]
    lines = (state.before.get(edit.file) or "").splitlines()
    if kind == "removed":
        edits[number : number + 1] = []
    elif kind == "twice":
        if not edit.added:
            return None
        edits[number] = replace(edit, added=edit.added * 2)
    else:
        # An edit that replaces lines moves what it adds.
        step = _step(lines, edit, -1 if kind == "moved up" else 1)
        others = [e for e in edits if e.file == edit.file and e is not edit]
        if step is None or not edit.added:
            return None
        if any(e.first < step + 1 and step < e.end + (not e.removed) for e in others):
            return None
        moved = Edit(edit.file, step, (), edit.added)
        edits[number : number + 1] = (
            [replace(edit, added=()), moved] if edit.removed else [moved]
        )
    return apply(state.before, edits)


def _step(lines: list[str], edit: Edit, direction: int) -> int | None:
    """Where lines are added that go past the next line with something in it."""
    at = edit.first - 1 if direction < 0 else edit.end
    while 0 <= at < len(lines) and not lines[at].strip():
        at += direction
    if not 0 <= at < len(lines):
        return None
    return at if direction < 0 else at + 1


def mutants(series: list[State]) -> Iterator[tuple[str, dict[str, str]]]:
    """What was done to which edit, and the texts of the patches that change with it;
    none where a file does not compile."""
    for number, state in enumerate(series):
        for which, edit in enumerate(parse(state.patch)):
            first = next((t for t in (*edit.added, *edit.removed) if t.strip()), "")
            for kind in KINDS:
                files = _spoilt(state, which, kind)
                if files is None or files == state.after:
                    continue
                name = f"{state.patch.name[:4]} {edit.file}: {first.strip()} {kind}"
                header = state.patch.header
                texts = {state.patch.name: header + diff(state.before, files)}
                try:
                    texts |= _later(series[number + 1 :], files)
                except ToolError:
                    texts = {}
                yield name, texts


def _later(series: list[State], files: Files) -> dict[str, str]:
    """The texts of the patches behind a spoilt one.

    Raises:
        ToolError: a file does not compile any more.
    """
    texts = {}
    for state in series:
        moved = carry(parse(state.patch), state.before, state.after, files)
        texts[state.patch.name] = state.patch.header + diff(moved.before, moved.after)
        files = moved.after
    return texts


def _noticed(layout: Layout, tag: str) -> str:
    """Which check says that something is wrong; empty if none does."""
    for name, check in (("seams", seams.check), ("places", places.check)):
        try:
            check(layout, tag)
        except ToolError:
            return name
    return ""


def mutate(layout: Layout, tag: str) -> Counter[str]:
    """Spoil a copy of the series in each way; how often which check noticed.

    Raises:
        ToolError: something was noticed by none, or the series itself is wrong.
    """
    series = states(layout, tag)
    scratch = Layout(layout.build / "mutate", layout.cache)
    shutil.rmtree(scratch.root, ignore_errors=True)
    scratch.build.parent.mkdir(parents=True)
    scratch.build.symlink_to(layout.build)
    folder = scratch.patches / tag
    shutil.copytree(layout.patches / tag, folder)
    shutil.copyfile(layout.patches / seams.TABLE, scratch.patches / seams.TABLE)
    if wrong := _noticed(scratch, tag):
        raise ToolError(f"{tag}: {wrong} do not hold before anything is spoilt")
    kept = {path: path.read_text() for path in folder.iterdir()}
    found: Counter[str] = Counter()
    missed = []
    for name, texts in mutants(series):
        _write(folder, texts)
        noticed = _noticed(scratch, tag) if texts else "the compiler"
        found[noticed or "nothing"] += 1
        if not noticed:
            missed.append(name)
        for path, text in kept.items():
            path.write_text(text)
    shutil.rmtree(scratch.root)
    shown = ", ".join(f"{count} by {name}" for name, count in found.most_common())
    say(f"{tag}: {found.total()} spoilt series, noticed: {shown}")
    if missed:
        raise ToolError(f"{tag}: nothing noticed\n  " + "\n  ".join(missed))
    return found


def _write(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).write_text(text)
