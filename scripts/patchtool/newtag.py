# SPDX-License-Identifier: Apache-2.0
"""`make new-tag`: carries a series from one upstream release to another."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from . import compare, places
from .carrying import (
    Carried,
    State,
    carry,
    carry_series,
    missing_lines,
    read_files,
    review,
    states,
)
from .config import (
    Layout,
    Patch,
    Pins,
    ToolError,
    load_pins,
    read_series,
    say,
    version_key,
)
from .hunks import diff, parse
from .pins import find_pins, pins_text
from .quilt import applied, quilt
from .series import set_date
from .stops import describe, write_rejects
from .tree import apply_patches, pristine_tree, upstream_tree


def _work(layout: Layout, tag: str) -> Path:
    return layout.build / "new-tag" / tag


def report_file(layout: Layout, tag: str) -> Path:
    """Every edit that has another place than its neighbours say, for review."""
    return _work(layout, tag) / "report.md"


def _note(layout: Layout, tag: str, text: str) -> None:
    with report_file(layout, tag).open("a") as file:
        file.write(text)


def choose_source(layout: Layout, pins: Pins) -> str:
    """The kept series of which the fewest edits stop on a release, then the fewest need
    a look, then the nearest."""
    tree = upstream_tree(layout, pins.tag, pins)
    found = []
    for source in layout.tags():
        if source == pins.tag:
            continue
        stops, looks = try_series(states(layout, source), tree)
        newer = version_key(source) > version_key(pins.tag)
        distance = sum(
            newer == (version_key(t) > version_key(pins.tag))
            and (version_key(t) < version_key(source)) == newer
            for t in layout.tags()
        )
        found.append(((stops, looks, distance), source))
        say(f"  from {source}: {stops} edits stop, {looks} are relocated")
    if not found:
        raise ToolError("there is no series to start from")
    return min(found)[1]


def try_series(series: list[State], tree: Path) -> tuple[int, int]:
    """How many edits of a series stop on a release, and how many are relocated."""
    names = {file for state in series for file in state.patch.files}
    tried = [c for _, c in carry_series(series, read_files(tree, names))]
    return sum(len(c.stopped) for c in tried), sum(len(c.relocated) for c in tried)


def _begin(layout: Layout, source: str | None, tag: str) -> str:
    near = min(
        layout.tags(),
        key=lambda t: [abs(a - b) for a, b in zip(version_key(t), version_key(tag))],
    )
    if source is not None and version_key(source) == version_key(tag):
        raise ToolError(f"FROM={source} and TAG={tag} are the same release")
    pins = find_pins(layout, load_pins(layout, source or near), tag)
    if source is None:
        say(f"trying all series on {tag}:")
        source = choose_source(layout, pins)
    series = read_series(layout, source)
    # Of an attempt whose series was removed.
    shutil.rmtree(layout.tree(tag), ignore_errors=True)
    target = layout.patches / tag
    target.mkdir(parents=True)
    for path in [layout.series(source), *(patch.path for patch in series)]:
        shutil.copyfile(path, target / path.name)
    (target / "upstream.toml").write_text(pins_text(pins))
    (_work(layout, tag) / "from").write_text(source)
    report_file(layout, tag).write_text(f"# {tag}, carried from {source}\n")
    say(f"patches/{tag}: pins and {len(series)} patches of {source}")
    _overview(layout, source, tag)
    return source


def _overview(layout: Layout, source: str, tag: str) -> None:
    """All that will stop, and what the nearest older series has that this one lacks."""
    series = states(layout, source)
    names = {file for state in series for file in state.patch.files}
    new = read_files(upstream_tree(layout, tag), names)
    for state, carried in carry_series(series, new):
        for place in carried.stopped:
            where = f"{place.edit.file}, {place.scope or 'module'}"
            say(f"will stop: {state.patch.name[:4]} {where}: {place.why}")
    if other := compare.older_neighbour(layout, source, tag):
        short, long = compare.series(layout, source, other)
        say(short)
        _note(layout, tag, long)


def _install(layout: Layout, tag: str, patch: Patch, carried: Carried) -> None:
    """Write what has a place as the patch, and push it; `quilt refresh` does the rest.

    Raises:
        ToolError: quilt does not take it.
    """
    tree = layout.tree(tag)
    header, changes = patch.header, diff(carried.before, carried.after)
    # quilt pushes a patch without changes only if it has no header either.
    patch.path.write_text(header + changes if changes else "")
    result = quilt(layout, tag, tree, "push")
    patch.path.write_text(header + changes)
    if result.returncode:
        raise ToolError(f"{patch.name}, as relocated:\n{result.stdout.rstrip()}")


def _refresh(
    layout: Layout, source: str, tag: str, patch: Patch, drop: Collection[int]
) -> None:
    """Refresh the top patch; it may not be empty, nor lack lines that FROM's has.

    Raises:
        ToolError: it would be, or it does; the patch stays as it was.
    """
    before = patch.text
    result = quilt(layout, tag, layout.tree(tag), "refresh")
    if result.returncode:
        raise ToolError(f"quilt refresh of {patch.name}:\n{result.stdout.rstrip()}")
    if not parse(patch):
        patch.path.write_text(before)
        raise ToolError(
            f"{patch.name} would be empty; put its lines into the tree (`make quilt "
            f"TAG={tag} ARGS='add FILE'` before editing a file that it does not change "
            "yet), or if upstream made it superfluous, "
            f"`make quilt TAG={tag} ARGS='delete -r {patch.name}'` and CONTINUE=1"
        )
    origin = layout.patches / source / patch.name
    if not origin.is_file():
        return
    lost = sorted(missing_lines(origin.read_text(), patch.text).elements())
    left = [n for n in range(1, len(lost) + 1) if n not in drop]
    if left:
        shown = "".join(
            f"\n  {n}  {file.rpartition('/')[2]}: {line}"
            for n, (file, line) in enumerate(lost, 1)
        )
        raise ToolError(
            f"{patch.name} lacks lines that it has for {source}:{shown}\n"
            "Put them in, or name those that are dropped or written otherwise here: "
            f"`make new-tag TAG={tag} CONTINUE=1 "
            f"DROP={','.join(str(n) for n in range(1, len(lost) + 1))}`"
        )
    for _, line in lost:
        _note(layout, tag, f"\nDropped from {patch.name}: `{line}`\n")


def _resume(layout: Layout, source: str, tag: str, drop: Collection[int]) -> None:
    """Refresh the patch that was mended by hand."""
    tree = layout.tree(tag)
    done = applied(tree)
    if not done:
        return
    patch = next((p for p in read_series(layout, tag) if p.name == done[-1]), None)
    if patch is None:
        raise ToolError(
            f"{done[-1]} is applied in {tree} but not in patches/{tag}/series; "
            f"remove {tree} and run it again"
        )
    if left := sorted(path.relative_to(tree) for path in tree.rglob("*.rej")):
        raise ToolError(
            f"{patch.name}: delete {', '.join(map(str, left))} in "
            f"{tree.relative_to(layout.root)} once their lines are in"
        )
    _refresh(layout, source, tag, patch, drop)
    say(f"{patch.name}: as mended by hand")


def _push(layout: Layout, source: str, tag: str, state: State, patch: Patch) -> None:
    """Carry one patch to the tree.

    Raises:
        ToolError: an edit has no place; the others are in, it is in a `.rej` file.
    """
    tree = layout.tree(tag)
    new = read_files(tree, state.patch.files)
    carried = carry(parse(state.patch), state.before, state.after, new)
    for place in carried.placements:
        if not place.exact:
            _note(layout, tag, f"\n## {patch.name}\n")
            _note(layout, tag, review(source, state, carried, place))
    with (_work(layout, tag) / "unseen").open("a") as unseen:
        for place in carried.relocated:
            unseen.write(places.mark(patch.name, place.edit) + "\n")
    _install(layout, tag, patch, carried)
    if carried.stopped:
        files = {place.edit.file for place in carried.stopped}
        here = [name for name in sorted(files) if (tree / name).is_file()]
        if here:
            quilt(layout, tag, tree, "add", *here)
        write_rejects(tree, state, carried.stopped)
        raise ToolError(describe(layout, source, tag, state, carried))
    if carried.relocated:
        set_date(patch)
    _refresh(layout, source, tag, patch, ())
    moved = f", {len(carried.relocated)} edits relocated" if carried.relocated else ""
    say(f"{patch.name}: applies{moved}")


def new_tag(
    layout: Layout,
    source: str | None,
    tag: str,
    resume: bool,
    drop: Collection[int] = (),
) -> None:
    """Copy a series to another tag and place it, patch by patch, on its tree.

    Stops at the first patch with an edit that has no place; resume goes on from there.
    Without a source, the one is taken that a dry run likes best. drop: numbers of the
    lines, as listed, that the patch mended by hand may lack.

    Raises:
        ToolError: something to mend by hand, or nothing to begin or to resume.
    """
    exists = (layout.patches / tag).exists()
    if exists and not resume:
        raise ToolError(
            f"patches/{tag} exists; CONTINUE=1 goes on with it, or remove it to begin "
            "again"
        )
    if resume and not exists:
        raise ToolError(f"nothing to continue: patches/{tag} does not exist")
    if not exists:
        source = _begin(layout, source, tag)
    if source is None:
        noted = _work(layout, tag) / "from"
        if not noted.is_file():
            raise ToolError(f"name the tag that {tag} is carried from: FROM=")
        source = noted.read_text()
    tree = pristine_tree(layout, tag)
    if resume:
        _resume(layout, source, tag, drop)
    by_name = {state.patch.name: state for state in states(layout, source)}
    for patch in read_series(layout, tag)[len(applied(tree)) :]:
        if patch.name in by_name:
            _push(layout, source, tag, by_name[patch.name], patch)
        elif quilt(layout, tag, tree, "push").returncode:
            raise ToolError(f"{patch.name}, which {source} has not, does not apply")
    noted = _work(layout, tag) / "unseen"
    places.write(layout, tag, noted.read_text().splitlines() if noted.exists() else ())
    apply_patches(layout, tag)
    say(f"{tag}: all patches apply. Then `make tags-page env check-patches TAG={tag}`")
    where = report_file(layout, tag).relative_to(layout.root)
    say(f"Look at what was relocated, in {where}, then `make places TAG={tag}`")
