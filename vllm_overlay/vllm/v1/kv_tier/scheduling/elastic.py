# SPDX-License-Identifier: Apache-2.0
"""Device memory that comes and goes: which pages are mapped, and when that changes.

    mapped ── idle, or others need it: blocks stored, then taken out ──▶ leaving
    leaving ── every rank: what touched it has ended ──▶ unmapped
    leaving ── a request needs blocks ──▶ mapped, at once: nothing was unmapped yet
    unmapped ── a request needs blocks, and there is memory ──▶ mapped

The free queue has blocks of mapped pages only, and upstream's checks of free blocks see
no others. So a page that cannot be mapped makes requests wait as a full device does;
nobody was promised its blocks.

A page leaves when all of its blocks are free. What the host lacks of it is stored
first, by an earlier plan, so that no forward pass waits for it. Its blocks are then
taken as a victim is taken, by a plan that has the ranks tell when stores, loads and
forward passes of plans up to it have ended: whatever touched the page came before.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_tier.scheduling.draft import PlanDraft
from vllm.v1.kv_tier.scheduling.free_blocks import FreeBlocks
from vllm.v1.kv_tier.scheduling.pages import ElasticLayout
from vllm.v1.kv_tier.scheduling.prefetches import Prefetches
from vllm.v1.kv_tier.scheduling.storing import BlockStorer
from vllm.v1.kv_tier.scheduling.tuning import SchedulingTuning
from vllm.v1.kv_tier.stats import KVTierStats


class Taker(Protocol):
    """The pool, as far as its blocks come and go."""

    def take_out(self, blocks: list[KVCacheBlock]) -> None:
        """Take free blocks as victims are taken, out of what the pool has."""

    def put_back(self, blocks: list[KVCacheBlock]) -> None:
        """The opposite, before their memory was unmapped."""

    def put_in(self, blocks: list[KVCacheBlock]) -> None:
        """The opposite, of blocks whose memory nobody has touched."""


class ElasticDevice:
    """Maps pages that requests need, and gives back those that nobody needs.

    Args:
        layout: Who maps pages, and when to give them back.
        pool: Whose blocks.
        taker: The same, as far as blocks come and go.
        free: Its free blocks.
        draft: The plan in the making.
        storer: Stores what the host lacks.
        prefetches: What is on its way.
        tuning: How much an idle step stores, and how long the engine sleeps then.
        clock: Seconds.
        stats: Counts pages.

    """

    def __init__(
        self,
        layout: ElasticLayout,
        pool: BlockPool,
        taker: Taker,
        free: FreeBlocks,
        draft: PlanDraft,
        storer: BlockStorer,
        prefetches: Prefetches,
        tuning: SchedulingTuning,
        clock: Callable[[], float],
        stats: KVTierStats,
    ) -> None:
        self._layout = layout
        self.mapper = layout.make_mapper(draft.unmap)
        self._blocks = pool.blocks
        self._taker = taker
        self._free = free
        self._draft = draft
        self._storer = storer
        self._prefetches = prefetches
        self._max_stores = max(1, tuning.idle_stores)
        # So many a step looks at, and takes out.
        size = self.mapper.blocks_per_page
        self._max_pages = max(1, tuning.max_page_looks // size)
        self.pause_s = tuning.idle_pause_s
        """Between two steps of an engine that waits until memory is due."""
        self._clock = clock
        self._stats = stats
        # The null block is never free, so its page stays.
        self.num_pages = -(-len(self._blocks) // size)
        self.leaving: dict[int, list[int]] = {}
        """Pages by the plan that took their blocks out, until all ranks have told that
        it has ended."""
        self.unmapped: set[int] = set()
        self._num_told: Counter[int] = Counter()
        # Pages that are about to leave, the next one last, and those of them whose
        # blocks were stored for it.
        self._order: list[int] = []
        self._stored: set[int] = set()
        # The page at which the search for such pages goes on, and what it has found.
        self._next_page = 0
        self._found: list[tuple[int, int]] = []
        # Whether the search has passed over nothing that an idle engine may give back.
        self._is_whole = True
        # Whether all that is left is kept for requests that may still come for it.
        self._is_kept = False
        self._idle_since: float | None = None
        self._is_done = False
        self._is_closed = False

    # ---------------------------------------------------------------- what is asked

    @property
    def is_busy(self) -> bool:
        """Whether there is something to do in steps that run nothing: pages to give
        back, now or in a while, or ranks to be told of those that have gone."""
        if self.leaving or self._draft.unmaps:
            return True
        return self._idle_since is not None and not self._is_done

    @property
    def is_waiting(self) -> bool:
        """Whether nothing is due yet of what will be."""
        since = self._idle_since
        if self._is_done or since is None:
            return False
        return self._is_kept or self._clock() - since < self._layout.shrink_after_s

    def missing_blocks(self) -> Iterable[KVCacheBlock]:
        """Those that the pool does not have now."""
        for pages in (self.unmapped, *self.leaving.values()):
            for page in pages:
                yield from self._of(page)

    def _of(self, page: int) -> list[KVCacheBlock]:
        size = self.mapper.blocks_per_page
        return self._blocks[page * size : (page + 1) * size]

    # ---------------------------------------------------------------------- growing

    def need(self, num_blocks: int, wait: bool = True) -> None:
        """Have at least so many free blocks, as far as there is memory.

        Args:
            num_blocks: How many.
            wait: As in `PageMapper`.

        """
        if num_blocks <= len(self._free):
            return
        while self.leaving and num_blocks > len(self._free):
            seq = max(self.leaving)
            page = self.leaving[seq].pop()
            if not self.leaving[seq]:
                self._forget(seq)
            self._taker.put_back(self._of(page))
            self._grew(1)
        self._map(num_blocks, wait)

    def spare_victims(self, num_blocks: int) -> None:
        """So many blocks are about to be taken: rather of memory that nobody has than
        of what is cached."""
        if not self.unmapped:
            return
        first = next(self._free.first(1), None)
        if first is None or first.block_hash is not None:
            # Not of pages that are leaving: this plan cannot load into them any more.
            self._map(len(self._free) + num_blocks, wait=True)

    def _map(self, num_blocks: int, wait: bool) -> None:
        """Have at least so many free blocks, of pages that can be mapped."""
        size = self.mapper.blocks_per_page
        while self.unmapped and (lack := num_blocks - len(self._free)) > 0:
            pages = self.mapper.map_pages(-(-lack // size), wait)
            if not pages:
                return
            for page in pages:
                self.unmapped.remove(page)
                self._taker.put_in(self._of(page))
            self._grew(len(pages))

    def _grew(self, num_pages: int) -> None:
        """Pages came for a request. It may be aborted before a step runs it."""
        self._stats.mapped_pages += num_pages
        self._idle_since, self._is_done = None, False

    def need_headroom(self, wait: bool) -> None:
        """Requests run: have what the next step of them may take.

        Args:
            wait: It is that step.

        """
        self.need(self._layout.headroom, wait)

    def need_prompt(self, num_blocks: int, wait: bool) -> None:
        """A request is looked at: have its prompt, and the headroom of those that run.

        Args:
            num_blocks: Of the prompt.
            wait: No other request waits meanwhile. Else it is admitted in a later step,
                so that a burst does not wait as a whole until all of it has memory.

        """
        if wait:
            self.need(num_blocks)
        self.need(num_blocks + self._layout.headroom, wait=False)

    def refused(self) -> None:
        """A request that could run lacks blocks. Upstream may ask for more than the
        request takes; so each time twice as many are free."""
        self.need(2 * max(len(self._free), self._layout.headroom), wait=False)

    # -------------------------------------------------------------------- shrinking

    def end_step(self, is_idle: bool) -> None:
        """The step is complete: give back what is due.

        Args:
            is_idle: It runs nothing, and no request holds blocks.

        """
        if self._is_closed:
            return
        self._is_kept = False
        num_pages = self._num_due(is_idle)
        if num_pages <= 0:
            self._begin_search()
            return
        if not self._order and not self._search(is_idle):
            # The next steps go on: there are many blocks.
            return
        self._shrink(min(num_pages, self._max_pages))
        if not self._order:
            self._is_done = is_idle and self._is_whole
            self._is_kept = is_idle and not self._is_whole
            self._begin_search()

    def _num_due(self, is_idle: bool) -> int:
        """Pages that are to be given back."""
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
        """Look for pages anew."""
        self._order.clear()
        self._stored.clear()
        self._found.clear()
        self._next_page = 0
        self._is_whole = True

    def _search(self, is_idle: bool) -> bool:
        """Look at more pages, for those that are free as a whole: they are to leave by
        the last use of any of their blocks.

        Returns:
            Whether all pages have been looked at, so that the order is known.

        """
        self._is_whole &= is_idle
        first, used_by = self._next_page, self._draft.used_by
        self._next_page = end = min(first + self._max_pages, self.num_pages)
        for page in range(first, end):
            blocks = self._of(page)
            # The null block is in use, though nobody counts it.
            if not any(block.ref_cnt or block.is_null for block in blocks):
                last_use = max(used_by[block.block_id] for block in blocks)
                self._found.append((last_use, page))
        if end < self.num_pages:
            return False
        self._order = [page for _, page in sorted(self._found, reverse=True)]
        self._found.clear()
        return True

    def _shrink(self, num_pages: int) -> None:
        """Take the blocks of the oldest pages out, up to `num_pages`, or store what the
        host lacks of them."""
        num_stores = self._max_stores
        taken: list[int] = []
        visited: list[int] = []
        is_kept = self._prefetches.kept()
        while self._order and len(taken) < num_pages:
            page = self._order.pop()
            if not self._is_quiet(page, is_kept):
                # It may be in a while.
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
                        # Others may have the same key.
                        if self._is_due(block):
                            self._storer.store(block, before_eviction=True)
                    self._stored.add(page)
                    visited.append(page)
                    continue
            self._stored.discard(page)
            self._taker.take_out(self._of(page))
            taken.append(page)
        self._order += reversed(visited)
        if taken:
            self.leaving.setdefault(self._draft.seq, []).extend(taken)
            self._draft.tell_end()
            self._stats.given_back_pages += len(taken)

    def _is_quiet(
        self, page: int, is_kept: Callable[[KVCacheBlock], bool] | None
    ) -> bool:
        """Whether a page is free as a whole, the step in the making does not use what
        it has freed of it, and nobody waits for what is in it (`Prefetches.kept`)."""
        freed = self._draft.freed
        return not any(
            block.ref_cnt
            or block.block_id in freed
            or (is_kept is not None and is_kept(block))
            for block in self._of(page)
        )

    def _is_due(self, block: KVCacheBlock) -> bool:
        """Whether a free block is to be stored."""
        storer = self._storer
        return (
            block.block_hash is not None
            and self._draft.is_computed(block)
            and not storer.is_clean(block)
            and storer.is_admitted(block)
        )

    def have_ended(self, seqs: Iterable[int]) -> None:
        """Ranks tell that all that plans up to these touched is over.

        Args:
            seqs: Of plans that asked, each as often as ranks have told.

        """
        for seq in seqs:
            if seq not in self.leaving:
                # The pages were needed after all.
                continue
            self._num_told[seq] += 1
            if self._num_told[seq] == self._layout.num_ranks:
                pages = self.leaving[seq]
                self._forget(seq)
                self.mapper.unmap_pages(pages)
                self.unmapped.update(pages)

    def _forget(self, seq: int) -> None:
        del self.leaving[seq]
        self._num_told.pop(seq, None)

    def close(self) -> None:
        """Ranks copy no more: give nothing back from now on."""
        self._is_closed = True
        self.need(len(self._blocks))
        self._is_done = True

    # ------------------------------------------------------------------------ stats

    def report(self, stats: KVTierStats) -> None:
        """Put what is mapped now into `stats`, and what that took."""
        num_mapped = self.num_pages - len(self.unmapped)
        stats.device_mapped_bytes = num_mapped * self._layout.page_bytes
        num_bytes = len(self.unmapped) * self._layout.page_bytes
        stats.device_unmapped_bytes = num_bytes
        stats.map_seconds, stats.unmap_seconds = self.mapper.take_seconds()
