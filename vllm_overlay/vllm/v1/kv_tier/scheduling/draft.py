# SPDX-License-Identifier: Apache-2.0
"""The plan in the making: its copies, its fences, and what they are computed from.

Nothing else writes a fence. A fence names the last plan whose copies or whose forward
pass used a device block or a slot that this plan uses too; so for each device block
four numbers are kept, each the `seq` of a plan.
"""

from collections.abc import Iterable, Sequence

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.scheduling.slots import HostSlot


class PlanDraft:
    """Copies and fences of the next `StepPlan`.

    Args:
        num_blocks: Device blocks.

    """

    def __init__(self, num_blocks: int) -> None:
        self.seq = 1
        """Of the plan in the making."""
        self.in_step = False
        """Whether the scheduler plans a step now."""
        self.takes_for_loads = False
        """Whether the blocks that are taken now are for loads."""
        # Stores and loads are keyed by what they overwrite (slot, device block), so
        # that a later copy to the same place replaces the earlier one.
        self.stores: dict[int, KVCacheBlock] = {}
        self.cleans: dict[int, KVCacheBlock] = {}
        self.loads: dict[int, HostSlot] = {}
        self.prefetches: dict[int, HostSlot] = {}
        self.freed: dict[int, KVCacheBlock] = {}
        """Blocks that the step in the making freed, by id. It may still use them."""
        self.computed_by = [0] * num_blocks
        """By device block: the plan whose forward pass computes it (hashed blocks)."""
        self.used_by = [0] * num_blocks
        """The last plan whose forward pass may use it (free blocks)."""
        self.prefetch_fence = 0
        """Forward passes from now on come after the prefetches of plans up to this."""
        # The last plan that stores the block, and the last that prefetches it, until
        # somebody waits for them.
        self._stored_by = [0] * num_blocks
        self._prefetched_by = [0] * num_blocks
        self._plan = StepPlan(self.seq)

    def begin(self) -> None:
        """The scheduler begins to plan the step.

        Raises:
            RuntimeError: Nobody took the plan of the one before.

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
        """The step is complete. Returns its plan, and begins the next one."""
        plan = self._plan
        plan.store_slots = list(self.stores)
        plan.store_blocks = [block.block_id for block in self.stores.values()]
        plan.clean_slots = list(self.cleans)
        plan.clean_blocks = [block.block_id for block in self.cleans.values()]
        plan.load_blocks = list(self.loads)
        plan.load_slots = [slot.index for slot in self.loads.values()]
        plan.ahead_blocks = list(self.prefetches)
        plan.ahead_slots = [slot.index for slot in self.prefetches.values()]
        for copies in (self.stores, self.cleans, self.loads, self.prefetches):
            copies.clear()
        self.freed.clear()
        if plan.compute_after_loads > self.prefetch_fence:
            self.prefetch_fence = plan.compute_after_loads
        plan.check()
        self.in_step = False
        self.seq += 1
        self._plan = StepPlan(self.seq)
        return plan

    # -------------------------------------------------------------- device blocks

    def hashed(self, block: KVCacheBlock) -> None:
        """`block` got a key. Outside of a step upstream hashes only what earlier steps
        computed."""
        self.computed_by[block.block_id] = self.seq if self.in_step else self.seq - 1

    def is_computed(self, block: KVCacheBlock) -> bool:
        """Whether an earlier plan computes a hashed block: nothing else is stored."""
        return self.computed_by[block.block_id] < self.seq

    def free(self, blocks: Iterable[KVCacheBlock]) -> None:
        """The step in the making, or the last one, used `blocks` last."""
        used_by, last = self.used_by, self.seq - 1
        if self.in_step:
            # A copy on write may still read it.
            last += 1
            self.freed.update((b.block_id, b) for b in blocks if not b.is_null)
        for block in blocks:
            used_by[block.block_id] = last

    def prefetched_by(self, block: KVCacheBlock) -> int:
        """The last plan that prefetches `block`; 0 once somebody has waited for it."""
        return self._prefetched_by[block.block_id]

    def overwrites(self, block: KVCacheBlock) -> None:
        """Somebody is about to overwrite `block`, whatever is in it."""
        plan, block_id = self._plan, block.block_id
        if stored_by := self._stored_by[block_id]:
            if stored_by > plan.load_after_stores:
                plan.load_after_stores = stored_by
            # The forward pass waits for a load as such, if it needs it. When the load
            # is called off, the next to take the block finds the mark.
            if not self.takes_for_loads:
                if stored_by > plan.compute_after_stores:
                    plan.compute_after_stores = stored_by
                self._stored_by[block_id] = 0
        if prefetched_by := self._prefetched_by[block_id]:
            # The fence is one of forward passes; loads run beside them.
            plan.load_after_loads = max(plan.load_after_loads, prefetched_by)
            self.uses_prefetches(prefetched_by)
            self._prefetched_by[block_id] = 0

    def uses_prefetches(self, seq: int) -> None:
        """The forward pass uses blocks that plans up to `seq` prefetch."""
        plan = self._plan
        if seq > max(self.prefetch_fence, plan.compute_after_loads):
            plan.compute_after_loads = seq

    def connector_writes(self) -> None:
        """A KV connector may write to blocks of this step when it likes."""
        self._plan.connector_writes = True

    def tell_end(self) -> None:
        """Have every rank tell when all is over that plans up to this one touch."""
        self._plan.tell_end = True

    def unmap(self, first: int, end: int) -> None:
        """Have every rank give back the memory of the blocks from `first` to before
        `end`, which nothing that is under way touches, before anything of this plan."""
        self._plan.unmap_blocks = (*self._plan.unmap_blocks, (first, end))

    @property
    def unmaps(self) -> bool:
        """Whether ranks are to give memory back before anything else of this plan."""
        return bool(self._plan.unmap_blocks)

    # --------------------------------------------------------------------- copies

    def store(
        self, block: KVCacheBlock, slot: HostSlot, last_load: int, before_eviction: bool
    ) -> None:
        """Copy `block` to `slot`.

        Args:
            block: Hashed, and computed by an earlier plan.
            slot: Filled by this plan.
            last_load: Last plan that read the memory of the slot.
            before_eviction: A later plan may overwrite the block. Else this one does.

        """
        plan, block_id = self._plan, block.block_id
        self._stored_by[block_id] = self.seq
        computed = self.computed_by[block_id]
        loaded = max(last_load, self._prefetched_by[block_id])
        if before_eviction:
            self.cleans[slot.index] = block
            # Without `max`: each new block of a decoding request comes by here.
            if computed > plan.clean_after_compute:
                plan.clean_after_compute = computed
            if loaded > plan.clean_after_loads:
                plan.clean_after_loads = loaded
        else:
            self.stores[slot.index] = block
            plan.store_after_compute = max(plan.store_after_compute, computed)
            plan.store_after_loads = max(plan.store_after_loads, loaded)

    def drop_stores(self, slot: HostSlot) -> None:
        """What this plan stores in `slot` is of no use."""
        self.stores.pop(slot.index, None)
        self.cleans.pop(slot.index, None)

    def load(
        self,
        slots: Sequence[HostSlot],
        blocks: Sequence[KVCacheBlock],
        prefetch: bool,
    ) -> None:
        """Copy `slots` to `blocks`, which were taken from the free queue for it.

        Args:
            slots: Filled by this plan or earlier ones; at least one.
            blocks: As many.
            prefetch: For a request of a later step.

        """
        plan, seq, computed_by = self._plan, self.seq, self.computed_by
        queue = self.prefetches if prefetch else self.loads
        last_store, last_use = plan.load_after_stores, plan.load_after_compute
        for slot, block in zip(slots, blocks, strict=True):
            block_id = block.block_id
            queue[block_id] = slot
            computed_by[block_id] = seq
            if slot.store_seq > last_store:
                last_store = slot.store_seq
            if self.used_by[block_id] > last_use:
                last_use = self.used_by[block_id]
            if prefetch:
                self._prefetched_by[block_id] = seq
        plan.load_after_stores, plan.load_after_compute = last_store, last_use

    def is_loaded(self, block: KVCacheBlock) -> bool:
        """Whether this plan loads `block`."""
        return block.block_id in self.loads or block.block_id in self.prefetches

    def call_off_load(self, block: KVCacheBlock) -> None:
        """A load into `block`, queued for a request that was preempted since, must not
        overwrite what comes next."""
        self.loads.pop(block.block_id, None)
        if self.prefetches.pop(block.block_id, None) is not None:
            self._prefetched_by[block.block_id] = 0
