# SPDX-License-Identifier: Apache-2.0
"""Reads and writes what a patch changes, as runs of lines, without quilt."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .config import Patch, ToolError

Files = Mapping[str, str | None]
"""Path in the tree to text; None where there is no such file."""


@dataclass(frozen=True)
class Edit:
    """One run of changed lines: from `first` (counted from 0) of the file as it was,
    `removed` goes and `added` comes."""

    file: str
    first: int
    removed: tuple[str, ...]
    added: tuple[str, ...]

    @property
    def end(self) -> int:
        return self.first + len(self.removed)

    def __str__(self) -> str:
        lines = [f"-{line}" for line in self.removed]
        return "\n".join([*lines, *(f"+{line}" for line in self.added)])


def split_files(text: str) -> dict[str, list[str]]:
    """The lines of each file's part of a diff, headers left out."""
    parts: dict[str, list[str]] = {}
    lines = text.splitlines()
    for number, line in enumerate(lines):
        following = lines[number + 1] if number + 1 < len(lines) else ""
        if line.startswith("--- ") and following.startswith("+++ "):
            names = [part[4:].split("\t")[0] for part in (following, line)]
            name = names[1] if names[0] == "/dev/null" else names[0]
            current = parts.setdefault(name.split("/", 1)[1], [])
        elif parts and not line.startswith("+++ "):
            current.append(line)
    return parts


def parse(patch: Patch) -> list[Edit]:
    """What a patch changes, in order; see `parse_diff`."""
    return parse_diff(patch.text[len(patch.header) :])


def parse_diff(text: str) -> list[Edit]:
    """What a diff changes, in order.

    Raises:
        ToolError: it speaks of a file without an end of line at its end.
    """
    edits: list[Edit] = []
    for file, lines in split_files(text).items():
        at = 0
        removed: list[str] = []
        added: list[str] = []
        for line in [*lines, " "]:
            if line[:1] in ("@", " ", "") and (removed or added):
                edit = Edit(file, at - len(removed), tuple(removed), tuple(added))
                edits.append(edit)
                removed, added = [], []
            if match := re.match(r"@@ -(\d+)(?:,(\d+))? ", line):
                # A range of no lines names the one before it.
                at = int(match[1]) - (match[2] != "0")
            elif line.startswith("-"):
                removed.append(line[1:])
                at += 1
            elif line.startswith("+"):
                added.append(line[1:])
            elif line.startswith("\\"):
                raise ToolError(f"{file} has no end of line at its end")
            else:
                at += 1
    return edits


def replace(text: str | None, edits: Iterable[Edit]) -> str | None:
    """The text with edits made where they say; None when no line is left.

    Raises:
        ToolError: lines to remove are not there.
    """
    lines = (text or "").splitlines()
    done = list(lines)
    # Stable: of insertions at one place the last comes first, from the end.
    for edit in reversed(sorted(edits, key=lambda e: (e.first, e.end))):
        if tuple(lines[edit.first : edit.end]) != edit.removed:
            raise ToolError(f"{edit.file}:{edit.first + 1} has other lines:\n{edit}")
        done[edit.first : edit.end] = edit.added
    return "".join(f"{line}\n" for line in done) if done or text == "" else None


def apply(files: Files, edits: Iterable[Edit]) -> dict[str, str | None]:
    """All files, with the edits made where they say."""
    by_file: dict[str, list[Edit]] = {}
    for edit in edits:
        by_file.setdefault(edit.file, []).append(edit)
    changed = {name: replace(files.get(name), found) for name, found in by_file.items()}
    return {**files, **changed}


def diff(before: Files, after: Files) -> str:
    """A diff of all files that differ, with three lines of context."""
    parts = []
    for name in sorted(after):
        old, new = before.get(name), after[name]
        if old == new:
            continue
        source = "/dev/null" if old is None else f"a/{name}"
        target = "/dev/null" if new is None else f"b/{name}"
        lines = difflib.unified_diff(
            (old or "").splitlines(), (new or "").splitlines(), source, target, n=3
        )
        parts += [line.rstrip("\n") for line in lines]
    return "".join(f"{line}\n" for line in parts)
