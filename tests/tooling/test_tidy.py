# SPDX-License-Identifier: Apache-2.0
"""The house stays tidy: doors and rooms, sizes, and what newcomers are told.

Looks at sources only, so that it needs no vLLM.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "vllm.v1.kv_tier"
OVERLAY = ROOT / "vllm_overlay" / Path(*PACKAGE.split("."))

MAX_CLASS_LINES, MAX_FUNCTION_LINES = 500, 70

PUBLIC = {"about", "hints", "policy"}
"""Doors that no patch opens: people do."""

SHARED = {"bounded", "options", "releases"}
"""Values at the top that only modules of the overlay import."""

DATA_DOORS = {"bounded", "config", "hints", "options", "plan", "releases", "stats"}
"""Doors that any room may import: they hold values and know of no room's work."""

FLOORS = (
    {"scheduling", "rank", "api"},
    {"copying"},
    {"memory", "eviction", "stores"},
)
"""Rooms, from the top floor down. A room imports from the floors below its own."""


# ---------------------------------------------------------------- what there is


def sources(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    """`scheduling.slots` for a module of the overlay, `scheduling` for its package."""
    parts = path.relative_to(OVERLAY).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {name_of(path): path for path in sorted(OVERLAY.rglob("*.py"))}


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(path: Path, types_too: bool = True) -> set[str]:
    """Modules of the overlay that a module of the overlay imports, anywhere in it."""
    found, todo = set(), [ast.parse(path.read_text())]
    while todo:
        node: ast.AST = todo.pop()
        if is_for_types(node) and not types_too:
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = [PACKAGE, *path.relative_to(OVERLAY).parts[:-1]]
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    inside = {m.removeprefix(PACKAGE).removeprefix(".") for m in found if PACKAGE in m}
    return (inside & MODULES.keys()) - {"", name_of(path)}


def room_of(module: str) -> str:
    """Empty for a door."""
    return module.partition(".")[0] if (OVERLAY / module.split(".")[0]).is_dir() else ""


def opened_by_patches() -> set[str]:
    """Modules that the lines of any series import."""
    added = re.compile(rf"^\+.*\b{re.escape(PACKAGE)}\.(\w+)", re.MULTILINE)
    texts = (p.read_text() for p in (ROOT / "patches").glob("*/*.patch"))
    return {name for text in texts for name in added.findall(text)}


# -------------------------------------------------------------- doors and rooms


def test_what_lies_at_the_top_is_a_door() -> None:
    doors = {p.stem for p in OVERLAY.glob("*.py")} - {"__init__"}
    assert doors == opened_by_patches() | PUBLIC | SHARED


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(module) for module in MODULES} - {""}
    assert rooms <= set().union(*FLOORS)


@pytest.mark.parametrize("module", [m for m in MODULES if room_of(m)])
def test_no_room_imports_upwards(module: str) -> None:
    room = room_of(module)
    (floor,) = (i for i, rooms in enumerate(FLOORS) if room in rooms)
    below = set().union(*FLOORS[floor + 1 :]) | {room}
    wrong = {
        other
        for other in imports(MODULES[module])
        if other not in DATA_DOORS and room_of(other) not in below
    }
    assert not wrong


def circles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Modules that import each other, each circle from one of its modules on."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> Iterator[list[str]]:
        if module in path:
            yield path[path.index(module) :]
        elif module not in done:
            for other in sorted(graph[module]):
                yield from visit(other, [*path, module])
            done.add(module)

    for module in graph:
        yield from visit(module, [])


def test_no_imports_go_in_circles() -> None:
    graph = {m: imports(path, types_too=False) for m, path in MODULES.items()}
    assert not list(circles(graph))


def test_a_circle_is_noticed() -> None:
    assert list(circles({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == [["b", "c"]]
    assert not list(circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}))


def test_newcomers_are_told_of_every_module() -> None:
    """Each has its line in the section of its room, and no other has one."""
    told, room = set(), ""
    for line in (OVERLAY / "README.md").read_text().splitlines():
        if line.startswith("#"):
            heading = re.match(r"#+ `(\w+)/`", line)
            room = f"{heading[1]}." if heading else ""
        elif entry := re.match(r"\| `(\w+)` \|", line):
            told.add(room + entry[1])
    modules = {m for m, path in MODULES.items() if path.name != "__init__.py"}
    assert told == modules, (
        f"kv_tier/README.md: no line `| NAME | what it does |` for "
        f"{sorted(modules - told)}, and no module for {sorted(told - modules)}"
    )


# ------------------------------------------------------------------------ sizes


def definitions(folder: str) -> Iterator[tuple[Path, ast.AST, int]]:
    """Each class and function of a folder, with its lines."""
    for path in sources(folder):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                yield path, node, node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("folder", ["vllm_overlay", "scripts", "ci", "tests"])
def test_no_class_or_function_is_too_long(folder: str) -> None:
    """A file may be as long as its subject needs."""
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name} ({lines} lines)"  # type: ignore[attr-defined]
        for path, node, lines in definitions(folder)
        if lines
        > (MAX_CLASS_LINES if isinstance(node, ast.ClassDef) else MAX_FUNCTION_LINES)
    ]
    assert not long


# ------------------------------------------------------------------------ tools


def test_commits_are_checked_by_the_same_ruff_as_everything() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    tools = (ROOT / "ci" / "requirements-test.txt").read_text()
    of_hooks = re.search(r"ruff-pre-commit\n *rev: v(\S+)", hooks)
    of_tools = re.search(r"^ruff==(\S+)$", tools, re.MULTILINE)
    assert of_hooks and of_tools and of_hooks[1] == of_tools[1]


# -------------------------------------------------------- what tests do not touch

PRIVATE = re.compile(r"(^|\.)_[A-Z][A-Z0-9_]*$")


def private_constants() -> set[str]:
    """Of all modules of the overlay."""
    found = set()
    for path in MODULES.values():
        for node in ast.parse(path.read_text()).body:
            names = [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
            if isinstance(node, ast.Assign | ast.AnnAssign):
                found |= {name for name in names if PRIVATE.search(name)}
    return found


def patched(source: str) -> set[str]:
    """Private constants that a source sets in another module, whichever way."""
    found: list[object] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rsplit(".", 1)[-1]
            if called in ("setattr", "delattr", "patch", "object"):
                found += [a.value for a in node.args if isinstance(a, ast.Constant)]
        elif isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [t.attr for t in targets if isinstance(t, ast.Attribute)]
    words = {word for word in found if isinstance(word, str)}
    return {word.rpartition(".")[2] for word in words if PRIVATE.search(word)}


@pytest.mark.parametrize(
    "source",
    [
        'monkeypatch.setattr(pool, "_CLEAN", 1)',
        'monkeypatch.setattr("vllm.v1.kv_tier.pool._CLEAN", 1)',
        'mock.patch("vllm.v1.kv_tier.pool._CLEAN", 1)',
        'patch.object(pool, "_CLEAN", 1)',
        "pool._CLEAN = 1",
    ],
)
def test_a_patched_constant_is_noticed(source: str) -> None:
    assert patched(source) == {"_CLEAN"}


def test_no_test_patches_a_private_constant() -> None:
    """They construct a tuning of their own instead."""
    private = private_constants()
    found = {
        path.relative_to(ROOT).as_posix(): names
        for path in sources("tests")
        if path != Path(__file__) and (names := patched(path.read_text()) & private)
    }
    assert not found
