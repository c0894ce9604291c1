# SPDX-License-Identifier: Apache-2.0
"""The block pool that answers for device and host together.

The life of a block beyond the device:

    get_new_blocks takes a victim ── demote ──▶ store queued, key → host slot
    get_cached_block finds only the slot ─────▶ the slot stands in the hit
    allocate_slots keeps that request ─ promote ▶ device block, load queued; the
                                                  request may wait for it
    take_plan ends the step ── clean ─────────▶ next victims stored ahead

Everything a step needs moved is in its `StepPlan`. A key is registered the moment
its copy is queued, since the workers put copies and compute in order.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.kv_tier.admission import Admission
from vllm.v1.kv_tier.config import KVTierLayout
from vllm.v1.kv_tier.host_table import HostSlot, HostTable
from vllm.v1.kv_tier.load_policy import LoadPolicy
from vllm.v1.kv_tier.plan import StepPlan, StepReport
from vllm.v1.kv_tier.policy import make_policy
from vllm.v1.kv_tier.stats import KVTierStats
from vllm.v1.request import Request


def make_block_pool(kv_cache_config: Any, **kwargs: Any) -> BlockPool:
    """The pool of a `KVCacheConfig`: tiered when the engine has a host tier."""
    layout: KVTierLayout | None = kv_cache_config.kv_tier
    if layout is None:
        return BlockPool(**kwargs)
    if kwargs.get("enable_kv_cache_events"):
        from vllm.v1.kv_tier.events import PublishingBlockPool

        return PublishingBlockPool(layout, **kwargs)
    return TieredBlockPool(layout, **kwargs)


def kv_tier_of(pool: BlockPool) -> "TieredBlockPool | None":
    return pool if isinstance(pool, TieredBlockPool) else None


@dataclass
class _Ahead:
    """Loads ahead of one plan."""

    end: float
    """When they will have ended, as far as one can tell."""
    unclaimed: set[int]
    """Ids of the blocks that no request has taken yet."""


class _Wait(NamedTuple):
    """A request that waits for loads."""

    until: float
    num_waits: int
    num_blocks: int = 0
    """What it will load in its step, beside what is loaded ahead."""


# Blocks at the head of the free queue that may be in use by a step in flight.
_RECENT = 16

# How often a request may wait for loads before it is admitted with them. And how many
# may wait before the list is looked through.
_MAX_WAITS = 4
_MANY_WAITS = 1024

# Loads ahead of what cannot run yet are not worth a plan below so many blocks.
_MIN_AHEAD = 64

# Part of the device blocks that loads ahead leave to the requests that run: one
# that takes a block loaded ahead waits for the load.
_SPARE = 1 / 32

# Blocks that write_back may store in a step even when steps take fewer, in one that
# runs nothing (an answer may wait for it to end), and in one that waits for loads. And
# how many it may look at.
_MIN_STORES, _IDLE_STORES, _STORES_BESIDE_LOADS = 128, 256, 32
_MIN_LOOKS, _LOOKS_BESIDE_LOADS = 512, 128

# Part of the device blocks that write_back keeps clean. What fits the rest is never
# stored.
_CLEAN = 3 / 4

# After so many steps it looks at what is clean anew: hits took some of it, and the host
# may have dropped some.
_LOOK_ANEW = 1000

# How long blocks loaded ahead are kept for the request that waits for them. It
# may have been aborted.
_CLAIM_WITHIN_S = 1.0


Hole = tuple[list[KVCacheBlock], int, HostSlot]
"""Where a loaded block belongs: index in a list, and the slot that is there."""


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
        self._admission: Admission | None = None
        if config.store_from_use > 1:
            # What both tiers hold, and as much of what they have dropped.
            num_keys = 2 * (self.num_gpu_blocks + layout.num_slots)
            self._admission = Admission(config.store_from_use, num_keys)
        self.slot_bytes = layout.slot_bytes
        self.loads = LoadPolicy(
            layout.load_s, config.max_load_stall_s, layout.layerwise
        )
        self._tokens_per_block = layout.tokens_per_block
        # Not all releases have metrics of single blocks.
        self._tells_evictions = self.enable_kv_cache_events or (
            getattr(self, "metrics_collector", None) is not None
        )

        # The plan in the making. Stores and loads are keyed by what they overwrite
        # (slot, device block), so that a later copy to the same place replaces the
        # earlier one.
        self._plan = StepPlan(seq=1)
        self._stores: dict[int, KVCacheBlock] = {}
        self._cleans: dict[int, KVCacheBlock] = {}
        self._loads: dict[int, HostSlot] = {}
        self._loads_ahead: dict[int, HostSlot] = {}

        self._in_step = False
        self._demoting = False
        self._serves_host = True
        # Blocks freed by the step in the making, by id.
        self._freed: dict[int, KVCacheBlock] = {}
        self._deferred: Request | None = None
        # By request id.
        self._waits: dict[str, _Wait] = {}
        # Per device block: the plan whose forward pass computes it (hashed
        # blocks), the last plan that stores it, the last plan that loads it ahead,
        # and the last plan whose forward pass may use it (free blocks).
        self._computed_by = [0] * self.num_gpu_blocks
        self._stored_by = [0] * self.num_gpu_blocks
        self._ahead_by = [0] * self.num_gpu_blocks
        self._used_by = [0] * self.num_gpu_blocks
        # By plan. Forward passes after the fence need not wait for them.
        self._ahead: dict[int, _Ahead] = {}
        self._ahead_fence = 0
        # write_through: blocks hashed since the last plan.
        self._fresh: list[KVCacheBlock] = []
        # write_back: device blocks taken per step, a maximum that decays.
        self._taken = 0
        self._taken_by_loads = 0
        self._take_rate = 0.0
        # How many of the next victims were clean when last looked at, a guess since
        # then; the last of them; and in how many steps they were enough.
        self._num_clean = 0
        self._last_clean: KVCacheBlock | None = None
        self._clean_steps = 0
        self._loading = False
        self._backlog = 0
        # Blocks that nobody may have once they are free, and those that nobody has.
        self._lost: set[int] = set()
        self._withdrawn: set[int] = set()
        self._stats = KVTierStats()

    # ------------------------------------------------------------------ a step

    def begin_step(self) -> None:
        """The scheduler starts to plan a step."""
        self._in_step = True
        self._serves_host = not self.loads.recompute
        if len(self._waits) > _MANY_WAITS:
            # Some were aborted.
            limit = self.loads.clock() - _CLAIM_WITHIN_S
            self._waits = {k: w for k, w in self._waits.items() if w.until > limit}

    def take_plan(self, is_idle: bool = False) -> StepPlan:
        """End the step: its copies and fences.

        Args:
            is_idle: The step runs nothing, so there is time.

        """
        self._in_step = False
        self._deferred = None
        self._freed.clear()
        if self.write_through:
            self._store_fresh()
        else:
            self._clean_next_victims(is_idle)
        plan = self._plan
        self._plan = StepPlan(seq=plan.seq + 1)
        plan.store_slots = list(self._stores)
        plan.store_blocks = [block.block_id for block in self._stores.values()]
        plan.clean_slots = list(self._cleans)
        plan.clean_blocks = [block.block_id for block in self._cleans.values()]
        plan.load_blocks = list(self._loads)
        plan.load_slots = [slot.index for slot in self._loads.values()]
        plan.ahead_blocks = list(self._loads_ahead)
        plan.ahead_slots = [slot.index for slot in self._loads_ahead.values()]
        self._stats.stored_blocks += len(self._stores) + len(self._cleans)
        self._stats.loaded_blocks += len(self._loads)
        self._stats.loaded_ahead_blocks += len(self._loads_ahead)
        self._stores.clear()
        self._cleans.clear()
        self._loads.clear()
        self._loads_ahead.clear()
        self.host.unpin_all()
        if plan.compute_after_loads > self._ahead_fence:
            self._ahead_fence = plan.compute_after_loads
        # Their blocks wait for a request even when the loads have ended.
        over = [
            seq
            for seq, ahead in self._ahead.items()
            if seq <= self._ahead_fence and not self._are_kept(ahead)
        ]
        for seq in over:
            del self._ahead[seq]
        return plan

    # ------------------------------------------------------------------ lookup

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: list[int]
    ) -> list[KVCacheBlock] | None:
        """As upstream; a `HostSlot` stands for a block that only the host has."""
        blocks: list[KVCacheBlock] = []
        for group_id in kv_cache_group_ids:
            key = make_block_hash_with_group_id(block_hash, group_id)
            block = self.cached_block_hash_to_block.get_one_block(key)
            if block is None:
                block = self.host.get(key)
                if block is None:
                    return None
                if not self._serves_host:
                    self._stats.recomputed_lookups += 1
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
        num_new_tokens: int,
        has_scheduled_reqs: bool,
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
            num_new_tokens: Tokens that the step would compute for the request.
            has_scheduled_reqs: Whether the step has other requests, which would
                wait for the loads of this one.

        Returns:
            The hit with device (or null) blocks only, or None when the request
            must wait for a later step: the others would wait too long for its
            loads, which begin now (but for those that its own step will hide), or
            its hit ends inside a block of this step (`defers` is true for both); or
            too few free blocks can be loaded, since others wait for them or this
            step still uses them.

        """
        if num_external_tokens:
            self._plan.connector_writes = True
        if self._copies_too_early(managers, computed_blocks, num_local_tokens):
            self._deferred = request
            return None
        if not self._ahead and not any(
            type(block) is HostSlot for group in computed_blocks for block in group
        ):
            self._count_uses(computed_blocks)
            self._stats.record_hit(request, num_local_tokens, 0)
            return computed_blocks
        groups, hits, holes = self._find_holes(
            managers, computed_blocks, num_local_tokens + num_external_tokens
        )
        num_host_tokens = self._num_host_tokens(managers, groups)
        last_ahead = self._last_ahead(hits)
        hidden_s = self.loads.hidden_s(num_new_tokens, self._tokens_per_block)
        if has_scheduled_reqs and self._stalls(last_ahead, len(holes), hidden_s):
            wait = self._waits.pop(request.request_id, _Wait(0.0, 0))
            # Those who overtook it may have taken its blocks again.
            if wait.num_waits < _MAX_WAITS:
                if len(holes) > self._room_ahead(hits):
                    # It lacks blocks after all: those that others wait for.
                    self._waits[request.request_id] = wait._replace(num_blocks=0)
                    return None
                if num_ahead := self._num_ahead(len(holes), hidden_s):
                    last_ahead = self._load(holes[:num_ahead], hits, ahead=True)
                num_left = len(holes) - num_ahead
                until = self.loads.end_of(num_left) - hidden_s if num_left else 0.0
                if last_ahead:
                    until = max(until, self._ahead[last_ahead].end)
                self._waits[request.request_id] = _Wait(
                    until, wait.num_waits + 1, num_left
                )
                self._deferred = request
                self._stats.deferred_requests += 1
                return None
        if holes and len(holes) > self._room(hits):
            # Too many blocks were freed by this step, which still uses them.
            return None
        self._waits.pop(request.request_id, None)
        if holes:
            self._load(holes, hits, ahead=False)
        self._claim(hits, last_ahead)
        self._count_uses(groups)
        self._stats.record_hit(request, num_local_tokens, num_host_tokens)
        return tuple(groups)

    def defers(self, request: Request) -> bool:
        """Whether `promote` made `request` wait in this step. Those behind it need
        not: it lacks time, not blocks."""
        return self._deferred is request

    def is_loading(self, request: Request, has_scheduled_reqs: bool) -> bool:
        """Whether `request` waits for loads that are still on their way, or comes after
        one whose loads begin with this step. Saves the lookup of its prefix."""
        if not has_scheduled_reqs:
            return False
        if self._deferred is not None:
            # They have taken what was free, and the sooner they begin the better.
            return True
        if request.request_id not in self._waits:
            return False
        return self.loads.stalls(self._waits[request.request_id].until)

    def load_ahead(
        self,
        managers: Sequence[Any],
        computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_tokens: int,
    ) -> None:
        """Begin to load the hit of a request that lacks blocks, as far as they go.

        Args:
            managers: As for `promote`.
            computed_blocks: As for `promote`.
            num_tokens: Tokens of the hit.

        """
        spare = int(_SPARE * self.num_gpu_blocks)
        # A request that can run soon would wait for all loads of the plan, and with
        # those of its step for all loads before them.
        if self._loads_ahead or self._num_waited_for():
            return
        if self._room_ahead(()) - spare < _MIN_AHEAD:
            return
        _, hits, holes = self._find_holes(managers, computed_blocks, num_tokens)
        num_loads = min(len(holes), self._room_ahead(hits) - spare)
        if num_loads >= min(len(holes), _MIN_AHEAD) > 0:
            self._load(holes[:num_loads], hits, ahead=True)

    def _find_holes(
        self,
        managers: Sequence[Any],
        computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_tokens: int,
    ) -> tuple[list[list[KVCacheBlock]], list[KVCacheBlock], list[Hole]]:
        """Take a hit of `num_tokens` apart.

        Returns:
            Its blocks by group, without what attention windows have left behind;
            those of them that the device has; and where the others belong.

        """
        groups = [list(group) for group in computed_blocks]
        hits: list[KVCacheBlock] = []
        holes: list[Hole] = []
        for manager, group in zip(managers, groups, strict=True):
            # Upstream drops the head that the attention window has left behind.
            first = manager.get_num_skipped_tokens(num_tokens) // manager.block_size
            for i, block in enumerate(group):
                if type(block) is HostSlot:
                    if i < first:
                        group[i] = self.null_block
                    else:
                        holes.append((group, i, block))
                elif i >= first and not block.is_null:
                    hits.append(block)
        return groups, hits, holes

    def _load(
        self,
        holes: list[Hole],
        hits: list[KVCacheBlock],
        ahead: bool,
    ) -> int:
        """Fill `holes` with device blocks whose loads are queued. Returns the plan."""
        # Taking blocks evicts others: neither the device part of this hit nor
        # its slots may be among them.
        self._hold(hits)
        self.host.pin(slot for _, _, slot in holes)
        num_stores = -len(self._stores)
        new_blocks = self._new_blocks_to_load(len(holes))
        num_stores += len(self._stores)
        self._taken -= len(holes)
        self._taken_by_loads += len(holes)
        self._stats.promoted_blocks += len(holes)
        plan = self._plan
        queue = self._loads_ahead if ahead else self._loads
        insert, computed_by = self.cached_block_hash_to_block.insert, self._computed_by
        for (group, i, slot), block in zip(holes, new_blocks):
            group[i] = block
            queue[block.block_id] = slot
            computed_by[block.block_id] = plan.seq
            # As `_insert_block_hash` does with a block that has no key yet.
            keys = slot.keys
            block.set_block_hash(keys[0], slot.num_tokens)
            insert(keys[0], block)
            for key in keys[1:]:
                super()._insert_block_hash(key, block, None)
        self.host.mark_loaded((slot for _, _, slot in holes), plan.seq)
        plan.load_after_stores = max(
            plan.load_after_stores, *(slot.store_seq for _, _, slot in holes)
        )
        plan.load_after_compute = max(
            plan.load_after_compute, *(self._used_by[b.block_id] for b in new_blocks)
        )
        # What is stored of the victims comes first, at about the same rate.
        end = self.loads.queue(len(holes) + num_stores)
        if ahead:
            entry = self._ahead.setdefault(plan.seq, _Ahead(end, set()))
            entry.end = end
            for block in new_blocks:
                self._ahead_by[block.block_id] = plan.seq
                entry.unclaimed.add(block.block_id)
        self._release(hits)
        self._release(new_blocks)
        return plan.seq

    def _new_blocks_to_load(self, num_blocks: int) -> list[KVCacheBlock]:
        """New blocks, none of which this step uses."""
        queue, in_flight = self.free_block_queue, self._plan.seq - 1
        set_aside = [block for block in self._freed.values() if block.ref_cnt == 0]
        for block in set_aside:
            queue.remove(block)
        # Loads into these would wait for the step in flight. Upstream reuses blocks
        # without keys first.
        recent = [
            block
            for block in self._free_blocks(_RECENT)
            if self._used_by[block.block_id] == in_flight
        ]
        if num_blocks + len(recent) <= self.get_num_free_blocks():
            for block in recent:
                queue.remove(block)
            set_aside += recent
        self._loading = True
        try:
            new_blocks = self.get_new_blocks(num_blocks)
        finally:
            self._loading = False
        self._append_free(set_aside)
        return new_blocks

    def _last_ahead(self, hits: Iterable[KVCacheBlock]) -> int:
        """Latest plan, not known to have ended, that loads one of `hits` ahead."""
        if not self._ahead:
            return 0
        ahead_by = self._ahead_by
        last = max((ahead_by[block.block_id] for block in hits), default=0)
        return last if last > self._ahead_fence else 0

    def _stalls(self, last_ahead: int, num_holes: int, hidden_s: float) -> bool:
        # A step waits for loads ahead at once, and those of the plan in the making
        # have not even begun.
        if last_ahead and (
            last_ahead == self._plan.seq
            or self.loads.stalls(self._ahead[last_ahead].end)
        ):
            return True
        end = self.loads.end_of(num_holes)
        return num_holes > 0 and self.loads.stalls(end, hidden_s)

    def _num_ahead(self, num_holes: int, hidden_s: float) -> int:
        """How many of the blocks that a request lacks must come before its step."""
        num_hidden = int(hidden_s / self.loads.load_s) if self.loads.load_s else 0
        if num_holes <= num_hidden:
            return 0
        return min(num_holes, max(num_holes - num_hidden, _MIN_AHEAD))

    def _room(self, hits: Iterable[KVCacheBlock]) -> int:
        """Blocks that can be loaded now without `hits`."""
        kept = {block.block_id for block in hits if block.ref_cnt == 0}
        kept.update(b.block_id for b in self._freed.values() if b.ref_cnt == 0)
        return self.get_num_free_blocks() - len(kept)

    def _room_ahead(self, hits: Iterable[KVCacheBlock]) -> int:
        """As `_room`, and without what others wait for."""
        ids = {block.block_id for block in hits}
        return self._room(hits) - len(self._kept() - ids) - self._num_waited_for()

    def _num_waited_for(self) -> int:
        """Blocks that requests will load in the step that they wait for."""
        # Some may have been aborted.
        limit = self.loads.clock() - _CLAIM_WITHIN_S
        return sum(w.num_blocks for w in self._waits.values() if w.until > limit)

    def _claim(self, hits: Iterable[KVCacheBlock], last_ahead: int) -> None:
        """A request takes `hits`: its forward pass waits for what loads them."""
        plan = self._plan
        plan.compute_after_loads = max(plan.compute_after_loads, last_ahead)
        if self._ahead:
            for block in hits:
                self._claim_block(block)

    def _num_host_tokens(
        self, managers: Sequence[Any], groups: Sequence[Sequence[KVCacheBlock]]
    ) -> int:
        """Tokens of a hit in slots, or in blocks that were loaded ahead for it."""
        waiting: set[int] = set()
        waiting.update(*(ahead.unclaimed for ahead in self._ahead.values()))
        return max(
            manager.block_size
            * sum(type(b) is HostSlot or b.block_id in waiting for b in group)
            for manager, group in zip(managers, groups, strict=True)
        )

    def _claim_block(self, block: KVCacheBlock) -> None:
        ahead = self._ahead.get(self._ahead_by[block.block_id])
        if ahead is not None:
            ahead.unclaimed.discard(block.block_id)

    def _are_kept(self, ahead: _Ahead) -> bool:
        """Whether blocks of `ahead` still wait for the request that they are for."""
        return bool(ahead.unclaimed) and (
            ahead.end > self.loads.clock() - _CLAIM_WITHIN_S
        )

    def _kept(self) -> set[int]:
        """Ids of the blocks that wait for the request that they are for."""
        kept: set[int] = set()
        for ahead in self._ahead.values():
            if self._are_kept(ahead):
                kept |= ahead.unclaimed
        return kept

    def _pass_over_kept(self, num_blocks: int) -> None:
        """Put blocks that wait for a request behind the next `num_blocks` victims."""
        kept = self._kept()
        if not kept:
            return
        queue = self.free_block_queue
        passed = []
        for block in self._free_blocks(queue.num_free_blocks):
            if num_blocks == 0:
                break
            if block.block_id in kept:
                passed.append(block)
            else:
                num_blocks -= 1
        for block in passed:
            queue.remove(block)
        self._append_free(passed)

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
                and tail.block_id not in self._loads_ahead
            ):
                return True
        return False

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
        self._append_free(freed)

    def _append_free(self, blocks: list[KVCacheBlock]) -> None:
        self._leave_place(blocks)
        self.free_block_queue.append_n(blocks)

    def _leave_place(self, blocks: list[KVCacheBlock]) -> None:
        """`blocks` go to the end of the free queue: where the cleaner stopped is no
        place to go on from if it is among them."""
        last = self._last_clean
        if last is not None and any(block is last for block in blocks):
            self._last_clean = None

    # ------------------------------------------------------------------ demote

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """As upstream; the content of cached victims goes to host slots."""
        if self._ahead:
            self._pass_over_kept(num_blocks)
        self._taken += num_blocks
        self._demoting = True
        try:
            return super().get_new_blocks(num_blocks)
        finally:
            self._demoting = False

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        # Upstream calls this for victims and for content that turned invalid.
        if not self._demoting:
            self._invalidate(block)
            return super()._maybe_evict_cached_block(block)
        if self._loads or self._loads_ahead:
            self._call_off_load(block)
        key, several = block.block_hash, self.cached_block_hashes_by_block
        if key is not None and (several or self.host.get(key) is None):
            self._demote(block)
        if several or self._tells_evictions:
            return super()._maybe_evict_cached_block(block)
        # The same for blocks of one key while nobody listens, in half of the time.
        if key is not None:
            self.cached_block_hash_to_block.pop(key, block.block_id)
            block.reset_hash()
        # Copies of what a reset forgot may still be under way.
        self._fence_overwrite(block)
        return key is not None

    def _call_off_load(self, block: KVCacheBlock) -> None:
        """A load into `block`, queued for a request that was preempted since, must not
        overwrite what comes next."""
        self._loads.pop(block.block_id, None)
        if block.block_id in self._loads_ahead:
            del self._loads_ahead[block.block_id]
            self._claim_block(block)
            self._ahead_by[block.block_id] = 0

    def _demote(self, block: KVCacheBlock) -> None:
        is_computed = self._computed_by[block.block_id] < self._plan.seq
        if not is_computed or self._is_clean(block):
            return
        if not self._is_admitted(block):
            self._stats.passed_over_blocks += 1
        elif not self._queue_store(block):
            self._stats.dropped_blocks += 1

    def _invalidate(self, block: KVCacheBlock) -> None:
        for key in self._keys(block):
            slot = self.host.get(key)
            if slot is not None:
                self._drop_slot(slot)

    def _queue_store(self, block: KVCacheBlock, ahead: bool = False) -> bool:
        """Give `block` a slot and store it in this plan, if there is room.

        Args:
            block: Hashed, computed by an earlier plan, and not clean.
            ahead: Of its eviction. Else this plan overwrites it.

        """
        plan, block_id = self._plan, block.block_id
        keys = self._keys(block)
        if len(keys) > 1 and not self._drop_stale(keys):
            self._stats.refused_pinned += 1
            return False
        slot = self.host.insert(keys, block.block_hash_num_tokens, plan.seq)
        if slot is None:
            self._stats.refused_no_slot += 1
            return False
        self._stored_by[block_id] = plan.seq
        computed = self._computed_by[block_id]
        loaded = max(self.host.last_load(slot), self._ahead_by[block_id])
        if ahead:
            self._cleans[slot.index] = block
            # Without `max`: each new block of a decoding request comes by here.
            if computed > plan.clean_after_compute:
                plan.clean_after_compute = computed
            if loaded > plan.clean_after_loads:
                plan.clean_after_loads = loaded
        else:
            self._stores[slot.index] = block
            plan.store_after_compute = max(plan.store_after_compute, computed)
            plan.store_after_loads = max(plan.store_after_loads, loaded)
        return True

    def _drop_stale(self, keys: Iterable[BlockHashWithGroupId]) -> bool:
        """Make way for a slot with all of `keys`: one that has only some of them may
        lack the bytes of others. False: the plan uses it."""
        for key in keys:
            stale = self.host.get(key)
            if stale is not None:
                if self.host.is_pinned(stale):
                    return False
                self.host.remove(stale)
        return True

    def _remove_cached_block_hashes(
        self, block: KVCacheBlock
    ) -> list[BlockHashWithGroupId]:
        # Whoever takes the keys away is about to overwrite the block.
        self._fence_overwrite(block)
        return super()._remove_cached_block_hashes(block)

    def _fence_overwrite(self, block: KVCacheBlock) -> None:
        plan = self._plan
        if stored_by := self._stored_by[block.block_id]:
            if stored_by > plan.load_after_stores:
                plan.load_after_stores = stored_by
            # The forward pass waits for a load as such, if it needs it. When the load
            # is called off, the next to take the block finds the mark.
            if not self._loading:
                if stored_by > plan.compute_after_stores:
                    plan.compute_after_stores = stored_by
                self._stored_by[block.block_id] = 0
        if ahead_by := self._ahead_by[block.block_id]:
            # The fence is one of forward passes; loads run beside them.
            plan.load_after_loads = max(plan.load_after_loads, ahead_by)
            self._claim_block(block)
            if ahead_by > self._ahead_fence:
                plan.compute_after_loads = max(plan.compute_after_loads, ahead_by)
            self._ahead_by[block.block_id] = 0

    def free_blocks(
        self, ordered_blocks: Iterable[KVCacheBlock], **kwargs: Any
    ) -> None:
        """As upstream; remembers which steps may still use the blocks."""
        blocks = list(ordered_blocks)
        used_by, last = self._used_by, self._plan.seq - 1
        if self._in_step:
            # A copy on write may still read it.
            last += 1
            self._freed.update((b.block_id, b) for b in blocks if not b.is_null)
            self._leave_place(blocks)
        for block in blocks:
            used_by[block.block_id] = last
        super().free_blocks(blocks, **kwargs)
        if self._lost:
            self._withdraw_lost()

    # ----------------------------------------------------------------- cleaner

    def _insert_block_hash(
        self,
        block_hash_with_group_id: BlockHashWithGroupId,
        block: KVCacheBlock,
        num_tokens: int | None,
    ) -> None:
        # A block without a primary key has no other.
        if block.block_hash is not None and self.cached_block_hash_to_block.contain(
            block_hash_with_group_id, block.block_id
        ):
            return
        super()._insert_block_hash(block_hash_with_group_id, block, num_tokens)
        # Outside of a step upstream hashes only what earlier steps computed.
        seq = self._plan.seq
        self._computed_by[block.block_id] = seq if self._in_step else seq - 1
        if self._admission is not None:
            self._admission.use(block_hash_with_group_id)
        if self.write_through:
            self._fresh.append(block)

    def _is_admitted(self, block: KVCacheBlock) -> bool:
        """Whether a hashed block has been used often enough to be stored."""
        return self._admission is None or self._admission.admits(block.block_hash)

    def _count_uses(self, groups: Iterable[Iterable[KVCacheBlock]]) -> None:
        """A request that hit `groups` is admitted."""
        if self._admission is None:
            return
        for group in groups:
            for block in group:
                if block.block_hash is not None:
                    self._admission.use(block.block_hash)
                    if self.write_through:
                        self._fresh.append(block)

    def _store_fresh(self) -> None:
        """write_through: store what earlier steps filled; keep the rest."""
        fresh, self._fresh = self._fresh, []
        for block in fresh:
            if block.block_hash is None or self._is_clean(block):
                continue
            if not self._is_admitted(block):
                continue
            if self._computed_by[block.block_id] < self._plan.seq:
                self._queue_store(block, ahead=True)
            else:
                self._fresh.append(block)

    def _clean_next_victims(self, is_idle: bool) -> None:
        """write_back: store the blocks that the next steps will evict."""
        self._take_rate = max(float(self._taken), 0.9 * self._take_rate)
        # Hits come in any size, and their loads wait for the stores of victims. What
        # they take says nothing of the steps to come.
        window = min(int(_CLEAN * self.num_gpu_blocks), self.host.num_slots // 4)
        window = max(int(2 * self._take_rate), window)
        # The other half is for what the device no longer has.
        window = min(window, self.host.num_slots // 2)
        min_stores = _IDLE_STORES if is_idle else _MIN_STORES
        max_looks = max(2 * self._taken, _MIN_LOOKS)
        if self._loads:
            min_stores = _STORES_BESIDE_LOADS
            max_looks = min(max_looks, _LOOKS_BESIDE_LOADS)
        max_stores = max(2 * self._taken, min_stores)
        num_gone = self._taken + self._taken_by_loads
        self._num_clean = max(0, self._num_clean - num_gone)
        self._taken = self._taken_by_loads = 0
        last = self._last_clean
        is_gone = last is None or last.next_free_block is None
        if is_gone or self._clean_steps > _LOOK_ANEW:
            self._num_clean = self._clean_steps = 0
            last = self.free_block_queue.fake_free_list_head
        num_looks = min(window - self._num_clean, max_looks)
        seq, computed_by = self._plan.seq, self._computed_by
        has_slot, have_one_key = self.host.get, not self.cached_block_hashes_by_block
        admits_all = self._admission is None
        for block in self._free_blocks(num_looks, last):
            key = block.block_hash
            is_clean = key is None or (
                has_slot(key) is not None if have_one_key else self._is_clean(block)
            )
            if not is_clean and (admits_all or self._is_admitted(block)):
                # Those that this step computes are the last ones.
                if computed_by[block.block_id] == seq or max_stores == 0:
                    break
                if not self._queue_store(block, ahead=True):
                    break
                max_stores -= 1
            self._num_clean += 1
            last = block
        self._last_clean = last
        self._clean_steps += self._num_clean >= window
        num_free = self.free_block_queue.num_free_blocks
        self._backlog = max(0, min(window, num_free) - self._num_clean)

    def _free_blocks(
        self, num_blocks: int, after: KVCacheBlock | None = None
    ) -> Iterator[KVCacheBlock]:
        """The first of the free blocks, or of those after one; next victim first."""
        queue = self.free_block_queue
        block = (after or queue.fake_free_list_head).next_free_block
        for _ in range(num_blocks):
            if block is None or block is queue.fake_free_list_tail:
                return
            yield block
            block = block.next_free_block

    def _is_clean(self, block: KVCacheBlock) -> bool:
        """Whether the host has every key of a hashed block."""
        if self.host.get(block.block_hash) is None:  # type: ignore[arg-type]
            return False
        if not self.cached_block_hashes_by_block:
            return True
        others = self.cached_block_hashes_by_block.get(block.block_id, ())
        return all(self.host.get(key) is not None for key in others)

    def _keys(self, block: KVCacheBlock) -> tuple[BlockHashWithGroupId, ...]:
        if (key := block.block_hash) is None:
            return ()
        others = self.cached_block_hashes_by_block.get(block.block_id)
        return (key, *others) if others else (key,)

    # ------------------------------------------------------------ what is void

    def reset_prefix_cache(self) -> bool:
        """As upstream; the host tier is cleared only when the device cache is."""
        if not super().reset_prefix_cache():
            return False
        self._clear_host()
        return True

    def apply_report(self, report: StepReport) -> int | None:
        """Take back what failed copies left without content.

        Returns:
            None if no load failed. Else everything computed since is void, which is
            the output of plans up to the one returned: the caller must drop it, and
            make every running request start over.

        """
        self.loads.take(report, self._tokens_per_block)
        self._stats.record_report(report)
        if report.lost_blocks is not None:
            self._switch_off(report.lost_blocks)
        for index, seq in report.failed_store_slots.items():
            slot = self.host.at(index)
            if slot is not None and slot.store_seq == seq:
                self._drop_slot(slot)
        failed = report.failed_load_seq
        if failed is None:
            return None
        for block in self.blocks:
            if block.block_hash is not None and (
                self._computed_by[block.block_id] >= failed
            ):
                self._maybe_evict_cached_block(block)
        for slot in self.host.filled():
            if max(slot.store_seq, self.host.last_load(slot)) >= failed:
                self._drop_slot(slot)
        return self._plan.seq - 1

    def _switch_off(self, lost_blocks: Iterable[int]) -> None:
        """A rank copies no more: do without host slots from now on.

        Args:
            lost_blocks: Device blocks that a load may overwrite whenever it likes.

        """
        self.host = HostTable(0, make_policy("lru", 0))
        self._lost |= {*lost_blocks} - self._withdrawn
        self._withdraw_lost()

    def _withdraw_lost(self) -> None:
        """Make the device cache smaller by the lost blocks that are free."""
        for block in [self.blocks[i] for i in self._lost]:
            if block.ref_cnt == 0:
                self._lost.remove(block.block_id)
                self._withdrawn.add(block.block_id)
                self._maybe_evict_cached_block(block)
                self._leave_place([block])
                self.free_block_queue.remove(block)
                block.ref_cnt = 1
                self.num_gpu_blocks -= 1

    def _drop_slot(self, slot: HostSlot) -> None:
        self._stores.pop(slot.index, None)
        self._cleans.pop(slot.index, None)
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
        stats.cleaner_backlog_blocks = (
            len(self._fresh) if self.write_through else self._backlog
        )
        stats.load_seconds_per_block = self.loads.load_s
        stats.prefill_seconds_per_block = self.loads.prefill_s
        stats.evicted_slots, self.host.evictions = self.host.evictions, 0
        return stats
