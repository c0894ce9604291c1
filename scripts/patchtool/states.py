# SPDX-License-Identifier: Apache-2.0
"""What the series of a release makes of its files, patch by patch, in memory; and in
which class or function a line is."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .config import Layout, Patch, ToolError, read_series
from .hunks import Files, apply, parse
from .tree import upstream_tree


@dataclass(frozen=True)
class State:
    """The files that a series touches, before and after one of its patches."""

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


@lru_cache(maxsize=512)
def syntax_tree(file: str, text: str) -> ast.Module:
    """The syntax tree of a file; an empty one if it is not Python.

    Raises:
        ToolError: it does not compile.
    """
    try:
        return ast.parse(text if file.endswith(".py") else "")
    except SyntaxError as error:
        raise ToolError(f"{file} does not compile: {error}") from error


def _definitions(parent: ast.AST) -> Iterator[tuple[str, int, int, ast.AST]]:
    """The outermost classes and functions in a node, with their first row from 0 and
    the row after their last."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            yield node.name, first - 1, node.end_lineno or first, node
        else:
            yield from _definitions(node)


def scope_at(file: str, text: str, row: int) -> str:
    """The qualified name of the class or function that has a row; empty if the module
    has it."""
    names: list[str] = []
    node: ast.AST | None = syntax_tree(file, text)
    while node is not None:
        inside = (d for d in _definitions(node) if d[1] <= row < d[2])
        name, _, _, node = next(inside, ("", 0, 0, None))
        names += [name] if name else []
    return ".".join(names)
