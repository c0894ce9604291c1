# SPDX-License-Identifier: Apache-2.0
"""Requests that compute their prompts from the beginning, while a directory as slow as
it may be gives the end. Answers must be those of an engine without a tier."""

import os
from pathlib import Path
from typing import Any

import pytest

from vllm.v1.kv_tier.releases import has_jump_seam

from . import runner_v2
from .compare import assert_same_answers
from .conftest import run_engine
from .jobs import CHUNKED, COMMON, Job, device, tier
from .model import make_llama
from .secondary import NEEDS_KEYS
from .throttled_workloads import NUM_BLOCKS, RATES

pytestmark = [
    NEEDS_KEYS,
    pytest.mark.skipif(
        not has_jump_seam(),
        reason="requests wait or compute: this release lacks the seam",
    ),
]

ALL = os.environ.get("KV_TIER_PARALLEL") == "all"
ENGINES: dict[str, dict[str, Any]] = {
    "alone": {},
    "asynchronous": {"async_scheduling": True},
    "two stages": device(3 * NUM_BLOCKS, num_ranks=1, num_stages=2),
    "two ranks": device(3 * NUM_BLOCKS, num_ranks=2),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("meeting"))


def meeting_job(folder: Path, is_on: bool, **llm: Any) -> Job:
    entry = {
        "type": "bench.slow_store.SlowConfig",
        "root_dir": str(folder / "kv"),
        "max_gib": 1,
        "rate_file": str(folder / "rate"),
        "debug": {"store_from_use": 1, "deadline_ms": 60_000, "num_processes": 0},
    }
    settings: dict[str, Any] = {"meet": is_on, "store_policy": "write_through"}
    settings |= {"eviction_policy": "lru"}
    return Job(
        COMMON
        | CHUNKED
        | device(3 * NUM_BLOCKS)
        | tier(6 * NUM_BLOCKS, secondary_tiers=[entry], **settings)
        | {"max_num_batched_tokens": 512, "max_model_len": 2048}
        | llm,
        ["meet_in_the_middle"],
    )


@pytest.mark.timed
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                name.startswith("two") and not ALL, reason="KV_TIER_PARALLEL=all"
            ),
        )
        for name in ENGINES
    ],
)
def test_answers_are_equal_at_every_rate(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    result = run_engine(
        name, meeting_job(tmp_path, True, **ENGINES[name]), model, tmp_path
    )
    assert jumped_at_full_rate(result) >= NUM_BLOCKS * 32


@pytest.mark.timed
@pytest.mark.skipif(not runner_v2.HAS_TRITON, reason="runner V2 needs Triton")
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_model_runner_v2_jumps(
    async_scheduling: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts computed tokens itself, on its device."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    job = meeting_job(tmp_path, True, async_scheduling=async_scheduling)
    # With a count that lags behind, it samples nothing and goes on for ever.
    result = run_engine("V2", job, model, tmp_path, "runner_v2", timeout_s=120)
    assert result["facts"]["runner_v2"]
    assert result["facts"]["async_scheduling"] == async_scheduling
    # The interpreter of its kernels takes time from the threads of the store.
    assert jumped_at_full_rate(result) >= NUM_BLOCKS * 16


def jumped_at_full_rate(result: dict[str, Any]) -> float:
    """Tokens that were jumped over where the directory is fast. Checks that all
    answers are those of the first two prompts, which were computed."""
    found = result["workloads"]["meet_in_the_middle"]
    answers = found["answers"]
    first = answers[:2]
    assert len(answers) == 2 * (1 + len(RATES))
    for i in range(2, len(answers), 2):
        assert_same_answers(answers[i : i + 2], first)
    jumped = {float(part): num for part, num in found["jumped"].items()}
    # What never comes is never jumped over; the faster, the more.
    assert jumped[0.0] == 0, (jumped, found["counters"])
    assert jumped[100.0] > jumped[0.2], (jumped, found["counters"])
    assert found["counters"]["kv_tier_secondary_loaded_blocks"] > 0
    return jumped[100.0]


def test_without_it_requests_wait_or_compute(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    found = run_engine("off", meeting_job(tmp_path, False), model, tmp_path)
    found = found["workloads"]["meet_in_the_middle"]
    assert not any(found["jumped"].values())
    for i in range(2, len(found["answers"]), 2):
        assert_same_answers(found["answers"][i : i + 2], found["answers"][:2])
