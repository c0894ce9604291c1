# SPDX-License-Identifier: Apache-2.0
"""Carries patches between releases in memory: what the series of a release makes of its
files, and what a patch becomes on the files of another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .config import Layout, Patch, read_series
from .hunks import Edit, Files, apply, changed_lines, parse
from .relocate import Placement, Relocator
from .source import Source
from .tree import upstream_tree

CONTEXT = 4
"""Lines shown before and behind a place."""


@dataclass(frozen=True)
class State:
    """The files that a series touches, before and behind one of its patches."""

    patch: Patch
    before: Files
    after: Files


@dataclass(frozen=True)
class Carried:
    """What became of a patch on other files."""

    before: Files
    after: Files
    """With the edits that have a place."""
    placements: list[Placement] = field(default_factory=list)

    @property
    def stopped(self) -> list[Placement]:
        return [p for p in self.placements if p.at is None]

    @property
    def relocated(self) -> list[Placement]:
        """Those that a person should look at."""
        return [p for p in self.placements if p.at is not None and not p.exact]


def read_files(tree: Path, names: Iterable[str]) -> dict[str, str | None]:
    paths = {name: tree / name for name in names}
    return {n: p.read_text() if p.is_file() else None for n, p in paths.items()}


def states(
    layout: Layout,
    tag: str,
    patches: list[Patch] | None = None,
    more: Iterable[str] = (),
) -> list[State]:
    """The state of each patch of a series, or of the patches given, on its release.
    more: names of files beside those that the series touches.

    Raises:
        ToolError: a patch does not say exactly where its lines are.
    """
    series = read_series(layout, tag) if patches is None else patches
    names = {*more, *(file for patch in series for file in patch.files)}
    files: Files = read_files(upstream_tree(layout, tag), names)
    found = []
    for patch in series:
        after = apply(files, parse(patch))
        found.append(State(patch, files, after))
        files = after
    return found


def carry(edits: list[Edit], old: Files, post: Files, new: Files) -> Carried:
    """Place edits, which made `post` of `old`, in the files of another release."""
    after = dict(new)
    placements: list[Placement] = []
    for file in dict.fromkeys(edit.file for edit in edits):
        here = [edit for edit in edits if edit.file == file]
        before, then, now = old.get(file), post.get(file), new.get(file)
        if before is not None and then is not None and now is not None:
            relocator = Relocator(file, before, then, now)
            found = relocator.place(here)
            after[file] = relocator.result(found)
        elif before is None and now is None:
            found = [Placement(edit, "", 0, exact=True) for edit in here]
            after[file] = then
        else:
            why = f"there is no {file}" if now is None else f"{file} exists, or differs"
            found = [Placement(edit, "", None, why) for edit in here]
        placements += found
    return Carried(new, after, placements)


def carry_series(series: list[State], new: Files) -> Iterator[tuple[State, Carried]]:
    """Carry all patches of a series one after the other, as far as they have places."""
    for state in series:
        carried = carry(parse(state.patch), state.before, state.after, new)
        yield state, carried
        new = carried.after


def missing_lines(source: str, target: str) -> Counter[tuple[str, str]]:
    """Lines that the text of patch `source` changes and `target` does not, as file and
    signed line; those without code do not count."""
    lost = changed_lines(source) - changed_lines(target)
    return Counter({key: n for key, n in lost.items() if key[1][1:].strip()})


def definitions(tree: Path, name: str) -> list[str]:
    """Where a tree defines a class or function of that name, as `file:line`."""
    short = name.split("#")[0].rpartition(".")[2]
    found = []
    for path in sorted((tree / "vllm").rglob("*.py")):
        text = path.read_text(errors="replace")
        if f"def {short}(" not in text and f"class {short}" not in text:
            continue
        file = path.relative_to(tree).as_posix()
        for scope in Source(file, text).module.walk():
            if scope.name == name or scope.name.endswith(f".{short}"):
                found.append(f"{file}:{scope.first + 1}")
    return found


def snippet(text: str | None, first: int, end: int) -> str:
    """Lines with their numbers, and some around them."""
    lines = (text or "").splitlines()
    shown = range(max(first - CONTEXT, 0), min(end + CONTEXT, len(lines)))
    return "".join(
        f"{'>' if first <= n < end else ' '} {n + 1:5} {lines[n]}\n" for n in shown
    )


def review(release: str, state: State, carried: Carried, place: Placement) -> str:
    """Where an edit was and where it is, or could not be, as Markdown."""
    edit = place.edit
    old = (state.before.get(edit.file) or "").splitlines()
    fence = "```"
    text = f"\n### {edit.file}, {place.scope or 'module'}\n\n"
    text += f"{'Placed' if place.at is not None else 'Not placed'}: {place.why}.\n\n"
    text += f"{fence}diff\n{edit}\n{fence}\n\nBefore it, {release}:\n\n{fence}\n"
    text += snippet("\n".join(old), edit.first, edit.end) + f"{fence}\n"
    if place.at is not None:
        end = place.at + len(edit.removed)
        text += f"\nHere, the change stands at line {place.at + 1}:\n\n{fence}\n"
        text += snippet(carried.before.get(edit.file), place.at, end) + f"{fence}\n"
    return text
