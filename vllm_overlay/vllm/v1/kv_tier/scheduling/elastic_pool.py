# SPDX-License-Identifier: Apache-2.0
"""The block pool of an engine that releases device memory, see `ElasticDevice`."""

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_tier.config import KVTierLayout
from vllm.v1.kv_tier.plan import StepPlan, StepReport
from vllm.v1.kv_tier.scheduling.block_pool import TieredBlockPool
from vllm.v1.kv_tier.scheduling.elastic import ElasticDevice
from vllm.v1.kv_tier.scheduling.publishing import PublishingBlockPool
from vllm.v1.kv_tier.stats import KVTierStats
from vllm.v1.request import Request


class ElasticBlockPool(TieredBlockPool):
    """A `TieredBlockPool` in which some blocks have no memory at times.

    `num_gpu_blocks` counts the blocks with memory, and upstream's check of free blocks
    sees only those. So memory is requested before that check.
    """

    def __init__(self, layout: KVTierLayout, **kwargs: Any) -> None:
        super().__init__(layout, **kwargs)
        assert layout.elastic is not None, "ask for another pool"
        self.elastic = ElasticDevice(
            layout.elastic,
            self,
            self,
            self.free,
            self._draft,
            self.storer,
            self.prefetches,
            layout.tuning,
            lambda: self.costs.clock(),
            self._stats,
        )
        self._block_sizes = layout.elastic.block_sizes
        self._take_missing()
        # Whether the last request that was looked up passed upstream's check of free
        # blocks.
        self._has_room = False

    def _take_missing(self) -> None:
        """Remove blocks that have no memory at start."""
        self.elastic.unmapped.update(self.elastic.mapper.missing)
        if missing := list(self.elastic.missing_blocks()):
            self.take_out(missing)

    # ------------------------------------------------------------------ a step

    def begin_step(self) -> None:
        super().begin_step()
        if not self._is_unused:
            self.elastic.need_headroom(wait=True)

    @property
    def _is_unused(self) -> bool:
        """Whether no block but the null block is in use."""
        return self.num_gpu_blocks - len(self.free) == 1

    def take_plan(self, is_idle: bool = False) -> StepPlan:
        self.elastic.end_step(is_idle and self._is_unused)
        return super().take_plan(is_idle)

    def is_loading(self, request: Request, has_scheduled_reqs: bool) -> bool:
        if super().is_loading(request, has_scheduled_reqs):
            return True
        num_blocks = sum(-(-request.num_tokens // size) for size in self._block_sizes)
        self.elastic.need_prompt(num_blocks, wait=not has_scheduled_reqs)
        self._has_room = False
        return False

    def promote(
        self, *args: Any, **kwargs: Any
    ) -> tuple[Sequence[KVCacheBlock], ...] | None:
        self._has_room = True
        return super().promote(*args, **kwargs)

    def load_ahead(
        self,
        managers: Sequence[Any],
        computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_tokens: int,
    ) -> None:
        super().load_ahead(managers, computed_blocks, num_tokens)
        if not self._has_room:
            self.elastic.refused()

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        self.elastic.spare_victims(num_blocks)
        blocks = super().get_new_blocks(num_blocks)
        self.elastic.need_headroom(wait=False)
        return blocks

    def apply_report(self, report: StepReport) -> int | None:
        if report.ended:
            self.elastic.have_ended(report.ended)
        return super().apply_report(report)

    def _switch_off(self, lost_blocks: Iterable[int]) -> None:
        self.elastic.close()
        super()._switch_off(lost_blocks)

    # --------------------------------------------------- blocks that come and go

    def take_out(self, blocks: list[KVCacheBlock]) -> None:
        """See `Taker`."""
        self.free.put_first(blocks, need_no_store=False)
        self._demoting = True
        try:
            taken = BlockPool.get_new_blocks(self, len(blocks))
        finally:
            self._demoting = False
        assert taken == blocks, "others are in front of what was put first"
        self.prefetches.claim(taken)
        if self.storer.released or self.storer.forbidden:
            self.releasing.taken(taken)
        self.num_gpu_blocks -= len(taken)

    def put_back(self, blocks: list[KVCacheBlock]) -> None:
        """See `Taker`."""
        self.num_gpu_blocks += len(blocks)
        # Copies may still read from these blocks.
        self.free_blocks(blocks)

    def put_in(self, blocks: list[KVCacheBlock]) -> None:
        """See `Taker`."""
        self.num_gpu_blocks += len(blocks)
        for block in blocks:
            block.ref_cnt = 0
        self.free.insert_first(blocks)

    # -------------------------------------------------------------------- stats

    def get_usage(self) -> float:
        """As upstream, for all blocks: those without memory count as free."""
        num_blocks = len(self.blocks) - 1
        if not num_blocks:
            return 0.0
        return (self.num_gpu_blocks - 1 - len(self.free)) / num_blocks

    def take_stats(self) -> KVTierStats:
        stats = super().take_stats()
        self.elastic.report(stats)
        return stats


class ElasticPublishingBlockPool(ElasticBlockPool, PublishingBlockPool):
    """The same with KV cache events."""
