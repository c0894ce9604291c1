# SPDX-License-Identifier: Apache-2.0
"""The glossary names code that exists.

Looks at sources only, so that it needs no vLLM.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "vllm.v1.kv_tier"
OVERLAY = ROOT / "vllm_overlay" / Path(*PACKAGE.split("."))
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
HEADER = ["word", "in the code", "meaning"]


def rows(page: str) -> list[list[str]]:
    """Cells of all tables, without headers and rulers."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row != HEADER and set("".join(row)) != {"-"}]


def members(node: ast.ClassDef) -> set[str]:
    """Methods and fields of a class, also those that a method sets."""
    found = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(inner.name)
        elif isinstance(inner, ast.AnnAssign | ast.Assign):
            targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
            for target in targets:
                if isinstance(target, ast.Attribute):
                    found.add(target.attr)
                elif isinstance(target, ast.Name):
                    found.add(target.id)
    return found


def names_of(source: str) -> set[str]:
    """What a module defines at its top, `Class.member` for classes, and what it
    imports from upstream."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if module.startswith("vllm.") and not module.startswith(PACKAGE):
            found |= {alias.name for alias in node.names}  # type: ignore[attr-defined]
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for name in members(node)}
    return found


KNOWN = {name for path in OVERLAY.rglob("*.py") for name in names_of(path.read_text())}


def unknown_in(page: str) -> list[str]:
    """Names of the middle column that no module of the overlay has."""
    named = [name for row in rows(page) for name in re.findall(r"`([^`]+)`", row[1])]
    return [name for name in named if name not in KNOWN]


def test_the_glossary_names_code_that_exists() -> None:
    assert not unknown_in(GLOSSARY)


@pytest.mark.parametrize("name", ["NoSuchClass", "SlotTable.no_such_method"])
def test_a_name_that_is_gone_is_noticed(name: str) -> None:
    page = GLOSSARY.replace("`SlotTable.pin`", f"`{name}`")
    assert page != GLOSSARY
    assert unknown_in(page) == [name]


def test_each_word_has_one_meaning() -> None:
    """One row for each word, and one word for each piece of code."""
    words = [word for row in rows(GLOSSARY) for word in row[0].split(", ")]
    assert len(words) == len(set(words)) > 40
    code = [name for row in rows(GLOSSARY) for name in re.findall("`([^`]+)`", row[1])]
    assert len(code) == len(set(code))


def test_all_rows_have_three_cells() -> None:
    assert all(len(row) == 3 and row[0] and row[2] for row in rows(GLOSSARY))
