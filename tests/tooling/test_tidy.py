# SPDX-License-Identifier: Apache-2.0
"""The structure stays as it is meant: layers, sizes, and what newcomers can read.

Looks at sources only, so that it needs no vLLM.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "vllm.v1.kv_tier"
OVERLAY = ROOT / "vllm_overlay" / Path(*PACKAGE.split("."))

MAX_CLASS_LINES, MAX_FUNCTION_LINES = 500, 70

VALUES = {
    "about",
    "bounded",
    "gil",
    "hints.schema",
    "options",
    "plan",
    "releases",
    "stats",
    "tuning",
    "weight_changes",
}
"""Modules that import nothing of the tier."""

LAYERS: tuple[set[str], ...] = (
    VALUES,
    {"keeper"},
    {"layout"},
    {"block_keys", "eviction", "hints", "memory", "metrics", "stores"},
    {"host_size_api", "keeper.state"},
    {"compatibility", "copying", "frontend", "keeper.server", "policy"},
    {"config", "keeper.__main__", "scheduler", "worker"},
    {"hints.retention"},
    {"hints.tracker"},
    {"scheduler.promotion"},
    {"scheduler.jumps"},
    {"scheduler.block_pool"},
    {"scheduler.events"},
    {"scheduler.shared_pool"},
    {"elastic"},
    {"opening", "pool"},
    {"recovery", "start"},
)
"""Modules and packages, the lowest first; the longest name that fits a module counts. A
module imports from the layers below its own, and from its own package in its layer."""

FOR_API_SERVERS = {"frontend", "hints.http"}
"""What the process that takes requests imports."""

BY_NAME = {"stores.fs", "stores.mooncake", "stores.redis", "keeper.__main__"}
"""Plugins and commands: known by an import path, and imported by nothing."""


# ---------------------------------------------------------------- what there is


def sources(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    """`scheduler.slots` for a module of the overlay, `scheduler` for its package."""
    parts = path.relative_to(OVERLAY).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {name_of(path): path for path in sorted(OVERLAY.rglob("*.py"))}


def imports(path: Path) -> set[str]:
    """Modules of the overlay that a module of the overlay imports, anywhere in it, for
    types as well."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = [PACKAGE, *path.relative_to(OVERLAY).parts[:-1]]
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    inside = {m.removeprefix(PACKAGE).removeprefix(".") for m in found if PACKAGE in m}
    return (inside & MODULES.keys()) - {"", name_of(path)}


GRAPH = {module: imports(path) for module, path in MODULES.items() if module}


def entry_of(module: str) -> str:
    """The longest entry of `LAYERS` that a module is, or is a part of."""
    entries = set().union(*LAYERS)
    parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in names if name in entries), "")


def layer_of(module: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if entry_of(module) in layer)


def reached(modules: Iterable[str], graph: Mapping[str, set[str]] = GRAPH) -> set[str]:
    """All that modules import, and what that imports, and so on."""
    seen: set[str] = set()
    todo = [*modules]
    while todo:
        for other in graph[todo.pop()] - seen:
            seen.add(other)
            todo.append(other)
    return seen


def imported_by_patches() -> set[str]:
    """Modules that the lines of any series import."""
    added = re.compile(
        rf"^\+.*\bfrom {re.escape(PACKAGE)}\.([\w.]+) import", re.MULTILINE
    )
    texts = (p.read_text() for p in (ROOT / "patches").glob("*/*.patch"))
    return {name for text in texts for name in added.findall(text)}


# ----------------------------------------------------------------------- layers


def test_patches_import_what_there_is() -> None:
    assert imported_by_patches() <= MODULES.keys()


@pytest.mark.parametrize("module", GRAPH)
def test_imports_go_down(module: str) -> None:
    assert entry_of(module), f"add {module}, or its package, to LAYERS"
    wrong = {
        other
        for other in GRAPH[module]
        if layer_of(other) >= layer_of(module) and entry_of(other) != entry_of(module)
    }
    assert not wrong


@pytest.mark.parametrize("module", sorted(VALUES & GRAPH.keys()))
def test_values_import_nothing_of_the_tier(module: str) -> None:
    assert not GRAPH[module]


def test_api_servers_import_no_scheduler() -> None:
    packages = {module.split(".")[0] for module in reached(FOR_API_SERVERS)}
    values = {"keeper", "layout", "releases", "tuning", "weight_changes"}
    assert packages <= values | {"hints", "host_size_api"}


@pytest.mark.parametrize(
    "side, other",
    [("scheduler", ("worker", "copying")), ("worker", ("scheduler", "eviction"))],
)
def test_scheduler_and_workers_do_not_import_each_other(
    side: str, other: tuple[str, ...]
) -> None:
    mine = [m for m in GRAPH if m.startswith((f"{side}.", f"{side}"))]
    assert not {m for m in reached(mine) if m.startswith(other)}


def test_elastic_memory_has_one_entry() -> None:
    for module, others in GRAPH.items():
        if module.split(".")[0] != "elastic":
            assert not {o for o in others if o.startswith("elastic.")}, module
    assert "elastic" in GRAPH
    assert not {m for m in imported_by_patches() if m.startswith("elastic.")}


@pytest.mark.parametrize("module", sorted(BY_NAME))
def test_plugins_are_imported_by_name(module: str) -> None:
    assert module in GRAPH
    assert not {m for m, others in GRAPH.items() if module in others}


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
    assert not list(circles(GRAPH))


def test_a_circle_is_noticed() -> None:
    assert list(circles({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == [["b", "c"]]
    assert not list(circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}))


def test_what_is_reached_goes_on() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": set[str](), "d": {"a"}}
    assert reached(["a"], graph) == {"b", "c"}


def test_newcomers_can_read_of_every_module() -> None:
    """Each has its line in the section of its package, and no other has one."""
    listed, package = set(), ""
    for line in (OVERLAY / "README.md").read_text().splitlines():
        if line.startswith("#"):
            heading = re.match(r"#+ `([\w/]+)/`", line)
            package = f"{heading[1].replace('/', '.')}." if heading else ""
        elif entry := re.match(r"\| `(\w+)` \|", line):
            listed.add(package + entry[1])
    modules = {m for m, path in MODULES.items() if path.name != "__init__.py"}
    assert listed == modules, (
        f"kv_tier/README.md: no line `| NAME | what it does |` for "
        f"{sorted(modules - listed)}, and no module for {sorted(listed - modules)}"
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
