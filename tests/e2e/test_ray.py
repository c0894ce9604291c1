# SPDX-License-Identifier: Apache-2.0
"""Ray, beside what `test_parallel.py` asks of its ranks: what is refused, and the end.

With `KV_TIER_PARALLEL=ray` only, since Ray is installed for it: see `ray_cpu`.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from . import ray_cpu
from .conftest import environment
from .jobs import ASKED
from .ray_jobs import ANSWERS
from .release import HAS_RAY_V2, HAS_TWO_RAYS
from .secondary import NEEDS_KEYS, objects

pytestmark = pytest.mark.skipif("ray" not in ASKED, reason="needs KV_TIER_PARALLEL=ray")
TIMEOUT_S = 300


def run(what: str, *args: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """One of the functions of `ray_jobs`, in a process of its own that has Ray."""
    with ray_cpu.environment() as others:
        return subprocess.run(
            [sys.executable, "-m", "tests.e2e.ray_jobs", what, *map(str, args)],
            env=environment(**others) | env,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )


def test_upstream_has_no_ray_on_cpus() -> None:
    """Why `ray_cpu` is needed. If this fails, maybe it no longer is."""
    found = run("without_devices")
    assert found.returncode != 0
    assert "current platform cpu does not support ray" in found.stderr


@pytest.mark.compat(
    "refused at start",
    "--distributed-executor-backend ray, VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0",
)
def test_upstreams_first_ray_executor(llama: Path) -> None:
    found = run("settings", llama, VLLM_USE_RAY_V2_EXECUTOR_BACKEND="0")
    if HAS_RAY_V2 and not HAS_TWO_RAYS:
        assert found.returncode == 0, found.stderr
        pytest.skip("this release has the second one only")
    assert found.returncode != 0
    assert "--kv-offloading-backend core is not supported with" in found.stderr
    assert "--distributed-executor-backend ray" in found.stderr
    mend = "Set VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1, or use mp"
    assert (mend if HAS_RAY_V2 else "Use mp") in found.stderr


@pytest.mark.skipif(not HAS_RAY_V2, reason="this release has the first one only")
@NEEDS_KEYS
@pytest.mark.compat("engine modes", "TP=2, Ray", "files below, written at the end")
def test_what_ranks_of_ray_write_at_their_end_is_found_again(
    llama: Path, tmp_path: Path
) -> None:
    root = tmp_path / "kv"
    answers = []
    for _ in range(2):
        found = run("below", llama, root, PYTHONHASHSEED="0")
        assert found.returncode == 0, found.stderr[-6000:] + found.stdout[-6000:]
        lines = found.stdout.splitlines()
        answers += [line for line in lines if line.startswith(ANSWERS)]
        ranks = {path.parent.parent.name for path in objects(root)}
        assert ranks == {"r0", "r1"}
    (first, hits), (second, more_hits) = (each.rsplit(" ", 1) for each in answers)
    assert second == first
    assert int(hits) == 0 and int(more_hits) > 0
