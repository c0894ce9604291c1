# SPDX-License-Identifier: Apache-2.0
"""Pages of blocks on pages of the driver.

A page of blocks lies in every region of the KV cache, and begins and ends where it
likes: two that are neighbours may share a page of the driver. That has memory as long
as one of them has. Where they can begin and end together, they do.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from vllm.v1.kv_tier.memory.limits import KEPT_FREE
from vllm.v1.kv_tier.memory.regions import Region

# What an engine leaves of the GPU's memory that has not enough for its longest request:
# with some tens of MiB kernels fail that the driver has yet to load (H100).
_LEAST_FREE = 1 / 100

# In each region, where pages of blocks do not end where those of the driver do. Whoever
# gives back one page amid others frees one less; but the page of the block that stands
# for none never goes.
_DRIVER_PAGES = 2


class DeviceMemory(Protocol):
    """See `KvcachedMemory`."""

    page_bytes: int

    def map(self, pages: Sequence[int]) -> bool: ...

    def unmap(self, pages: Sequence[int]) -> None: ...

    def free_bytes(self) -> tuple[int, int]: ...


class DevicePages:
    """Maps pages of blocks. Threads may share it.

    Args:
        memory: Behind the whole KV cache, without any page of it mapped.
        base: Address of its first byte.
        regions: Of the KV cache.
        num_blocks: Of the device.

    """

    def __init__(
        self,
        memory: DeviceMemory,
        base: int,
        regions: Sequence[Region],
        num_blocks: int,
    ) -> None:
        self._memory = memory
        # First byte, bytes from a block to the next one, and bytes of a block.
        self._regions = [
            (r.blocks.data_ptr() - base, r.blocks.stride(0), r.blocks.shape[1])
            for r in regions
        ]
        self._num_blocks = num_blocks
        self.blocks_per_page = max(1, min(self._num_together, num_blocks // 8))
        self.num_pages = -(-num_blocks // self.blocks_per_page)
        self.page_bytes = self.blocks_per_page * sum(r.block_bytes for r in regions)
        # How many mapped pages of blocks lie on each page of the driver.
        self._counts: Counter[int] = Counter()
        self.mapped_bytes = 0
        """Memory of the driver behind mapped pages."""
        self._lock = threading.Lock()

    @property
    def _num_together(self) -> int:
        """Blocks that come and go together."""
        size = self._memory.page_bytes
        width = min(num_bytes for _, _, num_bytes in self._regions)
        blocks = -(-size // width)
        if any(
            start % size or blocks * stride % size for start, stride, _ in self._regions
        ):
            blocks = -(-_DRIVER_PAGES * size // width)
        return blocks

    def map(self, page: int) -> bool:
        """Map a page that is not. False if there is no memory for it now."""
        numbers = self._numbers(page)
        with self._lock:
            new = [number for number in numbers if not self._counts[number]]
            if new and not self._memory.map(new):
                return False
            self._counts.update(numbers)
            self.mapped_bytes += len(new) * self._memory.page_bytes
        return True

    def unmap(self, page: int) -> None:
        """Give the memory of a mapped page back, as far as no other one has it.

        Raises:
            RuntimeError: The driver did not take it. Do not use the page any more.

        """
        numbers = self._numbers(page)
        with self._lock:
            gone = [number for number in numbers if self._counts[number] == 1]
            self._counts.subtract(numbers)
            if gone:
                self._memory.unmap(gone)
                self.mapped_bytes -= len(gone) * self._memory.page_bytes

    def map_at_first(self) -> list[int]:
        """Map as many as there is memory for, in their order.

        Returns:
            The others.

        """
        for page in range(self.num_pages):
            if self.spare_bytes() < self.page_bytes or not self.map(page):
                return [*range(page, self.num_pages)]
        return []

    def spare_bytes(self, at_any_rate: bool = False) -> int:
        """What the GPU can give beyond what shall stay free; negative when others need
        more.

        Args:
            at_any_rate: Leave others the least.

        """
        free, total = self._memory.free_bytes()
        return free - int((_LEAST_FREE if at_any_rate else KEPT_FREE) * total)

    def _numbers(self, page: int) -> list[int]:
        """Pages of the driver that a page of blocks touches, ascending."""
        first = page * self.blocks_per_page
        end = min(first + self.blocks_per_page, self._num_blocks)
        size = self._memory.page_bytes
        found: set[int] = set()
        for start, stride, num_bytes in self._regions:
            begin = start + first * stride
            until = start + (end - 1) * stride + num_bytes
            found.update(range(begin // size, -(-until // size)))
        return sorted(found)
