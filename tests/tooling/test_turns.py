# SPDX-License-Identifier: Apache-2.0
"""Older releases, one of which runs end to end in each submission."""

import subprocess
import sys
from pathlib import Path

from patchtool.config import Layout

sys.path.insert(0, str(Path(__file__).parents[2] / "ci"))
import run_tests  # noqa: E402


def test_each_older_release_has_its_turn(tmp_path: Path) -> None:
    tags = [f"v1.{n}.0" for n in range(5)]
    for tag in tags:
        (tmp_path / "patches" / tag).mkdir(parents=True)
        (tmp_path / "patches" / tag / "upstream.toml").touch()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
    subprocess.run([*git, "init", "-q"], check=True)
    found = []
    for _ in range(4):
        commit = [*git, "commit", "-qm", "more", "--allow-empty"]
        subprocess.run(commit, check=True)
        found.append(run_tests.turn(Layout(tmp_path, tmp_path)))
    # The newest two always run.
    assert sorted(found[:3]) == tags[:3]
    assert found[3] == found[0]
