# SPDX-License-Identifier: Apache-2.0
"""pytest plugin that makes every prefix-caching `BlockPool` a tiered one.

However upstream or a test builds a `BlockPool`, it gets a `TieredBlockPool` with a
small host tier. Subclasses of `BlockPool` and pools that the host tier refuses (no
prefix caching) stay as they are. Of KV cache events the tests see those of the device.

Upstream's tests seldom look for a block that was evicted. With --pressed, each
evictable device block that a lookup finds is evicted first, so that the hit must
come from the host.
"""

from typing import Any

import pytest

from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.kv_tier.config import KVTierConfig
from vllm.v1.kv_tier.layout import KVTierLayout
from vllm.v1.kv_tier.pool import TieredBlockPool
from vllm.v1.kv_tier.scheduler.events import MEDIUM_CPU, PublishingBlockPool
from vllm.v1.kv_tier.scheduler.slots import HostSlot

NUM_SLOTS = 512
SLOT_BYTES = 4096
LAYOUT = KVTierLayout(
    config=KVTierConfig(size_bytes=NUM_SLOTS * SLOT_BYTES),
    num_slots=NUM_SLOTS,
    slot_bytes=SLOT_BYTES,
)


class SwappedPool(TieredBlockPool):
    """`BlockPool(...)` as the tests call it, with a host tier."""

    pressed = False
    num_pools = 0
    num_slots_hit = 0

    def __init__(
        self, num_gpu_blocks: int, enable_caching: bool, hash_block_size: int, **kw: Any
    ) -> None:
        super().__init__(
            LAYOUT,
            num_gpu_blocks=num_gpu_blocks,
            enable_caching=enable_caching,
            hash_block_size=hash_block_size,
            **kw,
        )
        self.in_step = False
        SwappedPool.num_pools += 1

    def begin_step(self) -> None:
        # Tests of the KVCacheManager have no scheduler that would end a step.
        if self.in_step:
            self.take_plan()
        self.in_step = True
        super().begin_step()

    def take_plan(self, is_idle: bool = False) -> Any:
        self.in_step = False
        return super().take_plan(is_idle)

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: list[int]
    ) -> list[KVCacheBlock] | None:
        blocks = super().get_cached_block(block_hash, kv_cache_group_ids)
        if self.pressed and blocks:
            for block in blocks:
                self._evict(block)
            blocks = super().get_cached_block(block_hash, kv_cache_group_ids)
        SwappedPool.num_slots_hit += sum(type(b) is HostSlot for b in blocks or ())
        return blocks

    def _evict(self, block: KVCacheBlock) -> None:
        """Let a free block be the next one that is taken, and take it."""
        if block.next_free_block is not None:
            self.free_block_queue.remove(block)
            self.free_block_queue.prepend_n([block])
            self.free_blocks(self.get_new_blocks(1))


class SwappedPublishingPool(SwappedPool, PublishingBlockPool):
    """The same for `BlockPool(..., enable_kv_cache_events=True)`."""

    def take_events(self) -> list[KVCacheEvent]:
        events = super().take_events()
        return [e for e in events if getattr(e, "medium", None) != MEDIUM_CPU]


def new_pool(cls: type[BlockPool], *args: Any, **kwargs: Any) -> BlockPool:
    """`BlockPool.__new__`: decides by the arguments which class is built."""
    enable_caching = kwargs.get("enable_caching", args[1] if len(args) > 1 else False)
    events = kwargs.get("enable_kv_cache_events", args[3] if len(args) > 3 else False)
    if cls is not BlockPool or not enable_caching:
        return object.__new__(cls)
    if not events:
        return object.__new__(SwappedPool)
    # The host's own events could not be told from those of HiSparse's pool there.
    on_host = kwargs.get("medium") == MEDIUM_CPU
    return object.__new__(cls if on_host else SwappedPublishingPool)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pressed", action="store_true")


def pytest_configure(config: pytest.Config) -> None:
    SwappedPool.pressed = config.getoption("--pressed")
    BlockPool.__new__ = new_pool  # type: ignore[method-assign, assignment]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(
        f"host tier: {SwappedPool.num_pools} tiered pools, "
        f"{SwappedPool.num_slots_hit} host slots hit"
    )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    # A run in which no host slot was ever hit says nothing about the tier.
    if not SwappedPool.num_slots_hit:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
