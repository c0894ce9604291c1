# SPDX-License-Identifier: Apache-2.0
"""How the patches of two series differ, whatever the places of their lines."""

from __future__ import annotations

from .config import Layout, Patch, read_series, version_key
from .hunks import changed_lines


def older_neighbour(layout: Layout, source: str, tag: str) -> str | None:
    """The newest series older than `tag`, unless that is `source`."""
    older = [t for t in layout.tags() if version_key(t) < version_key(tag)]
    return older[-1] if older and older[-1] != source else None


def other_neighbour(layout: Layout, source: str, tag: str) -> str | None:
    """The kept series on the other side of `tag` than `source`."""
    key, tags = version_key(tag), [t for t in layout.tags() if t != tag]
    if version_key(source) > key:
        return max(
            (t for t in tags if version_key(t) < key), key=version_key, default=None
        )
    return min((t for t in tags if version_key(t) > key), key=version_key, default=None)


def patches(one: Patch, other: Patch, files: set[str] | None = None) -> list[str]:
    """Lines that only one of two patches changes, `<` for the first."""
    first, second = changed_lines(one.text), changed_lines(other.text)
    found = []
    for mark, lines in (("<", first - second), (">", second - first)):
        found += [
            f"{mark} {file.rpartition('/')[2]}: {line}"
            for (file, line), count in lines.items()
            for _ in range(count)
            if line[1:].strip() and (files is None or file in files)
        ]
    return found


def series(layout: Layout, source: str, other: str) -> tuple[str, str]:
    """What `other` has or changes otherwise: in short, and in full as Markdown."""
    ours = {p.name: p for p in read_series(layout, source)}
    theirs = {p.name: p for p in read_series(layout, other)}
    only = [name for name in theirs if name not in ours]
    short = f"{other}, the nearest older series, beside that of {source}:"
    long = f"\n## What the series of {other} has otherwise\n"
    for name in only:
        short += f"\n  {name}: only there"
        long += f"\n`{name}` is only there.\n"
    for name in theirs:
        if name in ours and (lines := patches(ours[name], theirs[name])):
            added = sum(line[0] == ">" for line in lines)
            short += (
                f"\n  {name[:4]}: {added} lines only there, {len(lines) - added} here"
            )
            shown = "\n".join(lines)
            long += f"\n`{name}`, `<` {source}, `>` {other}:\n\n```\n{shown}\n```\n"
    if short.endswith(":"):
        short += " the same lines"
    return short, long
