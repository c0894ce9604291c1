# SPDX-License-Identifier: Apache-2.0
"""`make carry`: one change of a series, made in all other series."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import differs
from .config import Layout, Patch, ToolError, read_series, say, version_key
from .hunks import Files, diff
from .merge import Merged, merge, renames
from .series import rewrite, set_date
from .states import states


def _git_show(layout: Layout, base: str, name: str) -> str | None:
    """A file of patches/ as it was in a commit; None if there was none."""
    command = ["git", "-C", str(layout.root), "show", f"{base}:patches/{name}"]
    result = subprocess.run(command, capture_output=True, text=True)
    return None if result.returncode else result.stdout


@contextmanager
def _former(layout: Layout, source: str, base: str) -> Iterator[list[Patch]]:
    """The series of a tag as it was in a commit."""
    listed = _git_show(layout, base, f"{source}/series")
    if listed is None:
        raise ToolError(f"BASE={base} has no series of {source}")
    with tempfile.TemporaryDirectory() as folder:
        patches = []
        for name in listed.split():
            path = Path(folder) / name
            path.write_text(_git_show(layout, base, f"{source}/{name}") or "")
            patches.append(Patch(path))
        yield patches


def _patch_named(patches: list[Patch], name: str) -> Patch:
    found = [patch for patch in patches if patch.name.startswith(name)]
    if len(found) != 1:
        names = ", ".join(patch.name for patch in found) or "no patch of the series"
        raise ToolError(f"PATCH={name} may be {names}")
    return found[0]


@dataclass(frozen=True)
class Change:
    """What a patch of the source makes of its files now and what it made before.

    former_header: None if the patch is new. previous: the patch that a new one follows.
    """

    source: str
    patch: Patch
    before: Files
    after: Files
    former_header: str | None = None
    previous: str | None = None

    @property
    def is_new(self) -> bool:
        return self.former_header is None

    def place_in(self, names: list[str]) -> int:
        """Which of the patches of another series it is, or, if new, is to be."""
        if not self.is_new:
            return names.index(self.patch.name)
        if self.previous in names:
            return names.index(self.previous) + 1
        return sum(name < self.patch.name for name in names)

    def header(self, theirs: str) -> str:
        """The header of the same patch of another series.

        Raises:
            ToolError: it differs, and this one has changed.
        """
        sides = [
            # The date is of each series.
            re.sub("(?m)^Last-Update: .*$", "", text or "")
            for text in (self.former_header, self.patch.header, theirs)
        ]
        if sides[0] == sides[1]:
            return theirs
        if sides[0] == sides[2]:
            return self.patch.header
        raise ToolError("its header differs; change it by hand")


def find_change(
    layout: Layout, source: str, name: str, base: str, tags: Collection[str] = ()
) -> Change:
    """The change of a patch since a commit. One that has not changed and that all of
    `tags` lack is new there.

    Raises:
        ToolError: there is no such patch, or it is as it was.
    """
    series = read_series(layout, source)
    patch = _patch_named(series, name)
    with _former(layout, source, base) as patches:
        names = {file for p in [*series, *patches] for file in p.files}
        found = {s.patch.name: s for s in states(layout, source, more=names)}
        now = found[patch.name]
        former = next((p for p in patches if p.name == patch.name), None)
        is_same = former is not None and former.text == patch.text
        lacking = [t for t in tags if not (layout.patches / t / patch.name).is_file()]
        if former is None or (is_same and tags and len(lacking) == len(tags)):
            number = series.index(patch)
            previous = series[number - 1].name if number else None
            return Change(source, patch, now.before, now.after, previous=previous)
        if is_same:
            raise ToolError(f"{source}/{patch.name} is as it was in {base}")
        found = {s.patch.name: s for s in states(layout, source, patches, names)}
        then, header = found[patch.name], former.header
        # On the files of today: patches before it may have changed as well.
        before = merge(then.before, then.after, now.before)
    if before.stopped:
        raise ToolError(
            f"{source}/{patch.name} and a patch before it changed the same lines since "
            f"{base}; commit and carry them one after the other"
        )
    return Change(source, patch, before.after, now.after, header)


def _stops(name: str, merged: Merged) -> list[str]:
    return [
        f"{name[:4]} {conflict.file}:{conflict.at + 1}: other lines than"
        + "".join(f"\n      {line}" for line in conflict.theirs[:12])
        for conflict in merged.stopped
    ]


def _carry_to(layout: Layout, change: Change, tag: str, base: str) -> str:
    """Make the change in one series, and place its later patches anew.

    Raises:
        ToolError: it does not merge, and the series is left as it is.
    """
    name = change.patch.name
    path = layout.patches / tag / name
    text = path.read_text() if path.is_file() else None
    is_kept = _git_show(layout, base, f"{tag}/series") is not None
    if is_kept and text != _git_show(layout, base, f"{tag}/{name}"):
        raise ToolError(f"{name} has changed since {base} already")
    if text is None and not change.is_new:
        raise ToolError(f"there is no {name}")
    old = states(layout, tag, more=change.after)
    at = change.place_in([state.patch.name for state in old])
    before = old[at].before if at < len(old) else old[-1].after
    later = old[at:] if change.is_new else old[at + 1 :]
    files = before if change.is_new else old[at].after
    header = change.patch.header
    if not change.is_new:
        header = change.header(old[at].patch.header)
    there = renames(layout, change.source, tag, change.patch.files)
    merged = merge(change.before, change.after, files, there)
    stops = _stops(name, merged)
    texts = {path: header + diff(before, merged.after)}
    for state in later:
        moved = merge(state.before, state.after, merged.after)
        stops += _stops(state.patch.name, moved)
        texts[state.patch.path] = state.patch.header + diff(moved.before, moved.after)
        merged = moved
    if stops:
        raise ToolError("\n  ".join(stops))
    kept = {p: p.read_text() for p in texts if p.is_file()}
    for where, new in texts.items():
        where.write_text(new)
    if change.is_new:
        names = layout.series(tag).read_text().splitlines()
        at = change.place_in(names)
        names.insert(at, name)
        layout.series(tag).write_text("\n".join([*names, ""]))
    rewrite(layout, tag)
    if text != path.read_text():
        set_date(Patch(path))
    changed = sorted(p.name[:4] for p in texts if kept.get(p) != p.read_text())
    return ", ".join(changed) or "as it is"


def carry_change(
    layout: Layout, source: str, name: str, base: str, tags: list[str]
) -> None:
    """Make the change of one patch since a commit in other series, by default in all;
    or have those named take over a patch that they lack.

    A series into which it does not merge is left as it is.

    Raises:
        ToolError: nothing changed, or a series was left as it is.
    """
    rewrite(layout, source)
    change = find_change(layout, source, name, base, tags)
    if change.patch.text != _git_show(layout, base, f"{source}/{change.patch.name}"):
        set_date(change.patch)
    wanted = tags or [t for t in layout.tags() if t != source]
    say(f"{change.patch.name} of {source}, as changed since {base}:")
    done, left = [source], []
    for tag in sorted(wanted, key=version_key, reverse=True):
        try:
            say(f"{tag}: {_carry_to(layout, change, tag, base)}")
            done.append(tag)
        except ToolError as error:
            say(f"{tag}: NOT carried\n  {error}")
            left.append(tag)
    asked = sum(len(differs.write(layout, tag)) for tag in done)
    if asked:
        say(f"{asked} questions: write a reason for each `= ?` in patches/*/differs")
    if left:
        raise ToolError(
            f"left as they are: {', '.join(left)}. Change them by hand as "
            "docs/rebase.md says, or change what stops and run it again for these: "
            f"TAGS={','.join(left)}"
        )
