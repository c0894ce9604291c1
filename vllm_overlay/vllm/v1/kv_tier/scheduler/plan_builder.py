# SPDX-License-Identifier: Apache-2.0
"""Builds the next plan: its copies and fences. Nothing else writes a fence.

A fence names the last plan whose copies or forward pass used a device block or slot
that this plan uses too. So four numbers, each the `seq` of a plan, are kept for each
device block.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter

from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_group_id
from vllm.v1.kv_tier.plan import HostAim, StepPlan
from vllm.v1.kv_tier.scheduler.slots import HostSlot, SlotTable, index_of

# No Python code for each block: hot paths.
block_id_of = attrgetter("block_id")
_store_seq_of = attrgetter("store_seq")


class StepPlanBuilder:
    """Copies and fences of the next `StepPlan`.

    Args:
        num_blocks: Number of device blocks.

    """

    def __init__(self, num_blocks: int) -> None:
        self.seq = 1
        """Number of the plan that is being built."""
        self.in_step = False
        """Whether the scheduler is planning a step."""
        self.takes_for_loads = False
        """Whether the blocks that are being allocated are for loads."""
        # Keyed by what they overwrite (slot, device block), so that a later copy to the
        # same place replaces an earlier one.
        self.stores: dict[int, KVCacheBlock] = {}
        self.cleans: dict[int, KVCacheBlock] = {}
        self.loads: dict[int, HostSlot] = {}
        self.prefetches: dict[int, HostSlot] = {}
        self.freed: dict[int, KVCacheBlock] = {}
        """Blocks that the current step freed, by id. It may still use them."""
        self.computed_by = [0] * num_blocks
        """By device block: the plan whose forward pass computes it (hashed blocks)."""
        self.used_by = [0] * num_blocks
        """By device block: the last plan whose forward pass may use it (free
        blocks)."""
        self.prefetch_fence = 0
        """Forward passes from now on follow the prefetches of plans up to this one."""
        # By device block: the last plan that stores it, and the last one that
        # prefetches it, until a plan waits for them.
        self._stored_by = [0] * num_blocks
        self._prefetched_by = [0] * num_blocks
        self._plan = StepPlan(self.seq)

    def begin(self) -> None:
        """Start to plan a step.

        Raises:
            RuntimeError: The plan of the previous step was not taken.

        """
        if self.in_step:
            raise RuntimeError(
                "--kv-offloading-backend core: the scheduler began a step without "
                "having sent the plan of the one before. Where it is a class of your "
                "own (--scheduler-cls), let its schedule() call super().schedule(), "
                "or remove the backend."
            )
        self.in_step = True

    def finish(self) -> StepPlan:
        """Complete the step's plan and return it. The next plan begins."""
        plan = self._plan
        plan.store_slots = list(self.stores)
        plan.store_blocks = [*map(block_id_of, self.stores.values())]
        plan.clean_slots = list(self.cleans)
        plan.clean_blocks = [*map(block_id_of, self.cleans.values())]
        plan.load_blocks = list(self.loads)
        plan.load_slots = [*map(index_of, self.loads.values())]
        plan.ahead_blocks = list(self.prefetches)
        plan.ahead_slots = [*map(index_of, self.prefetches.values())]
        for copies in (self.stores, self.cleans, self.loads, self.prefetches):
            copies.clear()
        self.freed.clear()
        if plan.compute_after_loads > self.prefetch_fence:
            self.prefetch_fence = plan.compute_after_loads
        plan.check()
        self.in_step = False
        self.seq += 1
        self._plan = StepPlan.empty(self.seq)
        return plan

    # -------------------------------------------------------------- device blocks

    def mark_hashed(self, block: KVCacheBlock) -> None:
        """Note that `block` got a key.

        Outside of a step, upstream hashes only blocks that earlier steps computed.
        """
        self.computed_by[block.block_id] = self.seq if self.in_step else self.seq - 1

    def is_computed(self, block: KVCacheBlock) -> bool:
        """Whether an earlier plan computes a hashed block.

        Only then may it be stored.
        """
        return self.computed_by[block.block_id] < self.seq

    def mark_freed(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Note that the current step, or the last one, used `blocks` last."""
        used_by, last = self.used_by, self.seq - 1
        if self.in_step:
            # A copy on write of this step may still read it.
            last += 1
            self.freed.update((b.block_id, b) for b in blocks if not b.is_null)
        for block in blocks:
            used_by[block.block_id] = last

    def prefetched_by(self, block: KVCacheBlock) -> int:
        """The last plan that prefetches `block`; 0 once a plan has waited for it."""
        return self._prefetched_by[block.block_id]

    def overwrite_all(self, blocks: Sequence[KVCacheBlock]) -> None:
        """As `overwrite` for each of `blocks`, at least one, in less time."""
        ids = [*map(block_id_of, blocks)]
        if any(map(self._prefetched_by.__getitem__, ids)):
            for block in blocks:
                self.overwrite(block)
            return
        plan, last = self._plan, max(map(self._stored_by.__getitem__, ids))
        plan.load_after_stores = max(plan.load_after_stores, last)
        if not self.takes_for_loads:
            plan.compute_after_stores = max(plan.compute_after_stores, last)
            for block_id in ids:
                self._stored_by[block_id] = 0

    def overwrite(self, block: KVCacheBlock) -> None:
        """Add the fences needed before `block` is overwritten.

        Marks remain if there is no step: the fences are then of a plan that may not
        use the block, and whose forward pass its next user does not wait for.
        """
        plan, block_id = self._plan, block.block_id
        if stored_by := self._stored_by[block_id]:
            if stored_by > plan.load_after_stores:
                plan.load_after_stores = stored_by
            # The forward pass waits for a load by other means, if it needs it. If the
            # load is cancelled, the mark remains for the next user of the block.
            if not self.takes_for_loads:
                if stored_by > plan.compute_after_stores:
                    plan.compute_after_stores = stored_by
                if self.in_step:
                    self._stored_by[block_id] = 0
        if prefetched_by := self._prefetched_by[block_id]:
            # That fence is for forward passes, and loads may run next to them.
            plan.load_after_loads = max(plan.load_after_loads, prefetched_by)
            self.wait_for_prefetches(prefetched_by)
            if self.in_step:
                self._prefetched_by[block_id] = 0

    def wait_for_prefetches(self, seq: int) -> None:
        """Fence the forward pass on prefetches of plans up to `seq`, which it uses."""
        plan = self._plan
        if seq > max(self.prefetch_fence, plan.compute_after_loads):
            plan.compute_after_loads = seq

    def allow_connector_writes(self) -> None:
        """Note that a KV connector may write to blocks of this step at any time."""
        self._plan.connector_writes = True

    def name_jump(self, request_id: str) -> None:
        """Let model runners that count computed tokens themselves take the scheduler's
        count of a request, which has changed by more than they computed."""
        self._plan.jumped.add(request_id)

    def report_end(self) -> None:
        """Let every rank report when all work of plans up to this one has ended."""
        self._plan.report_end = True

    def aim_host(self, aim: HostAim) -> None:
        """Let every rank open or close host slots.

        No copy in flight may use those that are to be closed.
        """
        self._plan.host_aim = aim

    def unmap(self, first: int, end: int) -> None:
        """Let every rank unmap blocks `first` to `end - 1` before this plan.

        No copy or forward pass in flight may use them.
        """
        self._plan.unmap_blocks = (*self._plan.unmap_blocks, (first, end))

    @property
    def unmaps(self) -> bool:
        """Whether this plan releases memory."""
        return bool(self._plan.unmap_blocks)

    # --------------------------------------------------------------------- copies

    def store(
        self,
        blocks: Sequence[KVCacheBlock],
        slots: Sequence[int],
        last_load: int,
        before_eviction: bool,
    ) -> None:
        """Copy `blocks`, at least one, to `slots`.

        Args:
            blocks: Hashed, and computed by an earlier plan.
            slots: Indices of their slots, filled by this plan.
            last_load: Last plan that read the memory of any of these.
            before_eviction: A later plan may overwrite the blocks; otherwise this one
                does.

        """
        plan, seq, stored_by = self._plan, self.seq, self._stored_by
        ids = [*map(block_id_of, blocks)]
        for block_id in ids:
            stored_by[block_id] = seq
        computed = max(map(self.computed_by.__getitem__, ids))
        loaded = max(last_load, max(map(self._prefetched_by.__getitem__, ids)))
        if before_eviction:
            self.cleans.update(zip(slots, blocks, strict=True))
            plan.clean_after_compute = max(plan.clean_after_compute, computed)
            plan.clean_after_loads = max(plan.clean_after_loads, loaded)
        else:
            self.stores.update(zip(slots, blocks, strict=True))
            plan.store_after_compute = max(plan.store_after_compute, computed)
            plan.store_after_loads = max(plan.store_after_loads, loaded)

    def drop_stores(self, slot: HostSlot) -> None:
        """Cancel this plan's stores to `slot`."""
        self.stores.pop(slot.index, None)
        self.cleans.pop(slot.index, None)

    def load(
        self,
        slots: Sequence[HostSlot],
        blocks: Sequence[KVCacheBlock],
        prefetch: bool,
    ) -> None:
        """Copy `slots` to `blocks`, which were allocated for it.

        Args:
            slots: Filled by this plan or earlier ones; at least one.
            blocks: Equally many blocks.
            prefetch: For a request of a later step.

        """
        plan, seq, computed_by = self._plan, self.seq, self.computed_by
        queue = self.prefetches if prefetch else self.loads
        last_store, last_use = plan.load_after_stores, plan.load_after_compute
        # A hot path: each loaded block.
        ids = [*map(block_id_of, blocks)]
        queue.update(zip(ids, slots, strict=True))
        for block_id in ids:
            computed_by[block_id] = seq
        last_store = max(last_store, *map(_store_seq_of, slots))
        last_use = max(last_use, *map(self.used_by.__getitem__, ids))
        if prefetch:
            for block_id in ids:
                self._prefetched_by[block_id] = seq
        plan.load_after_stores, plan.load_after_compute = last_store, last_use

    def is_loaded(self, block: KVCacheBlock) -> bool:
        """Whether this plan loads `block`."""
        return block.block_id in self.loads or block.block_id in self.prefetches

    def call_off_load(self, block: KVCacheBlock) -> None:
        """Cancel a load into `block`, whose request was preempted since."""
        self.loads.pop(block.block_id, None)
        if self.prefetches.pop(block.block_id, None) is not None:
            self._prefetched_by[block.block_id] = 0


def name_groups(plan: StepPlan, table: SlotTable) -> None:
    """Say in `plan` of which KV cache group the block in each of its slots is."""
    groups: dict[int, int] = {}
    for slots, _ in plan.pairs():
        for index in slots:
            # What was dropped since is copied whole.
            if (slot := table.at(index)) is not None:
                groups[index] = get_group_id(slot.keys[0])
    plan.groups = groups
