# SPDX-License-Identifier: Apache-2.0
"""Loads host slots into device blocks, in the plan that is being built."""

from collections.abc import Iterable, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_tier.scheduling.costs import Costs
from vllm.v1.kv_tier.scheduling.draft import PlanDraft
from vllm.v1.kv_tier.scheduling.free_blocks import FreeBlocks
from vllm.v1.kv_tier.scheduling.prefetches import Prefetches
from vllm.v1.kv_tier.scheduling.slots import HostSlot, SlotTable
from vllm.v1.kv_tier.scheduling.tuning import SchedulingTuning
from vllm.v1.kv_tier.scheduling.writing import Writer
from vllm.v1.kv_tier.stats import KVTierStats

Hole = tuple[list[KVCacheBlock], int, HostSlot]
"""A block of a hit that only the host has: the list of its group's blocks, its index
there, and the slot. A plain tuple, since a long prefix has thousands, which are looked
at in every step in which it waits."""


class Loader:
    """Loads slots into device blocks.

    Args:
        pool: The block pool.
        free: Its free queue.
        table: The slot table.
        draft: The plan that is being built.
        prefetches: Notified of loads ahead.
        costs: Notified of loads.
        writer: Notified of the number of loaded blocks.
        stats: Counts promoted blocks.
        tuning: How many recently used blocks to skip.

    """

    def __init__(
        self,
        pool: BlockPool,
        free: FreeBlocks,
        table: SlotTable,
        draft: PlanDraft,
        prefetches: Prefetches,
        costs: Costs,
        writer: Writer,
        stats: KVTierStats,
        tuning: SchedulingTuning,
    ) -> None:
        self._pool = pool
        self._free = free
        self._table = table
        self._draft = draft
        self._prefetches = prefetches
        self._costs = costs
        self._writer = writer
        self._stats = stats
        self._num_recent = tuning.num_recent

    def num_free(self, hits: Iterable[KVCacheBlock]) -> int:
        """Number of blocks that can be loaded now.

        Excludes `hits`, and blocks that this step has freed and still uses.
        """
        kept = {block.block_id for block in hits if block.ref_cnt == 0}
        kept.update(b.block_id for b in self._draft.freed.values() if b.ref_cnt == 0)
        return self._pool.get_num_free_blocks() - len(kept)

    def load(
        self, holes: Sequence[Hole], hits: Sequence[KVCacheBlock], prefetch: bool
    ) -> None:
        """Fill `holes` with device blocks whose loads are queued.

        The new blocks are free and hashed, like any evictable hit.

        Args:
            holes: At least one, and at most `num_free`.
            hits: Device blocks of the same hit.
            prefetch: For a request of a later step.

        """
        draft = self._draft
        # Allocating blocks evicts others, which must not be blocks or slots of this
        # hit.
        self._free.hold(hits)
        slots = [slot for _, _, slot in holes]
        self._table.pin(slots)
        num_stores = -len(draft.stores)
        blocks = self._take_blocks(len(holes))
        num_stores += len(draft.stores)
        self._writer.allocated_for_loads(len(holes))
        self._stats.promoted_blocks += len(holes)
        draft.load(slots, blocks, prefetch)
        insert = self._pool.cached_block_hash_to_block.insert
        for (group, i, slot), block in zip(holes, blocks):
            group[i] = block
            # As in `_insert_block_hash` for a block without a key.
            keys = slot.keys
            block.set_block_hash(keys[0], slot.num_tokens)
            insert(keys[0], block)
            for key in keys[1:]:
                BlockPool._insert_block_hash(self._pool, key, block, None)
        self._table.mark_loaded(slots, draft.seq)
        load = self._costs.queue(draft.seq, len(holes), num_stores, prefetch)
        if prefetch:
            self._prefetches.add(load, blocks)
        self._free.release(hits)
        self._free.release(blocks)

    def _take_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Allocate blocks that this step does not use."""
        draft, free = self._draft, self._free
        in_flight = draft.seq - 1
        set_aside = [block for block in draft.freed.values() if block.ref_cnt == 0]
        free.remove(set_aside)
        # Loads into these would wait for the step in flight. Upstream reuses blocks
        # without keys first.
        recent = [
            block
            for block in free.first(self._num_recent)
            if draft.used_by[block.block_id] == in_flight
        ]
        if num_blocks + len(recent) <= self._pool.get_num_free_blocks():
            free.remove(recent)
            set_aside += recent
        draft.takes_for_loads = True
        try:
            blocks = self._pool.get_new_blocks(num_blocks)
        finally:
            draft.takes_for_loads = False
        free.append(set_aside)
        return blocks
