# SPDX-License-Identifier: Apache-2.0
"""What `mutate.py` changes in a module, one place at a time.

A comparison turned or its bound moved, `and` and `or` exchanged, a
condition negated, a number one more, `True` and `False` exchanged, other arithmetic,
`min` for `max`, a call or an assignment with an operator left out, `break` and
`continue` exchanged or left out, and None returned, but not for False: who asks for
truth could not tell.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OVERLAY = ROOT / "vllm_overlay"

_COMPARE: dict[type, list[type]] = {
    ast.Lt: [ast.LtE, ast.Gt],
    ast.LtE: [ast.Lt],
    ast.Gt: [ast.GtE, ast.Lt],
    ast.GtE: [ast.Gt],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}
_ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


@dataclass(frozen=True)
class Mutant:
    """A module with one place changed."""

    path: Path
    line: int
    before: str
    after: str
    number: int
    """Of several changes of the same text in a module."""
    place: int
    change: int
    """Which place of the module, and which of the changes of it."""

    @property
    def name(self) -> str:
        """The same for the same change, wherever it moves within its file."""
        path = self.path.relative_to(OVERLAY).as_posix()
        again = f" ({self.number})" if self.number else ""
        return f"{path}: {self.before} -> {self.after}{again}"


def _changed(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of an expression or a statement."""
    new: Any
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            for other in _COMPARE.get(type(op), []):
                new = copy.deepcopy(node)
                new.ops[i] = other()
                yield new
    elif isinstance(node, ast.BoolOp):
        new = copy.deepcopy(node)
        new.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield new
    elif isinstance(node, (ast.BinOp, ast.AugAssign)):
        if operator := _ARITHMETIC.get(type(node.op)):
            new = copy.deepcopy(node)
            new.op = operator()
            yield new
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield copy.deepcopy(node.operand)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value)
        elif isinstance(node.value, (int, float)):
            yield ast.Constant(node.value + 1)
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
        new = copy.deepcopy(node)
        new.test = ast.UnaryOp(ast.Not(), new.test)
        yield new
    elif isinstance(node, ast.Return):
        if node.value is not None and not _is_none_or_false(node.value):
            yield ast.Return(ast.Constant(None))
    elif isinstance(node, (ast.Continue, ast.Break)):
        yield ast.Break() if isinstance(node, ast.Continue) else ast.Continue()
        yield ast.Pass()
    elif isinstance(node, ast.Call) and _first_line(node.func) in ("min", "max"):
        new = copy.deepcopy(node)
        name = "max" if _first_line(node.func) == "min" else "min"
        new.func = ast.Name(name, ast.Load())
        yield new
    if isinstance(node, (ast.AugAssign, ast.Delete, ast.Raise)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield ast.Pass()


def _is_none_or_false(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and (
        node.value is None or node.value is False
    )


@dataclass
class _Place:
    """Where a node is, so that another can be put there."""

    parent: ast.AST
    field: str
    index: int | None
    node: ast.AST
    function: ast.FunctionDef | ast.AsyncFunctionDef
    """The outermost one around it."""

    def put(self, node: ast.AST) -> None:
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


def _places(
    parent: ast.AST, function: ast.FunctionDef | ast.AsyncFunctionDef | None = None
) -> Iterator[_Place]:
    """Everything that may be changed: what runs when a function does, but for
    annotations and what is raised or logged."""
    if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef) and function is None:
        function = parent
    for name, value in ast.iter_fields(parent):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        # Defaults are made when the function is.
        if name == "args" and function is parent:
            continue
        for i, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST):
                continue
            if function is not None:
                index = i if isinstance(value, list) else None
                yield _Place(parent, name, index, child, function)
            if not (_is_message(child) or isinstance(child, ast.JoinedStr)):
                yield from _places(child, function)


def _is_message(node: ast.AST) -> bool:
    """A log line, or an error with its text."""
    return isinstance(node, ast.Raise) or _is_log(node)


def _is_log(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).startswith("logger.")
    )


def _first_line(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).split("\n")[0]


def mutants_of(path: Path) -> list[Mutant]:
    """All of a file, in its order."""
    counts: Counter[tuple[str, str]] = Counter()
    found: list[Mutant] = []
    for i, place in enumerate(_places(ast.parse(path.read_text()))):
        if _is_log(place.node):
            continue
        for j, new in enumerate(_changed(place.node)):
            texts = _first_line(place.node), _first_line(new)
            number = counts[texts]
            counts[texts] += 1
            line = getattr(place.node, "lineno", place.function.lineno)
            found.append(Mutant(path, line, *texts, number, i, j))
    return found


def changed_tree(mutant: Mutant) -> tuple[ast.Module, int]:
    """Its module, and the first line of the outermost function that is changed."""
    tree = ast.parse(mutant.path.read_text())
    place = [*_places(tree)][mutant.place]
    new = [*_changed(place.node)][mutant.change]
    function = place.function
    _keep_super(function)
    place.put(ast.copy_location(new, place.node))
    first = min(node.lineno for node in (function, *function.decorator_list))
    return ast.fix_missing_locations(tree), first


def _keep_super(function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    """A body without its call of `super` would not fit the function."""
    if any(isinstance(n, ast.Name) and n.id == "super" for n in ast.walk(function)):
        name = ast.Expr(ast.Name("__class__", ast.Load()))
        function.body.append(ast.If(ast.Constant(False), [name], []))
