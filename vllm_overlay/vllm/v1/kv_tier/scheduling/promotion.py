# SPDX-License-Identifier: Apache-2.0
"""Turns a prefix hit over both tiers into cached device blocks, now or later."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_tier.scheduling.admission import Admission
from vllm.v1.kv_tier.scheduling.backing import Backing
from vllm.v1.kv_tier.scheduling.draft import PlanDraft
from vllm.v1.kv_tier.scheduling.loading import Hole, Loader
from vllm.v1.kv_tier.scheduling.prefetches import Prefetches
from vllm.v1.kv_tier.scheduling.releasing import Releasing
from vllm.v1.kv_tier.scheduling.slots import HostSlot
from vllm.v1.kv_tier.scheduling.tuning import SchedulingTuning
from vllm.v1.kv_tier.scheduling.waiting import Admit, WaitingRoom
from vllm.v1.kv_tier.scheduling.writing import Writer
from vllm.v1.kv_tier.stats import KVTierStats
from vllm.v1.request import Request


@dataclass
class Hit:
    """A prefix hit over both tiers, taken apart."""

    groups: list[list[KVCacheBlock]]
    """Blocks by group, without those that attention windows have passed."""
    blocks: list[KVCacheBlock]
    """Blocks on the device."""
    holes: list[Hole]
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
    max_holes: int | None = None,
) -> Hit:
    """Take a hit of `num_tokens` apart.

    Args:
        managers: The `SingleTypeKVCacheManager` of each group.
        computed_blocks: Hit blocks per group, as found by upstream.
        num_tokens: Tokens of the hit.
        null_block: Stands for a block that is not needed.
        max_holes: Stop after this many host slots of a group. None: no limit.

    """
    hit = Hit([list(group) for group in computed_blocks], [], [])
    for manager, group in zip(managers, hit.groups, strict=True):
        # Upstream drops the blocks that the attention window has passed.
        first = manager.get_num_skipped_tokens(num_tokens) // manager.block_size
        end = None if max_holes is None else len(hit.holes) + max_holes
        for i, block in enumerate(group):
            if len(hit.holes) == end:
                break
            if type(block) is HostSlot:
                if i < first:
                    group[i] = null_block
                else:
                    hit.holes.append((group, i, block))
            elif i >= first and not block.is_null:
                hit.blocks.append(block)
    return hit


class Promotion:
    """Admits requests with a prefix hit, and loads what only the host has of it.

    Args:
        pool: The block pool.
        draft: The plan that is being built.
        loader: Loads blocks.
        waiting: Decides which requests wait.
        prefetches: Blocks that are being prefetched.
        writer: Notified of hits.
        admission: Counts uses; None if it is not needed.
        backing: The secondary tiers, notified of hits.
        releasing: Notified of hits.
        stats: Counts hits.
        tuning: When prefetches are worth it.

    """

    def __init__(
        self,
        pool: BlockPool,
        draft: PlanDraft,
        loader: Loader,
        waiting: WaitingRoom,
        prefetches: Prefetches,
        writer: Writer,
        admission: Admission | None,
        backing: Backing | None,
        releasing: Releasing,
        stats: KVTierStats,
        tuning: SchedulingTuning,
    ) -> None:
        self._pool = pool
        self._draft = draft
        self._loader = loader
        self._waiting = waiting
        self._prefetches = prefetches
        self._writer = writer
        self._admission = admission
        self._backing = backing
        self._releasing = releasing
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
            self._draft.connector_writes()
        if self._copies_too_early(managers, computed_blocks, num_local_tokens):
            return None
        if not self._prefetches and not has_slots(computed_blocks):
            self._count_uses(request, managers, computed_blocks)
            self._stats.record_hit(request, num_local_tokens, 0)
            return computed_blocks
        hit = take_apart(
            managers,
            computed_blocks,
            num_local_tokens + num_external_tokens,
            self._pool.null_block,
        )
        if not self._is_admitted_now(request, hit, num_new_tokens, has_scheduled_reqs):
            return None
        num_host_tokens = self._num_host_tokens(managers, hit)
        self._waiting.admitted(request)
        last_prefetch = self._waiting.last_prefetch(hit.blocks)
        if hit.holes:
            self._loader.load(hit.holes, hit.blocks, prefetch=False)
        # The forward pass waits for the plan that loads them.
        self._draft.uses_prefetches(last_prefetch)
        self._prefetches.claim(hit.blocks)
        self._count_uses(request, managers, hit.groups)
        self._stats.record_hit(request, num_local_tokens, num_host_tokens)
        return tuple(hit.groups)

    def _is_admitted_now(
        self, request: Request, hit: Hit, num_new_tokens: int, among_others: bool
    ) -> bool:
        """Whether `request` joins the step. If not, its loads may begin."""
        decision = self._waiting.decide(
            request,
            hit.blocks,
            len(hit.holes),
            num_new_tokens,
            self._loader.num_free(hit.blocks),
            among_others,
        )
        self.lacked_blocks = decision.admit is Admit.WITHOUT_ROOM
        if decision.admit is not Admit.LATER:
            return decision.admit is Admit.NOW
        if num_prefetch := decision.num_prefetch:
            holes = hit.holes[:num_prefetch]
            self._loader.load(holes, hit.blocks, prefetch=True)
        self._waiting.begin_wait(
            request,
            hit.blocks,
            len(hit.holes) - num_prefetch,
            num_new_tokens,
            self._draft.seq if num_prefetch else 0,
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
        draft = self._draft
        if draft.loads or draft.prefetches or self._waiting.num_waited_for():
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
        num_loads = min(len(hit.holes), room)
        if num_loads >= min(len(hit.holes), self._min_prefetch) > 0:
            self._loader.load(hit.holes[:num_loads], hit.blocks, prefetch=True)

    def _room_to_prefetch(self, hits: Sequence[KVCacheBlock]) -> int:
        num_free = self._loader.num_free(hits)
        return num_free - self._prefetches.num_kept(hits) - self._waiting.num_spare

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
        draft = self._draft
        for manager, group in zip(managers, computed_blocks, strict=True):
            if not group or num_local_tokens % manager.block_size == 0:
                continue
            tail = group[-1]
            if type(tail) is not HostSlot and not (
                draft.is_computed(tail) or draft.is_loaded(tail)
            ):
                return True
        return False

    def _num_host_tokens(self, managers: Sequence[Any], hit: Hit) -> int:
        """Tokens of a hit in slots, or in blocks that were prefetched for it."""
        unclaimed = self._prefetches.unclaimed
        return max(
            manager.block_size
            * sum(type(b) is HostSlot or b.block_id in unclaimed for b in group)
            for manager, group in zip(managers, hit.groups, strict=True)
        )

    def _count_uses(
        self,
        request: Request,
        managers: Sequence[Any],
        groups: Sequence[Sequence[KVCacheBlock]],
    ) -> None:
        """Record that `request` is admitted with the hit `groups`."""
        self._releasing.hit(request, groups, managers)
        if self._admission is None and self._backing is None:
            return
        for group in groups:
            keys = [key for block in group if (key := block.block_hash) is not None]
            if self._admission is not None:
                self._admission.hit(keys)
                self._writer.used(b for b in group if b.block_hash is not None)
            if self._backing is not None:
                self._backing.hit(keys)
