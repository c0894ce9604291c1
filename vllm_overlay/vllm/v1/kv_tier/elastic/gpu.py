# SPDX-License-Identifier: Apache-2.0
"""Pages of a GPU that engines share: on which pages of the driver they lie, who may map
how many, and a thread that unmaps.

A page of blocks has a part in every region of the KV cache, and its boundaries need not
match those of driver pages, so neighbouring pages of blocks may share a driver page.
That one stays mapped as long as any of them is. Sizes are chosen so that boundaries
match where possible.

Engines know nothing of each other but how much memory is free. Each leaves a reserve
free, and gives up pages while less is free. An engine with less memory than its longest
request needs may use the reserve; the others then release what they can. So no engine
waits forever, as long as the GPU can hold the longest request of each.
"""

import heapq
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from vllm.logger import init_logger
from vllm.v1.kv_tier.elastic.pages import engine_needs
from vllm.v1.kv_tier.gil import fast_switching
from vllm.v1.kv_tier.layout import ElasticLayout
from vllm.v1.kv_tier.memory.limits import KEPT_FREE
from vllm.v1.kv_tier.memory.regions import Region

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

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


class Device(Protocol):
    """What is used of `DevicePages`."""

    blocks_per_page: int
    num_pages: int
    page_bytes: int
    mapped_bytes: int

    def map(self, page: int) -> bool: ...

    def unmap(self, page: int) -> None: ...

    def spare_bytes(self, at_any_rate: bool = False) -> int: ...


class Limit(Protocol):
    """What is used of `SharedLimit`."""

    def limit_bytes(self) -> int | None: ...

    def report_use(self, used: int, ahead: int) -> None: ...


class GpuPages:
    """A page mapper in the scheduler's process, which is also the rank's.

        given    in use by the engine
        held     mapped, but not in use: ahead of need, or about to be unmapped
        absent   without memory

    Released pages are held until a thread unmaps them, so that the engine does not wait
    for the driver, and pages needed again soon are still mapped. While the engine
    grows, the thread maps some pages ahead, and those that a request lacks while others
    run.

    Args:
        device: Maps pages.
        absent: Pages that are not mapped at first.
        min_pages: Pages that may be mapped even if others lack memory, to hold the
            longest request.
        ahead: Pages to map ahead.
        limit: Limit of this engine; None for none.
        poll_s: Seconds between checks of what others need.

    """

    def __init__(
        self,
        device: Device,
        absent: Sequence[int],
        min_pages: int,
        ahead: int,
        limit: Limit | None,
        poll_s: float = 0.5,
    ) -> None:
        self.blocks_per_page = device.blocks_per_page
        self.missing = [*absent]
        self._device = device
        self._min_pages = min_pages
        self._ahead = ahead
        self._limit = limit
        self._poll_s = poll_s
        # Lowest first, since neighbours share driver pages.
        self._absent = sorted(absent)
        self._held: list[int] = []
        self._num_given = device.num_pages - len(absent)
        # Number of pages to hold.
        self._goal = 0
        self._lacking = 0
        self._asked = float("-inf")
        self._map_s = self._unmap_s = 0.0
        # Last values published by `limit`.
        self._reported = (-1, -1)
        self._changed = threading.Condition()
        threading.Thread(
            target=self._work, name="kv-tier-device-pages", daemon=True
        ).start()

    def num_wanted(self) -> int:
        now = time.monotonic()
        if now >= self._asked + self._poll_s:
            self._asked = now
            # Held pages are unmapped anyway.
            num_pages = self._spare_bytes() // self._device.page_bytes
            self._lacking = -num_pages - len(self._held)
            if num_pages < 0:
                self._hold(0)
        return max(0, min(self._lacking, self._num_given - self._min_pages))

    def map_pages(self, num_pages: int, wait: bool) -> list[int]:
        with self._changed:
            pages = [self._held.pop() for _ in range(min(num_pages, len(self._held)))]
            self._num_given += len(pages)
        # Checked each time, since others allocate memory meanwhile.
        while wait and len(pages) < num_pages and self._room() > 0:
            if (page := self._map_one()) is None:
                break
            pages.append(page)
            self._num_given += 1
        lack = 0 if wait else num_pages - len(pages)
        # While the engine grows, held pages stay.
        self._hold(max(self._ahead + lack, len(self._held)))
        return pages

    def unmap_pages(self, pages: list[int]) -> None:
        with self._changed:
            self._held += pages
            self._num_given -= len(pages)
            self._lacking -= len(pages)
        self._hold(0)

    def take_seconds(self) -> tuple[float, float]:
        with self._changed:
            taken = self._map_s, self._unmap_s
            self._map_s = self._unmap_s = 0.0
        return taken

    # ------------------------------------------------------------------- the memory

    def _spare_bytes(self) -> int:
        """Bytes that this engine could map; negative if it must release some."""
        spare = self._device.spare_bytes()
        limit = None if self._limit is None else self._limit.limit_bytes()
        return spare if limit is None else min(spare, limit - self._device.mapped_bytes)

    def _room(self) -> int:
        """How many pages may be mapped now."""
        size = self._device.page_bytes
        num_pages = self._spare_bytes() // size
        if (lack := self._min_pages - self._num_given - len(self._held)) > 0:
            least = self._device.spare_bytes(at_any_rate=True) // size
            num_pages = max(num_pages, min(lack, least))
        return max(0, num_pages)

    def _map_one(self) -> int | None:
        """Map the lowest absent page; None if there is no memory for it."""
        with self._changed:
            if not self._absent:
                return None
            page = heapq.heappop(self._absent)
        begun = time.monotonic()
        is_mapped = self._device.map(page)
        with self._changed:
            self._map_s += time.monotonic() - begun
            if not is_mapped:
                heapq.heappush(self._absent, page)
        return page if is_mapped else None

    # ------------------------------------------------------------------- the thread

    def _hold(self, num_pages: int) -> None:
        with self._changed:
            self._goal = num_pages
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_work or self._is_unreported)
                is_less = len(self._held) < self._goal
                page = self._held.pop() if len(self._held) > self._goal else None
            if page is not None:
                self._unmap_one(page)
            elif is_less and not self._hold_one():
                with self._changed:
                    # Wait until the engine needs more.
                    self._goal = min(self._goal, len(self._held))
            elif not is_less:
                self._report_use()

    @property
    def _has_work(self) -> bool:
        return len(self._held) != self._goal

    def _hold_one(self) -> bool:
        # Requests wait for it, and the driver call returns to Python many times.
        with fast_switching():
            page = self._map_one() if self._room() > 0 else None
        if page is None:
            return False
        with self._changed:
            self._held.append(page)
        return True

    def _unmap_one(self, page: int) -> None:
        begun = time.monotonic()
        try:
            self._device.unmap(page)
        except RuntimeError as e:
            logger.error(
                "KV tier: the driver did not take device memory back (%s). The engine "
                "goes on with less memory; restart it to have all of it again.",
                e,
            )
            return
        with self._changed:
            self._unmap_s += time.monotonic() - begun
            heapq.heappush(self._absent, page)

    @property
    def _is_unreported(self) -> bool:
        return self._limit is not None and self._use != self._reported

    @property
    def _use(self) -> tuple[int, int]:
        ahead = len(self._held) * self._device.page_bytes
        return max(0, self._device.mapped_bytes - ahead), ahead

    def _report_use(self) -> None:
        if self._limit is not None:
            self._reported = self._use
            self._limit.report_use(*self._reported)


def pages_of_gpu(
    vllm_config: "VllmConfig",
    kv_cache_config: Any,
    device: Device,
    absent: Sequence[int],
    limit: Limit | None,
    shrink_after_s: float,
) -> ElasticLayout:
    """The elastic layout of an engine's only GPU.

    Args:
        vllm_config: Settings of the engine.
        kv_cache_config: The scheduler's KV cache configuration.
        device: Maps pages.
        absent: Pages that are not mapped at first.
        limit: Limit of this engine, if any.
        shrink_after_s: The setting.

    """
    needs = engine_needs(vllm_config, kv_cache_config)
    size = device.blocks_per_page
    return ElasticLayout(
        # The rank has nothing to unmap itself.
        lambda unmap: GpuPages(
            device,
            absent,
            needs.min_pages(size),
            # What the next step may need.
            ahead=-(-needs.headroom // size),
            limit=limit,
        ),
        device.page_bytes,
        1,
        shrink_after_s,
        needs.block_sizes,
        needs.headroom,
    )
