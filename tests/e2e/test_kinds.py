# SPDX-License-Identifier: Apache-2.0
"""The host tier changes no answer of any kind of model.

Some kinds by default, all of them with `KV_TIER_KINDS=all`.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from inspect import getsource
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.sim.upstream import HAS_STATES, MambaCacheMode
from vllm.engine import arg_utils

from .compare import assert_same_answers
from .conftest import run_engine
from .kinds import EMBEDDING, IMAGE_TOKENS, IMAGES, KINDS, ROWS, WORKLOADS, Kind
from .release import model_source

DEFAULT = ["qwen3", "gemma3", "falcon_h1"]
CHOSEN = list(KINDS) if os.environ.get("KV_TIER_KINDS") == "all" else DEFAULT
TIERED = ["write_back", "write_through"]

Results = Callable[[str, str], dict[str, Any]]


def lacking(kind: str) -> str:
    """Why the release at hand cannot run a kind; empty if it can."""
    if kind == "gemma3" and "assert config.tie_word_embeddings" in model_source(kind):
        return "this release has no Gemma 3 whose outputs have weights of their own"
    refuses_windows = "sliding window (CPU backend)" in getsource(arg_utils)
    if refuses_windows and "SlidingWindowSpec" in KINDS[kind].groups:
        return "attention on CPUs has no windows in this release"
    if "mamba_cache_mode" not in KINDS[kind].llm:
        return ""
    if not HAS_STATES:
        return "the series refuses models with Mamba layers on this release"
    cpu = "vllm.model_executor.layers.mamba.ops.cpu"
    if kind == "falcon_h1" and not (find_spec(cpu) and find_spec(f"{cpu}.mamba_ssm")):
        return "this release has no kernels of Mamba-2 for CPUs"
    return ""


def unless_lacking(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(bool(lacking(name)), reason=lacking(name))


kinds = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            name,
            marks=[pytest.mark.compat("model kinds", ROWS[name]), unless_lacking(name)],
        )
        for name in CHOSEN
    ],
)
tiered = pytest.mark.parametrize("job", TIERED)


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Results]:
    """Results of an engine by kind and job, started once, two side by side."""
    params = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = {p.params["kind"] for p in params if p and "kind" in p.params}
    with ThreadPoolExecutor(2) as workers:
        running = {}
        for name in filter(wanted.__contains__, KINDS):
            if lacking(name):
                continue
            folder = tmp_path_factory.mktemp(name)
            model = KINDS[name].write(folder / "model")
            for job, spec in KINDS[name].jobs().items():
                running[name, job] = workers.submit(
                    run_engine, job, spec, model, folder
                )
        yield lambda kind, job: running[kind, job].result()
        for future in running.values():
            future.cancel()


def cached(result: dict[str, Any]) -> list[int]:
    return [answer["cached_tokens"] for answer in result["answers"]]


@kinds
def test_answers_depend_on_the_whole_prompt(found: Results, kind: str) -> None:
    """Else the comparisons below would prove nothing."""
    answers = found(kind, "large")["workloads"]["conversations"]["answers"]
    assert len({t for a in answers for t in a["tokens"]}) > 150
    assert len({tuple(a["tokens"]) for a in answers}) == len(answers)


@kinds
@tiered
@pytest.mark.parametrize("workload", WORKLOADS)
def test_same_answers_as_a_large_device_cache(
    found: Results, kind: str, job: str, workload: str
) -> None:
    assert_same_answers(
        found(kind, job)["workloads"][workload]["answers"],
        found(kind, "large")["workloads"][workload]["answers"],
    )


@kinds
@tiered
def test_evicted_prefixes_come_back_from_the_host(
    found: Results, kind: str, job: str
) -> None:
    engine = found(kind, job)
    assert engine["facts"]["pool"] == "TieredBlockPool"
    assert engine["facts"]["num_device_blocks"] == KINDS[kind].num_device_blocks
    result = engine["workloads"]["conversations"]
    large = found(kind, "large")["workloads"]["conversations"]
    # All that a cache finds which never evicts.
    assert cached(result) == cached(large)
    counters = result["counters"]
    hits = counters["kv_tier_host_hit_tokens"] + counters["kv_tier_device_hit_tokens"]
    assert hits == sum(cached(result)) > 0
    assert counters["kv_tier_host_hit_tokens"] >= 0.5 * hits
    assert counters["kv_tier_loaded_blocks"] > 0


@kinds
@tiered
def test_one_corrupted_slot_of_any_group_is_noticed(
    found: Results, kind: str, job: str
) -> None:
    """The negative control: every group's bytes matter to the comparison."""
    expected = found(kind, "large")["workloads"]["conversations"]["answers"]
    runs = found(kind, job)["workloads"]["corrupt_each_group"]["groups"]
    assert sorted(run["group"] for run in runs) == sorted(KINDS[kind].groups)
    for run in runs:
        assert run["spoilt"] == [1]
        # Before the damage.
        assert_same_answers(run["answers"][:6], expected[:6])
        with pytest.raises(AssertionError, match="other tokens|off by"):
            assert_same_answers(run["answers"], expected)


def only(*names: str) -> Any:
    """These kinds, as far as they were chosen."""
    chosen = [name for name in CHOSEN if name in names]
    return pytest.mark.parametrize(
        "kind", [pytest.param(name, marks=unless_lacking(name)) for name in chosen]
    )


@only("gemma3", "gpt_oss", "llama4")
@pytest.mark.compat("model kinds", "KV cache groups that share memory")
def test_groups_overlay_each_other(found: Results, kind: str) -> None:
    layout = found(kind, "write_back")["layout"]
    assert layout["groups_share_memory"]


@only("gemma3")
def test_a_group_that_needs_less_is_not_copied_whole(found: Results, kind: str) -> None:
    assert found(kind, "write_back")["layout"]["copies_groups"]


@only("gemma4")
@pytest.mark.compat("model kinds", "KV cache groups of different block sizes")
def test_block_sizes_differ(found: Results, kind: str) -> None:
    sizes = found(kind, "write_back")["layout"]["block_sizes"]
    assert len(set(sizes)) == 2


@only("gemma3n")
@pytest.mark.compat("model kinds", "KV shared between layers")
def test_layers_share_their_kv(found: Results, kind: str) -> None:
    assert found(kind, "write_back")["layout"]["layers_without_kv"] == 2


def test_every_mode_of_mamba_caches_has_a_kind() -> None:
    if MambaCacheMode is None:
        pytest.skip("this release caches no states")
    tested = {kind.llm.get("mamba_cache_mode", "none") for kind in KINDS.values()}
    missing = set(get_args(MambaCacheMode)) - tested
    if missing == {"all"}:
        pytest.skip("kernels for CPUs do not return the states that `all` keeps")
    assert not missing


def large_and_tiered(kind: Kind, folder: Path) -> Iterator[dict[str, Any]]:
    """Workloads of the engines `large` and `write_back`, which run side by side."""
    model = kind.write(folder / "model")
    jobs = kind.jobs()
    with ThreadPoolExecutor(2) as workers:
        running = [
            workers.submit(run_engine, job, jobs[job], model, folder)
            for job in ("large", "write_back")
        ]
        for each in running:
            yield each.result()["workloads"]


@pytest.mark.compat("model kinds", "decoder that embeds")
def test_embeddings(tmp_path: Path) -> None:
    large, tier = large_and_tiered(EMBEDDING, tmp_path)
    expected, found = large["embeddings"], tier["embeddings"]
    assert found["cached_tokens"] == expected["cached_tokens"]
    # Some releases do not tell how much of an embedded prompt was cached.
    if None not in found["cached_tokens"]:
        assert found["cached_tokens"] == 8 * [0] + 8 * [192]
    assert found["counters"]["kv_tier_host_hit_tokens"] >= 0.5 * 8 * 192
    for ours, theirs in zip(found["vectors"], expected["vectors"]):
        assert ours == pytest.approx(theirs, abs=1e-4)
    spoilt = tier["corrupt_embeddings"]
    assert spoilt["spoilt"] == [1]
    far = [
        max(abs(x - y) for x, y in zip(ours, theirs)) > 1e-2
        for ours, theirs in zip(spoilt["vectors"], expected["vectors"])
    ]
    assert not any(far[:8]) and any(far[8:])


@pytest.mark.compat("model kinds", "images (BLIP-2)")
def test_images(tmp_path: Path) -> None:
    """The tokens of a prompt do not tell which image they stand for."""
    large, tier = large_and_tiered(IMAGES, tmp_path)
    expected, found = large["images"], tier["images"]
    assert_same_answers(found["answers"], expected["answers"])
    # The second question about a picture shares the picture.
    assert cached(found) == 4 * [0] + [IMAGE_TOKENS] + 5 * [128]
    counters = found["counters"]
    assert counters["kv_tier_host_hit_tokens"] >= 0.5 * sum(cached(found)[5:])
    # Each picture is seen: taking one for another would show.
    first, *others = expected["answers"][:4]
    for other in others:
        with pytest.raises(AssertionError, match="other tokens|off by"):
            assert_same_answers([other], [first])
    spoilt = tier["corrupt_images"]
    assert spoilt["spoilt"] == [1]
    with pytest.raises(AssertionError, match="other tokens|off by"):
        assert_same_answers(spoilt["answers"], expected["answers"])
