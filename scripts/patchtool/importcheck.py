# SPDX-License-Identifier: Apache-2.0
"""Imports modules once for every prefix of a series, each in a forked child.

Runs in the Python of build/env/<tag>, on its own: `importcheck.py JOB.json`. Files that
the series or the overlay touch come from the prefix' folder, all others from the
installed package, which is upstream's there. torch and its like are imported once, and
so are vLLM's modules from the prefix on after which no patch has to do with them.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class Imports:
    """Which modules those of vLLM import, from when this is made on."""

    def __init__(self) -> None:
        self._of: defaultdict[str, set[str]] = defaultdict(set)
        self._import, self._import_module = builtins.__import__, importlib.import_module
        builtins.__import__ = self._statement
        importlib.import_module = self._call

    def _note(self, scope: Mapping[str, Any], name: str, items: Iterable[str]) -> None:
        if (importer := scope.get("__name__", "")).split(".")[0] == "vllm":
            name = importlib.util.resolve_name(name, scope["__package__"])
            self._of[importer] |= {name, *(f"{name}.{item}" for item in items)}

    def _statement(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        self._note(globals or {}, "." * level + name, fromlist or ())
        return self._import(name, globals, locals, fromlist or (), level)

    def _call(self, name: str, package: str | None = None) -> ModuleType:
        self._note(sys._getframe(1).f_globals, name, ())
        return self._import_module(name, package)

    def without(self, changing: Collection[str]) -> list[str]:
        """All modules that import none of these, nor a module that does."""
        users: defaultdict[str, set[str]] = defaultdict(set)
        for importer, names in self._of.items():
            for name in names:
                users[name].add(importer)
        for name in list(sys.modules):
            # Whatever lies in a package imports it.
            users[name.rpartition(".")[0]].add(name)
        tainted, left = set(changing), list(changing)
        while left:
            new = users[left.pop()] - tainted
            tainted |= new
            left += new
        return [name for name in sys.modules if name not in tainted]


class PrefixFinder(importlib.abc.MetaPathFinder):
    """Takes the files of one prefix instead of the installed ones."""

    def __init__(self, files: Sequence[str]) -> None:
        self.folder = Path()
        self._files = {module_name(file): file for file in files}

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        file = self._files.get(fullname)
        if file is None:
            return None
        source = self.folder / file
        if not source.is_file():
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        if not file.endswith("/__init__.py"):
            return importlib.util.spec_from_file_location(fullname, source)
        # Only the file is the prefix'; its neighbours are found as before.
        installed = [os.path.join(p, fullname.rpartition(".")[2]) for p in path or []]
        return importlib.util.spec_from_file_location(
            fullname, source, submodule_search_locations=installed
        )


def _import_all(modules: Sequence[str]) -> str:
    """Empty, or what went wrong."""
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException:
            return f"import {module} fails:\n{traceback.format_exc(limit=-3)}"
    return ""


def _in_child(
    imports: Imports, modules: Sequence[str], changing: Sequence[str]
) -> list[str]:
    """Error, then the names of the modules that are as they are with later prefixes."""
    reader, writer = os.pipe()
    if pid := os.fork():
        os.close(writer)
        with os.fdopen(reader) as pipe:
            answer = json.loads(pipe.read() or '["the import ended the process"]')
        os.waitpid(pid, 0)
        return answer
    with os.fdopen(writer, "w") as pipe:
        error = _import_all(modules)
        json.dump([error, *imports.without(changing)], pipe)
    os._exit(0)


def _preload(names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # Children share the memory as long as their collector does not write to it.
    gc.freeze()


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    results: list[str] = []
    _preload(job["preload"])
    finder, imports = PrefixFinder(job["files"]), Imports()
    sys.meta_path.insert(0, finder)
    for folder, modules, changing in job["prefixes"]:
        finder.folder = Path(folder)
        error, *same = _in_child(imports, modules, changing)
        if changing:
            _preload(name for name in same if name not in sys.modules)
        results.append(error)
    Path(job["results"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
