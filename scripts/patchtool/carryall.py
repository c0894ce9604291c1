# SPDX-License-Identifier: Apache-2.0
"""`make carry`: one change of a series, made in all other series."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from . import differs
from .config import Layout, Patch, ToolError, read_series, say, version_key
from .hunks import Edit, Files, diff, parse, parse_diff
from .merge import Merged, merge, renames
from .series import rewrite, set_date
from .states import states


@dataclass
class Outcome:
    """What became of the change in one series."""

    tag: str
    changed: list[str] = field(default_factory=list)
    open: int = 0
    stops: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.stops:
            return f"{self.tag}: NOT carried\n" + "\n".join(
                f"  {s}" for s in self.stops
            )
        what = ", ".join(name[:4] for name in self.changed) or "as it is"
        asked = f", {self.open} questions in differs" if self.open else ""
        return f"{self.tag}: {what}{asked}"


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


def _patch_named(patches: list[Patch], name: str) -> Patch | None:
    found = [patch for patch in patches if patch.name.startswith(name)]
    if len(found) > 1:
        raise ToolError(f"PATCH={name} may be {', '.join(p.name for p in found)}")
    return found[0] if found else None


@dataclass(frozen=True)
class Change:
    """What a patch of the source makes of its files now and what it made before."""

    source: str
    patch: Patch
    edits: list[Edit]
    before: Files
    after: Files
    former_header: str | None
    """None: the patch is new."""
    after_patch: str | None
    """The patch that a new one follows."""

    def place_in(self, names: list[str]) -> int:
        """How many of the patches of another series come before a new one."""
        if self.after_patch in names:
            return names.index(self.after_patch) + 1
        return sum(name < self.patch.name for name in names)


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
    if patch is None:
        raise ToolError(f"patches/{source} has no patch {name}…")
    with _former(layout, source, base) as patches:
        names = {file for p in [*series, *patches] for file in p.files}
        found = {s.patch.name: s for s in states(layout, source, more=names)}
        now = found[patch.name]
        former = next((p for p in patches if p.name == patch.name), None)
        lacking = [t for t in tags if not (layout.patches / t / patch.name).is_file()]
        is_taken = bool(tags) and len(lacking) == len(tags)
        if former is None or (former.text == patch.text and is_taken):
            number = series.index(patch)
            previous = series[number - 1].name if number else None
            edits = parse(patch)
            return Change(source, patch, edits, now.before, now.after, None, previous)
        if former.text == patch.text:
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
    edits = parse_diff(diff(before.after, now.after))
    return Change(source, patch, edits, before.after, now.after, header, None)


def _new_header(change: Change, header: str) -> str | None:
    """The header of the same patch of another series; None if it must be written."""
    was, now = change.former_header, change.patch.header
    if was is None:
        return now
    if was == now:
        return header
    # The date is of each series.
    lines = [
        [line for line in text.splitlines() if not line.startswith("Last-Update:")]
        for text in (was, header)
    ]
    return now if lines[0] == lines[1] else None


def _carry_to(layout: Layout, change: Change, tag: str, base: str) -> Outcome:
    """Make the change in one series, and place its later patches anew."""
    outcome = Outcome(tag)
    name = change.patch.name
    path = layout.patches / tag / name
    text = path.read_text() if path.is_file() else None
    is_kept = _git_show(layout, base, f"{tag}/series") is not None
    if is_kept and text != _git_show(layout, base, f"{tag}/{name}"):
        outcome.stops.append(f"{name} has changed since {base} already")
        return outcome
    old = states(layout, tag, more={edit.file for edit in change.edits})
    names = [state.patch.name for state in old]
    if change.former_header is None:
        at = change.place_in(names)
        before = files = old[at - 1].after if at else old[0].before
        header, rest = change.patch.header, old[at:]
    elif text is None:
        outcome.stops.append(f"there is no {name}")
        return outcome
    else:
        state = old[names.index(name)]
        before, files = state.before, state.after
        header, rest = state.patch.header, old[names.index(name) + 1 :]
    new_header = _new_header(change, header)
    if new_header is None:
        outcome.stops.append("its header differs; change it by hand")
    names_there = renames(layout, change.source, tag, change.patch.files)
    merged = merge(change.before, change.after, files, names_there)
    _judge(outcome, name, merged)
    texts = {path: (new_header or header) + diff(before, merged.after)}
    now = merged.after
    for state in rest:
        moved = merge(state.before, state.after, now)
        _judge(outcome, state.patch.name, moved)
        texts[state.patch.path] = state.patch.header + diff(moved.before, moved.after)
        now = moved.after
    if not outcome.stops:
        _write(layout, change, tag, texts, outcome)
    return outcome


def _judge(outcome: Outcome, name: str, merged: Merged) -> None:
    for conflict in merged.stopped:
        theirs = "\n".join(f"      {line}" for line in conflict.theirs[:12])
        outcome.stops.append(
            f"{name[:4]} {conflict.file}:{conflict.at + 1}: other lines than\n{theirs}"
        )


def _write(
    layout: Layout, change: Change, tag: str, texts: dict[Path, str], outcome: Outcome
) -> None:
    """Write the patches of one series, all or none, as `quilt refresh` does."""
    folder = layout.patches / tag
    kept = {p: p.read_text() for p in folder.iterdir() if p.is_file()}
    for path, text in texts.items():
        path.write_text(text)
    series = layout.series(tag)
    if change.former_header is None:
        names = kept[series].splitlines()
        at = change.place_in(names)
        series.write_text("\n".join([*names[:at], change.patch.name, *names[at:], ""]))
    own = folder / change.patch.name
    try:
        rewrite(layout, tag)
    except ToolError as error:
        for path in texts.keys() - kept.keys():
            path.unlink()
        for path, text in kept.items():
            path.write_text(text)
        outcome.stops.append(str(error))
        return
    if kept.get(own) != own.read_text():
        set_date(Patch(own))
    outcome.open = len(differs.write(layout, tag))
    changed = [p for p in texts if kept.get(p) != p.read_text()]
    outcome.changed = sorted(path.name for path in changed)


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
    former = _git_show(layout, base, f"{source}/{change.patch.name}")
    if change.patch.text != former:
        set_date(change.patch)
    wanted = tags or [t for t in layout.tags() if t != source]
    say(f"{change.patch.name} of {source}, {len(change.edits)} edits since {base}:")
    outcomes = []
    for tag in sorted(wanted, key=version_key, reverse=True):
        outcomes.append(_carry_to(layout, change, tag, base))
        say(str(outcomes[-1]))
    asked = len(differs.write(layout, source)) + sum(each.open for each in outcomes)
    if asked:
        say(f"{asked} questions: write a reason for each `= ?` in patches/*/differs")
    if left := [outcome.tag for outcome in outcomes if outcome.stops]:
        raise ToolError(
            f"left as they are: {', '.join(left)}. Change them by hand as "
            "docs/rebase.md says, or change what stops and run it again for these: "
            f"TAGS={','.join(left)}"
        )
