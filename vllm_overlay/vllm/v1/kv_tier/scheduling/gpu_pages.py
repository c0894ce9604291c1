# SPDX-License-Identifier: Apache-2.0
"""Pages of a GPU that several engines share: how many each may map, and when.

Engines know nothing of each other but how much memory is free. Each leaves a reserve
free, and gives up pages while less is free. An engine with less memory than its longest
request needs may use the reserve; the others then release what they can. So no engine
waits forever, as long as the GPU can hold the longest request of each.
"""

import heapq
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from vllm.logger import init_logger
from vllm.v1.kv_tier.scheduling.pages import ElasticLayout, engine_needs
from vllm.v1.kv_tier.stores.turns import short_turns

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


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

    def tell(self, used: int, ahead: int) -> None: ...


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
        self._told = (-1, -1)
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
                self._changed.wait_for(lambda: self._has_work or self._is_untold)
                is_less = len(self._held) < self._goal
                page = self._held.pop() if len(self._held) > self._goal else None
            if page is not None:
                self._unmap_one(page)
            elif is_less and not self._hold_one():
                with self._changed:
                    # Wait until the engine needs more.
                    self._goal = min(self._goal, len(self._held))
            elif not is_less:
                self._tell()

    @property
    def _has_work(self) -> bool:
        return len(self._held) != self._goal

    def _hold_one(self) -> bool:
        # Requests wait for it, and the driver call returns to Python many times.
        with short_turns():
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
    def _is_untold(self) -> bool:
        return self._limit is not None and self._use != self._told

    @property
    def _use(self) -> tuple[int, int]:
        ahead = len(self._held) * self._device.page_bytes
        return max(0, self._device.mapped_bytes - ahead), ahead

    def _tell(self) -> None:
        if self._limit is not None:
            self._told = self._use
            self._limit.tell(*self._told)


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


def check_device(vllm_config: "VllmConfig") -> None:
    """Refuse settings that `shrink_after_s` does not support.

    Args:
        vllm_config: Settings of the engine.

    Raises:
        ValueError: The message has the fix.

    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return
    setting = "--kv-offloading-config: shrink_after_s"
    if not current_platform.is_cuda():
        raise ValueError(
            f"{setting} works on CPUs and on CUDA, not on "
            f"{current_platform.device_name or current_platform.device_type}. "
            "Remove shrink_after_s."
        )
    if find_spec("kvcached") is None:
        raise ValueError(
            f"{setting} needs kvcached on a GPU, which is not installed. Install it "
            "(pip install kvcached --no-build-isolation), or remove shrink_after_s."
        )
    parallel = vllm_config.parallel_config
    executor = parallel.distributed_executor_backend
    if parallel.world_size > 1 or executor not in (None, "uni"):
        raise ValueError(
            f"{setting} on a GPU is for engines with one rank, in the process of the "
            f"scheduler, not for {parallel.world_size} with "
            f"--distributed-executor-backend {executor}. Run one engine for each GPU, "
            "with --distributed-executor-backend uni, or remove shrink_after_s."
        )
    if vllm_config.model_config.enable_sleep_mode:
        raise ValueError(
            f"{setting} and --enable-sleep-mode both release the memory of the KV "
            "cache. Remove one of them."
        )
    if (transfer := vllm_config.kv_transfer_config) is not None:
        raise ValueError(
            f"{setting} on a GPU and --kv-transfer-config "
            f"kv_connector={transfer.kv_connector!r} cannot be combined: connectors "
            "register the memory of the KV cache once. Remove one of them."
        )
