# SPDX-License-Identifier: Apache-2.0
"""Maps pages of blocks on a GPU to pages of its driver.

A page of blocks has a part in every region of the KV cache, and its boundaries need not
match those of driver pages, so neighbouring pages of blocks may share a driver page.
That one stays mapped as long as any of them is. Sizes are chosen so that boundaries
match where possible.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from vllm.v1.kv_tier.memory.limits import KEPT_FREE
from vllm.v1.kv_tier.memory.regions import Region

# Part of the GPU's memory that stays free even where an engine cannot hold its longest
# request: with some tens of MiB, loading further kernels fails (H100).
_LEAST_FREE = 1 / 100

# Driver pages per page of blocks in each region, where boundaries do not match.
# Unmapping a page between mapped ones frees one less. Two, so that unmapping always
# frees something; the page of the null block is never unmapped.
_DRIVER_PAGES = 2


class DeviceMemory(Protocol):
    """What `DevicePages` uses of `KvcachedMemory`."""

    page_bytes: int

    def map(self, pages: Sequence[int]) -> bool: ...

    def unmap(self, pages: Sequence[int]) -> None: ...

    def free_bytes(self) -> tuple[int, int]: ...


class DevicePages:
    """Maps and unmaps pages of blocks. Safe to use from several threads.

    Args:
        memory: Address range of the whole KV cache, with no page mapped.
        base: Address of its first byte.
        regions: Regions of the KV cache.
        num_blocks: Number of device blocks.

    """

    def __init__(
        self,
        memory: DeviceMemory,
        base: int,
        regions: Sequence[Region],
        num_blocks: int,
    ) -> None:
        self._memory = memory
        # Offset, bytes from block to block, and bytes of a block.
        self._regions = [
            (r.blocks.data_ptr() - base, r.blocks.stride(0), r.blocks.shape[1])
            for r in regions
        ]
        self._num_blocks = num_blocks
        self.blocks_per_page = max(1, min(self._num_together, num_blocks // 8))
        self.num_pages = -(-num_blocks // self.blocks_per_page)
        self.page_bytes = self.blocks_per_page * sum(r.block_bytes for r in regions)
        # Mapped pages of blocks on each driver page.
        self._counts: Counter[int] = Counter()
        self.mapped_bytes = 0
        """Driver memory behind mapped pages."""
        self._lock = threading.Lock()

    @property
    def _num_together(self) -> int:
        """Blocks of a page: mapped and unmapped together."""
        size = self._memory.page_bytes
        width = min(num_bytes for _, _, num_bytes in self._regions)
        blocks = -(-size // width)
        if any(
            start % size or blocks * stride % size for start, stride, _ in self._regions
        ):
            blocks = -(-_DRIVER_PAGES * size // width)
        return blocks

    def map(self, page: int) -> bool:
        """Map an unmapped page. Returns False if there is no memory for it now."""
        numbers = self._numbers(page)
        with self._lock:
            new = [number for number in numbers if not self._counts[number]]
            if new and not self._memory.map(new):
                return False
            self._counts.update(numbers)
            self.mapped_bytes += len(new) * self._memory.page_bytes
        return True

    def unmap(self, page: int) -> None:
        """Unmap a page. Driver pages that other mapped pages need stay mapped.

        Raises:
            RuntimeError: The driver did not unmap it. The page must not be used again.

        """
        numbers = self._numbers(page)
        with self._lock:
            gone = [number for number in numbers if self._counts[number] == 1]
            self._counts.subtract(numbers)
            if gone:
                self._memory.unmap(gone)
                self.mapped_bytes -= len(gone) * self._memory.page_bytes

    def map_at_first(self) -> list[int]:
        """Map as many pages as there is memory for, in order.

        Returns:
            The pages that stayed unmapped.

        """
        for page in range(self.num_pages):
            if self.spare_bytes() < self.page_bytes or not self.map(page):
                return [*range(page, self.num_pages)]
        return []

    def spare_bytes(self, at_any_rate: bool = False) -> int:
        """Free bytes of the GPU beyond the reserve; negative if others need memory.

        Args:
            at_any_rate: Use the smallest reserve instead of the usual one.

        """
        free, total = self._memory.free_bytes()
        return free - int((_LEAST_FREE if at_any_rate else KEPT_FREE) * total)

    def _numbers(self, page: int) -> list[int]:
        """Driver pages that a page of blocks touches, ascending."""
        first = page * self.blocks_per_page
        end = min(first + self.blocks_per_page, self._num_blocks)
        size = self._memory.page_bytes
        found: set[int] = set()
        for start, stride, num_bytes in self._regions:
            begin = start + first * stride
            until = start + (end - 1) * stride + num_bytes
            found.update(range(begin // size, -(-until // size)))
        return sorted(found)
