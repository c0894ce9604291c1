# SPDX-License-Identifier: Apache-2.0
"""`patches/seams.toml`: what every series must do to upstream, and what of upstream the
overlay relies on; checked by syntax tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import differs, names
from .config import Layout, ToolError, tomllib, version_key
from .hunks import Edit, parse
from .states import State, read_files, scope_at, states, syntax_tree
from .tree import upstream_tree

TABLE = "seams.toml"


@dataclass(frozen=True)
class Seam:
    """One thing that every series does.

    file, scope: where; several where releases differ. code: a pattern that one line
    matches that is added there. needs: `file:name` of what upstream must define for it.
    test: what fails without it. since, until: the oldest and the newest release that
    have it; why: what would be wrong with it in later ones. twice: a pattern;
    where upstream has it in the file, there are two such places. before: a pattern of
    lines that all come later in the file.
    """

    name: str
    patch: str
    file: tuple[str, ...]
    scope: tuple[str, ...]
    code: str
    test: str
    why: str = ""
    needs: tuple[str, ...] = ()
    since: str = "v0.0.0"
    until: str = ""
    twice: str = ""
    before: str = ""

    def matches(self, edit: Edit) -> list[int]:
        """The added lines of an edit that are this seam's, by number."""
        return [n for n, line in enumerate(edit.added) if re.search(self.code, line)]

    def is_in(self, tag: str) -> bool:
        return version_key(self.since) <= version_key(tag) and not self.is_past(tag)

    def is_past(self, tag: str) -> bool:
        return bool(self.until) and version_key(self.until) < version_key(tag)


@dataclass(frozen=True)
class Needed:
    """Names of a class or module of upstream that the overlay calls or overrides."""

    file: tuple[str, ...]
    names: tuple[str, ...]
    by: str
    since: str = "v0.0.0"


def _tuple(value: object) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)  # type: ignore[arg-type]


def load(layout: Layout) -> tuple[list[Seam], list[Needed]]:
    """The table.

    Raises:
        ToolError: it is missing, or has a key that is not known.
    """
    path = layout.patches / TABLE
    try:
        data = tomllib.loads(path.read_text()) if path.is_file() else {}
        several = ("file", "scope", "needs", "names")
        rows: dict[str, list[dict[str, Any]]] = {
            kind: [
                {k: _tuple(v) if k in several else v for k, v in row.items()}
                for row in data.get(kind, [])
            ]
            for kind in ("seam", "upstream")
        }
        return (
            [Seam(**row) for row in rows["seam"]],
            [Needed(**row) for row in rows["upstream"]],
        )
    except (TypeError, tomllib.TOMLDecodeError) as error:
        raise ToolError(f"patches/{TABLE}: {error}") from error


@lru_cache(maxsize=512)
def defined(name: str, text: str) -> frozenset[str]:
    """What a file defines: functions, classes, fields, and attributes of `self`."""
    return frozenset(_of(syntax_tree(name, text), ""))


def _of(node: ast.AST, prefix: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield f"{prefix}{child.name}"
            yield from _of(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{child.name}"
            arguments = [*child.args.args, *child.args.kwonlyargs]
            yield from (f"{prefix}{child.name}({a.arg})" for a in arguments)
            yield from _attributes(child, prefix)
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = getattr(child, "targets", None) or [child.target]  # type: ignore[union-attr]
            yield from (f"{prefix}{t.id}" for t in targets if hasattr(t, "id"))
        elif isinstance(child, ast.ImportFrom | ast.Import):
            yield from (f"{prefix}{a.asname or a.name}" for a in child.names)
        else:
            yield from _of(child, prefix)


def _attributes(function: ast.AST, prefix: str) -> Iterator[str]:
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield f"{prefix}{node.attr}"


def _edits(series: list[State], seam: Seam) -> Iterator[tuple[State, Edit]]:
    """Where a series has what the seam's edit adds."""
    for state in series:
        if state.patch.name.startswith(seam.patch):
            for edit in parse(state.patch):
                if edit.file in seam.file and seam.matches(edit):
                    yield state, edit


def _row(state: State, edit: Edit, seam: Seam) -> int:
    """Where the line of an edit that is the seam's is in the file after the patch."""
    shift = sum(
        len(e.added) - len(e.removed)
        for e in parse(state.patch)
        if e.file == edit.file and e.first < edit.first
    )
    return edit.first + shift + seam.matches(edit)[0]


def _scope(state: State, edit: Edit, seam: Seam) -> str:
    text = state.after.get(edit.file) or ""
    return scope_at(edit.file, text, _row(state, edit, seam))


def _is_late(state: State, edit: Edit, seam: Seam) -> bool:
    """Whether a line that must come later than the seam's does not."""
    lines = (state.after.get(edit.file) or "").splitlines()
    rows = [n for n, line in enumerate(lines) if re.search(seam.before, line)]
    return bool(seam.before) and min(rows, default=-1) <= _row(state, edit, seam)


def _missing(
    wanted: Mapping[tuple[str, ...], set[str]], files: Mapping[str, str | None]
) -> list[str]:
    """Names that none of their files defines."""
    lost = []
    for alternatives, needed in wanted.items():
        known: set[str] = set()
        for file in alternatives:
            if (text := files.get(file)) is not None:
                known |= defined(file, text)
        lost += [f"{alternatives[0]}:{name}" for name in sorted(needed - known)]
    return lost


def _lines(layout: Layout, tag: str, seam: Seam) -> str:
    """How the nearest other series has a seam."""
    for other in differs.neighbours(layout, tag):
        if seam.is_in(other):
            for state, edit in _edits(states(layout, other), seam):
                lines = [edit.added[n].strip() for n in seam.matches(edit)]
                scope = _scope(state, edit, seam)
                shown = f"{other} has in {edit.file}, {scope or 'module'}:"
                return "\n      ".join([shown, *lines])
    return "no neighbour has it"


def _wrong(layout: Layout, tag: str, series: list[State], seam: Seam) -> str:
    """What is wrong with a seam of a series; empty if nothing is."""
    found = list(_edits(series, seam))
    if seam.is_past(tag):
        return f"is for releases up to {seam.until}: {seam.why}" if found else ""
    if not seam.is_in(tag):
        return ""
    count = sum(len(seam.matches(edit)) for _, edit in found)
    upstream = (series[0].before.get(file) or "" for file in seam.file if series)
    most = 1 + bool(seam.twice and any(re.search(seam.twice, t) for t in upstream))
    where = f"{' or '.join(seam.file)}, {' or '.join(seam.scope) or 'module'}"
    if count != most:
        return f"is there {count} times and not {most}, in {where}: `{seam.code}`"
    if scopes := ({_scope(*each, seam) for each in found} - set(seam.scope)):
        return f"is in {', '.join(scopes)} and not in {where}: `{seam.code}`"
    if any(_is_late(*each, seam) for each in found):
        return f"is not before `{seam.before}`, in {where}: `{seam.code}`"
    return ""


def check(layout: Layout, tag: str, series: list[State] | None = None) -> str:
    """Compare a series, and its release, with the table. series: instead of the one
    that is kept.

    Raises:
        ToolError: seams are missing, there twice, or in another scope; or names of
            upstream are missing. The message has all of them.
    """
    seams, needed = load(layout)
    series = states(layout, tag) if series is None else series
    errors = []
    for seam in seams:
        if wrong := _wrong(layout, tag, series, seam):
            errors.append(
                f"the seam `{seam.name}` of {seam.patch} {wrong}\n"
                f"    {_lines(layout, tag, seam)}\n    {seam.test} fails without it"
            )
    seams = [seam for seam in seams if seam.is_in(tag)]
    wanted: dict[tuple[str, ...], set[str]] = {}
    for seam in seams:
        for need in seam.needs:
            file, _, name = need.partition(":")
            wanted.setdefault((file,), set()).add(name)
    for row in needed:
        if version_key(row.since) <= version_key(tag):
            wanted.setdefault(row.file, set()).update(row.names)
    files = read_files(upstream_tree(layout, tag), {f for fs in wanted for f in fs})
    # Prerequisites bring what a release lacks.
    files |= {
        k: v for k, v in (series[-1].after if series else {}).items() if k in files
    }
    if lost := _missing(wanted, files):
        errors.append(f"the series or the overlay needs {', '.join(lost)}")
    if lost := names.unknown(layout, tag, series):
        errors.append(f"neither {tag} nor the overlay has {', '.join(lost)}")
    if errors:
        raise ToolError(f"{tag}: " + "\n  ".join(errors))
    count = sum(len(found) for found in wanted.values())
    return (
        f"{len(seams)} seams once and in their scopes, {count} names of upstream there"
    )


def check_tests(layout: Layout) -> list[str]:
    """Tests that the table names and that are not there."""
    lost = []
    for seam in load(layout)[0]:
        file, _, name = seam.test.partition("::")
        path = Path(layout.root) / file
        if not path.is_file() or f"def {name.split('[')[0]}(" not in path.read_text():
            lost.append(seam.test)
    return lost
