# SPDX-License-Identifier: Apache-2.0
"""The host tier changes no answer, whatever is asked of the engine."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.sim.upstream import HAS_ASYNC

from .compare import assert_same_answers
from .conftest import Results
from .jobs import BLOCK_TOKENS, COMMON, JOBS, SMALL, TIERED, marks_of

ROWS = {
    "salts": "cache salt",
    "prompt_logprobs": "prompt logprobs",
    "aborts": "aborts",
    "reset": "`reset_prefix_cache`",
}
"""Of docs/compatibility.md, by workload."""


def rows(name: str, workload: str) -> Iterator[str]:
    """Rows that a comparison with an engine proves."""
    llm = JOBS[name].llm
    if name not in TIERED:
        return
    if workload in ROWS:
        yield ROWS[workload]
    if workload == "conversations":
        if llm.get("async_scheduling") and HAS_ASYNC:
            yield "asynchronous scheduling"
        if llm["max_num_batched_tokens"] < COMMON["max_num_batched_tokens"]:
            yield "chunked prefill"


def engine_and_workload() -> list[Any]:
    """All workloads of all engines that shall answer as `large` does."""
    return [
        pytest.param(
            name,
            workload,
            marks=[
                *marks_of(name, "large"),
                *(
                    pytest.mark.compat("engine modes", row)
                    for row in rows(name, workload)
                ),
            ],
        )
        for name in ["small", *TIERED]
        for workload in JOBS[name].workloads
        if workload in JOBS["large"].workloads
    ]


def tiered(*others: str) -> list[Any]:
    return [pytest.param(name, marks=marks_of(name, *others)) for name in TIERED]


def cached(result: dict[str, Any]) -> list[int]:
    return [answer["cached_tokens"] for answer in result["answers"]]


@pytest.mark.parametrize("name, workload", engine_and_workload())
def test_same_answers_as_a_large_device_cache(
    results: Results, name: str, workload: str
) -> None:
    found = results(name)["workloads"][workload]["answers"]
    expected = results("large")["workloads"][workload]["answers"]
    assert_same_answers(found, expected)


@pytest.mark.engines("large")
def test_answers_depend_on_the_whole_prompt(results: Results) -> None:
    """Else the comparisons above would prove nothing."""
    answers = results("large")["workloads"]["conversations"]["answers"]
    assert len({t for a in answers for t in a["tokens"]}) > 150
    assert len({tuple(a["tokens"]) for a in answers}) == len(answers)
    for a in results("large")["workloads"]["sampling"]["answers"]:
        assert len({tuple(tokens) for tokens in [a["tokens"], *a["others"]]}) == 3


@pytest.mark.parametrize("name", tiered())
def test_engine_is_what_the_test_means(results: Results, name: str) -> None:
    facts, llm = results(name)["facts"], JOBS[name].llm
    assert facts == {
        "async_scheduling": llm.get("async_scheduling", False) and HAS_ASYNC,
        "runner_v2": False,
        "world_size": llm["tensor_parallel_size"],
        "num_device_blocks": SMALL,
        "num_host_slots": facts["num_host_slots"],
        "pool": "TieredBlockPool",
    }
    assert facts["num_host_slots"] >= 70


@pytest.mark.parametrize("name", tiered("small"))
def test_conversations_are_served_from_the_host(results: Results, name: str) -> None:
    small = results("small")["workloads"]["conversations"]
    found = results(name)["workloads"]["conversations"]
    assert sum(cached(small)) < 0.2 * sum(cached(found))
    counters = found["counters"]
    assert counters["kv_tier_loaded_blocks"] > 0
    assert counters["kv_tier_stored_blocks"] > 0
    hits = counters["kv_tier_host_hit_tokens"] + counters["kv_tier_device_hit_tokens"]
    assert hits == sum(cached(found))
    assert counters["kv_tier_host_hit_tokens"] > 0.5 * hits


@pytest.mark.compat("model kinds", "full attention (Llama)")
@pytest.mark.parametrize("name", tiered("large"))
def test_nothing_that_was_computed_is_computed_again(
    results: Results, name: str
) -> None:
    """The tier finds all that a cache finds which never evicts."""
    found = results(name)["workloads"]["conversations"]
    expected = results("large")["workloads"]["conversations"]
    assert cached(found) == cached(expected)


@pytest.mark.parametrize("name", tiered())
def test_preempted_requests_resume_from_the_host(results: Results, name: str) -> None:
    counters = results(name)["workloads"]["overcommit"]["counters"]
    assert counters["num_preemptions"] > 0
    assert counters["kv_tier_resumed_host_hit_tokens"] > 0
    # They had no hit when they first came.
    assert counters["kv_tier_host_hit_tokens"] == 0


@pytest.mark.parametrize("name", tiered())
def test_an_evicted_prefix_is_loaded_once_for_all(results: Results, name: str) -> None:
    result = results(name)["workloads"]["shared_prefix"]
    assert cached(result) == [0] + 6 * [5 * BLOCK_TOKENS]
    assert result["counters"]["kv_tier_loaded_blocks"] == 5


@pytest.mark.parametrize("name", tiered())
def test_salts_keep_prompts_apart(results: Results, name: str) -> None:
    result = results(name)["workloads"]["salts"]
    hit = 5 * BLOCK_TOKENS
    # Salts a, a, b; evicted before each of a, b, c, none.
    assert cached(result) == [0, hit, 0, hit, hit, 0, 0]
    assert result["counters"]["kv_tier_loaded_blocks"] > 0


@pytest.mark.parametrize("name", tiered())
def test_prompt_logprobs_read_no_cache(results: Results, name: str) -> None:
    answers = results(name)["workloads"]["prompt_logprobs"]["answers"]
    assert [a["cached_tokens"] for a in answers] == [0, 0, 5 * BLOCK_TOKENS]
    assert len(answers[1]["prompt_logprobs"]) == 5 * BLOCK_TOKENS + 2


@pytest.mark.parametrize("name", tiered())
def test_reset_empties_both_tiers(results: Results, name: str) -> None:
    result = results(name)["workloads"]["reset"]
    assert result["was_reset"] is True
    assert result["counters"]["kv_tier_stored_blocks"] > 0
    assert result["counters"]["kv_tier_loaded_blocks"] == 0
    assert not any(cached(result))


@pytest.mark.parametrize("name", tiered())
def test_reset_is_refused_while_requests_run(results: Results, name: str) -> None:
    assert results(name)["workloads"]["reset_while_running"]["was_reset"] is False


@pytest.mark.engines("lora")
def test_adapters_keep_prompts_apart(results: Results) -> None:
    result = results("lora")["workloads"]["loras"]
    assert cached(result) == [0, 0, 0] + 3 * [5 * BLOCK_TOKENS]
    assert result["counters"]["kv_tier_loaded_blocks"] == 3 * 5
    computed, loaded = result["answers"][:3], result["answers"][3:]
    assert_same_answers(loaded, computed)
    assert len({tuple(a["tokens"]) for a in computed}) == 3
