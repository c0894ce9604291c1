# SPDX-License-Identifier: Apache-2.0
"""What the series of a release makes of its files, patch by patch, in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .config import Layout, Patch, read_series
from .hunks import Files, apply, parse
from .source import Source
from .tree import upstream_tree


@dataclass(frozen=True)
class State:
    """The files that a series touches, before and behind one of its patches."""

    patch: Patch
    before: Files
    after: Files


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
    more: names of files that the series does not touch.

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
