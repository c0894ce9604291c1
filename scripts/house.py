# SPDX-License-Identifier: Apache-2.0
"""Measures the structure of the overlay and the length of the documents.

    python3 scripts/house.py [REV ...]

Prints one line for each figure, with a column for each revision (the work tree is
the last column). Reads sources only, so it needs no vLLM.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TypeGuard

ROOT = Path(__file__).parents[1]
OVERLAY = "vllm_overlay/vllm/v1/kv_tier/"
PACKAGE = "vllm.v1.kv_tier"
RELEASES = "releases"
"""The module that may look for what a release of upstream lacks."""

Files = Mapping[str, str]
"""Text of each file by its path in the repository."""


def work_tree() -> Files:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split("\0")
    found = {name: ROOT / name for name in names if name.endswith((".py", ".md"))}
    return {name: path.read_text() for name, path in found.items() if path.is_file()}


def revision(rev: str) -> Files:
    data = subprocess.check_output(["git", "archive", rev], cwd=ROOT)
    files = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is not None and member.name.endswith((".py", ".md")):
                files[member.name] = file.read().decode()
    return files


def modules(files: Files) -> dict[str, str]:
    """Sources of the overlay's modules by name, packages left out."""
    return {
        name.removeprefix(OVERLAY).removesuffix(".py").replace("/", "."): text
        for name, text in files.items()
        if name.startswith(OVERLAY)
        and name.endswith(".py")
        and not name.endswith("__init__.py")
    }


def imports(module: str, source: str, known: set[str]) -> set[str]:
    """Modules of the overlay that one of them imports, for types as well."""
    package = PurePosixPath(PACKAGE.replace(".", "/"), module.replace(".", "/")).parent
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.parts[: len(package.parts) + 1 - node.level]
                base = ".".join([*parts, *([base] if base else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return ({name.removeprefix(f"{PACKAGE}.") for name in found} & known) - {module}


def graph(found: Mapping[str, str]) -> dict[str, set[str]]:
    return {name: imports(name, text, set(found)) for name, text in found.items()}


def circles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for other in arrows[todo.pop()] - seen:
                seen.add(other)
                todo.append(other)
        return seen

    reached = {module: reach(module) for module in arrows}
    groups = {
        tuple(sorted(o for o in reached[m] if m in reached[o]))
        for m in arrows
        if m in reached[m]
    }
    return [list(group) for group in sorted(groups)]


def replaced_methods(found: Mapping[str, str]) -> Iterator[str]:
    """Assignments to an attribute that is a method: `scheduler.has_requests = …`.

    Of other objects, the names are those of methods of the overlay, unless a class has
    a field of that name, and of upstream; of `self`, those of the same class. Settings
    of the process count as well, unless a context manager restores them.
    """
    trees = {name: ast.parse(text) for name, text in found.items()}
    classes = [
        node
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    methods = UPSTREAM_METHODS.union(*map(methods_of, classes))
    methods -= set().union(*map(fields_of, classes)) - UPSTREAM_METHODS
    for name, tree in trees.items():
        of_class = {
            id(node): methods_of(owner)
            for owner in ast.walk(tree)
            if isinstance(owner, ast.ClassDef)
            for node in ast.walk(owner)
        }
        for node in ast.walk(tree):
            for target in targets(node):
                is_own = ast.unparse(target.value) == "self"
                if target.attr in (of_class.get(id(node), ()) if is_own else methods):
                    yield f"{name}:{target.lineno} {ast.unparse(target)}"
    setters = re.compile(r"setattr|sys\.setswitchinterval")
    for name, tree in trees.items():
        scoped = {
            id(node)
            for scope in ast.walk(tree)
            if isinstance(scope, ast.FunctionDef)
            and any(ast.unparse(d) == "contextmanager" for d in scope.decorator_list)
            for node in ast.walk(scope)
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and setters.fullmatch(ast.unparse(node.func))
                and id(node) not in scoped
            ):
                yield f"{name}:{node.lineno} {ast.unparse(node)}"


def methods_of(owner: ast.ClassDef) -> set[str]:
    return {
        node.name
        for node in owner.body
        if isinstance(node, ast.FunctionDef)
        and not any(
            ast.unparse(d).endswith(("property", ".setter"))
            for d in node.decorator_list
        )
    }


def fields_of(owner: ast.ClassDef) -> set[str]:
    """What a class declares, or sets on `self`."""
    declared = {
        node.target.id
        for node in owner.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return declared | {
        target.attr
        for node in ast.walk(owner)
        for target in targets(node)
        if ast.unparse(target.value) == "self"
    }


def targets(node: ast.AST) -> list[ast.Attribute]:
    """Attributes that an assignment sets."""
    if isinstance(node, ast.Assign):
        found: list[ast.expr] = node.targets
    elif isinstance(node, ast.AnnAssign):
        found = [node.target]
    else:
        return []
    return [target for target in found if isinstance(target, ast.Attribute)]


UPSTREAM_METHODS = {
    "allocate_slots",
    "cache_full_blocks",
    "collective_rpc",
    "free_blocks",
    "get_cached_block",
    "get_computed_blocks",
    "get_new_blocks",
    "has_requests",
    "reset_prefix_cache",
    "schedule",
    "touch",
    "update_from_output",
}
"""Methods of upstream's scheduler, cache manager, block pool and executor."""


NO_KEYS = {"size_bytes", "index", "debug", "example", "locality"}
"""Fields of settings that are no JSON keys of their own, and constants of stores."""


def json_keys(found: Mapping[str, str]) -> set[str]:
    """Keys of `--kv-offloading-config` and of entries of `secondary_tiers`, without
    those in `debug`."""
    return {
        node.target.id
        for text in found.values()
        for owner in ast.walk(ast.parse(text))
        if isinstance(owner, ast.ClassDef) and is_settings(owner)
        for node in owner.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    } - NO_KEYS


def is_settings(owner: ast.ClassDef) -> bool:
    """`KVTierConfig`, `StoreConfig`, and what is derived from the latter."""
    bases = {ast.unparse(base) for base in owner.bases}
    return owner.name in ("KVTierConfig", "StoreConfig") or "StoreConfig" in bases


def upstream_lookups(found: Mapping[str, str]) -> Iterator[str]:
    """Places that ask what a release of upstream has, outside of `releases`: `getattr`,
    `hasattr`, and an import of vLLM that may fail.

    `getattr(self, name)` with a computed name reads our own fields.
    """
    for module, text in found.items():
        if module.split(".")[-1] == RELEASES:
            continue
        for node in ast.walk(ast.parse(text)):
            if is_lookup(node) or may_fail_to_import(node):
                yield f"{module}:{node.lineno} {ast.unparse(node).splitlines()[0]}"


def is_lookup(node: ast.AST) -> TypeGuard[ast.Call]:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    if node.func.id not in ("getattr", "hasattr"):
        return False
    owner, name = map(ast.unparse, node.args[:2])
    return owner != "self" or name[0] in "\"'"


def may_fail_to_import(node: ast.AST) -> TypeGuard[ast.stmt]:
    """Whether a statement imports upstream and goes on where that lacks the module."""
    if isinstance(node, ast.Try):
        guards = [ast.unparse(h.type) if h.type else "" for h in node.handlers]
        handles = any(
            not g or re.search(r"Import|NotFound|Exception", g) for g in guards
        )
    elif isinstance(node, ast.With):
        guards = [ast.unparse(item) for item in node.items]
        handles = any(re.search(r"suppress\(.*(Import|NotFound)", g) for g in guards)
    else:
        return False
    names = [
        name
        for inner in (i for stmt in node.body for i in ast.walk(stmt))
        for name in (
            [inner.module or ""]
            if isinstance(inner, ast.ImportFrom)
            else [alias.name for alias in inner.names]
            if isinstance(inner, ast.Import)
            else []
        )
    ]
    upstream = re.compile(r"vllm(?!\.v1\.kv_tier)(\.|$)")
    return handles and any(map(upstream.match, names))


def figures(files: Files) -> dict[str, int]:
    found = modules(files)
    arrows = graph(found)
    importers = [m for others in arrows.values() for m in others]

    def lines(prefix: str, suffix: str) -> int:
        return sum(
            text.count("\n")
            for name, text in files.items()
            if name.startswith(prefix) and name.endswith(suffix)
        )

    return {
        "modules": len(found),
        "lines of the overlay": sum(text.count("\n") for text in found.values()),
        "modules with one importer": sum(importers.count(m) == 1 for m in found),
        "import circles, types included": len(circles(arrows)),
        "replaced methods": len(list(replaced_methods(found))),
        "getattr on upstream outside of releases": len(list(upstream_lookups(found))),
        "settings outside of debug": len(json_keys(found)),
        "lines of scripts": lines("scripts/", ".py"),
        "lines of tests": lines("tests/", ".py"),
        "lines of docs": lines("docs/", ".md"),
        "words of README": len(files["README.md"].split()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rev", nargs="*", help="revisions to compare with")
    parser.add_argument("--list", action="store_true", help="name what is counted")
    options = parser.parse_args()
    trees = [*(revision(rev) for rev in options.rev), work_tree()]
    columns = [figures(tree) for tree in trees]
    for name in columns[0]:
        print(f"{name:42}", *(f"{column[name]:>8}" for column in columns))
    if options.list:
        found = modules(trees[-1])
        for circle in circles(graph(found)):
            print("circle:", ", ".join(circle))
        for place in replaced_methods(found):
            print("replaced:", place)
        for place in upstream_lookups(found):
            print("looks for:", place)


if __name__ == "__main__":
    main()
