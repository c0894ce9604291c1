# SPDX-License-Identifier: Apache-2.0
"""Stores device blocks in host slots."""

from collections.abc import Iterable

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.kv_tier.scheduling.admission import Admission
from vllm.v1.kv_tier.scheduling.draft import PlanDraft
from vllm.v1.kv_tier.scheduling.slots import HostSlot, SlotTable
from vllm.v1.kv_tier.stats import KVTierStats


class BlockStorer:
    """Stores hashed device blocks in slots, in the plan that is being built.

    Args:
        pool: Knows the keys of blocks.
        table: The slot table.
        draft: The plan that is being built.
        admission: Which blocks were used often enough; None for all.
        stats: Counts refused stores.

    """

    def __init__(
        self,
        pool: BlockPool,
        table: SlotTable,
        draft: PlanDraft,
        admission: Admission | None,
        stats: KVTierStats,
    ) -> None:
        self._pool = pool
        self._table = table
        self._draft = draft
        self.admission = admission
        self._stats = stats
        self.released: set[int] = set()
        """Ids of device blocks of finished conversations, which are not stored."""
        self.forbidden: set[int] = set()
        """Ids of device blocks that hints exclude from being stored."""

    def keys(self, block: KVCacheBlock) -> tuple[BlockHashWithGroupId, ...]:
        """All prefix-cache keys of `block`, the primary one first."""
        if (key := block.block_hash) is None:
            return ()
        others = self._pool.cached_block_hashes_by_block.get(block.block_id)
        return (key, *others) if others else (key,)

    def is_clean(self, block: KVCacheBlock) -> bool:
        """Whether the host has every key of a hashed block."""
        if self._table.get(block.block_hash) is None:  # type: ignore[arg-type]
            return False
        if not self._pool.cached_block_hashes_by_block:
            return True
        others = self._pool.cached_block_hashes_by_block.get(block.block_id, ())
        return all(self._table.get(key) is not None for key in others)

    @property
    def admits_all(self) -> bool:
        """Whether `is_admitted` is true for every block."""
        if self.released or self.forbidden:
            return False
        return self.admission is None or self.admission.admits_all

    def is_admitted(self, block: KVCacheBlock) -> bool:
        """Whether a hashed block is worth a slot.

        That is: it was used often enough, is not of a finished conversation, and not
        excluded by a hint.
        """
        if block.block_id in self.released or block.block_id in self.forbidden:
            return False
        return self.admission is None or self.admission.admits(block.block_hash)

    def demote(self, block: KVCacheBlock) -> None:
        """Store a block that the plan overwrites, if that is worth it.

        It is hashed, and the host lacks its primary key, or it has several keys.
        """
        # A hot path with few calls: each block of a long prefix.
        draft = self._draft
        if draft.computed_by[block.block_id] >= draft.seq:
            return
        if self._pool.cached_block_hashes_by_block and self.is_clean(block):
            return
        # The property inlined.
        admission = self.admission
        admits_all = admission is None or admission.admits_all
        admits_all = admits_all and not (self.released or self.forbidden)
        if not (admits_all or self.is_admitted(block)):
            self._stats.passed_over_blocks += 1
        elif not self.store(block, before_eviction=False):
            self._stats.dropped_blocks += 1

    def store(self, block: KVCacheBlock, before_eviction: bool) -> bool:
        """Store `block` in a slot in this plan, if there is room.

        Args:
            block: Hashed, computed by an earlier plan, and not clean.
            before_eviction: A later plan may overwrite it; otherwise this one does.

        Returns:
            Whether it is stored.

        """
        table, draft = self._table, self._draft
        # No call for blocks with one key: a hot path for each store.
        keys: tuple[BlockHashWithGroupId, ...]
        keys = (block.block_hash,)  # type: ignore[assignment]
        if self._pool.cached_block_hashes_by_block:
            keys = self.keys(block)
        if len(keys) > 1 and not self._drop_stale(keys):
            self._stats.refused_pinned += 1
            return False
        slot = table.insert(keys, block.block_hash_num_tokens, draft.seq)
        if slot is None:
            self._stats.refused_no_slot += 1
            return False
        draft.store(block, slot, table.last_load(slot), before_eviction)
        return True

    def _drop_stale(self, keys: Iterable[BlockHashWithGroupId]) -> bool:
        """Remove slots with some of `keys`, since they may lack bytes of others.

        Returns:
            False if the plan uses one of them.

        """
        for key in keys:
            stale = self._table.get(key)
            if stale is not None:
                if self._table.is_pinned(stale):
                    return False
                self._table.remove(stale)
        return True

    def invalidate(self, block: KVCacheBlock) -> None:
        """Drop the host's copy of `block`, whose content is void."""
        for key in self.keys(block):
            slot = self._table.get(key)
            if slot is not None:
                self.drop(slot)

    def drop(self, slot: HostSlot) -> None:
        """Drop `slot`, and this plan's store to it."""
        self._draft.drop_stores(slot)
        self._table.remove(slot)

    def drop_all(self) -> None:
        """Drop every slot."""
        for slot in self._table.filled():
            self.drop(slot)
