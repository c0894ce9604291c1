# SPDX-License-Identifier: Apache-2.0
"""What a person needs who places an edit by hand: the lines, where its scope is now,
what upstream changed there, and how another series has it."""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path

from . import compare
from .carrying import Carried, State, definitions
from .config import Layout, Patch
from .relocate import Placement
from .source import read_source
from .tree import upstream_tree

CONTEXT = 3
# Lines round an edit in which upstream's changes are shown.
NEAR = 12
# Lines shown of each part, so that a stop fits a screen.
SHOWN = 16


def write_rejects(tree: Path, state: State, stopped: list[Placement]) -> None:
    """FILE.rej beside each file: the lines, and those round them as they were."""
    for file in dict.fromkeys(place.edit.file for place in stopped):
        lines = (state.before.get(file) or "").splitlines()
        text = ""
        for place in stopped:
            if (edit := place.edit).file != file:
                continue
            first, end = max(edit.first - CONTEXT, 0), edit.end + CONTEXT
            text += (
                f"@@ line {edit.first + 1} before, in {place.scope or 'module'} @@\n"
            )
            text += "".join(f" {line}\n" for line in lines[first : edit.first])
            text += f"{edit}\n"
            text += "".join(f" {line}\n" for line in lines[edit.end : end])
        path = tree / f"{file}.rej"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def upstream_changes(old: str, new: str, place: Placement) -> str:
    """What upstream changed near an edit, within its scope where both have that."""
    sources = [read_source(place.edit.file, text) for text in (old, new)]
    lines = []
    for source in sources:
        scope = source.scopes.get(place.scope, source.module)
        lines.append((scope.first, source.lines[scope.first : scope.end]))
    (shift, before), (_, after) = lines
    low, high = place.edit.first - shift - NEAR, place.edit.end - shift + NEAR
    shown: list[str] = []
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for kind, i, j, k, m in matcher.get_opcodes():
        if kind != "equal" and i <= high and j >= low:
            shown += [f"-{line}" for line in before[i:j]]
            shown += [f"+{line}" for line in after[k:m]]
            shown.append("")
    return _short("\n".join(shown).rstrip()) or f"nothing within {NEAR} lines"


def _short(text: str) -> str:
    lines = text.splitlines()
    more = [f"… {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n".join(lines[:SHOWN] + more)


def _where(layout: Layout, tag: str, place: Placement, new: str | None) -> str:
    """Where the scope of an edit is now."""
    if new is not None:
        source = read_source(place.edit.file, new)
        if place.scope in source.scopes:
            line = source.scopes[place.scope].first + 1
            return f"{place.scope or 'module'} is at line {line}"
    if not place.scope:
        return "its file is gone"
    found = definitions(upstream_tree(layout, tag), place.scope)
    return f"{place.scope} is now in {', '.join(found[:4]) or 'no file'}"


def describe(
    layout: Layout, source: str, tag: str, state: State, carried: Carried
) -> str:
    """The message of a stop."""
    name = state.patch.name
    tree = layout.tree(tag).relative_to(layout.root)
    text = f"{name} needs a hand in {tree}:\n"
    for place in carried.stopped:
        file = place.edit.file
        old, new = state.before.get(file), carried.before.get(file)
        if new is None and old is not None:
            scope = read_source(file, old).scope_at(place.edit.first).name
            place = replace(place, scope=scope)
        text += f"\n-- {file}.rej: {place.why}; {_where(layout, tag, place, new)}\n"
        text += _short(str(place.edit)) + "\n"
        if old is not None and new is not None:
            what = upstream_changes(old, new, place)
            text += f"-- what upstream changed there from {source} to {tag}\n{what}\n"
    other = compare.other_neighbour(layout, source, tag)
    if other and (path := layout.patches / other / name).is_file():
        files = {place.edit.file for place in carried.stopped}
        lines = compare.patches(state.patch, Patch(path), files)
        shown = _short("\n".join(lines)) or "the same lines"
        text += f"-- how the series of {other} has it (>)\n{shown}\n"
    return text + (
        f"\nPut the lines in, delete the .rej files, then\n"
        f"  make new-tag TAG={tag} CONTINUE=1\n"
        "which refreshes the patch and goes on. If it must change another file now, "
        f"first run `make quilt TAG={tag} ARGS='add FILE'`; if it is no longer needed, "
        f"`make quilt TAG={tag} ARGS='delete -r {name}'`."
    )
