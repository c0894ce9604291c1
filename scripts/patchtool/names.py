# SPDX-License-Identifier: Apache-2.0
"""Finds names that a series uses or imports wrongly, and that its release lacks.

Python finds these when the line runs, which may be long after the import, or never: an
attribute that is only assigned is an attribute.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from .config import Layout, ToolError, overlay_files
from .hunks import parse
from .states import State, syntax_tree
from .tree import upstream_tree

WORD = re.compile(r"\w+")


def _ruff(ruff: Path, rules: str, root: Path, files: list[str]) -> dict[tuple, int]:
    """What ruff says of files, as file, rule and message, with the line."""
    command = [str(ruff), "check", "--isolated", "--no-cache", "--select", rules]
    command += ["--exit-zero", "--output-format", "json"]
    paths = [file for file in files if (root / file).is_file()]
    if not paths:
        return {}
    result = subprocess.run(
        [*command, *paths], cwd=root, capture_output=True, text=True
    )
    if result.returncode:
        raise ToolError(f"ruff fails:\n{result.stderr[-2000:]}")
    found = {}
    for each in json.loads(result.stdout):
        file = Path(each["filename"]).resolve().relative_to(root.resolve())
        message = re.sub(r" from line \d+| on line \d+|:\d+:\d+", "", each["message"])
        found[file.as_posix(), each["code"], message] = each["location"]["row"]
    return found


def lint(ruff: Path, upstream: Path, prefixes: list[Path], series: list[State]) -> str:
    """What ruff finds in a series and not upstream, as a message; or nothing. Of every
    prefix names that are not defined; of the whole series imports that are not used or
    made twice.

    prefixes: for each patch the folder of the files as it leaves them.
    """
    files = sorted({f for s in series for f in s.patch.files if f.endswith(".py")})
    known = _ruff(ruff, "F821,F811,F401", upstream, files)
    added: dict[str, set[str]] = {}
    for edit in (edit for state in series for edit in parse(state.patch)):
        added.setdefault(edit.file, set()).update(edit.added)
    for folder, state in zip(prefixes, series):
        rules = "F821,F811,F401" if state is series[-1] else "F821"
        for (file, code, message), row in _ruff(ruff, rules, folder, files).items():
            # An import that only lost its users is upstream's.
            line = (state.after.get(file) or "").splitlines()[row - 1]
            mine = code == "F821" or line in added.get(file, ())
            if mine and (file, code, message) not in known:
                return f"prefix up to {state.patch.name}: {file}:{row}: {message}"
    return ""


def _added_rows(series: list[State]) -> Iterator[tuple[State, str, set[int]]]:
    """For each patch and file the rows, from 1, that the patch adds."""
    for state in series:
        rows: dict[str, set[int]] = {}
        shift: dict[str, int] = {}
        for edit in parse(state.patch):
            first = edit.first + shift.get(edit.file, 0) + 1
            rows.setdefault(edit.file, set()).update(
                range(first, first + len(edit.added))
            )
            change = len(edit.added) - len(edit.removed)
            shift[edit.file] = shift.get(edit.file, 0) + change
        for file, found in rows.items():
            if file.endswith(".py") and state.after.get(file):
                yield state, file, found


def _uses(tree: ast.AST, rows: set[int]) -> Iterator[tuple[str, bool]]:
    """Attributes and keywords in some rows, and whether one is only assigned."""
    for node in ast.walk(tree):
        if getattr(node, "lineno", 0) not in rows:
            continue
        if isinstance(node, ast.Attribute):
            is_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            stored = isinstance(node.ctx, ast.Store)
            yield node.attr, stored and not is_self
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg, False


def unknown(layout: Layout, tag: str, series: list[State]) -> list[str]:
    """Attributes and arguments that a series uses and that neither its release nor the
    overlay has. What it assigns on objects of others must be a field of its own or of
    its release: the overlay knows names of several releases."""
    own: set[str] = set()
    fields: set[str] = set()
    used: dict[tuple[str, bool], str] = {}
    for state, file, rows in _added_rows(series):
        text = state.after[file] or ""
        lines = text.splitlines()
        for name, foreign in _uses(syntax_tree(file, text), rows):
            used.setdefault((name, foreign), f"{state.patch.name[:4]} {file}")
        for row in rows:
            line = lines[row - 1]
            own.update(re.findall(r"(?:def |self\.|^\s*)(\w+)\s*(?:[:(=]|$)", line))
            own.update(re.findall(r"(\w+): ", line))
            fields.update(re.findall(r"^\s*(\w+): ", line))
    for path in overlay_files(layout).values():
        if path.suffix == ".py":
            own.update(WORD.findall(path.read_text()))
    known: set[str] = set()
    for before in series[0].before.values() if series else ():
        known.update(WORD.findall(before or ""))
    left = {k for k in used if k[0] not in known | (fields if k[1] else own)}
    if left:
        words = "|".join(sorted({name for name, _ in left}))
        command = ["grep", "-rhowE", "--include=*.py", words, "vllm"]
        tree = upstream_tree(layout, tag)
        result = subprocess.run(command, cwd=tree, capture_output=True, text=True)
        left = {key for key in left if key[0] not in set(result.stdout.split())}
    return sorted(f"{used[key]}: `{key[0]}`" for key in left)
