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
from vllm.v1.kv_tier.eviction.base import EvictionPolicy
from vllm.v1.kv_tier.hints.retention import RetentionManager
from vllm.v1.kv_tier.hints.tracker import ConversationTracker
from vllm.v1.kv_tier.layout import KVTierLayout
from vllm.v1.kv_tier.plan import StepPlan, StepReport
from vllm.v1.kv_tier.scheduler.admission import make_admission
from vllm.v1.kv_tier.scheduler.costs import Costs, LoadBreaker
from vllm.v1.kv_tier.scheduler.free_blocks import FreeBlocks, LostBlocks
from vllm.v1.kv_tier.scheduler.host_size import make_host
from vllm.v1.kv_tier.scheduler.host_writer import (
    Cleaner,
    HostWriter,
    StoreTiming,
    WriteThrough,
)
from vllm.v1.kv_tier.scheduler.jumps import Jumps, needs_only_kv
from vllm.v1.kv_tier.scheduler.kv_groups import HitListener
from vllm.v1.kv_tier.scheduler.load_admission import LoadAdmission, Prefetches
from vllm.v1.kv_tier.scheduler.plan_builder import StepPlanBuilder, name_groups
from vllm.v1.kv_tier.scheduler.promotion import Loader, Promotion
from vllm.v1.kv_tier.scheduler.secondary.fetches import before_secondary
from vllm.v1.kv_tier.scheduler.secondary.manager import make_secondary_manager
from vllm.v1.kv_tier.scheduler.slots import SlotTable
from vllm.v1.kv_tier.scheduler.superseded import make_superseded
from vllm.v1.kv_tier.stats import KVTierStats
from vllm.v1.request import Request

Finder = Callable[[BlockHashWithGroupId], KVCacheBlock | None]
"""Finds what stands in a hit for a block that neither the device nor the host has."""

_FEW = 3
"""New blocks that are evicted one by one."""


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
        self._publishes_evictions = (
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
        self._builder = builder = StepPlanBuilder(self.num_gpu_blocks)
        self.host, self.host_size = make_host(layout, builder, self._make_table)
        self.free = FreeBlocks(self)
        # As many keys as both tiers hold, plus as many evicted ones.
        num_keys = 2 * (self.num_gpu_blocks + layout.num_slots)
        of_admission = self.num_gpu_blocks, num_keys, self.host.has_room
        self.admission = make_admission(layout, *of_admission)
        self.host_writer = writer = self._make_writer(
            self, self.host, builder, self.admission, stats
        )
        self.prefetches = prefetches = Prefetches(self.costs, tuning)
        common = self, self.free, self.host
        timing: StoreTiming = (
            WriteThrough(builder, writer)
            if config.debug.store_policy == "write_through"
            else Cleaner(*common, builder, writer, self.costs, tuning)
        )
        self.store_timing = timing
        self._write_through = timing if isinstance(timing, WriteThrough) else None
        quotas = config.quotas or {}
        self.retention = retention = RetentionManager(
            *common, prefetches, self.admission, self.costs, num_keys, quotas, stats
        )
        self.conversations = ConversationTracker(
            *common, writer, prefetches, retention, num_keys, stats
        )
        spare = int(tuning.spare * self.num_gpu_blocks)
        waits = LoadAdmission(costs, prefetches, builder, tuning, spare)
        self.load_admission = waits
        loader = Loader(*common, builder, prefetches, self.costs, timing, stats, tuning)
        self.secondary = make_secondary_manager(layout, self, self.host, self.costs)
        self._find_elsewhere = _finder(self)
        self._promotion = Promotion(
            self, builder, loader, waits, prefetches, stats, tuning
        )
        self.superseded = make_superseded(layout, self, self.secondary, stats)
        self._promotion.listeners += _hit_listeners(self)
        self._jumps = self._make_jumps(loader)
        self.adapter_files = layout.adapter_files
        self._can_jump, self._copies_groups = layout.can_jump, layout.copies_groups
        self._breaker = LoadBreaker(tuning)
        self.lost = LostBlocks()
        self.void_plan = 0
        """The last plan whose forward pass used what a failed load left."""
        self._num_taken, self._serves_host = 0, True
        self._demoting = self._are_evicted = False
        # Whether the request that was looked up only waits for loads.
        self._is_deferred = False
        # Which blocks may be loaded for the request that is looked up; None for all.
        self._load_filter: Callable[[BlockHash], bool] | None = None
        # That request, if `_load_filter` is set.
        self._capped: Request | None = None

    def _make_table(
        self, layout: KVTierLayout, policy: EvictionPolicy, num_open: int
    ) -> SlotTable:
        return SlotTable(layout.num_slots, policy, num_open)

    def _make_writer(self, *args: Any) -> HostWriter:
        return HostWriter(*args)

    def _make_jumps(self, loader: Loader) -> Jumps:
        plan = self._builder, loader, self.load_admission, self.prefetches
        listeners = self._promotion.listeners
        return Jumps(self, self.host, *plan, self.costs, listeners, self._stats)

    # ------------------------------------------------------------------ a step

    def begin_step(self) -> None:
        """Start to plan a step."""
        self._builder.begin()
        self.conversations.begin_step()
        is_open = self._breaker.is_open(self.costs.clock())
        self._serves_host = not (self.costs.recompute or is_open)

    def take_plan(self, is_idle: bool = False) -> StepPlan:
        """End the step and return its plan.

        Args:
            is_idle: The step runs nothing, so there is time.

        """
        self.store_timing.record_allocated(self._num_taken)
        self._num_taken, self._capped = 0, None
        below = self.secondary
        is_read = is_idle and below is not None and below.reader.num_awaited > 0
        self.store_timing.write(is_idle, is_read)
        if is_idle and self.prefetches:
            # Left by aborted requests. Waiting for them costs nothing now.
            self._builder.wait_for_prefetches(self.prefetches.last_unused())
        plan = self._builder.finish()
        if self._copies_groups:
            name_groups(plan, self.host)
        if below is not None:
            below.finish(plan, is_idle)
        self._stats.stored_blocks += len(plan.store_slots) + len(plan.clean_slots)
        self._stats.loaded_blocks += len(plan.load_slots)
        self._stats.loaded_ahead_blocks += len(plan.ahead_slots)
        self.host.unpin_all()
        if self.host_size.is_due:
            self.host_size.end_step()
        if self.superseded is not None:
            self.superseded.end_plan()
        if self.prefetches:
            self.prefetches.forget(self._builder.prefetch_fence)
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
                if block is None and self._find_elsewhere is not None:
                    block = self._find_elsewhere(key)
                if block is None:
                    return None
                if not self._serves_host:
                    self._stats.recomputed_lookups += 1
                    return None
                if self._load_filter is not None and not self._load_filter(block_hash):
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
        """As `Promotion.promote`. Blocks in secondary tiers are fetched first.

        Returns:
            The hit, or None if the request waits.

        """
        below = self.secondary
        if below is not None and below.reader.begin_fetch(computed_blocks):
            self._is_deferred = True
            return None
        num_before = len(self._builder.prefetches)
        hit = self._promotion.promote(request, managers, computed_blocks, *others)
        self._is_deferred = hit is None and not self._promotion.lacked_blocks
        if self._capped is not None:
            self._count_loads_ahead(num_before)
        if hit is None:
            return None
        if self._capped is not None:
            self.conversations.end_loads_ahead(request)
        if below is not None:
            below.reader.end_wait(request)
        return hit

    def _count_loads_ahead(self, num_before: int) -> None:
        """Count loads ahead for the request with a cap, beyond `num_before`."""
        num_loads = len(self._builder.prefetches) - num_before
        if num_loads and self._capped is not None:
            self.conversations.count_loads_ahead(self._capped, num_loads)

    def is_loading(self, request: Request, has_scheduled_reqs: bool) -> bool:
        """Whether `request` waits for loads, or lets others go first.

        Saves the lookup of its prefix.
        """
        self._load_filter, self._capped, self._is_deferred = None, None, False
        if self.adapter_files is not None and request.lora_request is not None:
            self.adapter_files.watch(request.lora_request.lora_int_id)
        speaks = self.conversations.has_hints(request)
        if speaks:
            self.conversations.follow(request)
            if has_scheduled_reqs and self.conversations.must_wait(request):
                return True
        below = self.secondary if self._serves_host else None
        is_idle = not has_scheduled_reqs
        loadable = self.conversations.make_load_filter if speaks else None
        if below is not None:
            meets = self._may_jump(request)
            if below.reader.look_up(request, is_idle, loadable, meets):
                return True
        if has_scheduled_reqs and self.load_admission.is_loading(request):
            return True
        if speaks:
            self._load_filter = self.conversations.make_load_filter(request)
            self._capped = None if self._load_filter is None else request
        return False

    def load_ahead(
        self,
        managers: Sequence[Any],
        computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_tokens: int,
    ) -> None:
        """Begin to load the hit of a request without room, see `Promotion.prefetch`."""
        if not self._is_deferred:
            self.conversations.prewarms.record_shortage()
        below = self.secondary
        if below is not None and below.reader.begin_fetch(computed_blocks):
            computed_blocks = before_secondary(computed_blocks)
        num_before = len(self._builder.prefetches)
        self._promotion.prefetch(managers, computed_blocks, num_tokens)
        self._count_loads_ahead(num_before)

    # ------------------------------------------------------------------- jumps

    def _may_jump(self, request: Request) -> bool:
        can = self._can_jump and needs_only_kv(request)
        return can and not self.conversations.has_hints(request)

    def jump(
        self, request: Request, manager: Any, num_tokens: int, among_others: bool
    ) -> list[KVCacheBlock]:
        """Blocks that exist by now behind the front of a prefill, see `Jumps.jump`."""
        if not (self._serves_host and self._may_jump(request)):
            return []
        hit = self._jumps.jump(request, manager, num_tokens, among_others)
        below = self.secondary
        if hit and below is not None and below.reader.meetings.is_first_jump(request):
            self._stats.record_meeting(request.num_computed_tokens, request.num_tokens)
        return hit

    def take_jumped(self, request: Request, new_blocks: Any) -> Any:
        """`new_blocks`, a `KVCacheBlocks`, behind the blocks of a jump of `request`."""
        jumped = self._jumps.take_unnamed(request)
        if not jumped:
            return new_blocks
        self._builder.name_jump(request.request_id)
        first, *others = new_blocks.blocks
        return type(new_blocks)(([*jumped, *first], *others))

    def cut(
        self, request: Request, start: int, num_new_tokens: int, may_wait: bool
    ) -> int:
        """How many of `num_new_tokens` a prefill computes from `start` on, so that it
        ends where the request can jump; see `Meetings.cut`."""
        below = self.secondary
        if below is None or not below.reader.meetings:
            return num_new_tokens
        keys = self._jumps.keys(request, below.block_sizes[0])
        cut = below.reader.meetings.cut
        return cut(request, keys, start, num_new_tokens, may_wait)

    # ------------------------------------------------------------------ demote

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """As upstream, but the content of cached victims goes to host slots."""
        # A hot path: each new block of a decoding request passes here.
        prefetches, host_writer = self.prefetches, self.host_writer
        if self.retention.on_device:
            self.retention.pass_over_retained(num_blocks)
        if prefetches.unclaimed and (is_kept := prefetches.kept()):
            self.free.pass_over(num_blocks, prefetches.unclaimed.keys(), is_kept)
        self._num_taken += num_blocks
        self._demoting = True
        try:
            if num_blocks > _FEW and not self._publishes_evictions:
                self._are_evicted = host_writer.evict_first(num_blocks)
            blocks = super().get_new_blocks(num_blocks)
        finally:
            self._demoting = self._are_evicted = False
        if prefetches.unclaimed:
            prefetches.claim(blocks)
        if host_writer.released or host_writer.forbidden:
            self.conversations.record_taken(blocks)
        return blocks

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        # Upstream calls this for victims, and for content that became invalid.
        if self._are_evicted:
            return False
        if not self._demoting:
            self.host_writer.invalidate(block)
            return super()._maybe_evict_cached_block(block)
        builder, places = self._builder, self.host.places
        if builder.loads or builder.prefetches:
            builder.call_off_load(block)
        key, several = block.block_hash, self.cached_block_hashes_by_block
        if key is not None and (
            several or key not in places.parts[hash(key) % places.num_parts]
        ):
            self.host_writer.demote((block,))
        if several or self._publishes_evictions:
            return super()._maybe_evict_cached_block(block)
        # Same result for blocks of one key without listeners, in half the time.
        if key is not None:
            self.cached_block_hash_to_block.pop(key, block.block_id)
            block.reset_hash()
        # Copies that a reset dropped may still run.
        builder.overwrite(block)
        return key is not None

    def _remove_cached_block_hashes(
        self, block: KVCacheBlock
    ) -> list[BlockHashWithGroupId]:
        # Callers that remove the keys are about to overwrite the block.
        self.prefetches.claim((block,))
        self.conversations.record_taken((block,))
        self._builder.overwrite(block)
        return super()._remove_cached_block_hashes(block)

    def free_blocks(
        self, ordered_blocks: Iterable[KVCacheBlock], **kwargs: Any
    ) -> None:
        """As upstream; also remembers which steps may still use the blocks."""
        blocks = list(ordered_blocks)
        self._builder.mark_freed(blocks)
        self.conversations.record_freed(blocks)
        if self._builder.in_step:
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
        if self.conversations.is_listening:
            self.conversations.record_cached(request, blocks, *place)
        if (superseded := self.superseded) is not None and superseded.follows:
            superseded.record_call(request, blocks, *place[:2], args, kwargs)

    def cache_partial_block(
        self, request: Request, block: KVCacheBlock, *args: Any, **kwargs: Any
    ) -> Any:
        """As upstream, in releases that have it."""
        if self.conversations.is_listening:
            self.conversations.record_partial(request, block)
        return super().cache_partial_block(request, block, *args, **kwargs)

    def _insert_block_hash(
        self, key: BlockHashWithGroupId, block: KVCacheBlock, num_tokens: int | None
    ) -> None:
        cached, block_id = self.cached_block_hash_to_block, block.block_id
        # A block without a primary key has no other keys.
        if block.block_hash is None:
            block.set_block_hash(key, num_tokens)
            cached.insert(key, block)
        elif cached.contain(key, block_id):
            return
        else:
            super()._insert_block_hash(key, block, num_tokens)
            block_id = -1
        self._builder.mark_hashed(block)
        if self.admission is not None:
            self.admission.record_use(key, block_id)
        if self._write_through is not None:
            self._write_through.record_hashed(block)

    # ------------------------------------------------------------ what is void

    def reset_prefix_cache(self) -> bool:
        """As upstream; clears the host tier only if the device cache is cleared."""
        if was_reset := super().reset_prefix_cache():
            self._clear_host()
        return was_reset

    def _clear_host(self) -> None:
        self.host_writer.drop_all()
        if self.superseded is not None:
            self.superseded.forget()
        self.conversations.forget()
        self.store_timing.forget()
        if self.admission is not None:
            self.admission.clear()
        if self.secondary is not None:
            self.secondary.detach(
                "the prefix cache was cleared, maybe for other weights"
            )

    def apply_report(self, report: StepReport) -> int | None:
        """Drop content that failed copies left void.

        Returns:
            None if no load failed. Otherwise everything computed since is void: the
            caller must drop the outputs of plans up to the returned one, and let every
            running request start over.

        """
        self.costs.take_report(report)
        self._breaker.take_report(report, self.costs.clock())
        self._stats.record_report(report.failures, report.times)
        if self.secondary is not None:
            self.secondary.take_results(report.secondary)
        self.host_size.take_report(report)
        if report.lost_blocks is not None:
            self._switch_off(report.lost_blocks)
        for index, seq in report.failed_store_slots.items():
            slot = self.host.at(index)
            if slot is not None and slot.store_seq == seq:
                self.host_writer.drop(slot)
        if (failed := report.failed_load_seq) is None:
            return None
        self.void_since(failed)
        return self._builder.seq - 1

    def void_since(self, seq: int) -> None:
        """What was computed or loaded since plan `seq` is not what its keys say."""
        for block in self.blocks:
            if block.block_hash is not None and (
                self._builder.computed_by[block.block_id] >= seq
            ):
                self._maybe_evict_cached_block(block)
        for slot in self.host.changed_since(seq):
            self.host_writer.drop(slot)

    def _switch_off(self, lost_blocks: Iterable[int]) -> None:
        """Stop using host slots, since a rank copies no more.

        Args:
            lost_blocks: Device blocks that a load may still overwrite at any time.

        """
        self.host_writer.drop_all()
        if self.secondary is not None:
            self.secondary.detach("the host tier is off")
        self.host_size.close()
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

    def take_call(self, said: dict[str, Any]) -> dict[str, int]:
        """Answer a call of `conversation_api` or `host_size_api`."""
        if (num_bytes := said.get("host_bytes")) is not None:
            return self.host_size.resize(num_bytes // self.slot_bytes)
        return self.conversations.end_conversation(**said)

    # -------------------------------------------------------- events and stats

    def serve_late_subscribers(self, publisher: EventPublisher) -> None:
        """Does nothing without KV events; see `PublishingBlockPool`."""

    def take_stats(self) -> KVTierStats:
        """Stats since the last call."""
        stats = self._stats.take()
        self.host_size.report(stats)
        stats.slot_bytes = self.slot_bytes
        stats.cleaner_backlog_blocks = self.store_timing.backlog
        stats.load_seconds_per_block = self.costs.load_s
        stats.prefill_seconds_per_block = self.costs.prefill_s
        self.retention.report(stats)
        if self.secondary is not None:
            stats.secondary = self.secondary.take_stats()
        return stats


def _finder(pool: TieredBlockPool) -> Finder | None:
    return None if pool.secondary is None else pool.secondary.reader.find


def _hit_listeners(pool: TieredBlockPool) -> list[HitListener]:
    listeners: list[HitListener] = [pool.conversations]
    if pool.admission is not None:
        listeners.append(pool.admission)
        if isinstance(pool.store_timing, WriteThrough):
            # The hit may be the use from which on a block is stored.
            listeners.append(pool.store_timing)
    if pool.secondary is not None:
        listeners.append(pool.secondary)
    if pool.superseded is not None:
        listeners.append(pool.superseded)
    return listeners
