# SPDX-License-Identifier: Apache-2.0
"""`patches/<tag>/places`: where every edit of a series stands, as somebody has seen it.

A line for each edit: the patch, the file, the scope and the innermost block by syntax
tree, the lines before and behind it, and how it begins. A patch that applies may still
stand in the wrong place, or lack an edit; then it no longer agrees with this file. What
the tool relocated is marked with `?` until a person has looked at it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

from .carrying import State, states
from .config import Layout, ToolError, say
from .hunks import Edit, parse
from .source import Source, read_source

MARK = "? "
NEW = """\
# Where the edits of this series stand: written by `make places`, see docs/rebase.md.
"""


def _beside(lines: list[str], numbers: Iterable[int]) -> str:
    """The first of some lines that is not blank."""
    return next((text for n in numbers if (text := lines[n].strip())), "")


def place_of(edit: Edit, at: int, source: Source) -> str:
    """The line for an edit. at: where it begins in the file that it made."""
    end = at + len(edit.added)
    code = [n for n in range(at, end) if source.lines[n].strip()]
    line = code[0] if code else min(at, len(source.lines) - 1)
    blocks = source.blocks_at(line) if source.lines else ()
    scope = source.scope_at(line).name if source.lines else ""
    before = _beside(source.lines, range(at - 1, -1, -1))
    after = _beside(source.lines, range(end, len(source.lines)))
    parts = [
        edit.file,
        scope or "module",
        blocks[-1] if blocks else "",
        before,
        after,
        _what(edit),
    ]
    return " | ".join(parts)


def _what(edit: Edit) -> str:
    """How an edit begins, and how many lines it has, but for blank ones: quilt and this
    tool may take another one of two for new."""
    added, removed = (
        [line.strip() for line in lines if line.strip()]
        for lines in (edit.added, edit.removed)
    )
    return f"+{len(added)} -{len(removed)} {[*added, *removed, ''][0]}"


def mark(name: str, edit: Edit) -> str:
    """What tells the line of an edit of a patch, wherever it stands."""
    return f"{_number(name)} | {edit.file} | {_what(edit)}"


def places(series: list[State]) -> list[str]:
    """A line for each edit of a series, in order."""
    found = []
    for state in series:
        shifts: Counter[str] = Counter()
        sources: dict[str, Source] = {}
        for edit in parse(state.patch):
            if edit.file not in sources:
                text = state.after.get(edit.file) or ""
                sources[edit.file] = read_source(edit.file, text)
            at = edit.first + shifts[edit.file]
            shifts[edit.file] += len(edit.added) - len(edit.removed)
            number = _number(state.patch.name)
            found.append(f"{number} | {place_of(edit, at, sources[edit.file])}")
    return found


def _number(name: str) -> str:
    """`0004`, and for one of several prerequisites its name."""
    return name.removesuffix(".patch") if name.startswith("0000") else name[:4]


def _path(layout: Layout, tag: str) -> Path:
    return layout.patches / tag / "places"


def read(layout: Layout, tag: str) -> list[str]:
    """The lines that are kept for a tag, marks included."""
    path = _path(layout, tag)
    if not path.is_file():
        raise ToolError(f"patches/{tag}/places is missing; `make places TAG={tag}`")
    lines = path.read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def write(layout: Layout, tag: str, unseen: Collection[str] = ()) -> None:
    """Keep the places as they are now. unseen: the `mark` of edits that nobody has
    looked at; those of lines that are marked already stay."""
    path = _path(layout, tag)
    before = read(layout, tag) if path.is_file() else []
    lines = []
    for line in places(states(layout, tag)):
        parts = line.split(" | ")
        is_new = " | ".join([*parts[:2], parts[-1]]) in unseen
        is_marked = is_new or f"{MARK}{line}" in before
        lines.append(f"{MARK if is_marked else ''}{line}\n")
    path.write_text(NEW + "".join(lines))


def accept(layout: Layout, tag: str) -> None:
    """Write the places of a tag, all as seen, and say what is new."""
    path = _path(layout, tag)
    before = Counter(read(layout, tag)) if path.is_file() else Counter()
    path.unlink(missing_ok=True)
    write(layout, tag)
    now = Counter(read(layout, tag))
    for line in (before - now).elements():
        say(f"- {line}")
    for line in (now - before).elements():
        say(f"+ {line}")


def check(layout: Layout, tag: str) -> str:
    """Compare a series with its places.

    Raises:
        ToolError: an edit is missing, is new, stands elsewhere, or was not looked at.
    """
    kept, now = read(layout, tag), places(states(layout, tag))
    unseen = [line for line in kept if line.startswith(MARK)]
    lost = Counter(line.removeprefix(MARK) for line in kept)
    new = Counter(now)
    lines = [f"- {line}" for line in (lost - new).elements()]
    lines += [f"+ {line}" for line in (new - lost).elements()]
    if lines or unseen:
        shown = "".join(f"\n  {line}" for line in [*lines, *unseen][:12])
        raise ToolError(
            f"{tag}: edits do not stand where somebody has seen them (`-` kept, `+` now"
            f", `?` relocated):{shown}\nLook at them, then `make places TAG={tag}`"
        )
    if kept != now:
        raise ToolError(f"{tag}: edits stand in another order; `make places TAG={tag}`")
    return f"{len(now)} edits stand where somebody has seen them"
