# SPDX-License-Identifier: Apache-2.0
"""Device memory that comes and goes: which pages are mapped, when that changes, and the
block pool of such an engine.

mapped ── idle, or others need memory: blocks stored, then taken out ──▶ leaving
    leaving ── every rank: all that touched it has ended ──▶ unmapped
    leaving ── a request needs blocks ──▶ mapped at once; nothing was unmapped yet
    unmapped ── a request needs blocks, and there is memory ──▶ mapped

The free queue has blocks of mapped pages only, and so have upstream's checks of free
blocks. A page that cannot be mapped makes requests wait, as a full device does.

A page leaves when all of its blocks are free. Blocks that the host lacks are stored
first, by an earlier plan, so that no forward pass waits for it. Then the blocks are
allocated like victims, by a plan that lets ranks report when all work of plans up to it
has ended, which includes all use of the page.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_tier.layout import ElasticLayout, KVTierLayout
from vllm.v1.kv_tier.plan import StepPlan, StepReport
from vllm.v1.kv_tier.scheduler.block_pool import TieredBlockPool
from vllm.v1.kv_tier.scheduler.events import PublishingBlockPool
from vllm.v1.kv_tier.scheduler.free_blocks import FreeBlocks
from vllm.v1.kv_tier.scheduler.host_writer import HostWriter
from vllm.v1.kv_tier.scheduler.load_admission import Prefetches
from vllm.v1.kv_tier.scheduler.plan_builder import StepPlanBuilder
from vllm.v1.kv_tier.stats import KVTierStats
from vllm.v1.kv_tier.tuning import SchedulingTuning
from vllm.v1.request import Request


class ElasticBlocks(Protocol):
    """The pool's methods to remove and add blocks."""

    def take_out(self, blocks: list[KVCacheBlock]) -> None:
        """Allocate free blocks like victims, and remove them from the pool."""

    def reclaim(self, blocks: list[KVCacheBlock]) -> None:
        """Undo `take_out` before the memory is unmapped."""

    def add_unmapped(self, blocks: list[KVCacheBlock]) -> None:
        """Undo `take_out` for blocks with new memory, which nothing has used."""


class ElasticDevice:
    """Maps pages that requests need, and releases pages that are not needed.

    Args:
        layout: The page mapper, and when to release pages.
        pool: The block pool.
        elastic_blocks: The same pool, to remove and add blocks.
        free: Its free queue.
        builder: The plan that is being built.
        host_writer: Stores blocks that the host lacks.
        prefetches: Blocks that are being prefetched.
        tuning: Limits for idle steps.
        clock: Time in seconds.
        stats: Counts pages.

    """

    def __init__(
        self,
        layout: ElasticLayout,
        pool: BlockPool,
        elastic_blocks: ElasticBlocks,
        free: FreeBlocks,
        builder: StepPlanBuilder,
        host_writer: HostWriter,
        prefetches: Prefetches,
        tuning: SchedulingTuning,
        clock: Callable[[], float],
        stats: KVTierStats,
    ) -> None:
        self._layout = layout
        self.mapper = layout.make_mapper(builder.unmap)
        self._blocks = pool.blocks
        self._elastic_blocks = elastic_blocks
        self._free = free
        self._builder = builder
        self._host_writer = host_writer
        self._prefetches = prefetches
        self._max_stores = max(1, tuning.idle_stores)
        # Most pages that a step looks at and removes.
        size = self.mapper.blocks_per_page
        self._max_pages = max(1, tuning.max_page_looks // size)
        self._clock = clock
        self._stats = stats
        # The null block is never free, so its page stays.
        self.num_pages = -(-len(self._blocks) // size)
        self.leaving: dict[int, list[int]] = {}
        """Pages by the plan that removed their blocks, until all ranks report its
        end."""
        self.unmapped: set[int] = set()
        self._num_reported: Counter[int] = Counter()
        # Pages to release, the next one last, and those whose blocks were stored for
        # it.
        self._order: list[int] = []
        self._stored: set[int] = set()
        # Position of the search for such pages, and what it has found.
        self._next_page = 0
        self._found: list[tuple[int, int]] = []
        # Whether the search has found all pages that an idle engine may release.
        self._is_whole = True
        # Whether the rest is only kept for requests that may still use it.
        self._is_kept = False
        self._idle_since: float | None = None
        self._is_done = False
        self._is_closed = False

    # ---------------------------------------------------------------- what is asked

    @property
    def is_busy(self) -> bool:
        """Whether steps that run nothing still have work here.

        That is: pages to release, now or soon, or reports of ranks to wait for.
        """
        if self.leaving or self._builder.unmaps:
            return True
        return self._idle_since is not None and not self._is_done

    @property
    def is_waiting(self) -> bool:
        """Whether nothing is due yet."""
        since = self._idle_since
        if self._is_done or since is None:
            return False
        return self._is_kept or self._clock() - since < self._layout.shrink_after_s

    def missing_blocks(self) -> Iterable[KVCacheBlock]:
        """Blocks that the pool does not have now."""
        for pages in (self.unmapped, *self.leaving.values()):
            for page in pages:
                yield from self._of(page)

    def _of(self, page: int) -> list[KVCacheBlock]:
        size = self.mapper.blocks_per_page
        return self._blocks[page * size : (page + 1) * size]

    # ---------------------------------------------------------------------- growing

    def need(self, num_blocks: int, wait: bool = True) -> None:
        """Make `num_blocks` free blocks available, as far as there is memory.

        Args:
            num_blocks: Number of free blocks.
            wait: As in `PageMapper`.

        """
        if num_blocks <= len(self._free):
            return
        while self.leaving and num_blocks > len(self._free):
            seq = max(self.leaving)
            page = self.leaving[seq].pop()
            if not self.leaving[seq]:
                self._forget(seq)
            self._elastic_blocks.reclaim(self._of(page))
            self._grew(1)
        self._map(num_blocks, wait)

    def spare_victims(self, num_blocks: int) -> None:
        """Before `num_blocks` are allocated, map pages rather than evict blocks."""
        if not self.unmapped:
            return
        first = next(self._free.first(1), None)
        if first is None or first.block_hash is not None:
            # Leaving pages are not used: this plan can no longer load into them.
            self._map(len(self._free) + num_blocks, wait=True)

    def _map(self, num_blocks: int, wait: bool) -> None:
        """Make `num_blocks` free blocks available from pages that can be mapped."""
        size = self.mapper.blocks_per_page
        while self.unmapped and (lack := num_blocks - len(self._free)) > 0:
            pages = self.mapper.map_pages(-(-lack // size), wait)
            if not pages:
                return
            for page in pages:
                self.unmapped.remove(page)
                self._elastic_blocks.add_unmapped(self._of(page))
            self._grew(len(pages))

    def _grew(self, num_pages: int) -> None:
        """Note that pages were mapped for a request.

        It may be aborted before it runs.
        """
        self._stats.mapped_pages += num_pages
        self._idle_since, self._is_done = None, False

    def need_headroom(self, wait: bool) -> None:
        """While requests run, keep what their next step may need.

        Args:
            wait: It is that step.

        """
        self.need(self._layout.headroom, wait)

    def need_prompt(self, num_blocks: int, wait: bool) -> None:
        """Make room for a request's prompt, plus the headroom of running requests.

        Args:
            num_blocks: Blocks of the prompt.
            wait: No other request waits meanwhile. Otherwise it is admitted in a later
                step, so that a burst does not wait until all of it has memory.

        """
        if wait:
            self.need(num_blocks)
        self.need(num_blocks + self._layout.headroom, wait=False)

    def record_refusal(self) -> None:
        """Note that a request lacks blocks.

        Upstream may check for more than the request needs, so each time twice as many
        are made available.
        """
        self.need(2 * max(len(self._free), self._layout.headroom), wait=False)

    # -------------------------------------------------------------------- shrinking

    def end_step(self, is_idle: bool) -> None:
        """Release pages that are due, at the end of a step.

        Args:
            is_idle: The step runs nothing, and no request holds blocks.

        """
        if self._is_closed:
            return
        self._is_kept = False
        num_pages = self._num_due(is_idle)
        if num_pages <= 0:
            self._begin_search()
            return
        if not self._order and not self._search(is_idle):
            # The next steps continue the search, since there are many blocks.
            return
        self._shrink(min(num_pages, self._max_pages))
        if not self._order:
            self._is_done = is_idle and self._is_whole
            self._is_kept = is_idle and not self._is_whole
            self._begin_search()

    def _num_due(self, is_idle: bool) -> int:
        """Number of pages to release."""
        num_wanted = self.mapper.num_wanted()
        num_leaving = sum(map(len, self.leaving.values()))
        if not is_idle:
            self._idle_since, self._is_done = None, False
            room = len(self._free) - self._layout.headroom
            return min(num_wanted - num_leaving, room // self.mapper.blocks_per_page)
        if self._idle_since is None:
            self._idle_since = self._clock()
        if self._is_done:
            return 0
        if self._clock() - self._idle_since >= self._layout.shrink_after_s:
            return self.num_pages
        return num_wanted - num_leaving

    def _begin_search(self) -> None:
        """Restart the search for pages."""
        self._order.clear()
        self._stored.clear()
        self._found.clear()
        self._next_page = 0
        self._is_whole = True

    def _search(self, is_idle: bool) -> bool:
        """Look at more pages for those without blocks in use.

        They are to be released by the last use of any of their blocks.

        Returns:
            Whether all pages have been looked at, so that the order is known.

        """
        self._is_whole &= is_idle
        first, used_by = self._next_page, self._builder.used_by
        self._next_page = end = min(first + self._max_pages, self.num_pages)
        for page in range(first, end):
            blocks = self._of(page)
            # The null block is in use, though its count is 0.
            if not any(block.ref_cnt or block.is_null for block in blocks):
                last_use = max(used_by[block.block_id] for block in blocks)
                self._found.append((last_use, page))
        if end < self.num_pages:
            return False
        self._order = [page for _, page in sorted(self._found, reverse=True)]
        self._found.clear()
        return True

    def _shrink(self, num_pages: int) -> None:
        """Remove the blocks of the oldest pages, up to `num_pages`.

        Blocks that the host lacks are stored first.
        """
        num_stores = self._max_stores
        taken: list[int] = []
        visited: list[int] = []
        is_kept = self._prefetches.kept()
        while self._order and len(taken) < num_pages:
            page = self._order.pop()
            if not self._is_quiet(page, is_kept):
                # It may be released later.
                self._is_whole = False
                continue
            if page not in self._stored:
                dirty = [b for b in self._of(page) if self._is_due(b)]
                if dirty:
                    if num_stores <= 0:
                        self._order.append(page)
                        break
                    num_stores -= len(dirty)
                    for block in dirty:
                        # Blocks of the page may share a key.
                        if self._is_due(block):
                            self._host_writer.store([block], before_eviction=True)
                    self._stored.add(page)
                    visited.append(page)
                    continue
            self._stored.discard(page)
            self._elastic_blocks.take_out(self._of(page))
            taken.append(page)
        self._order += reversed(visited)
        if taken:
            self.leaving.setdefault(self._builder.seq, []).extend(taken)
            self._builder.report_end()
            self._stats.given_back_pages += len(taken)

    def _is_quiet(
        self, page: int, is_kept: Callable[[KVCacheBlock], bool] | None
    ) -> bool:
        """Whether a page is free, unused by this step, and not kept for a request."""
        freed = self._builder.freed
        return not any(
            block.ref_cnt
            or block.block_id in freed
            or (is_kept is not None and is_kept(block))
            for block in self._of(page)
        )

    def _is_due(self, block: KVCacheBlock) -> bool:
        """Whether a free block must be stored."""
        host_writer = self._host_writer
        return (
            block.block_hash is not None
            and self._builder.is_computed(block)
            and not host_writer.is_clean(block)
            and host_writer.is_admitted(block)
        )

    def record_ended(self, seqs: Iterable[int]) -> None:
        """Take in reports that all work of plans up to these has ended.

        Args:
            seqs: Plans, once for each rank that reported.

        """
        for seq in seqs:
            if seq not in self.leaving:
                # A request needed the pages again.
                continue
            self._num_reported[seq] += 1
            if self._num_reported[seq] == self._layout.num_ranks:
                pages = self.leaving[seq]
                self._forget(seq)
                self.mapper.unmap_pages(pages)
                self.unmapped.update(pages)

    def _forget(self, seq: int) -> None:
        del self.leaving[seq]
        self._num_reported.pop(seq, None)

    def close(self) -> None:
        """Stop releasing memory, since ranks copy no more."""
        self._is_closed = True
        self.need(len(self._blocks))
        self._is_done = True

    # ------------------------------------------------------------------------ stats

    def report(self, stats: KVTierStats) -> None:
        """Put the current sizes and the time spent into `stats`."""
        num_mapped = self.num_pages - len(self.unmapped)
        stats.device_mapped_bytes = num_mapped * self._layout.page_bytes
        num_bytes = len(self.unmapped) * self._layout.page_bytes
        stats.device_unmapped_bytes = num_bytes
        stats.map_seconds, stats.unmap_seconds = self.mapper.take_seconds()


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
            self._builder,
            self.host_writer,
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
            self.elastic.record_refusal()

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        self.elastic.spare_victims(num_blocks)
        blocks = super().get_new_blocks(num_blocks)
        self.elastic.need_headroom(wait=False)
        return blocks

    def apply_report(self, report: StepReport) -> int | None:
        if report.ended:
            self.elastic.record_ended(report.ended)
        return super().apply_report(report)

    def _switch_off(self, lost_blocks: Iterable[int]) -> None:
        self.elastic.close()
        super()._switch_off(lost_blocks)

    # --------------------------------------------------- blocks that come and go

    def take_out(self, blocks: list[KVCacheBlock]) -> None:
        """See `ElasticBlocks`."""
        self.free.put_first(blocks, need_no_store=False)
        self._demoting = True
        try:
            taken = BlockPool.get_new_blocks(self, len(blocks))
        finally:
            self._demoting = False
        assert taken == blocks, "others are in front of what was put first"
        self.prefetches.claim(taken)
        if self.host_writer.released or self.host_writer.forbidden:
            self.conversations.record_taken(taken)
        self.num_gpu_blocks -= len(taken)

    def reclaim(self, blocks: list[KVCacheBlock]) -> None:
        """See `ElasticBlocks`."""
        self.num_gpu_blocks += len(blocks)
        # Copies may still read from these blocks.
        self.free_blocks(blocks)

    def add_unmapped(self, blocks: list[KVCacheBlock]) -> None:
        """See `ElasticBlocks`."""
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
