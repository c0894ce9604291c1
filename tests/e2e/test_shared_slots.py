# SPDX-License-Identifier: Apache-2.0
"""Two ranks that hold the same KV hold it once on the host, and no answer changes.

Most of it only with `KV_TIER_PARALLEL=all`. MLA caches no prefixes on CPUs without AMX;
one head of keys and values on two ranks is held twice in the same way.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from .compare import assert_same_answers
from .conftest import run_engine
from .jobs import BLOCK_TOKENS, CORRUPT_EACH_RANK, ONE_RANK, WITH_RANKS, GiB, Job
from .kinds import HOST_GIB, KINDS, Kind, like_llama
from .workloads import SERVED

ONE_HEAD = "one head"
MODELS = {
    ONE_HEAD: Kind(
        like_llama("Qwen3ForCausalLM", "qwen3", num_key_value_heads=1),
        ["FullAttentionSpec"],
    ),
    "mla": KINDS["deepseek_v3"],
}
TWO_RANKS = {"tensor_parallel_size": 2}
ASKED = {
    "large": ["conversations"],
    "write_back": ["conversations", *ONE_RANK, CORRUPT_EACH_RANK],
    "write_through": ["conversations"],
    "write_back twice": ["served_twice"],
}
"""Workloads by engine."""

Results = Callable[[str, str], dict[str, Any]]


def has_amx() -> bool:
    return getattr(torch.cpu, "_is_amx_tile_supported", bool)()


models = pytest.mark.parametrize(
    "model",
    [
        ONE_HEAD,
        pytest.param(
            "mla",
            marks=pytest.mark.skipif(
                not has_amx(), reason="MLA caches no prefixes on this CPU"
            ),
        ),
    ],
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    """Results of an engine with two ranks by model and job, one started at a time."""
    with ThreadPoolExecutor(1) as workers:
        running: dict[tuple[str, str], Any] = {}

        def get(model: str, name: str) -> dict[str, Any]:
            if (model, name) not in running:
                folder = tmp_path_factory.mktemp("model")
                kind = MODELS[model]
                llm = kind.jobs()[name.split()[0]].llm | TWO_RANKS
                if (config := llm.get("kv_offloading_config")) is not None:
                    llm["kv_offloading_config"] = config | {"share_replicas": True}
                spec = Job(llm, ASKED[name])
                path = kind.write(folder / "model")
                running[model, name] = workers.submit(
                    run_engine, "engine", spec, path, folder
                )
            return running[model, name].result()

        yield get


def cached(result: dict[str, Any]) -> list[int]:
    return [answer["cached_tokens"] for answer in result["answers"]]


def check_slots(engine: dict[str, Any], workload: str) -> None:
    """A slot takes the bytes of one rank: private ones would be half as many."""
    ranks = engine["workloads"][workload]["ranks"]
    assert ranks == 2 * [{"slot_bytes": ranks[0]["slot_bytes"], "is_shared": True}]
    num_slots = HOST_GIB * GiB // ranks[0]["slot_bytes"]
    assert engine["facts"]["num_host_slots"] == num_slots


def test_ranks_that_hold_the_same_have_twice_the_slots(found: Results) -> None:
    """The short one: an engine that finds on the host what it has computed."""
    engine = found(ONE_HEAD, "write_back twice")
    check_slots(engine, "served_twice")
    result = engine["workloads"]["served_twice"]
    half = len(SERVED)
    computed, loaded = result["answers"][:half], result["answers"][half:]
    assert_same_answers(loaded, computed)
    assert not any(answer["cached_tokens"] for answer in computed)
    assert result["counters"]["kv_tier_host_hit_tokens"] >= 0.5 * sum(
        answer["cached_tokens"] for answer in loaded
    )
    assert sum(answer["cached_tokens"] for answer in loaded) == half * 5 * BLOCK_TOKENS


@WITH_RANKS
@models
@pytest.mark.parametrize("job", ["write_back", "write_through"])
def test_same_answers_and_hits_as_a_large_device_cache(
    found: Results, model: str, job: str
) -> None:
    large = found(model, "large")["workloads"]["conversations"]
    result = found(model, job)["workloads"]["conversations"]
    assert_same_answers(result["answers"], large["answers"])
    assert cached(result) == cached(large)
    counters = result["counters"]
    assert counters["kv_tier_host_hit_tokens"] >= 0.5 * sum(cached(result)) > 0


@WITH_RANKS
@models
def test_a_copy_that_fails_on_one_rank_changes_no_answer(
    found: Results, model: str
) -> None:
    expected = found(model, "large")["workloads"]["conversations"]["answers"]
    for fault in ONE_RANK:
        result = found(model, "write_back")["workloads"][fault]
        on_first = fault.endswith("first_rank")
        failures = [int(on_first), int(not on_first)]
        if fault == "store_fails":
            # The last rank is not asked to store.
            failures = [0, 0]
        assert result["failures"] == failures
        assert_same_answers(result["answers"], expected)


@WITH_RANKS
@models
def test_one_corrupted_slot_is_noticed(found: Results, model: str) -> None:
    """The negative control: the comparison can fail, and the slots are those used."""
    expected = found(model, "large")["workloads"]["conversations"]["answers"]
    runs = found(model, "write_back")["workloads"][CORRUPT_EACH_RANK]["ranks"]
    for run in runs:
        assert_same_answers(run["answers"][:6], expected[:6])
        with pytest.raises(AssertionError, match="other tokens|off by"):
            assert_same_answers(run["answers"], expected)
    assert len(runs) == 2
