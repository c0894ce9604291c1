# SPDX-License-Identifier: Apache-2.0
"""What patches add to upstream's classes: room for the tier, empty until it starts."""

from inspect import getsource, signature
from queue import Queue
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs, core
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.stats import KVTierStats
from vllm.v1.kv_tier.worker.layers import set_layer_waits
from vllm.v1.metrics.stats import SchedulerStats

from ..names import WorkerWrapperBase, touch_kv_layer
from ..sim import upstream
from .tier import BLOCK, Tier


def test_the_scheduler_hears_of_no_tier() -> None:
    config = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    assert config.kv_tier is None


def test_a_step_without_a_tier_has_no_plan() -> None:
    assert upstream.empty_step().kv_tier_plan is None


@pytest.mark.skipif(
    "batch_queue.full()" not in getsource(EngineCore.step_with_batch_queue),
    reason="upstream sends every step",
)
def test_a_pipeline_sends_a_plan_where_nothing_runs() -> None:
    """Else the copies of a step without tokens never begin."""
    step = upstream.empty_step()
    step.kv_tier_plan = StepPlan(1)
    engine = MagicMock(batch_queue=Queue(1))
    engine.scheduler.schedule.return_value = step
    EngineCore.step_with_batch_queue(engine)
    engine.model_executor.execute_model.assert_called_once_with(step)


def test_a_worker_begins_without_a_tier() -> None:
    config = {"vllm_config": SimpleNamespace(model_config=None)}
    known = signature(WorkerWrapperBase).parameters
    wrapper = WorkerWrapperBase(**{k: v for k, v in config.items() if k in known})
    assert wrapper.kv_tier is None


def test_an_executor_begins_without_reports_to_merge() -> None:
    class Ranks(Executor):
        def _init_executor(self) -> None:
            pass

    Ranks.__abstractmethods__ = frozenset()
    executor = Ranks(MagicMock())  # type: ignore[abstract]
    assert executor.kv_tier_aggregator is None


def test_counts_travel_to_the_api_server() -> None:
    stats = SchedulerStats(kv_tier_stats=KVTierStats(host_hit_tokens=3))
    packed = msgspec.msgpack.encode(stats)
    there = msgspec.msgpack.decode(packed, type=SchedulerStats)
    assert there.kv_tier_stats == stats.kv_tier_stats


def test_llm_records_a_step_that_only_moved_blocks() -> None:
    """Upstream drops the counts of steps without outputs in some releases."""
    engine = MagicMock(should_execute_dummy_batch=False, log_stats=False)
    stats = SchedulerStats(kv_tier_stats=KVTierStats(host_hit_tokens=3))
    engine.engine_core.get_output.return_value = EngineCoreOutputs(
        scheduler_stats=stats
    )
    LLMEngine.step(engine)
    calls = [engine.logger_manager.record, engine.stat_logger.record]
    assert sum(call.call_count for call in calls) == 1


@pytest.mark.skipif(
    not hasattr(core, "flush_kv_tier"), reason="has no secondary tiers to write to"
)
def test_an_engine_that_ends_writes_before_its_ranks_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that ends by itself writes too, but not through ranks elsewhere."""
    order: list[str] = []
    monkeypatch.setattr(core, "flush_kv_tier", lambda *_: order.append("writes"))
    monkeypatch.setattr(core, "cleanup_dist_env_and_memory", lambda: None, False)
    engine = MagicMock()
    engine.model_executor.shutdown = lambda: order.append("ranks end")
    EngineCore.shutdown(engine)
    assert order == ["writes", "ranks end"]


@pytest.mark.skipif(
    not hasattr(Scheduler, "_handle_invalid_blocks")
    or "recompute_kv_load_failures" not in getsource(Scheduler._handle_invalid_blocks),
    reason="requests of failed loads end otherwise in this release",
)
@pytest.mark.parametrize("has_tier", [True, False])
def test_keys_of_blocks_that_a_connector_could_not_load(has_tier: bool) -> None:
    """Upstream keeps them, since the blocks are computed in place; a tier would store
    them before."""
    tier = object() if has_tier else None
    scheduler = MagicMock(recompute_kv_load_failures=True)
    scheduler.kv_cache_manager.kv_tier = tier
    scheduler.kv_cache_config.kv_cache_groups = ["one"]
    # None that waits, and one that runs.
    found = [(set(), 0, set()), ({"r"}, 1, {3})]
    scheduler._update_requests_with_invalid_blocks.side_effect = found
    # Newer releases are told how many tokens each request computes.
    handle = Scheduler._handle_invalid_blocks
    arguments = [scheduler, {3}, {"r": 1}][: len(signature(handle).parameters)]
    assert handle(*arguments) == {"r"}
    evicted = scheduler.kv_cache_manager.evict_blocks
    assert [call.args for call in evicted.call_args_list] == [({3},)] * has_tier


def test_a_layer_waits_before_all_else() -> None:
    class WaitedError(Exception):
        pass

    def wait(layer: str) -> None:
        raise WaitedError(layer)

    waits: Any = SimpleNamespace(is_armed=True, wait=wait)
    set_layer_waits(waits)
    try:
        with pytest.raises(WaitedError, match="the layer"):
            touch_kv_layer("the layer")
    finally:
        set_layer_waits(None)


@pytest.mark.skipif(
    not upstream.RESETS_RUNNING_REQUESTS, reason="so old that all managers share a pool"
)
def test_keys_of_uncomputed_blocks_leave_the_pool_of_their_manager() -> None:
    """A manager may have a pool of its own, as that of HiSparse has, whose block ids
    are those of other blocks elsewhere."""
    tiers = [Tier(4), Tier(4)]
    blocks = [tier.computed("ab") for tier in tiers]
    main, own = (tier.pool for tier in tiers)
    managers = [SimpleNamespace(block_pool=own, block_size=BLOCK)]
    manager: Any = SimpleNamespace(
        block_pool=main,
        evict_blocks=main.evict_blocks,
        coordinator=SimpleNamespace(
            single_type_managers=managers, get_blocks=lambda request_id: blocks[1:]
        ),
    )
    request: Any = SimpleNamespace(request_id="r", num_computed_tokens=BLOCK)
    KVCacheManager.evict_uncomputed(manager, request)
    assert [bool(block.block_hash) for block in blocks[1]] == [True, False]
    assert all(block.block_hash for block in blocks[0])
