# SPDX-License-Identifier: Apache-2.0
"""Imports modules once for every prefix of a series, each in a forked child.

Runs in the Python of build/env/<tag>, on its own: `importcheck.py JOB.json`. Files that
the series or the overlay touch come from the prefix' folder, all others from the
installed package, which is upstream's there. torch and its like are imported once.
"""

from __future__ import annotations

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
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


def module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class PrefixFinder(importlib.abc.MetaPathFinder):
    """Takes the files of one prefix instead of the installed ones."""

    def __init__(self, folder: Path, files: Sequence[str]) -> None:
        self._folder = folder
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
        source = self._folder / file
        if not source.is_file():
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        if not file.endswith("/__init__.py"):
            return importlib.util.spec_from_file_location(fullname, source)
        # Only the file is the prefix'; its neighbours are found as before.
        installed = [os.path.join(p, fullname.rpartition(".")[2]) for p in path or []]
        return importlib.util.spec_from_file_location(
            fullname, source, submodule_search_locations=installed
        )


def _import_all(folder: Path, files: Sequence[str], modules: Sequence[str]) -> str:
    """Empty, or what went wrong."""
    sys.meta_path.insert(0, PrefixFinder(folder, files))
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException:
            return f"import {module} fails:\n{traceback.format_exc(limit=-3)}"
    return ""


def _in_child(folder: Path, files: Sequence[str], modules: Sequence[str]) -> list[str]:
    """Error, then the names of the other packages' modules that were imported."""
    reader, writer = os.pipe()
    if pid := os.fork():
        os.close(writer)
        with os.fdopen(reader) as pipe:
            answer = json.loads(pipe.read() or '["the import ended the process"]')
        os.waitpid(pid, 0)
        return answer
    with os.fdopen(writer, "w") as pipe:
        error = _import_all(folder, files, modules)
        others = [name for name in sys.modules if name.split(".")[0] != "vllm"]
        json.dump([error, *others], pipe)
    os._exit(0)


def _preload(names: Sequence[str]) -> None:
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # Children share the memory as long as their collector does not write to it.
    gc.freeze()


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    results: list[str] = []
    _preload(job["preload"])
    for folder, modules in job["prefixes"]:
        error, *others = _in_child(Path(folder), job["files"], modules)
        if not results:
            _preload(others)
        results.append(error)
    Path(job["results"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
