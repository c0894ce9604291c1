# SPDX-License-Identifier: Apache-2.0
"""Nothing stays cached that was never computed, with the series; without it, it does.

See `uncomputed`, which runs once on upstream's tree and once on the patched one.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from patchtool.config import Layout
from patchtool.tree import upstream_tree

ROOT = Path(__file__).parents[2]


def run(*paths: Path, module: str = "tests.sim.uncomputed") -> dict[str, int]:
    """What a module prints, with `paths` before all others."""
    found = [*paths, ROOT / "scripts" / "bench", ROOT]
    done = subprocess.run(
        [sys.executable, "-m", module],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, found))},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """A folder with nothing but upstream's package."""
    tag = "v" + importlib.metadata.version("vllm").partition("+")[0]
    tree = upstream_tree(Layout.default(), tag)
    (tmp_path / "vllm").symlink_to(tree / "vllm")
    return tmp_path


def test_upstream_leaves_blocks_cached_that_nobody_computed(upstream: Path) -> None:
    """When this fails with a new release, patch 0010 has done its work."""
    try:
        tokens = run(upstream)
    except subprocess.CalledProcessError as error:
        # It counts more requests in the step than there are running ones.
        assert "len(scheduled_resumed_reqs)" in error.stderr, error.stderr
        pytest.skip("the first releases end with an AssertionError there")
    assert tokens["found"] > tokens["computed"] > 0


def test_the_series_does_not() -> None:
    tokens = run()
    assert tokens["found"] == tokens["computed"] > 0
