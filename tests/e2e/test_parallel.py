# SPDX-License-Identifier: Apache-2.0
"""Several ranks or engines: the host tier changes no answer, and ranks agree.

What takes longest only with `KV_TIER_PARALLEL=all`, ranks of Ray with `ray`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_tier.config import KVTierConfig
from vllm.v1.kv_tier.memory.limits import available_host_bytes

from .compare import assert_same_answers
from .conftest import Results, run_engine
from .engine import Answer
from .jobs import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    CORRUPT_EACH_RANK,
    JOBS,
    ONE_RANK,
    PARALLEL,
    PARALLEL_WORKLOADS,
    SMALL,
    WITH_RANKS,
    GiB,
    Job,
)
from .kinds import EMBEDDING
from .model import make_tokenizer
from .release import CHOOSES_REPLICAS, REPLICAS_ENVIRONMENT, known
from .server import Server, refused
from .test_http import CORE, NUM_SLOTS, SERVE, SIZE, server_environment
from .workloads import SERVED


def engines(*others: str) -> Any:
    """Runs a test on each of the engines; marks it as a proof of that mode."""
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(
                name,
                marks=[
                    pytest.mark.engines(name, *others),
                    pytest.mark.compat("engine modes", name),
                ],
            )
            for name in PARALLEL
        ],
    )


def cached(result: dict[str, Any]) -> list[int]:
    return [answer["cached_tokens"] for answer in result["answers"]]


@engines()
def test_engine_is_what_the_test_means(results: Results, name: str) -> None:
    facts, job = results(name)["facts"], JOBS[name]
    assert facts == {
        "async_scheduling": job.llm.get("async_scheduling", False),
        "runner_v2": False,
        "world_size": job.num_ranks,
        "num_device_blocks": SMALL,
        "num_host_slots": 1000,
        "pool": "TieredBlockPool",
    }
    assert job.num_ranks > 1


@engines("large")
@pytest.mark.parametrize("workload", PARALLEL_WORKLOADS)
def test_same_answers_as_a_large_device_cache(
    results: Results, name: str, workload: str
) -> None:
    assert_same_answers(
        results(name)["workloads"][workload]["answers"],
        results("large")["workloads"][workload]["answers"],
    )


@engines("large")
def test_evicted_prefixes_come_back_from_the_host(results: Results, name: str) -> None:
    found = results(name)["workloads"]["conversations"]
    # All that a cache finds which never evicts.
    assert cached(found) == cached(results("large")["workloads"]["conversations"])
    counters = found["counters"]
    hits = counters["kv_tier_host_hit_tokens"] + counters["kv_tier_device_hit_tokens"]
    assert hits == sum(cached(found))
    assert counters["kv_tier_host_hit_tokens"] > 0.5 * hits
    assert counters["kv_tier_loaded_blocks"] > 0


@engines("large")
def test_one_corrupted_slot_of_any_rank_is_noticed(results: Results, name: str) -> None:
    """The negative control: every rank's bytes matter to the comparison."""
    expected = results("large")["workloads"]["conversations"]["answers"]
    runs = results(name)["workloads"][CORRUPT_EACH_RANK]["ranks"]
    num_ranks = JOBS[name].num_ranks
    for rank, run in enumerate(runs):
        assert run["spoilt"] == [int(r == rank) for r in range(num_ranks)]
        # Before the damage.
        assert_same_answers(run["answers"][:6], expected[:6])
        with pytest.raises(AssertionError, match="other tokens|off by"):
            assert_same_answers(run["answers"], expected)
    assert len(runs) == num_ranks


def faults(prefix: str = "") -> Any:
    """Runs a test with each fault whose name begins so."""
    return pytest.mark.parametrize(
        "fault",
        [
            pytest.param(
                fault,
                marks=pytest.mark.compat(
                    "faults", f"a {fault.partition('_')[0]} fails on one rank"
                ),
            )
            for fault in ONE_RANK
            if fault.startswith(prefix)
        ],
    )


@engines("large")
@faults()
def test_a_copy_that_fails_on_one_rank_changes_no_answer(
    results: Results, name: str, fault: str
) -> None:
    found = results(name)["workloads"][fault]
    failed = [0] * JOBS[name].num_ranks
    failed[0 if fault.endswith("first_rank") else -1] = 1
    assert found["failures"] == failed
    expected = results("large")["workloads"][ONE_RANK[fault]]["answers"]
    assert_same_answers(found["answers"], expected)


@engines()
@faults("load")
def test_a_load_that_fails_on_one_rank_makes_all_start_over(
    results: Results, name: str, fault: str
) -> None:
    workloads = results(name)["workloads"]
    undamaged = workloads[ONE_RANK[fault]]["counters"]["num_preemptions"]
    assert workloads[fault]["counters"]["num_preemptions"] > undamaged


# ------------------------------------------------------------ data parallel engines

REPLICAS = ["--data-parallel-size", "2"]
SPOIL = ["--worker-extension-cls", "tests.e2e.spoil_extension.SpoilSlots"]
HIT = len(SERVED) * 5 * BLOCK_TOKENS


@pytest.fixture(scope="module")
def replicas(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two engines behind one API server, each with a tier of its own."""
    make_tokenizer(llama)
    server = Server(
        llama,
        [*SERVE, *CORE, *SIZE, *REPLICAS, *SPOIL],
        server_environment() | REPLICAS_ENVIRONMENT | {"VLLM_SERVER_DEV_MODE": "1"},
        tmp_path_factory.mktemp("replicas") / "log",
    )
    yield server
    server.kill()


def ask(server: Server, replica: int | None = None) -> list[Answer]:
    """The answers of one engine to what the workload `served` asks."""
    return [
        answer_of(
            server.complete(
                prompt,
                replica,
                max_tokens=8,
                ignore_eos=True,
                logprobs=5,
                return_tokens_as_token_ids=True,
            )
        )
        for prompt in SERVED
    ]


def answer_of(response: dict[str, Any]) -> Answer:
    """What `/v1/completions` said, which was asked as `ask` does."""
    (choice,) = response["choices"]
    found = choice["logprobs"]

    def token(name: str) -> int:
        return int(name.removeprefix("token_id:"))

    return Answer(
        tokens=[token(name) for name in found["tokens"]],
        logprobs=[
            sorted(((token(n), x) for n, x in top.items()), key=lambda pair: -pair[1])[
                :5
            ]
            for top in found["top_logprobs"]
        ],
        others=[],
        prompt_logprobs=[],
        cached_tokens=(response["usage"]["prompt_tokens_details"] or {}).get(
            "cached_tokens"
        )
        or 0,
    )


@pytest.mark.engines("large")
@pytest.mark.compat("engine modes", "DP=2")
def test_each_data_parallel_engine_has_a_tier_of_its_own(
    results: Results, replicas: Server
) -> None:
    if not CHOOSES_REPLICAS:
        pytest.skip("nobody can tell this release which engine shall answer")
    expected = results("large")["workloads"]["served"]["answers"]
    for replica in range(2):
        first, second = ask(replicas, replica), ask(replicas, replica)
        assert_same_answers(first, expected)
        assert_same_answers(second, expected)
        # The second engine has nothing from the first.
        assert not any(answer["cached_tokens"] for answer in first)
        assert sum(answer["cached_tokens"] for answer in second) == HIT
        # Those that have run: several API servers publish no others.
        for engine in range(replica + 1):
            found = replicas.metrics("vllm:kv_tier_", engine)
            assert found["vllm:kv_tier_host_slots"] == NUM_SLOTS
            assert found["vllm:kv_tier_slot_bytes"] == BLOCK_BYTES
            assert found["vllm:kv_tier_host_hit_tokens_total"] == HIT
            assert found["vllm:kv_tier_loaded_blocks_total"] == HIT / BLOCK_TOKENS
            assert found["vllm:kv_tier_slots_used"] == HIT / BLOCK_TOKENS
    # The negative control: this comparison can fail, for the engine with the damage.
    replicas.post("/collective_rpc", {"method": "spoil_all_slots", "args": [1]})
    assert_same_answers(ask(replicas, 0), expected)
    with pytest.raises(AssertionError, match="other tokens|off by"):
        assert_same_answers(ask(replicas, 1), expected)
    assert replicas.terminate() == 0
    assert replicas.leftover_processes() == []
    assert replicas.stranded_shared_memory() == set()


@pytest.mark.compat("refused at start", "DP: engines whose host memory does not fit")
def test_data_parallel_engines_that_do_not_fit_together(
    llama: Path, tmp_path: Path
) -> None:
    """Each alone would."""
    size = 0.7 * available_host_bytes() / GiB
    flags = [*SERVE, *CORE, "--kv-offloading-size", f"{size:.2f}", *REPLICAS]
    output = refused(llama, *flags, env=server_environment(), log=tmp_path / "log")
    assert f"--kv-offloading-size {size:.2f}".rstrip("0") in output
    assert "does not fit: each of the 2 data parallel engines on this" in output
    # Before any of them starts.
    assert "KV tier:" not in output and "EngineCore_DP" not in output


# ------------------------------------------------------------------ pooling models


@WITH_RANKS
@pytest.mark.compat("engine modes", "PP=2", "embedding models too")
def test_embeddings_with_a_pipeline(tmp_path: Path) -> None:
    """The first stage of a pooling model has no output to send a report with."""
    model = EMBEDDING.write(tmp_path / "model")
    jobs = EMBEDDING.jobs()
    two_stages = Job(
        jobs["write_back"].llm | {"pipeline_parallel_size": 2},
        ["embeddings", "embeddings_load_fails_on_the_first_rank"],
    )
    large = run_engine("large", jobs["large"], model, tmp_path)["workloads"]
    found = run_engine("pp2", two_stages, model, tmp_path)["workloads"]
    expected = large["embeddings"]
    assert found["embeddings"]["cached_tokens"] == expected["cached_tokens"]
    assert found["embeddings"]["counters"]["kv_tier_host_hit_tokens"] >= 0.5 * 8 * 192
    fault = found["embeddings_load_fails_on_the_first_rank"]
    assert fault["failures"] == [1, 0]
    for result in (found["embeddings"], fault):
        for ours, theirs in zip(result["vectors"], expected["vectors"]):
            assert ours == pytest.approx(theirs, abs=1e-4)


# ----------------------------------------------------------------------- executors


def two_ranks(llama: Path, executor: str) -> EngineArgs:
    return EngineArgs(
        model=str(llama),
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
        distributed_executor_backend=executor,
        **known({"kv_cache_memory_bytes": SMALL * BLOCK_BYTES}),
        kv_offloading_backend="core",
        kv_offloading_size=0.1,
    )


REFUSED = "not supported with --distributed-executor-backend"
"""The scheduler would hear of the failed copies of one rank only."""


@pytest.mark.compat(
    "refused at start", "--distributed-executor-backend external_launcher"
)
def test_ranks_with_schedulers_of_their_own(llama: Path) -> None:
    with pytest.raises(ValueError, match=f"{REFUSED} external_launcher: .* Use mp"):
        config = two_ranks(llama, "external_launcher").create_engine_config()
        if config.parallel_config.distributed_executor_backend == "mp":
            pytest.skip("on CPUs this release takes mp in its place")


@pytest.mark.compat("refused at start", "--distributed-executor-backend ray, on CPUs")
def test_ranks_of_ray(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set afterwards: without Ray installed upstream ends before the tier is asked."""
    config = two_ranks(llama, "mp").create_engine_config()
    monkeypatch.setattr(config.parallel_config, "distributed_executor_backend", "ray")
    with pytest.raises(ValueError, match=f"{REFUSED} ray: .* for cpu. Use mp"):
        KVTierConfig.from_vllm_config(config)
