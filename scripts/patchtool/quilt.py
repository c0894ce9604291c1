# SPDX-License-Identifier: Apache-2.0
"""Runs quilt with the project's one settings file."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from .config import Layout, ToolError, say

APPLIED = Path(".pc") / "applied-patches"


def ensure_quilt() -> None:
    """Install quilt where that is possible without asking, else say how."""
    if shutil.which("quilt"):
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        say("installing quilt with apt-get")
        env = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
        install = ["apt-get", "install", "-qq", "-y", "--no-install-recommends"]
        for command in (["apt-get", "update", "-qq"], [*install, "quilt"]):
            subprocess.run(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
    if not shutil.which("quilt"):
        raise ToolError(
            "quilt is not installed; install it with your package manager, e.g. "
            "`sudo apt-get install quilt`, `sudo dnf install quilt` or "
            "`brew install quilt`"
        )


def environment(layout: Layout, tag: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("QUILT")}
    return dict(env, QUILT_PATCHES=str(layout.patches / tag), LC_ALL="C")


def quilt(
    layout: Layout, tag: str, tree: Path, *args: str, patches: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one quilt command in a tree; the caller judges the exit status.

    patches: another patch folder than the tag's own, for work on a copy.
    """
    ensure_quilt()
    env = environment(layout, tag)
    if patches:
        env["QUILT_PATCHES"] = str(patches)
    return subprocess.run(
        ["quilt", "--quiltrc", str(layout.quiltrc), *args],
        cwd=tree,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def applied(tree: Path) -> list[str]:
    path = tree / APPLIED
    return path.read_text().split() if path.is_file() else []


def push_all(layout: Layout, tag: str, tree: Path) -> None:
    """Apply what is left of the series.

    Raises:
        ToolError: a patch does not apply without fuzz.
    """
    result = quilt(layout, tag, tree, "push", "-a")
    # 2: nothing left to push
    if result.returncode not in (0, 2):
        raise ToolError(
            f"the series of {tag} does not apply with zero fuzz:\n"
            f"{result.stdout.rstrip()}\n"
            f"change the patch in patches/{tag}, or take its last good state from git"
        )
