# SPDX-License-Identifier: Apache-2.0
"""The block pool that answers for device and host together.

The life of a block beyond the device:

    get_new_blocks takes a victim ── demote ──▶ store queued, key → host slot
    get_cached_block finds only the slot ─────▶ the slot stands in the hit
    allocate_slots keeps that request ─ promote ▶ device block, load queued
    take_plan ends the step ── clean ─────────▶ next victims stored ahead

Everything a step needs moved is in its `StepPlan`. A key is registered the moment
its copy is queued, since the workers put copies and compute in order.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.kv_tier.config import KVTierLayout
from vllm.v1.kv_tier.host_table import HostSlot, HostTable
from vllm.v1.kv_tier.plan import StepPlan, StepReport
from vllm.v1.kv_tier.policy import make_policy
from vllm.v1.kv_tier.stats import KVTierStats
from vllm.v1.request import Request


def make_block_pool(kv_cache_config: Any, **kwargs: Any) -> BlockPool:
    """The pool of a `KVCacheConfig`: tiered when the engine has a host tier."""
    layout: KVTierLayout | None = kv_cache_config.kv_tier
    if layout is None:
        return BlockPool(**kwargs)
    return TieredBlockPool(layout, **kwargs)


def kv_tier_of(pool: BlockPool) -> "TieredBlockPool | None":
    return pool if isinstance(pool, TieredBlockPool) else None


class TieredBlockPool(BlockPool):
    """A `BlockPool` whose evicted blocks live on in host slots.

    Args:
        layout: Slots and settings of the host tier.
        **kwargs: As for `BlockPool`.

    """

    def __init__(self, layout: KVTierLayout, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        config = layout.config
        policy = make_policy(config.eviction_policy, layout.num_slots)
        self.host = HostTable(layout.num_slots, policy)
        self.write_through = config.store_policy == "write_through"
        self.slot_bytes = layout.slot_bytes
        budget = config.load_budget_bytes
        self._max_loads = None if budget is None else max(1, budget // self.slot_bytes)

        # The plan in the making. `_stores` and `_loads` are keyed by what they
        # overwrite (slot, device block), so that a later copy to the same place
        # replaces the earlier one.
        self._plan = StepPlan(seq=1)
        self._stores: dict[int, KVCacheBlock] = {}
        self._loads: dict[int, HostSlot] = {}

        self._in_step = False
        self._demoting = False
        # Per device block: the plan whose forward pass computes it (hashed
        # blocks), and the last plan that stores it.
        self._computed_by = [0] * self.num_gpu_blocks
        self._stored_by = [0] * self.num_gpu_blocks
        # write_through: blocks hashed since the last plan.
        self._fresh: list[KVCacheBlock] = []
        # write_back: device blocks taken per step, a maximum that decays.
        self._taken = 0
        self._take_rate = 0.0
        self._stats = KVTierStats()

    # ------------------------------------------------------------------ a step

    def begin_step(self) -> None:
        """The scheduler starts to plan a step."""
        self._in_step = True

    def take_plan(self) -> StepPlan | None:
        """End the step: its copies, or None when it has none."""
        self._in_step = False
        if self.write_through:
            self._store_fresh()
        else:
            self._clean_next_victims()
        plan, seq = self._plan, self._plan.seq
        self._plan = StepPlan(seq=seq + 1)
        for index, block in self._stores.items():
            plan.store_slots.append(index)
            plan.store_blocks.append(block.block_id)
        for block_id, slot in self._loads.items():
            plan.load_slots.append(slot.index)
            plan.load_blocks.append(block_id)
        self._stats.stored_blocks += len(self._stores)
        self._stats.loaded_blocks += len(self._loads)
        self._stores.clear()
        self._loads.clear()
        self.host.unpin_all()
        # Even without copies, a step may overwrite what an earlier plan reads.
        idle = not (plan.store_slots or plan.load_slots or plan.compute_after_stores)
        return None if idle else plan

    # ------------------------------------------------------------------ lookup

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: list[int]
    ) -> list[KVCacheBlock] | None:
        """As upstream; a `HostSlot` stands for a block that only the host has."""
        blocks: list[KVCacheBlock] = []
        for group_id in kv_cache_group_ids:
            key = make_block_hash_with_group_id(block_hash, group_id)
            block = self.cached_block_hash_to_block.get_one_block(key)
            if block is None and (block := self.host.get(key)) is None:
                return None
            blocks.append(block)
        return blocks

    # ----------------------------------------------------------------- promote

    def promote(
        self,
        request: Request,
        managers: Sequence[Any],
        computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_local_tokens: int,
        num_external_tokens: int,
    ) -> tuple[Sequence[KVCacheBlock], ...] | None:
        """Turn the host slots of a prefix hit into cached device blocks.

        Call it when the request is sure to be admitted, before upstream touches
        the hit. The new blocks are free and hashed, like any evictable hit.

        Args:
            request: The request that hit.
            managers: The `SingleTypeKVCacheManager` of each group.
            computed_blocks: Hit blocks per group, as `get_computed_blocks` found
                them in this step.
            num_local_tokens: Tokens of the hit.
            num_external_tokens: Tokens that a KV connector adds to it.

        Returns:
            The hit with device (or null) blocks only, or None when the request
            must wait for the next step: its loads exceed what is left of the
            step's load budget, or its hit ends inside a block of this step.

        """
        if self._copies_too_early(managers, computed_blocks, num_local_tokens):
            return None
        if not any(type(b) is HostSlot for group in computed_blocks for b in group):
            self._stats.record_hit(request, num_local_tokens, 0)
            return computed_blocks
        groups = [list(group) for group in computed_blocks]
        hits: list[KVCacheBlock] = []
        holes: list[tuple[list[KVCacheBlock], int, HostSlot]] = []
        num_host_tokens = 0
        for manager, group in zip(managers, groups, strict=True):
            # Upstream drops the head that the attention window has left behind.
            skipped = manager.get_num_skipped_tokens(
                num_local_tokens + num_external_tokens
            )
            first = skipped // manager.block_size
            num_holes = -len(holes)
            for i, block in enumerate(group):
                if isinstance(block, HostSlot):
                    if i < first:
                        group[i] = self.null_block
                    else:
                        holes.append((group, i, block))
                elif i >= first and not block.is_null:
                    hits.append(block)
            num_holes += len(holes)
            num_host_tokens = max(num_host_tokens, num_holes * manager.block_size)
        num_loads = len(self._loads)
        if (
            self._max_loads is not None
            and num_loads
            and num_loads + len(holes) > self._max_loads
        ):
            return None

        # Taking blocks evicts others: neither the device part of this hit nor
        # its slots may be among them.
        self._hold(hits)
        for _, _, slot in holes:
            self.host.pin(slot)
        new_blocks = self.get_new_blocks(len(holes))
        for (group, i, slot), block in zip(holes, new_blocks):
            self._queue_load(slot, block)
            group[i] = block
        self._release(hits)
        self._release(new_blocks)
        self._stats.record_hit(request, num_local_tokens, num_host_tokens)
        return tuple(groups)

    def _copies_too_early(
        self,
        managers: Sequence[Any],
        computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_local_tokens: int,
    ) -> bool:
        """Whether a hit ends inside a block that this step's forward pass computes.

        Upstream copies such a block before the forward pass. Without a tier the
        case does not arise: the Mamba state that a sub-block hit needs is evicted
        before the attention blocks of the same prefix, but the host keeps it.
        """
        for manager, group in zip(managers, computed_blocks, strict=True):
            if not group or num_local_tokens % manager.block_size == 0:
                continue
            tail = group[-1]
            if (
                type(tail) is not HostSlot
                and self._computed_by[tail.block_id] == self._plan.seq
                and tail.block_id not in self._loads
            ):
                return True
        return False

    def _queue_load(self, slot: HostSlot, block: KVCacheBlock) -> None:
        plan = self._plan
        self._loads[block.block_id] = slot
        plan.load_after_stores = max(plan.load_after_stores, slot.store_seq)
        self.host.mark_loaded(slot, plan.seq)
        self.host.touch(slot)
        primary, *others = slot.keys
        self._insert_block_hash(primary, block, num_tokens=slot.block_hash_num_tokens)
        for key in others:
            self._insert_block_hash(key, block, num_tokens=None)

    def _hold(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def _release(self, blocks: Iterable[KVCacheBlock]) -> None:
        freed = []
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                freed.append(block)
        self.free_block_queue.append_n(freed)

    # ------------------------------------------------------------------ demote

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """As upstream; the content of cached victims goes to host slots."""
        self._demoting = True
        try:
            blocks = super().get_new_blocks(num_blocks)
        finally:
            self._demoting = False
        self._taken += num_blocks
        return blocks

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        # Upstream calls this for victims and for content that turned invalid.
        if self._demoting:
            self._demote(block)
        else:
            self._invalidate(block)
        return super()._maybe_evict_cached_block(block)

    def _demote(self, block: KVCacheBlock) -> None:
        # A load into the block, queued for a request that was preempted since,
        # must not overwrite what comes next.
        self._loads.pop(block.block_id, None)
        if block.block_hash is None:
            return
        slot = self.host.get(block.block_hash)
        if slot is not None and self._is_clean(block):
            self.host.touch(slot)
        elif self._computed_by[block.block_id] < self._plan.seq:
            self._queue_store(block)

    def _invalidate(self, block: KVCacheBlock) -> None:
        for key in self._keys(block):
            slot = self.host.get(key)
            if slot is not None:
                self._drop_slot(slot)

    def _queue_store(self, block: KVCacheBlock) -> bool:
        """Give `block` a slot and store it in this plan, if there is room."""
        keys = tuple(self._keys(block))
        for key in keys:
            # A slot that has only some of the keys may lack the bytes of others.
            stale = self.host.get(key)
            if stale is not None:
                if self.host.is_pinned(stale):
                    return False
                self.host.remove(stale)
        plan = self._plan
        slot = self.host.insert(keys, block.block_hash_num_tokens, plan.seq)
        if slot is None:
            return False
        self.host.pin(slot)
        self._stores[slot.index] = block
        self._stored_by[block.block_id] = plan.seq
        last_load = self.host.last_load(slot)
        plan.store_after_loads = max(plan.store_after_loads, last_load)
        return True

    def _remove_cached_block_hashes(
        self, block: KVCacheBlock
    ) -> list[BlockHashWithGroupId]:
        # Whoever takes the keys away is about to overwrite the block.
        plan, stored_by = self._plan, self._stored_by[block.block_id]
        plan.compute_after_stores = max(plan.compute_after_stores, stored_by)
        plan.load_after_stores = max(plan.load_after_stores, stored_by)
        self._stored_by[block.block_id] = 0
        return super()._remove_cached_block_hashes(block)

    # ----------------------------------------------------------------- cleaner

    def _insert_block_hash(
        self,
        block_hash_with_group_id: BlockHashWithGroupId,
        block: KVCacheBlock,
        num_tokens: int | None,
    ) -> None:
        if self.cached_block_hash_to_block.contain(
            block_hash_with_group_id, block.block_id
        ):
            return
        super()._insert_block_hash(block_hash_with_group_id, block, num_tokens)
        # Outside of a step upstream hashes only what earlier steps computed.
        seq = self._plan.seq
        self._computed_by[block.block_id] = seq if self._in_step else seq - 1
        if self.write_through:
            self._fresh.append(block)

    def _store_fresh(self) -> None:
        """write_through: store what earlier steps filled; keep the rest."""
        fresh, self._fresh = self._fresh, []
        for block in fresh:
            if block.block_hash is None or self._is_clean(block):
                continue
            if self._computed_by[block.block_id] < self._plan.seq:
                self._queue_store(block)
            else:
                self._fresh.append(block)

    def _clean_next_victims(self) -> None:
        """write_back: store the blocks that the next steps will evict."""
        self._take_rate = max(float(self._taken), 0.9 * self._take_rate)
        self._taken = 0
        for block in self._next_victims(int(2 * self._take_rate)):
            if (
                block.block_hash is not None
                and self._computed_by[block.block_id] < self._plan.seq
                and not self._is_clean(block)
                and not self._queue_store(block)
            ):
                return

    def _next_victims(self, num_blocks: int) -> Iterator[KVCacheBlock]:
        queue = self.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        for _ in range(min(num_blocks, queue.num_free_blocks)):
            assert block is not None
            yield block
            block = block.next_free_block

    def _is_clean(self, block: KVCacheBlock) -> bool:
        return all(self.host.get(key) is not None for key in self._keys(block))

    def _keys(self, block: KVCacheBlock) -> Iterator[BlockHashWithGroupId]:
        if block.block_hash is not None:
            yield block.block_hash
            yield from self.cached_block_hashes_by_block.get(block.block_id, ())

    # ------------------------------------------------------------ what is void

    def forget_uncomputed(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Take back the keys that this step gave to blocks it will not compute.

        Upstream preempts requests that it has already scheduled in the same
        step, and leaves their blocks hashed.
        """
        for block in blocks:
            if (
                not block.is_null
                and block.block_hash is not None
                and self._computed_by[block.block_id] == self._plan.seq
            ):
                self._maybe_evict_cached_block(block)

    def reset_prefix_cache(self) -> bool:
        """As upstream; the host tier is cleared only when the device cache is."""
        if not super().reset_prefix_cache():
            return False
        self._clear_host()
        return True

    def apply_report(self, report: StepReport) -> bool:
        """Take back what failed copies left without content.

        Returns:
            Whether a load failed. Then everything computed since is void, and the
            caller must make every running request start over.

        """
        for index, seq in report.failed_store_slots.items():
            slot = self.host.at(index)
            if slot is not None and slot.store_seq == seq:
                self._drop_slot(slot)
        failed = report.failed_load_seq
        if failed is None:
            return False
        for block in self.blocks:
            if block.block_hash is not None and (
                self._computed_by[block.block_id] >= failed
            ):
                self._maybe_evict_cached_block(block)
        for slot in self.host.filled():
            if slot.store_seq >= failed or slot.load_seq >= failed:
                self._drop_slot(slot)
        return True

    def _drop_slot(self, slot: HostSlot) -> None:
        self._stores.pop(slot.index, None)
        self.host.remove(slot)

    def _clear_host(self) -> None:
        for slot in self.host.filled():
            self._drop_slot(slot)
        self._fresh.clear()

    # ------------------------------------------------------------------- stats

    def take_stats(self) -> KVTierStats:
        """What happened since the last call."""
        stats, self._stats = self._stats, KVTierStats()
        stats.slots_total = self.host.num_slots
        stats.slots_used = len(self.host)
        stats.slot_bytes = self.slot_bytes
        stats.evicted_slots, self.host.evictions = self.host.evictions, 0
        return stats
