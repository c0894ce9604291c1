# SPDX-License-Identifier: Apache-2.0
"""The block pool that answers for device and host together.

The life of a block beyond the device:

    get_new_blocks takes a victim ── demote ──▶ store queued, key → host slot
    get_cached_block finds only the slot ─────▶ the slot is part of the hit
    allocate_slots keeps that request ─ promote ▶ device block, load queued; the
                                                  request may wait for it
    take_plan ends the step ── write ─────────▶ next victims stored ahead

A step's `StepPlan` has all copies that it needs. A key is registered when its copy is
queued, since the workers order copies and compute. This module has the methods that
upstream calls for each block and each step; other modules decide.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.distributed.kv_events import EventPublisher
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.config import KVTierLayout
from vllm.v1.kv_tier.eviction.by_name import make_policy
from vllm.v1.kv_tier.plan import StepPlan, StepReport
from vllm.v1.kv_tier.scheduling.backing import make_backing
from vllm.v1.kv_tier.scheduling.choosing import make_admission
from vllm.v1.kv_tier.scheduling.costs import Costs
from vllm.v1.kv_tier.scheduling.draft import PlanDraft
from vllm.v1.kv_tier.scheduling.free_blocks import FreeBlocks
from vllm.v1.kv_tier.scheduling.loading import Loader
from vllm.v1.kv_tier.scheduling.losses import LoadBreaker, LostBlocks
from vllm.v1.kv_tier.scheduling.prefetches import Prefetches
from vllm.v1.kv_tier.scheduling.promotion import Promotion
from vllm.v1.kv_tier.scheduling.releasing import Releasing
from vllm.v1.kv_tier.scheduling.retaining import Retaining
from vllm.v1.kv_tier.scheduling.slots import SlotTable
from vllm.v1.kv_tier.scheduling.stored import before_stored
from vllm.v1.kv_tier.scheduling.storing import BlockStorer
from vllm.v1.kv_tier.scheduling.waiting import WaitingRoom
from vllm.v1.kv_tier.scheduling.writing import Cleaner, Writer, WriteThrough
from vllm.v1.kv_tier.stats import KVTierStats
from vllm.v1.request import Request


class TieredBlockPool(BlockPool):
    """A `BlockPool` whose evicted blocks live on in host slots.

    Args:
        layout: Slots and settings of the host tier.
        **kwargs: As for `BlockPool`.

    """

    def __init__(self, layout: KVTierLayout, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        config, tuning = layout.config, layout.tuning
        self.slot_bytes = layout.slot_bytes
        self._tells_evictions = (
            self.enable_kv_cache_events or releases.has_block_metrics(self)
        )
        self._stats = stats = KVTierStats()
        self.costs = costs = Costs(
            layout.load_s,
            config.max_load_stall_s,
            layout.layerwise,
            layout.tokens_per_block,
            tuning,
        )
        policy = make_policy(config.eviction_policy, layout.num_slots)
        self.host = SlotTable(layout.num_slots, policy)
        self._draft = PlanDraft(self.num_gpu_blocks)
        self.free = FreeBlocks(self)
        # As many keys as both tiers hold, plus as many evicted ones.
        num_keys = 2 * (self.num_gpu_blocks + layout.num_slots)
        self.admission = make_admission(
            layout, self.num_gpu_blocks, num_keys, self.host.has_room
        )
        self.storer = BlockStorer(self, self.host, self._draft, self.admission, stats)
        self._writes_through = config.debug.store_policy == "write_through"
        self.prefetches = prefetches = Prefetches(self.costs, tuning)
        common = self, self.free, self.host
        self.writer: Writer = (
            WriteThrough(self._draft, self.storer)
            if self._writes_through
            else Cleaner(*common, self._draft, self.storer, self.costs, tuning)
        )
        quotas = config.quotas or {}
        self.retaining = Retaining(
            *common, prefetches, self.admission, self.costs, num_keys, quotas, stats
        )
        self.releasing = Releasing(
            *common, self.storer, prefetches, self.retaining, num_keys, stats
        )
        num_spare = int(tuning.spare * self.num_gpu_blocks)
        self.waiting = WaitingRoom(costs, prefetches, self._draft, tuning, num_spare)
        loader = Loader(
            *common, self._draft, prefetches, self.costs, self.writer, stats, tuning
        )
        self.backing = make_backing(layout, self, self.host, self.costs)
        deciding = loader, self.waiting, prefetches, self.writer, self.admission
        self._promotion = Promotion(
            self, self._draft, *deciding, self.backing, self.releasing, stats, tuning
        )
        self._breaker = LoadBreaker(tuning)
        self.lost = LostBlocks()
        self.void_plan = 0
        """The last plan whose forward pass used what a failed load left."""
        self._num_taken = 0
        self._demoting = False
        self._serves_host = True
        # Whether the request that was looked up only waits for loads.
        self._is_deferred = False
        # Which blocks may be loaded for the request that is looked up; None for all.
        self._may_load: Callable[[BlockHash], bool] | None = None
        # That request, if `_may_load` is set.
        self._capped: Request | None = None

    # ------------------------------------------------------------------ a step

    def begin_step(self) -> None:
        """Start to plan a step."""
        self._draft.begin()
        self.releasing.begin_step()
        is_open = self._breaker.is_open(self.costs.clock())
        self._serves_host = not (self.costs.recompute or is_open)

    def take_plan(self, is_idle: bool = False) -> StepPlan:
        """End the step and return its plan.

        Args:
            is_idle: The step runs nothing, so there is time.

        """
        self.writer.allocated(self._num_taken)
        self._num_taken, self._capped = 0, None
        below = self.backing
        is_read = is_idle and below is not None and below.fetching.num_awaited > 0
        self.writer.write(is_idle, is_read)
        if is_idle and self.prefetches:
            # Left by aborted requests. Waiting for them costs nothing now.
            self._draft.uses_prefetches(self.prefetches.last_unused())
        plan = self._draft.finish()
        if below is not None:
            below.finish(plan, is_idle)
        self._stats.stored_blocks += len(plan.store_slots) + len(plan.clean_slots)
        self._stats.loaded_blocks += len(plan.load_slots)
        self._stats.loaded_ahead_blocks += len(plan.ahead_slots)
        self.host.unpin_all()
        if self.prefetches:
            self.prefetches.forget(self._draft.prefetch_fence)
        return plan

    # ------------------------------------------------------------------ lookup

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: list[int]
    ) -> list[KVCacheBlock] | None:
        """As upstream, but a `HostSlot` stands for a block that only the host has."""
        blocks: list[KVCacheBlock] = []
        for group_id in kv_cache_group_ids:
            key = make_block_hash_with_group_id(block_hash, group_id)
            block = self.cached_block_hash_to_block.get_one_block(key)
            if block is None:
                block = self.host.get(key)
                if block is None and self.backing is not None:
                    block = self.backing.fetching.found.get(key)
                if block is None:
                    return None
                if not self._serves_host:
                    self._stats.recomputed_lookups += 1
                    return None
                if self._may_load is not None and not self._may_load(block_hash):
                    return None
            blocks.append(block)
        return blocks

    # ----------------------------------------------------------------- promote

    def promote(
        self,
        request: Request,
        managers: Sequence[Any],
        computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        *others: Any,
    ) -> tuple[Sequence[KVCacheBlock], ...] | None:
        """Turn the host slots of a prefix hit into cached device blocks.

        Takes the same arguments as `Promotion.promote`. Blocks in secondary tiers are
        fetched first.

        Returns:
            The hit, or None if the request waits.

        """
        below = self.backing
        if below is not None and below.fetching.fetches(request, computed_blocks):
            self._is_deferred = True
            return None
        num_before = len(self._draft.prefetches)
        hit = self._promotion.promote(request, managers, computed_blocks, *others)
        self._is_deferred = hit is None and not self._promotion.lacked_blocks
        if self._capped is not None:
            self._count_loads_ahead(num_before)
        if hit is None:
            return None
        if self._capped is not None:
            self.releasing.end_loads_ahead(request)
        if below is not None:
            below.fetching.admitted(request)
        return hit

    def _count_loads_ahead(self, num_before: int) -> None:
        """Count loads ahead for the request with a cap, beyond `num_before`."""
        num_loads = len(self._draft.prefetches) - num_before
        if num_loads and self._capped is not None:
            self.releasing.loads_ahead(self._capped, num_loads)

    def is_loading(self, request: Request, has_scheduled_reqs: bool) -> bool:
        """Whether `request` waits for loads, or lets others go first.

        Saves the lookup of its prefix.
        """
        self._may_load, self._capped, self._is_deferred = None, None, False
        speaks = self.releasing.speaks(request)
        if speaks:
            self.releasing.follow(request)
            if has_scheduled_reqs and self.releasing.must_wait(request):
                return True
        below = self.backing if self._serves_host else None
        is_idle = not has_scheduled_reqs
        may_load = self.releasing.may_load if speaks else None
        if below is not None and below.fetching.holds_back(request, is_idle, may_load):
            return True
        if has_scheduled_reqs and self.waiting.is_loading(request):
            return True
        if speaks:
            self._may_load = self.releasing.may_load(request)
            self._capped = None if self._may_load is None else request
        return False

    def load_ahead(
        self,
        managers: Sequence[Any],
        computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_tokens: int,
    ) -> None:
        """Begin to load the hit of a request without room, see `Promotion.prefetch`."""
        if not self._is_deferred:
            self.releasing.prewarms.others_lack_blocks()
        below = self.backing
        if below is not None and below.fetching.fetches(None, computed_blocks):
            computed_blocks = before_stored(computed_blocks)
        num_before = len(self._draft.prefetches)
        self._promotion.prefetch(managers, computed_blocks, num_tokens)
        self._count_loads_ahead(num_before)

    # ------------------------------------------------------------------ demote

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """As upstream, but the content of cached victims goes to host slots."""
        # A hot path: each new block of a decoding request passes here.
        prefetches, storer = self.prefetches, self.storer
        if self.retaining.on_device:
            self.retaining.make_way(num_blocks)
        if prefetches.unclaimed and (is_kept := prefetches.kept()):
            self.free.pass_over(num_blocks, prefetches.unclaimed.keys(), is_kept)
        self._num_taken += num_blocks
        self._demoting = True
        try:
            blocks = super().get_new_blocks(num_blocks)
        finally:
            self._demoting = False
        if prefetches.unclaimed:
            prefetches.claim(blocks)
        if storer.released or storer.forbidden:
            self.releasing.taken(blocks)
        return blocks

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        # Upstream calls this for victims, and for content that became invalid.
        if not self._demoting:
            self.storer.invalidate(block)
            return super()._maybe_evict_cached_block(block)
        draft = self._draft
        if draft.loads or draft.prefetches:
            draft.call_off_load(block)
        key, several = block.block_hash, self.cached_block_hashes_by_block
        if key is not None and (several or self.host.get(key) is None):
            self.storer.demote(block)
        if several or self._tells_evictions:
            return super()._maybe_evict_cached_block(block)
        # Same result for blocks of one key without listeners, in half the time.
        if key is not None:
            self.cached_block_hash_to_block.pop(key, block.block_id)
            block.reset_hash()
        # Copies that a reset dropped may still run.
        draft.overwrites(block)
        return key is not None

    def _remove_cached_block_hashes(
        self, block: KVCacheBlock
    ) -> list[BlockHashWithGroupId]:
        # Callers that remove the keys are about to overwrite the block.
        self.prefetches.claim((block,))
        self.releasing.taken((block,))
        self._draft.overwrites(block)
        return super()._remove_cached_block_hashes(block)

    def free_blocks(
        self, ordered_blocks: Iterable[KVCacheBlock], **kwargs: Any
    ) -> None:
        """As upstream; also remembers which steps may still use the blocks."""
        blocks = list(ordered_blocks)
        self._draft.free(blocks)
        self.releasing.freed(blocks)
        if self._draft.in_step:
            self.free.leave_place(blocks)
        super().free_blocks(blocks, **kwargs)
        if self.lost.in_use:
            self._withdraw_lost()

    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """As upstream; also records what requests with hints compute."""
        place = num_cached_blocks, num_full_blocks, block_size
        super().cache_full_blocks(request, blocks, *place, *args, **kwargs)
        if self.releasing.is_listening:
            self.releasing.cached(request, blocks, *place)

    def cache_partial_block(
        self, request: Request, block: KVCacheBlock, *args: Any, **kwargs: Any
    ) -> Any:
        """As upstream, in releases that have it."""
        if self.releasing.is_listening:
            self.releasing.cached_part(request, block)
        return super().cache_partial_block(request, block, *args, **kwargs)

    def _insert_block_hash(
        self, key: BlockHashWithGroupId, block: KVCacheBlock, num_tokens: int | None
    ) -> None:
        cached = self.cached_block_hash_to_block
        # A block without a primary key has no other keys.
        if block.block_hash is None:
            block.set_block_hash(key, num_tokens)
            cached.insert(key, block)
        elif cached.contain(key, block.block_id):
            return
        else:
            super()._insert_block_hash(key, block, num_tokens)
        self._draft.hashed(block)
        if self.admission is not None:
            self.admission.use(key)
        if self._writes_through:
            self.writer.used((block,))

    # ------------------------------------------------------------ what is void

    def reset_prefix_cache(self) -> bool:
        """As upstream; clears the host tier only if the device cache is cleared."""
        if was_reset := super().reset_prefix_cache():
            self._clear_host()
        return was_reset

    def _clear_host(self) -> None:
        self.storer.drop_all()
        self.releasing.forget()
        self.writer.forget()
        if self.admission is not None:
            self.admission.clear()
        if self.backing is not None:
            self.backing.detach("the prefix cache was cleared, maybe for other weights")

    def apply_report(self, report: StepReport) -> int | None:
        """Drop content that failed copies left void.

        Returns:
            None if no load failed. Otherwise everything computed since is void: the
            caller must drop the outputs of plans up to the returned one, and let every
            running request start over.

        """
        self.costs.take(report)
        self._breaker.take(report, self.costs.clock())
        self._stats.record_report(report)
        if self.backing is not None:
            self.backing.take(report.secondary)
        if report.lost_blocks is not None:
            self._switch_off(report.lost_blocks)
        for index, seq in report.failed_store_slots.items():
            slot = self.host.at(index)
            if slot is not None and slot.store_seq == seq:
                self.storer.drop(slot)
        if (failed := report.failed_load_seq) is None:
            return None
        self.void_since(failed)
        return self._draft.seq - 1

    def void_since(self, seq: int) -> None:
        """What was computed or loaded since plan `seq` is not what its keys say."""
        for block in self.blocks:
            if block.block_hash is not None and (
                self._draft.computed_by[block.block_id] >= seq
            ):
                self._maybe_evict_cached_block(block)
        for slot in self.host.filled():
            if max(slot.store_seq, self.host.last_load(slot)) >= seq:
                self.storer.drop(slot)

    def _switch_off(self, lost_blocks: Iterable[int]) -> None:
        """Stop using host slots, since a rank copies no more.

        Args:
            lost_blocks: Device blocks that a load may still overwrite at any time.

        """
        self.storer.drop_all()
        if self.backing is not None:
            self.backing.detach("the host tier is off")
        self.host.close()
        self.lost.add(lost_blocks)
        self._withdraw_lost()

    def _withdraw_lost(self) -> None:
        """Remove lost blocks from the device cache once they are free."""
        for block in self.lost.take_free(self.blocks):
            self._maybe_evict_cached_block(block)
            self.free.leave_place([block])
            self.free.remove([block])
            block.ref_cnt = 1
            self.num_gpu_blocks -= 1

    @property
    def num_lost_blocks(self) -> int:
        """Device blocks that are lost to the cache, or will be when they are free."""
        return len(self.lost.withdrawn) + len(self.lost.in_use)

    # -------------------------------------------------------- events and stats

    def serve_late_subscribers(self, publisher: EventPublisher) -> None:
        """Does nothing without KV events; see `PublishingBlockPool`."""

    def take_stats(self) -> KVTierStats:
        """Stats since the last call."""
        stats = self._stats.take()
        stats.slots_total = self.host.num_slots
        stats.slots_used = len(self.host)
        stats.slot_bytes = self.slot_bytes
        stats.cleaner_backlog_blocks = self.writer.backlog
        stats.load_seconds_per_block = self.costs.load_s
        stats.prefill_seconds_per_block = self.costs.prefill_s
        stats.evicted_slots, self.host.num_evicted = self.host.num_evicted, 0
        self.retaining.report(stats)
        if self.backing is not None:
            stats.secondary = self.backing.take_stats()
        return stats
