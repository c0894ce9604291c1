# SPDX-License-Identifier: Apache-2.0
"""Gives device blocks host slots."""

from collections.abc import Iterable

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.kv_tier.scheduling.admission import Admission
from vllm.v1.kv_tier.scheduling.draft import PlanDraft
from vllm.v1.kv_tier.scheduling.slots import HostSlot, SlotTable
from vllm.v1.kv_tier.stats import KVTierStats


class BlockStorer:
    """Stores hashed device blocks in slots, in the plan in the making.

    Args:
        pool: Knows the keys of blocks.
        table: The slots.
        draft: The plan in the making.
        admission: Which blocks have been used often enough; None: all.
        stats: Counts what was refused.

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
        """Device blocks, by id, that nobody will ask for again: they are not stored."""
        self.forbidden: set[int] = set()
        """Device blocks, by id, that clients do not want to be stored."""

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
        """Whether `is_admitted` is true of every block."""
        if self.released or self.forbidden:
            return False
        return self.admission is None or self.admission.admits_all

    def is_admitted(self, block: KVCacheBlock) -> bool:
        """Whether a hashed block is worth a slot: it has been used often enough, and
        somebody may ask for it again, and nobody has anything against it."""
        if block.block_id in self.released or block.block_id in self.forbidden:
            return False
        return self.admission is None or self.admission.admits(block.block_hash)

    def demote(self, block: KVCacheBlock) -> None:
        """The plan overwrites a hashed block whose primary key the host lacks, or one
        with several keys: store it if that is worth it."""
        # With few calls: each block of a long prefix comes by here.
        draft = self._draft
        if draft.computed_by[block.block_id] >= draft.seq:
            return
        if self._pool.cached_block_hashes_by_block and self.is_clean(block):
            return
        # As the property says, without a call.
        admission = self.admission
        admits_all = admission is None or admission.admits_all
        admits_all = admits_all and not (self.released or self.forbidden)
        if not (admits_all or self.is_admitted(block)):
            self._stats.passed_over_blocks += 1
        elif not self.store(block, before_eviction=False):
            self._stats.dropped_blocks += 1

    def store(self, block: KVCacheBlock, before_eviction: bool) -> bool:
        """Give `block` a slot and store it in this plan, if there is room.

        Args:
            block: Hashed, computed by an earlier plan, and not clean.
            before_eviction: A later plan may overwrite it. Else this one does.

        """
        table, draft = self._table, self._draft
        # Without a call for blocks of one key: each store comes by here.
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
        """Make way for a slot with all of `keys`: one that has only some of them may
        lack the bytes of others. False: the plan uses it."""
        for key in keys:
            stale = self._table.get(key)
            if stale is not None:
                if self._table.is_pinned(stale):
                    return False
                self._table.remove(stale)
        return True

    def invalidate(self, block: KVCacheBlock) -> None:
        """The content of `block` is void, and so is its copy on the host."""
        for key in self.keys(block):
            slot = self._table.get(key)
            if slot is not None:
                self.drop(slot)

    def drop(self, slot: HostSlot) -> None:
        """Forget `slot`, and the store that this plan may have for it."""
        self._draft.drop_stores(slot)
        self._table.remove(slot)

    def drop_all(self) -> None:
        """Forget every slot."""
        for slot in self._table.filled():
            self.drop(slot)
