# SPDX-License-Identifier: Apache-2.0
"""The scopes of a Python file, by line.

The standard library's `ast` knows where everything stands, and the lines themselves
keep comments and white space: trees are read here and never printed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .config import ToolError

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Scope:
    """A class or function; the module has no name. Lines count from 0."""

    name: str
    first: int
    end: int
    """The line behind the last."""
    inner: tuple[Scope, ...] = ()

    def walk(self) -> Iterator[Scope]:
        yield self
        for scope in self.inner:
            yield from scope.walk()


def _start(node: ast.AST) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)]) - 1  # type: ignore[attr-defined]


def _end(node: ast.AST) -> int:
    return node.end_lineno  # type: ignore[attr-defined, no-any-return]


class Source:
    """A file's text with its tree; files that are not Python have one scope.

    Raises:
        ToolError: it is Python and does not compile.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.lines = text.splitlines()
        self.tree = ast.Module([], [])
        if name.endswith(".py"):
            try:
                self.tree = ast.parse(text)
            except SyntaxError as error:
                raise ToolError(f"{name} does not compile: {error}") from error

    @cached_property
    def module(self) -> Scope:
        return Scope("", 0, len(self.lines), self._inner(self.tree, ""))

    def _inner(self, node: ast.AST, prefix: str) -> tuple[Scope, ...]:
        found: list[Scope] = []

        def visit(parent: ast.AST) -> None:
            for child in ast.iter_child_nodes(parent):
                if not isinstance(child, SCOPES):
                    visit(child)
                    continue
                name = f"{prefix}{child.name}"
                # Overloads, properties and branches may define a name again.
                count = sum(s.name.split("#")[0] == name for s in found)
                name += f"#{count + 1}" if count else ""
                inner = self._inner(child, f"{name}.")
                found.append(Scope(name, _start(child), _end(child), inner))

        visit(node)
        return tuple(found)

    @cached_property
    def scopes(self) -> dict[str, Scope]:
        """By qualified name; a name's second definition ends in `#2`."""
        return {scope.name: scope for scope in self.module.walk()}

    def scope_at(self, line: int) -> Scope:
        """The innermost scope that has the line."""
        scope = self.module
        while True:
            inner = [s for s in scope.inner if s.first <= line < s.end]
            if not inner:
                return scope
            scope = inner[0]


@lru_cache(maxsize=512)
def read_source(name: str, text: str) -> Source:
    """The source of a file, parsed once."""
    return Source(name, text)
