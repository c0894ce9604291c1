# SPDX-License-Identifier: Apache-2.0
"""The interface to map pages of device memory, and its implementation on CPUs.

A page is a run of device blocks whose memory is mapped and unmapped together, on all
ranks. Page `p` starts at block `p * blocks_per_page`; the last one may be shorter.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.kv_tier.layout import ElasticLayout, UnmapBlocks
from vllm.v1.kv_tier.memory.limits import (
    KEPT_FREE,
    available_host_bytes,
    total_host_bytes,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class RankPages:
    """Pages whose memory the ranks release to the system.

    The system backs them again when they are written to, so mapping needs no action.

    Args:
        num_blocks: Number of device blocks.
        blocks_per_page: As in `PageMapper`.
        page_bytes: Bytes of a page on all ranks together.
        min_pages: Pages that may always be mapped, to hold the longest request.
        spare_bytes: Free bytes beyond the reserve; negative if others need memory.
        unmap: Called to release blocks on the ranks.
        poll_s: Seconds between calls of `spare_bytes`.

    """

    def __init__(
        self,
        num_blocks: int,
        blocks_per_page: int,
        page_bytes: int,
        min_pages: int,
        spare_bytes: Callable[[], int],
        unmap: UnmapBlocks,
        poll_s: float = 0.5,
    ) -> None:
        self.blocks_per_page = blocks_per_page
        self.missing: list[int] = []
        self._num_blocks = num_blocks
        self._num_pages = -(-num_blocks // blocks_per_page)
        self._page_bytes = page_bytes
        self._min_pages = min_pages
        self._ask_spare_bytes = spare_bytes
        self._unmap = unmap
        self._poll_s = poll_s
        self._unmapped: list[int] = []
        self._spare_pages = 0
        self._asked = float("-inf")

    def _num_mappable(self) -> int:
        num_mapped = self._num_pages - len(self._unmapped)
        num_pages = max(self._min_pages - num_mapped, self._spare())
        return min(len(self._unmapped), max(0, num_pages))

    def num_wanted(self) -> int:
        num_mapped = self._num_pages - len(self._unmapped)
        return max(0, min(-self._spare(), num_mapped - self._min_pages))

    def map_pages(self, num_pages: int, wait: bool) -> list[int]:
        num_pages = min(num_pages, self._num_mappable())
        # `spare_bytes` is called seldom, so subtract what was mapped since.
        self._spare_pages -= num_pages
        return [self._unmapped.pop() for _ in range(num_pages)]

    def unmap_pages(self, pages: list[int]) -> None:
        for page in pages:
            first = page * self.blocks_per_page
            self._unmap(first, min(first + self.blocks_per_page, self._num_blocks))
        self._unmapped += pages
        self._spare_pages += len(pages)

    def take_seconds(self) -> tuple[float, float]:
        return 0.0, 0.0

    def _spare(self) -> int:
        now = time.monotonic()
        if now >= self._asked + self._poll_s:
            self._asked = now
            self._spare_pages = self._ask_spare_bytes() // self._page_bytes
        return self._spare_pages


class EngineNeeds(NamedTuple):
    """Blocks that requests of an engine need."""

    block_sizes: tuple[int, ...]
    """As in `ElasticLayout`."""
    headroom: int
    """As in `ElasticLayout`."""
    longest: int
    """Blocks of the longest request, including its headroom."""

    def min_pages(self, blocks_per_page: int) -> int:
        """Number of pages that hold the longest request."""
        # Plus one for the null block.
        return -(-(self.longest + 1) // blocks_per_page)


def engine_needs(vllm_config: "VllmConfig", kv_cache_config: Any) -> EngineNeeds:
    """Blocks that requests of an engine need.

    Args:
        vllm_config: Settings of the engine.
        kv_cache_config: The scheduler's KV cache configuration.

    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    block_sizes = tuple(spec.block_size for spec in specs)
    max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    # A step may begin and end within a block, and draft tokens follow it.
    headroom = sum(-(-max_tokens // size) + 2 for size in block_sizes)
    longest = sum(
        -(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes)
        for spec in specs
    )
    return EngineNeeds(block_sizes, headroom, longest + headroom)


def pages_of_ranks(
    vllm_config: "VllmConfig",
    kv_cache_config: Any,
    blocks_per_page: int,
    rank_bytes: Sequence[int],
    shrink_after_s: float,
) -> ElasticLayout:
    """The elastic layout of ranks that release memory themselves, on this machine.

    Args:
        vllm_config: Settings of the engine.
        kv_cache_config: The scheduler's KV cache configuration.
        blocks_per_page: Suits the memory of every rank.
        rank_bytes: Bytes of a block on each rank; 0 for ranks without KV memory.
        shrink_after_s: The setting.

    """
    num_blocks = kv_cache_config.num_blocks
    page_bytes = blocks_per_page * sum(rank_bytes)
    needs = engine_needs(vllm_config, kv_cache_config)
    return ElasticLayout(
        lambda unmap: RankPages(
            num_blocks,
            blocks_per_page,
            page_bytes,
            min_pages=needs.min_pages(blocks_per_page),
            spare_bytes=_spare_bytes,
            unmap=unmap,
        ),
        page_bytes,
        sum(map(bool, rank_bytes)),
        shrink_after_s,
        needs.block_sizes,
        needs.headroom,
    )


def _spare_bytes() -> int:
    return available_host_bytes() - int(KEPT_FREE * total_host_bytes())
