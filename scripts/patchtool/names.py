# SPDX-License-Identifier: Apache-2.0
"""Finds names that a series uses, or no longer imports, and that its release lacks.

Python finds these when the line runs, which may be long after the import.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from .config import Patch, ToolError
from .hunks import parse


def undefined_names(ruff: Path, prefixes: list[Path], patches: list[Patch]) -> str:
    """The first undefined name that a patch has to do with, as a message; or nothing.

    prefixes: for each patch the folder of the files as it leaves them.

    Raises:
        ToolError: ruff fails.
    """
    files: dict[str, str] = {}
    for patch in patches:
        for edit in parse(patch):
            if edit.file.endswith(".py"):
                files[edit.file] = f"{files.get(edit.file, '')}\n{edit}"
    paths = [folder / name for folder in prefixes for name in files]
    command = [str(ruff), "check", "--isolated", "--no-cache", "--select", "F821"]
    command += ["--exit-zero", "--output-format", "json"]
    result = subprocess.run(
        [*command, *(str(path) for path in paths if path.is_file())],
        capture_output=True,
        text=True,
    )
    if result.returncode:
        raise ToolError(f"ruff fails:\n{result.stderr[-2000:]}")
    found = {(f["filename"], f["message"]): f for f in json.loads(result.stdout)}
    for folder, patch in zip(prefixes, patches):
        for name, lines in files.items():
            for (path, message), place in found.items():
                what = re.search(r"`(.*)`", message)
                # Those of lines that no patch touches are upstream's.
                if Path(path) == (folder / name).resolve() and (
                    what and re.search(rf"\b{re.escape(what[1])}\b", lines)
                ):
                    line = place["location"]["row"]
                    return f"prefix up to {patch.name}: {name}:{line}: {message}"
    return ""
