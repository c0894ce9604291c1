# SPDX-License-Identifier: Apache-2.0
"""Turns a prefix hit over both tiers into cached device blocks, now or later."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_tier.scheduler.costs import Costs
from vllm.v1.kv_tier.scheduler.free_blocks import FreeBlocks
from vllm.v1.kv_tier.scheduler.host_writer import StoreTiming
from vllm.v1.kv_tier.scheduler.kv_groups import HitListener, UsedBlocks
from vllm.v1.kv_tier.scheduler.load_admission import Admit, LoadAdmission, Prefetches
from vllm.v1.kv_tier.scheduler.plan_builder import StepPlanBuilder
from vllm.v1.kv_tier.scheduler.slots import HostSlot, SlotTable
from vllm.v1.kv_tier.stats import KVTierStats
from vllm.v1.kv_tier.tuning import SchedulingTuning
from vllm.v1.request import Request

LoadTarget = tuple[list[KVCacheBlock], int, HostSlot]
"""A block of a hit that only the host has: the list of its group's blocks, its index
there, and the slot. A plain tuple, since a long prefix has thousands, which are looked
at in every step in which it waits."""


class Loader:
    """Loads slots into device blocks.

    Args:
        pool: The block pool.
        free: Its free queue.
        table: The slot table.
        builder: The plan that is being built.
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
        builder: StepPlanBuilder,
        prefetches: Prefetches,
        costs: Costs,
        writer: StoreTiming,
        stats: KVTierStats,
        tuning: SchedulingTuning,
    ) -> None:
        self._pool = pool
        self._free = free
        self._table = table
        self._builder = builder
        self._prefetches = prefetches
        self._costs = costs
        self._timing = writer
        self._stats = stats
        self._num_recent = tuning.num_recent

    def num_free(self, hits: Iterable[KVCacheBlock]) -> int:
        """Number of blocks that can be loaded now.

        Excludes `hits`, and blocks that this step has freed and still uses.
        """
        kept = {block.block_id for block in hits if block.ref_cnt == 0}
        kept.update(b.block_id for b in self._builder.freed.values() if b.ref_cnt == 0)
        return self._pool.get_num_free_blocks() - len(kept)

    def load(
        self,
        targets: Sequence[LoadTarget],
        hits: Sequence[KVCacheBlock],
        prefetch: bool,
    ) -> None:
        """Fill `targets` with device blocks whose loads are queued.

        The new blocks are free and hashed, like any evictable hit.

        Args:
            targets: At least one, and at most `num_free`.
            hits: Device blocks of the same hit.
            prefetch: For a request of a later step.

        """
        builder = self._builder
        # Allocating blocks evicts others, which must not be blocks or slots of this
        # hit.
        self._free.hold(hits)
        slots = [slot for _, _, slot in targets]
        self._table.pin(slots)
        num_stores = -len(builder.stores)
        blocks = self._take_blocks(len(targets))
        num_stores += len(builder.stores)
        self._timing.record_allocated_for_loads(len(targets))
        self._stats.promoted_blocks += len(targets)
        builder.load(slots, blocks, prefetch)
        insert = self._pool.cached_block_hash_to_block.insert
        for (group, i, slot), block in zip(targets, blocks):
            group[i] = block
            # As in `_insert_block_hash` for a block without a key.
            key, *others = slot.keys
            block.set_block_hash(key, slot.num_tokens)
            insert(key, block)
            if others:
                for key in others:
                    BlockPool._insert_block_hash(self._pool, key, block, None)
        self._table.mark_loaded(slots, builder.seq)
        load = self._costs.queue(builder.seq, len(targets), num_stores, prefetch)
        if prefetch:
            self._prefetches.add(load, blocks)
        self._free.release(hits)
        # As `release`, since nobody else uses them yet.
        for block in blocks:
            block.ref_cnt = 0
        self._free.append(blocks)

    def _take_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Allocate blocks that this step does not use."""
        builder, free = self._builder, self._free
        in_flight = builder.seq - 1
        set_aside = [block for block in builder.freed.values() if block.ref_cnt == 0]
        free.remove(set_aside)
        # Loads into these would wait for the step in flight. Upstream reuses blocks
        # without keys first.
        recent = [
            block
            for block in free.first(self._num_recent)
            if builder.used_by[block.block_id] == in_flight
        ]
        if num_blocks + len(recent) <= self._pool.get_num_free_blocks():
            free.remove(recent)
            set_aside += recent
        builder.takes_for_loads = True
        try:
            blocks = self._pool.get_new_blocks(num_blocks)
        finally:
            builder.takes_for_loads = False
        free.append(set_aside)
        return blocks


@dataclass
class Hit:
    """A prefix hit over both tiers, taken apart."""

    groups: list[list[KVCacheBlock]]
    """Blocks by group, without those that attention windows have passed."""
    blocks: list[KVCacheBlock]
    """Blocks on the device."""
    targets: list[LoadTarget]
    """Blocks that only the host has, to be filled by `Loader.load`."""


def has_slots(computed_blocks: Sequence[Sequence[KVCacheBlock]]) -> bool:
    """Whether a hit, by group, has host slots."""
    # A hot path: every block of every hit.
    return any(HostSlot in map(type, group) for group in computed_blocks)


def take_apart(
    managers: Sequence[Any],
    computed_blocks: Sequence[Sequence[KVCacheBlock]],
    num_tokens: int,
    null_block: KVCacheBlock,
    max_targets: int | None = None,
) -> Hit:
    """Take a hit of `num_tokens` apart.

    Args:
        managers: The `SingleTypeKVCacheManager` of each group.
        computed_blocks: Hit blocks per group, as found by upstream.
        num_tokens: Tokens of the hit.
        null_block: Stands for a block that is not needed.
        max_targets: Stop after this many host slots of a group. None: no limit.

    """
    hit = Hit([list(group) for group in computed_blocks], [], [])
    for manager, group in zip(managers, hit.groups, strict=True):
        # Upstream drops the blocks that the attention window has passed.
        first = manager.get_num_skipped_tokens(num_tokens) // manager.block_size
        end = None if max_targets is None else len(hit.targets) + max_targets
        # A hot path: each block of each hit with host slots.
        targets, on_device = hit.targets, hit.blocks
        for i in range(min(first, len(group))):
            if type(group[i]) is HostSlot:
                group[i] = null_block
        for i, block in enumerate(group[first:], first):
            if type(block) is HostSlot:
                targets.append((group, i, block))
                if end is not None and len(targets) == end:
                    break
            elif not block.is_null:
                on_device.append(block)
    return hit


class Promotion:
    """Admits requests with a prefix hit, and loads what only the host has of it.

    Args:
        pool: The block pool.
        builder: The plan that is being built.
        loader: Loads blocks.
        waiting: Decides which requests wait.
        prefetches: Blocks that are being prefetched.
        stats: Counts hits.
        tuning: When prefetches are worth it.

    """

    def __init__(
        self,
        pool: BlockPool,
        builder: StepPlanBuilder,
        loader: Loader,
        waiting: LoadAdmission,
        prefetches: Prefetches,
        stats: KVTierStats,
        tuning: SchedulingTuning,
    ) -> None:
        self._pool = pool
        self._builder = builder
        self._loader = loader
        self._load_admission = waiting
        self._prefetches = prefetches
        self.listeners: list[HitListener] = []
        """Notified of the blocks that admitted requests use."""
        self._stats = stats
        self._min_prefetch = tuning.min_prefetch
        self._max_prefetch = max(tuning.min_prefetch, tuning.max_prefetch)
        self.lacked_blocks = False
        """Whether the last request was not admitted for lack of free device blocks."""

    def promote(
        self,
        request: Request,
        managers: Sequence[Any],
        computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_local_tokens: int,
        num_external_tokens: int,
        num_new_tokens: int,
        has_scheduled_reqs: bool,
    ) -> tuple[Sequence[KVCacheBlock], ...] | None:
        """Turn the host slots of a prefix hit into cached device blocks.

        Call it when the request will otherwise be admitted, before upstream touches the
        hit. The new blocks are free and hashed, like any evictable hit.

        Args:
            request: The request of the hit.
            managers: The `SingleTypeKVCacheManager` of each group.
            computed_blocks: Hit blocks per group, from `get_computed_blocks` in this
                step.
            num_local_tokens: Tokens of the hit.
            num_external_tokens: Tokens that a KV connector adds to it.
            num_new_tokens: Tokens that the step would compute for the request.
            has_scheduled_reqs: Whether the step has other requests, which would wait
                for the loads of this one.

        Returns:
            The hit with device (or null) blocks only. None if the request must wait for
            a later step: its loads would hold up the others for too long, and begin now
            (except those that its own step will hide); or its hit ends inside a block
            of this step; or there are too few free blocks that are not kept for others
            or in use by this step.

        """
        self.lacked_blocks = False
        if num_external_tokens:
            self._builder.allow_connector_writes()
        if self._copies_too_early(managers, computed_blocks, num_local_tokens):
            return None
        if not self._prefetches and not has_slots(computed_blocks):
            self._notify(request, managers, computed_blocks)
            self._stats.record_hit(request, num_local_tokens, 0)
            return computed_blocks
        hit = take_apart(
            managers,
            computed_blocks,
            num_local_tokens + num_external_tokens,
            self._pool.null_block,
        )
        if not self._admit(request, hit, num_new_tokens, has_scheduled_reqs):
            return None
        num_host_tokens = self._num_host_tokens(managers, hit)
        self._load_admission.end_wait(request)
        last_prefetch = self._load_admission.last_prefetch(hit.blocks)
        if hit.targets:
            self._loader.load(hit.targets, hit.blocks, prefetch=False)
        # The forward pass waits for the plan that loads them.
        self._builder.wait_for_prefetches(last_prefetch)
        self._prefetches.claim(hit.blocks)
        self._notify(request, managers, hit.groups)
        self._stats.record_hit(request, num_local_tokens, num_host_tokens)
        return tuple(hit.groups)

    def _admit(
        self, request: Request, hit: Hit, num_new_tokens: int, among_others: bool
    ) -> bool:
        """Whether `request` joins the step. If not, its loads may begin."""
        decision = self._load_admission.decide(
            request,
            hit.blocks,
            len(hit.targets),
            num_new_tokens,
            self._loader.num_free(hit.blocks),
            among_others,
        )
        self.lacked_blocks = decision.admit is Admit.WITHOUT_ROOM
        if decision.admit is not Admit.LATER:
            return decision.admit is Admit.NOW
        if num_prefetch := decision.num_prefetch:
            targets = hit.targets[:num_prefetch]
            self._loader.load(targets, hit.blocks, prefetch=True)
        self._load_admission.begin_wait(
            request,
            hit.blocks,
            len(hit.targets) - num_prefetch,
            num_new_tokens,
            self._builder.seq if num_prefetch else 0,
            decision.is_part,
        )
        self._stats.deferred_requests += 1
        return False

    def prefetch(
        self,
        managers: Sequence[Any],
        computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_tokens: int,
    ) -> None:
        """Begin to load the hit of a request that lacks blocks, as far as they go.

        Args:
            managers: As in `promote`.
            computed_blocks: As in `promote`.
            num_tokens: Tokens of the hit.

        """
        # A request that can run soon would wait for all loads of this plan, and so for
        # loads that share it. Nor should these share the link with loads that this step
        # waits for. The next step has time.
        builder = self._builder
        if builder.loads or builder.prefetches or self._load_admission.num_waited_for():
            return
        if self._room_to_prefetch(()) < self._min_prefetch:
            return
        # Look at no more of a long prompt than this plan may load, since others wait.
        hit = take_apart(
            managers,
            computed_blocks,
            num_tokens,
            self._pool.null_block,
            self._max_prefetch,
        )
        room = min(self._room_to_prefetch(hit.blocks), self._max_prefetch)
        num_loads = min(len(hit.targets), room)
        if num_loads >= min(len(hit.targets), self._min_prefetch) > 0:
            self._loader.load(hit.targets[:num_loads], hit.blocks, prefetch=True)

    def _room_to_prefetch(self, hits: Sequence[KVCacheBlock]) -> int:
        num_free = self._loader.num_free(hits)
        return (
            num_free - self._prefetches.num_kept(hits) - self._load_admission.num_spare
        )

    def _copies_too_early(
        self,
        managers: Sequence[Any],
        computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_local_tokens: int,
    ) -> bool:
        """Whether a hit ends inside a block that this step's forward pass computes.

        Upstream copies such a block before the forward pass. Without a tier this does
        not happen: the Mamba state that such a hit needs is evicted before the
        attention blocks of the same prefix, but the host keeps it.
        """
        builder = self._builder
        for manager, group in zip(managers, computed_blocks, strict=True):
            if not group or num_local_tokens % manager.block_size == 0:
                continue
            tail = group[-1]
            if type(tail) is not HostSlot and not (
                builder.is_computed(tail) or builder.is_loaded(tail)
            ):
                return True
        return False

    def _num_host_tokens(self, managers: Sequence[Any], hit: Hit) -> int:
        """Tokens of a hit in slots, or in blocks that were prefetched for it."""
        unclaimed = self._prefetches.unclaimed
        most = 0
        for manager, group in zip(managers, hit.groups, strict=True):
            num_blocks = list(map(type, group)).count(HostSlot)
            if unclaimed:
                num_blocks += sum(block.block_id in unclaimed for block in group)
            most = max(most, manager.block_size * num_blocks)
        return most

    def _notify(
        self,
        request: Request,
        managers: Sequence[Any],
        groups: Sequence[Sequence[KVCacheBlock]],
    ) -> None:
        """Notify the listeners that `request` is admitted with the hit `groups`."""
        for manager, group in zip(managers, groups, strict=True):
            used = UsedBlocks(group, manager.block_size)
            for listener in self.listeners:
                listener.on_hit(request, used)
