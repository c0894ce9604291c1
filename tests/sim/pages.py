# SPDX-License-Identifier: Apache-2.0
"""Device memory that comes and goes, as others want it and as luck has it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

from vllm.v1.kv_tier.elastic.pages import RankPages
from vllm.v1.kv_tier.layout import ElasticLayout, PageMapper, UnmapBlocks

from .content import EMPTY, Violation
from .layouts import Layout


class DeviceMemory(list[list[int]]):
    """What each device block holds. Who touches one that is not mapped fails."""

    def __init__(
        self, blocks: Iterable[list[int]], unmapped: Iterable[int] = ()
    ) -> None:
        super().__init__(blocks)
        self.unmapped = {*unmapped}

    def __getitem__(self, block: int) -> list[int]:  # type: ignore[override]
        self._touch(block)
        return super().__getitem__(block)

    def __setitem__(self, block: int, content: list[int]) -> None:  # type: ignore[override]
        self._touch(block)
        super().__setitem__(block, content)

    def _touch(self, block: int) -> None:
        if block in self.unmapped:
            raise Violation("unmapped", f"block {block} has no memory")

    def copy(self) -> "DeviceMemory":
        return DeviceMemory((block.copy() for block in self), self.unmapped)


@dataclass(frozen=True)
class Elastic:
    """Pages of an engine, and what others do with the memory."""

    seed: int
    blocks_per_page: int
    shrink_after: float
    """In steps."""
    pressure: float = 0.2
    """How often others want pages."""
    missing: float = 0.0
    """Part of the pages that are not mapped at first."""
    by_ranks: bool = False
    """The ranks give memory back, as plans ask; else whoever maps does, at once."""


class Pages:
    """Maps pages, in place of another project, in the scheduler's process.

    Args:
        elastic: What it does.
        num_blocks: Of the device.
        device: Memory of the rank, once it is there.

    """

    def __init__(
        self, elastic: Elastic, num_blocks: int, device: Callable[[], DeviceMemory]
    ) -> None:
        self.blocks_per_page = elastic.blocks_per_page
        self._num_blocks = num_blocks
        self._num_pages = -(-num_blocks // self.blocks_per_page)
        self._pressure = elastic.pressure
        self._rng = Random(elastic.seed)
        self._device = device
        # The longest request of a script may need all others.
        self._unmapped = self._rng.sample(
            range(1, self._num_pages), int(elastic.missing * (self._num_pages - 1))
        )
        self.missing = [*self._unmapped]
        device().unmapped.update(self._blocks(self.missing))
        self.counts = (0, 0)
        """Pages that were unmapped, and pages that were mapped again."""

    def num_wanted(self) -> int:
        if self._rng.random() >= self._pressure:
            return 0
        return self._rng.randint(1, self._num_pages)

    def map_pages(self, num_pages: int, wait: bool) -> list[int]:
        # Whether who asks waits or not, others may have the memory.
        num_pages = min(num_pages, self._rng.randint(0, len(self._unmapped)))
        self._rng.shuffle(self._unmapped)
        pages = [self._unmapped.pop() for _ in range(num_pages)]
        device = self._device()
        for block in self._blocks(pages):
            device.unmapped.remove(block)
            device[block] = [EMPTY] * len(device[block])
        self._count(0, len(pages))
        return pages

    def unmap_pages(self, pages: list[int]) -> None:
        if {*pages} & {*self._unmapped}:
            raise Violation("unmapped", f"{pages} are unmapped twice")
        self._unmapped += pages
        self._device().unmapped.update(self._blocks(pages))
        self._count(len(pages), 0)

    def take_seconds(self) -> tuple[float, float]:
        return 0.0, 0.0

    def _count(self, num_unmapped: int, num_mapped: int) -> None:
        self.counts = self.counts[0] + num_unmapped, self.counts[1] + num_mapped

    def _blocks(self, pages: list[int]) -> Iterable[int]:
        for page in pages:
            first = page * self.blocks_per_page
            yield from range(first, min(first + self.blocks_per_page, self._num_blocks))


def elastic_layout(
    elastic: Elastic,
    layout: Layout,
    num_blocks: int,
    token_budget: int,
    device: Callable[[], DeviceMemory],
) -> ElasticLayout:
    """Pages of a simulated engine."""
    sizes = tuple(group.block_size for group in layout.groups)

    def make_mapper(unmap: UnmapBlocks) -> PageMapper:
        if not elastic.by_ranks:
            return Pages(elastic, num_blocks, device)
        rng, num_pages = Random(elastic.seed), -(-num_blocks // elastic.blocks_per_page)
        return RankPages(
            num_blocks,
            elastic.blocks_per_page,
            page_bytes=1,
            min_pages=1,
            spare_bytes=lambda: rng.randint(-num_pages, num_pages),
            unmap=unmap,
            poll_s=0.0,
        )

    return ElasticLayout(
        make_mapper,
        page_bytes=1,
        num_ranks=1,
        shrink_after_s=elastic.shrink_after,
        block_sizes=sizes,
        headroom=sum(-(-token_budget // size) + 2 for size in sizes),
    )
