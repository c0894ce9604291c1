# SPDX-License-Identifier: Apache-2.0
"""`make mutate-series`: makes errors in the series that still compile, and sees that
`differs` notices each.

Drawn for each series, with a fixed seed: the name of an attribute changes to one that
the file has, an argument is left out, the edits of one file are left out, an edit goes
past the line before or after it.
"""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from . import differs
from .config import Layout, ToolError, say
from .hunks import Edit, apply, diff, parse
from .merge import merge
from .states import State

Spoil = Callable[[random.Random, State, list[Edit], int], list[Edit] | None]
TRIES = 20
"""Edits drawn for each error wanted: many have no argument, some are drawn twice."""
ATTRIBUTE = re.compile(r"(?<=\.)[a-z_]\w{3,}")


def _attribute(
    draw: random.Random, state: State, edits: list[Edit], number: int
) -> list[Edit] | None:
    text = "\n".join(edits[number].added)
    names = ATTRIBUTE.findall(text)
    there = sorted(set(ATTRIBUTE.findall(state.before.get(edits[number].file) or "")))
    if not names or not there:
        return None
    old, new = draw.choice(names), draw.choice(there)
    text = re.sub(rf"(?<=\.){old}\b", new, text, count=1)
    return _with(edits, number, text)


def _argument(
    draw: random.Random, state: State, edits: list[Edit], number: int
) -> list[Edit] | None:
    del state
    text = "\n".join(edits[number].added)
    found = list(re.finditer(r"(?<=[(\s])\w+=[\w.]+(\([\w.]*\))?, ?|, \w+(?=\))", text))
    if not found:
        return None
    drawn = draw.choice(found)
    return _with(edits, number, text[: drawn.start()] + text[drawn.end() :])


def _file(
    draw: random.Random, state: State, edits: list[Edit], number: int
) -> list[Edit] | None:
    del draw, state
    left = [edit for edit in edits if edit.file != edits[number].file]
    return left or None


def _order(
    draw: random.Random, state: State, edits: list[Edit], number: int
) -> list[Edit] | None:
    edit = edits[number]
    lines = (state.before.get(edit.file) or "").splitlines()
    step = draw.choice((-1, 1))
    at = edit.first + step
    while 0 < at < len(lines) and not lines[min(at, at - step)].strip():
        at += step
    others = [e for e in edits if e.file == edit.file and e is not edit]
    if edit.removed or not 0 < at < len(lines):
        return None
    if any(min(at, edit.first) <= e.first <= max(at, edit.first) for e in others):
        return None
    return [*edits[:number], replace(edit, first=at), *edits[number + 1 :]]


def _with(edits: list[Edit], number: int, text: str) -> list[Edit]:
    edit = replace(edits[number], added=tuple(text.split("\n")))
    return [*edits[:number], edit, *edits[number + 1 :]]


KINDS: dict[str, Spoil] = {
    "another attribute": _attribute,
    "an argument left out": _argument,
    "the edits of a file left out": _file,
    "past a neighbour": _order,
}


def _compiles(text: str | None) -> bool:
    try:
        ast.parse(text or "")
    except SyntaxError:
        return False
    return True


def spoilt(
    draw: random.Random, series: list[State], kind: str
) -> tuple[str, list[State]] | None:
    """What was done to a series, and its states then; None where it cannot be."""
    number = draw.randrange(len(series))
    state = series[number]
    edits = parse(state.patch)
    which = draw.randrange(len(edits))
    new = KINDS[kind](draw, state, edits, which)
    if new is None:
        return None
    files = apply(state.before, new)
    file = edits[which].file
    if files == state.after or (file.endswith(".py") and not _compiles(files[file])):
        return None
    if not _changes(files.get(file), state.after.get(file)):
        return None
    found = [*series[:number], replace(state, after=files)]
    for later in series[number + 1 :]:
        merged = merge(later.before, later.after, files)
        found.append(replace(later, before=files, after=merged.after))
        files = dict(merged.after)
    what = diff({file: state.after.get(file)}, {file: files.get(file)})
    return f"{state.patch.name}, {kind}:\n{what}", found


def _changes(one: str | None, other: str | None) -> bool:
    """Whether more than blank lines differ."""
    sides = [
        [t for t in (text or "").splitlines() if t.strip()] for text in (one, other)
    ]
    return sides[0] != sides[1]


def mutate(layout: Layout, each: int) -> Counter[str]:
    """Make so many different errors of each kind in every series, and count those that
    `differs` notices.

    Raises:
        ToolError: something was not noticed.
    """
    count: Counter[str] = Counter()
    missed = []
    for tag in layout.tags():
        draw = random.Random(tag)
        others = differs.neighbours(layout, tag)
        series = differs.read_states(layout, tag, others)
        differs.check(layout, tag, series)
        for kind in KINDS:
            drawn: dict[str, list[State]] = {}
            for _ in range(TRIES * each):
                if len(drawn) < each and (found := spoilt(draw, series, kind)):
                    drawn.setdefault(*found)
            for what, states in drawn.items():
                try:
                    differs.check(layout, tag, states)
                except ToolError:
                    count[kind] += 1
                else:
                    missed.append(f"{tag}: {what}")
    shown = ", ".join(f"{n} of {kind}" for kind, n in sorted(count.items()))
    say(f"{sum(count.values()) + len(missed)} spoilt series, noticed: {shown}")
    if missed:
        raise ToolError("not noticed\n  " + "\n  ".join(missed))
    return count
