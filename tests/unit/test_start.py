# SPDX-License-Identifier: Apache-2.0
"""How many slots a size gives, over all ranks."""

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.v1.kv_tier import start
from vllm.v1.kv_tier.config import GiB, KVTierConfig
from vllm.v1.kv_tier.memory import limits
from vllm.v1.kv_tier.start import start_kv_tier
from vllm.v1.kv_tier.worker.layers import (
    LayerWaits,
    set_layer_waits,
    wait_for_layer_load,
)
from vllm.v1.kv_tier.worker.report import StepReportAggregator

from ..settings import options

NUM_BLOCKS = 4
BLOCK_BYTES = 256
MAX_MODEL_LEN = 48 * 1024


class Executor:
    """Ranks in this process; rank r has r + 1 layers."""

    def __init__(self, num_ranks: int, num_layers: int = 1) -> None:
        self.kv_tier_aggregator: Any = None
        self.wrappers = [self._rank(num_layers * (r + 1)) for r in range(num_ranks)]

    @staticmethod
    def _rank(num_layers: int) -> Any:
        caches = [torch.zeros(NUM_BLOCKS, BLOCK_BYTES // 4) for _ in range(num_layers)]
        runner = SimpleNamespace(kv_caches=caches, device=torch.device("cpu"))
        worker = SimpleNamespace(model_runner=runner, vllm_config=None)
        return SimpleNamespace(worker=worker, kv_tier=None, rpc_rank=0)

    def collective_rpc(self, method: Any, args: tuple = ()) -> list[Any]:
        return [method(wrapper, *args) for wrapper in self.wrappers]


def run(
    monkeypatch: pytest.MonkeyPatch,
    executor: Executor,
    num_bytes: int,
    block_sizes: Sequence[int] = (16,),
    is_last_stage: bool = True,
    decode_context_parallel_size: int = 1,
    dcp_sharded: Sequence[bool] = (),
    **settings: Any,
) -> SimpleNamespace:
    config = KVTierConfig(num_bytes, **options(**settings))
    monkeypatch.setattr(start, "tier_config", lambda vllm_config: config)
    monkeypatch.setattr(KVTierConfig, "check_engine", lambda self, vllm_config: None)
    stage = SimpleNamespace(is_last_rank=is_last_stage)
    monkeypatch.setattr(start, "get_pp_group", lambda: stage)
    parallel = SimpleNamespace(
        nnodes=1, decode_context_parallel_size=decode_context_parallel_size
    )
    specs = [SimpleNamespace(block_size=size) for size in block_sizes]
    for spec, is_sharded in zip(specs, dcp_sharded):
        spec.dcp_sharded = is_sharded
    kv_cache_config = SimpleNamespace(
        num_blocks=NUM_BLOCKS,
        kv_tier=None,
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs],
    )
    model = SimpleNamespace(max_model_len=MAX_MODEL_LEN)
    vllm_config: Any = SimpleNamespace(
        parallel_config=parallel, model_config=model, speculative_config=None
    )
    start_kv_tier(vllm_config, executor, kv_cache_config)
    return kv_cache_config


def test_the_size_is_that_of_all_ranks_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = Executor(num_ranks=2)
    # 1 layer + 2 layers, and a rest that is not enough for another slot.
    config = run(monkeypatch, executor, 10 * 3 * BLOCK_BYTES + 500)
    assert config.kv_tier.num_slots == 10
    assert config.kv_tier.slot_bytes == 3 * BLOCK_BYTES
    shapes = [w.kv_tier.buffer.slots.shape for w in executor.wrappers]
    assert shapes == [(10, BLOCK_BYTES), (10, 2 * BLOCK_BYTES)]


def test_the_scheduler_hears_what_loads_cost_on_the_slowest_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = Executor(num_ranks=3)
    config = run(monkeypatch, executor, 100 * BLOCK_BYTES)
    times = [
        (r + 1) * BLOCK_BYTES / w.kv_tier.engines.load_bytes_per_s
        for r, w in enumerate(executor.wrappers)
    ]
    assert 0 < config.kv_tier.load_s == max(times)


@pytest.mark.parametrize(
    "block_sizes, num_tokens", [([16], 16), ([16, 16], 8), ([16, 48], 12)]
)
def test_tokens_of_a_block_where_groups_have_blocks_of_their_own(
    monkeypatch: pytest.MonkeyPatch, block_sizes: list[int], num_tokens: int
) -> None:
    config = run(monkeypatch, Executor(1), 100 * BLOCK_BYTES, block_sizes)
    # 48 tokens take three blocks of one group and one of the other.
    assert config.kv_tier.tokens_per_block == pytest.approx(num_tokens)


@pytest.mark.parametrize(
    "block_sizes, sharded, num_tokens",
    [
        # Releases before layers could stay whole.
        ([16], [], 64),
        ([16], [True], 64),
        ([16], [False], 16),
        ([16, 16], [True, False], 12.8),
    ],
)
def test_tokens_of_a_block_whose_tokens_ranks_share(
    monkeypatch: pytest.MonkeyPatch,
    block_sizes: list[int],
    sharded: list[bool],
    num_tokens: float,
) -> None:
    """As upstream's managers count them, with decode context parallelism of four."""
    config = run(
        monkeypatch,
        Executor(1),
        100 * BLOCK_BYTES,
        block_sizes,
        decode_context_parallel_size=4,
        dcp_sharded=sharded,
    )
    assert config.kv_tier.tokens_per_block == pytest.approx(num_tokens)


def test_a_copy_engine_that_cannot_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="copy_engine 'dma' cannot be used here"):
        run(monkeypatch, Executor(1), 100 * BLOCK_BYTES, copy_engine="dma")


def test_without_streams_no_layer_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an engine that this process ran before left there is gone."""

    class Left:
        def wait(self, stream: torch.cuda.Stream) -> None:
            raise AssertionError

    waits = LayerWaits({"layer": 0}, 1)
    waits.arm([range(1)], [Left()])
    set_layer_waits(waits)
    run(monkeypatch, Executor(1), 100 * BLOCK_BYTES)
    wait_for_layer_load("layer")


def test_reports_are_merged_where_there_are_several_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two, one = Executor(num_ranks=2), Executor(num_ranks=1)
    for executor in (one, two):
        run(monkeypatch, executor, 100 * BLOCK_BYTES)
    assert one.kv_tier_aggregator is None
    assert isinstance(two.kv_tier_aggregator, StepReportAggregator)


@pytest.mark.parametrize("is_last", [True, False])
def test_a_rank_knows_whether_its_outputs_have_tokens(
    monkeypatch: pytest.MonkeyPatch, is_last: bool
) -> None:
    executor = Executor(num_ranks=1)
    run(monkeypatch, executor, 100 * BLOCK_BYTES, is_last_stage=is_last)
    assert executor.wrappers[0].kv_tier.is_last_stage is is_last


def test_not_enough_for_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Executor(num_ranks=2)
    with pytest.raises(ValueError) as error:
        run(monkeypatch, executor, 3 * BLOCK_BYTES - 1)
    text = str(error.value)
    assert f"--kv-offloading-size {(3 * BLOCK_BYTES - 1) / GiB:g}" in text
    assert f"not enough for one KV block: a block takes {3 * BLOCK_BYTES} bytes" in text
    advice = re.search(r"Set it to at least (\S+) GiB", text)
    assert advice is not None
    assert 3 * BLOCK_BYTES <= int(float(advice[1]) * GiB) < 3.1 * BLOCK_BYTES
    assert all(w.kv_tier is None for w in executor.wrappers)


def test_a_model_without_a_kv_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no KV cache to offload. Remove the backend"):
        run(monkeypatch, Executor(num_ranks=1, num_layers=0), 1 << 20)


def test_memory_that_is_in_use_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_host_bytes", lambda: 1 << 20)
    executor = Executor(num_ranks=1)
    with pytest.raises(ValueError, match="does not fit: 0.0 GiB of host memory"):
        run(monkeypatch, executor, 2 << 20)
    assert executor.wrappers[0].kv_tier is None
    # Unless nobody is to look.
    run(monkeypatch, executor, 2 << 20, check_memory=False)
    assert executor.wrappers[0].kv_tier is not None


def test_each_machine_gives_what_its_own_ranks_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank r takes r + 1 parts of 6."""
    executor = Executor(num_ranks=3)
    names = iter(["a", "a", "b"] * 2)
    monkeypatch.setattr(limits.platform, "node", lambda: next(names))
    monkeypatch.setattr(limits, "available_host_bytes", lambda: 3 << 20)
    # Three MiB on each of them.
    run(monkeypatch, executor, 6 << 20)
    with pytest.raises(ValueError, match="2 of the 3 ranks run on a and take"):
        run(monkeypatch, executor, 7 << 20)


def test_nothing_is_started_when_the_tier_is_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start, "tier_config", lambda vllm_config: None)
    executor: Any = None
    start_kv_tier(SimpleNamespace(), executor, SimpleNamespace())
