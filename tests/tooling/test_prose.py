# SPDX-License-Identifier: Apache-2.0
"""Plain English in everything that users read: pages, patch headers and messages.

The list has words and phrases that this project once used with meanings of its own, and
what to write instead. Code is not prose: spans and blocks of it are left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OVERLAY = ROOT / "vllm_overlay" / "vllm" / "v1" / "kv_tier"

INSTEAD = {
    r"beside": "next to (a place); with, in addition to, compared with",
    r"told|tells? \w+ anew": "informed, reported, published; the passive",
    r"mend(s|ed|ing)?": "fix",
    r"nobody|nothing is said|somebody": "the passive; no one, someone",
    r"com(es?|ing) by(?! [\w`])": "reach, pass, is called",
    r"(is|are|be) said (to be|of)|what is said": "name who says it, or the fact",
    r"anew": "again",
    r"of late": "recent, recently",
    r"(an?|the|from|of) (below|ahead)(?! of)": "secondary tier; prefetch",
    r"tiers? below": "secondary tier",
    r"loads? ahead|loaded ahead": "prefetch",
    r"(take|takes|taken|took) out": "remove",
    r"in the making": "current",
    r"to be had|can be had": "available",
    r"(come|comes|came) to (its|their|an) end": "complete, end",
    r"hears? (of|from)|heard of": "is informed, gets, sees",
    r"look(s|ed)? on": "watches, observes",
    r"of (its|their|your|one's) own accord": "by itself",
    r"the house|doors?": "repository, public module",
}
"""Regular expressions of whole words: what to write instead."""

DIALECT = {
    re.compile(rf"\b(?:{word})\b", re.IGNORECASE): w for word, w in INSTEAD.items()
}

CODE = re.compile(
    r"^(?: {4}|\t)[^\n]*$|```.*?```|`[^`]*`|\]\([^)]*\)|<[a-z/!][^>\n]*>", re.M | re.S
)
"""Code, link targets and tags in Markdown."""


def found_in(prose: str) -> list[str]:
    """Each use of a word of the list, with its surroundings and the alternatives."""
    text = re.sub(r"\s+", " ", prose)
    return [
        f"…{text[max(match.start() - 30, 0) : match.end() + 30]}…: write {instead}"
        for word, instead in DIALECT.items()
        for match in word.finditer(text)
    ]


# ------------------------------------------------------------------------- pages

PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(OVERLAY.glob("*.md")),
]


def id_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_pages(page: Path) -> None:
    assert not found_in(CODE.sub(" ", page.read_text()))


RECIPES = [
    path
    for folder in ("deploy", "ops")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.is_file() and path.suffix != ".pyc" and path.suffix != ".json"
]


@pytest.mark.parametrize("path", RECIPES, ids=id_of)
def test_comments_of_recipes(path: Path) -> None:
    lines = (line.partition("#") for line in path.read_text().splitlines())
    assert not found_in(" ".join(comment for _, sign, comment in lines if sign))


def test_texts_of_the_dashboard_and_the_alerts() -> None:
    text = (ROOT / "ops" / "grafana.json").read_text()
    shown = re.findall(r'"(?:title|description)": "((?:[^"\\]|\\.)*)"', text)
    alerts = (ROOT / "ops" / "alerts.yml").read_text()
    assert shown and not found_in(CODE.sub(" ", "\n".join([*shown, alerts])))


# ------------------------------------------------------------------ patch headers


@pytest.mark.parametrize("series", sorted((ROOT / "patches").glob("v*")), ids=id_of)
def test_patch_headers(series: Path) -> None:
    headers = {
        path.name: path.read_text().partition("\n--- ")[0]
        for path in series.glob("*.patch")
    }
    assert headers
    assert not {
        name: found for name, text in headers.items() if (found := found_in(text))
    }


# ----------------------------------------------------------------------- messages

SAYS = re.compile(
    r"(\w+Error|SystemExit|Metric|Unusable|_fault|logger\.\w+|warnings\.warn)$"
)
"""Calls whose texts users read."""


def texts(node: ast.AST) -> str:
    """All literal text in an expression, with a space for what is filled in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else " "
    if isinstance(node, ast.JoinedStr):
        return "".join(map(texts, node.values))
    return " ".join(map(texts, ast.iter_child_nodes(node)))


def messages(source: str) -> Iterator[str]:
    """What a module says in errors, in the log and in metrics."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and SAYS.search(ast.unparse(node.func)):
            yield " ".join(map(texts, [*node.args, *(k.value for k in node.keywords)]))
        elif isinstance(node, ast.Return | ast.Assign) and node.value is not None:
            # Texts that are put together before they are raised.
            text = texts(node.value)
            if text.count(" ") > 3:
                yield text


@pytest.mark.parametrize("path", sorted(OVERLAY.rglob("*.py")), ids=id_of)
def test_messages(path: Path) -> None:
    assert not [
        found for text in messages(path.read_text()) for found in found_in(text)
    ]


# ---------------------------------------------------------------------- the check


@pytest.mark.parametrize(
    "text",
    [
        "Copies run beside the steps.",
        "The scheduler is told of it",
        "this is mended",
        "nobody\nreads it",
        "A tier below the host",
        "blocks that came from below",
        "Take out one of them.",
    ],
)
def test_dialect_is_noticed(text: str) -> None:
    assert found_in(text)


@pytest.mark.parametrize(
    "text",
    ["see the table below", "a step ahead of time", "Go only", "recommend", "behind"],
)
def test_plain_english_is_not(text: str) -> None:
    assert not found_in(text)


def test_code_is_no_prose() -> None:
    page = "A [page](told.md) of `nobody`:\n\n    beside\n\n```\nmend\n```\n"
    assert not found_in(CODE.sub(" ", page))


def test_messages_are_found() -> None:
    source = "def f(x):\n    raise ValueError(f'{x} is mended')\n"
    assert [found for text in messages(source) for found in found_in(text)]
