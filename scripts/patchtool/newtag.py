# SPDX-License-Identifier: Apache-2.0
"""`make new-tag`: carries the series of an upstream release's neighbours to it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from . import differs
from .config import Layout, Patch, ToolError, load_pins, read_series, say, version_key
from .hunks import diff, parse
from .merge import Merged, merge, renames
from .pins import find_pins, pins_text
from .quilt import applied, quilt
from .series import set_date
from .states import State, read_files, scope_at, states
from .tree import apply_patches, pristine_tree, upstream_tree

MARKER = "<<<<<<< "


def _noted(layout: Layout, tag: str) -> Path:
    """A file with the tags of the series that one is carried from."""
    return layout.build / "new-tag" / tag / "from"


def _names(layout: Layout, sources: list[str]) -> dict[str, str]:
    """All patches of some series in order, with the first series that has each."""
    names = {patch.name: sources[0] for patch in read_series(layout, sources[0])}
    for source in sources[1:]:
        order = list(names)
        before = ""
        for patch in read_series(layout, source):
            if patch.name not in names:
                order.insert(order.index(before) + 1 if before else 0, patch.name)
                names[patch.name] = source
            before = patch.name
        names = {name: names[name] for name in order}
    return names


def _begin(layout: Layout, source: str | None, tag: str) -> list[str]:
    if source is not None and version_key(source) == version_key(tag):
        raise ToolError(f"FROM={source} and TAG={tag} are the same release")
    sources = [source] if source else differs.neighbours(layout, tag)
    if not sources:
        raise ToolError("there is no series to start from")
    pins = find_pins(layout, load_pins(layout, sources[0]), tag)
    # Of an attempt whose series was removed.
    shutil.rmtree(layout.tree(tag), ignore_errors=True)
    target = layout.patches / tag
    target.mkdir(parents=True)
    names = _names(layout, sources)
    for name, origin in names.items():
        shutil.copyfile(layout.patches / origin / name, target / name)
    (target / "series").write_text("".join(f"{name}\n" for name in names))
    (target / "upstream.toml").write_text(pins_text(pins))
    _noted(layout, tag).parent.mkdir(parents=True, exist_ok=True)
    _noted(layout, tag).write_text(" ".join(sources))
    say(f"patches/{tag}: pins, and {len(names)} patches of {' and '.join(sources)}")
    return sources


def _merged(
    layout: Layout, tag: str, name: str, series: dict[str, dict[str, State]]
) -> tuple[str, Merged]:
    """A patch in the files of a release, of the series that needs the fewest hands; of
    the first one if several do. series: by tag and name of the patch."""
    found = []
    for source, patches in series.items():
        if state := patches.get(name):
            renamed = renames(layout, source, tag, state.patch.files)
            files = [renamed.get(file, file) for file in state.patch.files]
            ours = read_files(layout.tree(tag), files)
            label = f"{name} of {source}"
            found.append(
                (source, merge(state.before, state.after, ours, renamed, label))
            )
    return min(found, key=lambda each: len(each[1].stopped))


def _where(layout: Layout, tag: str, state: State, file: str) -> str:
    """Where that is now what a patch changes in a file that is gone."""
    edits = [edit for edit in parse(state.patch) if edit.file == file]
    text = state.before.get(file) or ""
    scopes = {scope_at(file, text, edit.first) for edit in edits} - {""}
    short = "|".join(sorted(scope.rpartition(".")[2] for scope in scopes)) or "^$"
    command = ["grep", "-rnoE", "--include=*.py", rf"(def|class) ({short})\b", "vllm"]
    tree = upstream_tree(layout, tag)
    result = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    found = sorted(result.stdout.splitlines())
    return "; what it changed is in" + "".join(f"\n    {line}" for line in found[:6])


def _stop(
    layout: Layout, tag: str, state: State, merged: Merged, source: str, others: str
) -> str:
    """The message of a stop; lines for files that are gone, or that upstream has while
    the patch adds them, are in `.rej` files. others: the neighbours that lack it."""
    tree = layout.tree(tag)
    lines: list[str] = []
    for conflict in merged.stopped:
        file = conflict.file
        text = (tree / file).read_text() if (tree / file).is_file() else ""
        rows = [n for n, t in enumerate(text.split("\n"), 1) if t.startswith(MARKER)]
        if rows:
            line = f"{file}: lines {', '.join(map(str, rows))}"
        else:
            path = tree / f"{file}.rej"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(diff({file: state.before[file]}, {file: state.after[file]}))
            there = _where(layout, tag, state, file)
            line = f"{file} is upstream's here" if text else f"{file} is gone{there}"
        if line not in lines:
            lines.append(line)
    shown = "".join(f"\n  {line}" for line in lines)
    name, where = state.patch.name, tree.relative_to(layout.root)
    header = state.patch.header if others else ""
    retires = re.findall("^Retires-when: (.*)$", header, re.M)
    return (
        f"{name} of {source} does not merge, in {where}:{shown}\n"
        "Edit the lines between the markers, or put those of `.rej` files where they "
        f"belong (`make quilt TAG={tag} ARGS='add FILE'` first) and delete these.\n"
        f"  make new-tag TAG={tag} CONTINUE=1\n"
        f"A patch that is not needed: `make quilt TAG={tag} ARGS='delete -r {name}'`."
        + "".join(f"\n{others} lacks it. Retires when {line}." for line in retires)
    )


def _refresh(layout: Layout, tag: str, patch: Patch) -> None:
    before = patch.text
    result = quilt(layout, tag, layout.tree(tag), "refresh")
    if result.returncode:
        raise ToolError(f"quilt refresh of {patch.name}:\n{result.stdout.rstrip()}")
    if not parse(patch):
        patch.path.write_text(before)
        raise ToolError(
            f"{patch.name} would be empty; put its lines into the tree, or "
            f"`make quilt TAG={tag} ARGS='delete -r {patch.name}'` and CONTINUE=1"
        )


def _resume(layout: Layout, tag: str) -> None:
    """Refresh the patch that was changed by hand."""
    tree = layout.tree(tag)
    if not (done := applied(tree)):
        return
    patch = next((p for p in read_series(layout, tag) if p.name == done[-1]), None)
    if patch is None:
        raise ToolError(
            f"{done[-1]} is applied in {tree} but not in patches/{tag}/series; "
            f"remove {tree} and run it again"
        )
    left = [path.relative_to(tree) for path in tree.rglob("*.rej")]
    for file in patch.files:
        if (tree / file).is_file() and f"\n{MARKER}" in (tree / file).read_text():
            left.append(Path(file))
    if left:
        names = ", ".join(map(str, sorted(left)))
        raise ToolError(
            f"{patch.name}: markers, or lines to place, are left in {names}"
        )
    before = patch.text
    _refresh(layout, tag, patch)
    if patch.text != before:
        set_date(patch)
        say(f"{patch.name}: as changed by hand")


def _leave_out(layout: Layout, tag: str, patch: Patch, why: str) -> None:
    series = layout.series(tag)
    names = [n for n in series.read_text().splitlines() if n != patch.name]
    series.write_text("".join(f"{name}\n" for name in names))
    patch.path.unlink()
    say(f"{patch.name}: left out, {why}")


def _push(
    layout: Layout, tag: str, patch: Patch, series: dict[str, dict[str, State]]
) -> None:
    """Carry one patch to the tree.

    Raises:
        ToolError: upstream and the patch changed the same lines; markers are there.
    """
    source, merged = _merged(layout, tag, patch.name, series)
    state = series[source][patch.name]
    if merged.marked == merged.before and not merged.stopped:
        return _leave_out(layout, tag, patch, "upstream has its lines")
    tree = layout.tree(tag)
    header, changes = state.patch.header, diff(merged.before, merged.marked)
    # quilt pushes a patch without changes only if it has no header either.
    patch.path.write_text(header + changes if changes else "")
    result = quilt(layout, tag, tree, "push")
    patch.path.write_text(header + changes)
    if result.returncode:
        raise ToolError(f"{patch.name}, as merged:\n{result.stdout.rstrip()}")
    if merged.stopped:
        others = ", ".join(s for s in series if patch.name not in series[s])
        raise ToolError(_stop(layout, tag, state, merged, source, others))
    _refresh(layout, tag, patch)
    if merged.conflicts:
        set_date(patch)
    for conflict in merged.conflicts:
        where = f"{conflict.file}:{conflict.at + 1}"
        say(f"  {where}: {conflict.why}")
    say(f"{patch.name}: that of {source}")


def new_tag(layout: Layout, source: str | None, tag: str, resume: bool) -> None:
    """Merge the patches of the neighbours of a release into its files, one by one.

    Stops at the first one with a conflict; resume goes on from there. source: the only
    series to take patches from.

    Raises:
        ToolError: a patch does not merge, or nothing to begin or to resume.
    """
    exists = (layout.patches / tag).exists()
    if exists and not resume:
        raise ToolError(
            f"patches/{tag} exists; CONTINUE=1 goes on with it, or remove it to begin "
            "again"
        )
    if resume and not exists:
        raise ToolError(f"nothing to continue: patches/{tag} does not exist")
    if exists:
        noted = _noted(layout, tag)
        sources = noted.read_text().split() if noted.is_file() else []
        sources = [source] if source else sources or differs.neighbours(layout, tag)
    else:
        sources = _begin(layout, source, tag)
    tree = pristine_tree(layout, tag)
    if resume:
        _resume(layout, tag)
    series = {s: {e.patch.name: e for e in states(layout, s)} for s in sources}
    for patch in read_series(layout, tag)[len(applied(tree)) :]:
        _push(layout, tag, patch, series)
    apply_patches(layout, tag)
    asked = differs.write(layout, tag)
    say(
        f"{tag}: all patches apply. {len(asked)} questions in patches/{tag}/differs: "
        f"write a reason for each `= ?`, or change the patch. Then\n"
        f"  make tags-page env check-patches TAG={tag}"
    )
