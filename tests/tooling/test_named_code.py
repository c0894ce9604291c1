# SPDX-License-Identifier: Apache-2.0
"""Pages for contributors name code and files that exist.

Looks at sources only, so that it needs no vLLM.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "vllm.v1.kv_tier"
OVERLAY = ROOT / "vllm_overlay" / Path(*PACKAGE.split("."))
GLOSSARY = ROOT / "docs" / "glossary.md"
PAGES = {
    "how-it-works": ROOT / "docs" / "how-it-works.md",
    "overlay": OVERLAY / "README.md",
    "glossary": GLOSSARY,
}
HEADER = ["word", "in the code", "meaning"]
NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)?")
PLACEHOLDERS = re.compile(r"NAME|TAG|\*|…")


# ---------------------------------------------------------------- what there is


def members(node: ast.ClassDef) -> set[str]:
    """Methods and fields of a class, also those that a method sets."""
    found = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(inner.name)
        elif isinstance(inner, ast.AnnAssign | ast.Assign):
            targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
            found |= {t.attr for t in targets if isinstance(t, ast.Attribute)}
            found |= {t.id for t in targets if isinstance(t, ast.Name)}
    return found


def names_of(source: str) -> set[str]:
    """Classes and functions of a module, `Class.member`, and imports from upstream."""
    found, tree = set(), ast.parse(source)
    for node in ast.walk(tree):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if module.startswith("vllm.") and not module.startswith(PACKAGE):
            found |= {alias.name for alias in node.names}  # type: ignore[attr-defined]
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for name in members(node)}
    return found


def sources(*folders: str) -> list[str]:
    files = (p for folder in folders for p in (ROOT / folder).rglob("*.py"))
    return [path.read_text() for path in files if path.name != Path(__file__).name]


OF_OVERLAY = set().union(*map(names_of, sources("vllm_overlay")))
KNOWN = OF_OVERLAY.union(*map(names_of, sources("tests", "scripts", "ci")))
PATCHES = [path.read_text() for path in (ROOT / "patches").glob("*/*.patch")]
WORDS = set(
    re.findall(r"\w+", "\n".join([*sources("vllm_overlay", "tests"), *PATCHES]))
)
PACKAGES = {path.name for path in OVERLAY.iterdir() if path.is_dir()}
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()}


# --------------------------------------------------------------- what pages name


def spans(text: str) -> list[str]:
    """What stands in backticks, without blocks of code."""
    prose = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    found = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    return [span for span in found if not PLACEHOLDERS.search(span)]


def is_there(span: str) -> bool:
    """Whether code or a file has that name. Commands and values are left alone."""
    first, slash, rest = span.partition("/")
    if slash and first in PACKAGES:
        return (OVERLAY / span).is_dir() or (OVERLAY / f"{span}.py").is_file()
    if slash and first in FOLDERS:
        return (ROOT / span.split()[0]).exists()
    if not NAME.fullmatch(span):
        return True
    if "." in span or re.match(r"[A-Z]\w*[a-z]", span):
        return span in KNOWN or span.startswith("vllm.")
    return span in WORDS


def missing(text: str) -> list[str]:
    return [span for span in spans(text) if not is_there(span)]


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_what_a_page_names_is_there(page: Path) -> None:
    assert not missing(page.read_text())


@pytest.mark.parametrize(
    "gone",
    [
        *("NoSuchClass", "SlotTable.no_such_method", "no_such_function"),
        *("eviction/no_such_module", "tests/unit/test_no_such_file.py"),
    ],
)
def test_a_name_that_is_gone_is_noticed(gone: str) -> None:
    text = PAGES["overlay"].read_text()
    assert missing(text.replace("`SlotTable`", f"`{gone}`", 1)) == [gone]


# ------------------------------------------------------------------ the glossary


def rows(page: str) -> list[list[str]]:
    """Cells of all tables, without headers and rulers."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row != HEADER and set("".join(row)) != {"-"}]


ROWS = rows(GLOSSARY.read_text())


def unknown(table: Iterable[list[str]]) -> list[str]:
    """Names of the middle column that no module of the overlay has."""
    named = [name for row in table for name in re.findall(r"`([^`]+)`", row[1])]
    return [name for name in named if name not in OF_OVERLAY]


def test_each_word_of_the_glossary_has_its_code() -> None:
    assert all(len(row) == 3 and row[0] and row[2] for row in ROWS)
    assert not unknown(ROWS)
    assert unknown([["word", "`SlotTable.pins`, `SlotTable`", ""]]) == [
        "SlotTable.pins"
    ]


def test_each_word_of_the_glossary_has_one_row() -> None:
    words = [word for row in ROWS for word in row[0].split(", ")]
    assert len(words) == len(set(words)) > 40
    code = [name for row in ROWS for name in re.findall("`([^`]+)`", row[1])]
    assert len(code) == len(set(code))
