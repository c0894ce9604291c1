# SPDX-License-Identifier: Apache-2.0
"""What would leave the tier without effect, and its memory taken for nothing, is an
error that says so."""

from typing import Any

import pytest

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

from .layouts import LAYOUTS
from .scheduler import Setup, make_scheduler

SETUP = Setup(LAYOUTS[0], spare_blocks=8, num_slots=8)


class ElasticPool(BlockPool):
    """Another project's."""


def replace_pool(coordinator: Any) -> None:
    """What kvcached does once upstream has made a coordinator."""
    ours = coordinator.block_pool
    coordinator.block_pool = ElasticPool(
        num_gpu_blocks=ours.num_gpu_blocks,
        enable_caching=True,
        hash_block_size=ours.hash_block_size,
    )


@pytest.mark.compat(
    "refused at start", "a block pool that replaces the tier's (kvcached)"
)
def test_a_pool_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    init = KVCacheCoordinator.__init__

    def init_and_replace(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        replace_pool(self)

    monkeypatch.setattr(KVCacheCoordinator, "__init__", init_and_replace)
    with pytest.raises(ValueError) as error:
        make_scheduler(SETUP)
    text = str(error.value)
    assert "--kv-offloading-backend core: the block pool was replaced" in text
    assert f"{__name__}.ElasticPool" in text and "ENABLE_KVCACHED" in text


@pytest.mark.compat(
    "refused at start", "--scheduler-cls with a class that sends no plans"
)
def test_a_scheduler_that_sends_no_plan() -> None:
    """Where nothing at start tells."""
    scheduler: Any = make_scheduler(SETUP)
    scheduler.kv_cache_manager.kv_tier.take_plan = lambda is_idle=False: None
    scheduler.schedule()
    with pytest.raises(RuntimeError, match="without having sent the plan") as error:
        scheduler.schedule()
    assert "--scheduler-cls" in str(error.value)
