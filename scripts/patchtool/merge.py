# SPDX-License-Identifier: Apache-2.0
"""Makes the changes of a patch in the files of another release: git's three-way merge,
and git's detection of renamed files."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from .config import Layout, ToolError
from .hunks import Files, diff, parse_diff
from .tree import upstream_tree

IMPORT = re.compile(r"\s*(?:from [\w.]+ )?import [^(\\]+")


@dataclass(frozen=True)
class Conflict:
    """Lines that upstream and the patch both changed. at: the first line of `text` in
    the merged file. why: how it was resolved; empty where a person must do it."""

    file: str
    ours: tuple[str, ...]
    base: tuple[str, ...]
    theirs: tuple[str, ...]
    at: int
    text: tuple[str, ...]
    why: str = ""


@dataclass(frozen=True)
class Merged:
    """Files with the changes of a patch. marked: with conflict markers where a person
    must decide; after: with upstream's lines there."""

    before: Files
    after: Files
    marked: Files
    conflicts: list[Conflict] = field(default_factory=list)

    @property
    def stopped(self) -> list[Conflict]:
        return [c for c in self.conflicts if not c.why]


def _resolve(
    ours: list[str], base: list[str], theirs: list[str]
) -> tuple[list[str], str]:
    """The lines of a conflict, and why those; upstream's and no reason if unsure."""
    size = len(base)
    if size and theirs[-size:] == base:
        return theirs[:-size] + ours, "upstream changed what follows"
    if size and theirs[:size] == base:
        return ours + theirs[size:], "upstream changed what stands before"
    sides = ["".join(f"{x}\n" for x in lines) for lines in (base, theirs)]
    text = list(ours)
    for edit in parse_diff(diff({"f": sides[0]}, {"f": sides[1]})):
        size = len(edit.removed)
        if not size and all(map(IMPORT.fullmatch, edit.added)):
            lines = [n for n, t in enumerate(text) if IMPORT.fullmatch(t)]
            if lines:
                later = (n for n in lines if text[n] > edit.added[0])
                at = next(later, lines[-1] + 1)
                text[at:at] = edit.added
                continue
        found = [
            n for n in range(len(text)) if tuple(text[n : n + size]) == edit.removed
        ]
        if not size or len(found) != 1:
            return ours, ""
        text[found[0] : found[0] + size] = edit.added
    return text, "upstream changed lines round it"


def _git_merge(ours: str, base: str, theirs: str, label: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        names = ["ours", "base", "theirs"]
        for name, text in zip(names, (ours, base, theirs)):
            (Path(folder) / name).write_text(text)
        labels = ["-L", "upstream", "-L", "before the patch", "-L", label]
        command = ["git", "merge-file", "-p", "--diff3", *labels, *names]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if result.returncode < 0 or result.returncode > 127:
        raise ToolError(f"git merge-file fails: {result.stderr.strip()}")
    return result.stdout


@lru_cache(maxsize=4096)
def merge_text(
    file: str, ours: str, base: str, theirs: str, label: str = "the patch"
) -> tuple[str, str, tuple[Conflict, ...]]:
    """The merged text, that with conflict markers, and the conflicts."""
    if ours == base or base == theirs:
        text = theirs if ours == base else ours
        return text, text, ()
    after: list[str] = []
    marked: list[str] = []
    conflicts: list[Conflict] = []
    parts: list[list[str]] = []
    shown: list[str] = []
    for line in _git_merge(ours, base, theirs, label).splitlines():
        if line.startswith("<<<<<<< ") and not parts:
            parts, shown = [[]], [line]
        elif parts and (line.startswith("||||||| ") or line == "======="):
            parts.append([])
            shown.append(line)
        elif parts and line.startswith(">>>>>>> "):
            chosen, why = _resolve(*parts)
            sides = [tuple(part) for part in parts]
            at = len(after)
            conflicts.append(
                Conflict(file, sides[0], sides[1], sides[2], at, tuple(chosen), why)
            )
            after += chosen
            marked += chosen if why else [*shown, line]
            parts = []
        elif parts:
            parts[-1].append(line)
            shown.append(line)
        else:
            after.append(line)
            marked.append(line)
    joined = ("".join(f"{line}\n" for line in lines) for lines in (after, marked))
    return next(joined), next(joined), tuple(conflicts)


def merge(
    old: Files,
    new: Files,
    ours: Files,
    renamed: dict[str, str] | None = None,
    label: str = "the patch",
) -> Merged:
    """Make the change from `old` to `new` in the files of another release. renamed:
    the names that files have there."""
    after, marked, conflicts = dict(ours), dict(ours), []
    for name in sorted({*old, *new}):
        base, theirs = old.get(name), new.get(name)
        if base == theirs:
            continue
        file = (renamed or {}).get(name, name)
        here = after.get(file)
        if base is None and here is None:
            after[file] = marked[file] = theirs
        elif here is None or base is None or theirs is None:
            was, now = (tuple((t or "").splitlines()) for t in (base, theirs))
            conflicts.append(Conflict(file, (), was, now, 0, ()))
        else:
            text, shown, found = merge_text(file, here, base, theirs, label)
            after[file], marked[file] = text, shown
            conflicts += found
    return Merged(ours, after, marked, conflicts)


@lru_cache(maxsize=64)
def _renames(old: Path, new: Path, names: tuple[str, ...]) -> dict[str, str]:
    """What git takes for the new names of files that are gone."""
    added = [
        path.relative_to(new).as_posix()
        for path in sorted((new / "vllm").rglob("*.py"))
        if not (old / path.relative_to(new)).exists()
    ]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for side, tree, files in (("a", old, names), ("b", new, added)):
            (root / side).mkdir()
            for file in files:
                (root / side / file).parent.mkdir(parents=True, exist_ok=True)
                (root / side / file).write_bytes((tree / file).read_bytes())
        command = ["git", "diff", "--no-index", "-M", "-l0", "--name-status", "a", "b"]
        result = subprocess.run(command, cwd=root, capture_output=True, text=True)
    found = {}
    for line in result.stdout.splitlines():
        kind, *files = line.split("\t")
        if kind[0] == "R":
            found[files[0][2:]] = files[1][2:]
    return found


def renames(
    layout: Layout, source: str, tag: str, names: Iterable[str]
) -> dict[str, str]:
    """The names that files of one release have in another where they were renamed."""
    old, new = upstream_tree(layout, source), upstream_tree(layout, tag)
    gone = [n for n in names if (old / n).is_file() and not (new / n).is_file()]
    return _renames(old, new, tuple(sorted(set(gone)))) if gone else {}
