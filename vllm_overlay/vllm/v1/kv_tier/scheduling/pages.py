# SPDX-License-Identifier: Apache-2.0
"""Who maps the device's pages: what the scheduler's side asks of it, and the ranks.

A page is a run of device blocks whose memory comes and goes together, on all ranks.
Page `p` has the blocks from `p * blocks_per_page` on; the last one may have fewer.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from vllm.v1.kv_tier.memory.limits import (
    KEPT_FREE,
    available_host_bytes,
    total_host_bytes,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class PageMapper(Protocol):
    """Maps the pages of an engine.

    Who calls it sees to it that nothing reads or writes a page that is not mapped, nor
    will when what is under way goes on.
    """

    @property
    def blocks_per_page(self) -> int:
        """Device blocks of a page."""

    @property
    def missing(self) -> list[int]:
        """Pages that are not mapped at first."""

    def num_wanted(self) -> int:
        """How many mapped pages others need more than this engine does."""

    def map_pages(self, num_pages: int, wait: bool) -> list[int]:
        """Map some that are not mapped: `num_pages`, or as many as there is memory for.

        Args:
            num_pages: How many.
            wait: The engine waits for them. Else those that would take time are made
                ready meanwhile, for the next call.

        Returns:
            Which, without content.

        """

    def unmap_pages(self, pages: list[int]) -> None:
        """Give the memory of mapped `pages` back, with what is in it."""

    def take_seconds(self) -> tuple[float, float]:
        """Seconds that mapping and unmapping took since the last call, as far as it is
        done in this process."""


UnmapBlocks = Callable[[int, int], None]
"""Has all ranks give the memory of blocks back, from one up to another, before anything
else of the plan in the making."""


class RankPages:
    """Pages of memory that the ranks have from the machine, which backs it again when
    it is next written to: nothing need be done to map one.

    Args:
        num_blocks: Of the device.
        blocks_per_page: As in `PageMapper`.
        page_bytes: Bytes of a page on all ranks together.
        min_pages: So many may always be mapped: the longest request must fit.
        spare_bytes: What the machine can give beyond what shall stay free; negative
            when others need more. Asked every `poll_s`.
        unmap: Tells the ranks.
        poll_s: Seconds.

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
        # It is asked for seldom, and this much of it is gone.
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


MakeMapper = Callable[[UnmapBlocks], PageMapper]


@dataclass(frozen=True)
class ElasticLayout:
    """Device memory that can be given back: what the scheduler must know of it."""

    make_mapper: MakeMapper
    page_bytes: int
    """Bytes of a page on all ranks together."""
    num_ranks: int
    """With KV memory. Each tells when what touched a page has ended."""
    shrink_after_s: float
    """As in `KVTierConfig`."""
    block_sizes: tuple[int, ...]
    """Tokens of a block of each group of layers."""
    headroom: int
    """Blocks that the step of one request takes at most: so many are kept mapped and
    free while requests run."""


class EngineNeeds(NamedTuple):
    """What requests of an engine take."""

    block_sizes: tuple[int, ...]
    """As in `ElasticLayout`."""
    headroom: int
    """As in `ElasticLayout`."""
    longest: int
    """Blocks of the longest request, and its headroom."""

    def min_pages(self, blocks_per_page: int) -> int:
        """Pages with which the longest request fits."""
        # The null block is not for requests.
        return -(-(self.longest + 1) // blocks_per_page)


def engine_needs(vllm_config: "VllmConfig", kv_cache_config: Any) -> EngineNeeds:
    """What requests of an engine take.

    Args:
        vllm_config: Settings of the engine.
        kv_cache_config: The scheduler's.

    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    block_sizes = tuple(spec.block_size for spec in specs)
    max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    # What it computes may begin and end within a block, and drafts follow it.
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
    """Pages that the ranks of an engine give back themselves, all on this machine.

    Args:
        vllm_config: Settings of the engine.
        kv_cache_config: The scheduler's.
        blocks_per_page: What suits the memory of every rank.
        rank_bytes: Of a block, for each rank; 0 where one has no KV memory.
        shrink_after_s: As set.

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
