# SPDX-License-Identifier: Apache-2.0
"""When blocks are stored before their eviction: the two store policies.

A forward pass that overwrites a block waits for its store. So blocks are stored ahead:
by `write_through` as soon as they are computed, by `write_back` shortly before their
eviction.

**The cleaner** of `write_back` is a control loop. Its input is how many blocks steps
allocate, its output how many of the next victims are clean. At the end of each step it
continues after the last clean block in the order of eviction, and stores blocks until
its window is clean or the step has stored enough. Three limits apply:

- The window, since clean blocks take slots too: as many as hits may take at once
  (`clean_window`), and at most half of the slots. The other half is for blocks that the
  device no longer has.
- The stores of a step: twice what steps allocate, to gain on them, and a minimum, to
  start early.
- The blocks that a step looks at. A cursor after the last clean block avoids a scan of
  all clean blocks in each step.

The number of clean blocks is an estimate, since hits take blocks from the window and
the host drops slots. So all of them are counted again from time to time. A victim that
is dirty nevertheless is stored in its own step.
"""

from collections.abc import Iterable
from typing import Protocol

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_tier.scheduling.costs import Costs
from vllm.v1.kv_tier.scheduling.draft import PlanDraft
from vllm.v1.kv_tier.scheduling.free_blocks import FreeBlocks
from vllm.v1.kv_tier.scheduling.slots import SlotTable
from vllm.v1.kv_tier.scheduling.storing import BlockStorer
from vllm.v1.kv_tier.scheduling.tuning import SchedulingTuning


class Writer(Protocol):
    """Stores blocks before their eviction."""

    def used(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Record that blocks got a key, or were hit."""

    def allocated(self, num_blocks: int) -> None:
        """Record that this step allocates blocks to compute."""

    def allocated_for_loads(self, num_blocks: int) -> None:
        """Record that some of the blocks just counted are for loads."""

    def write(self, is_idle: bool, is_read: bool) -> None:
        """Store what is due at the end of a step.

        Args:
            is_idle: The step runs nothing, so there is time.
            is_read: It runs nothing, and a request waits for reads from a secondary
                tier.

        """

    def forget(self) -> None:
        """All tiers are cleared."""

    @property
    def backlog(self) -> int:
        """Blocks that are due but not stored yet."""


class WriteThrough:
    """Stores every block in the step after the one that computes it.

    Args:
        draft: The plan that is being built.
        storer: Stores blocks.

    """

    def __init__(self, draft: PlanDraft, storer: BlockStorer) -> None:
        self._draft = draft
        self._storer = storer
        # Blocks that were hashed or hit since the last `write`.
        self._fresh: list[KVCacheBlock] = []

    def used(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._fresh.extend(blocks)

    def allocated(self, num_blocks: int) -> None:
        pass

    def allocated_for_loads(self, num_blocks: int) -> None:
        pass

    def write(self, is_idle: bool, is_read: bool) -> None:
        fresh, self._fresh = self._fresh, []
        storer, draft = self._storer, self._draft
        seq, computed_by = draft.seq, draft.computed_by
        admits_all = storer.admits_all
        for block in fresh:
            if not (admits_all or storer.is_admitted(block)):
                continue
            # Each block passes twice, first in the step that hashed it.
            if computed_by[block.block_id] >= seq:
                self._fresh.append(block)
            elif block.block_hash is not None and not storer.is_clean(block):
                storer.store(block, before_eviction=True)

    def forget(self) -> None:
        self._fresh.clear()

    @property
    def backlog(self) -> int:
        return len(self._fresh)


def clean_window(
    num_blocks: int, num_slots: int, load_s: float, tuning: SchedulingTuning
) -> int:
    """How many of the next victims should be clean when steps allocate few.

    Args:
        num_blocks: Number of device blocks.
        num_slots: Number of host slots.
        load_s: Seconds to load a block; 0 if unknown.
        tuning: Limits.

    """
    window = min(int(tuning.clean_part * num_blocks), num_slots // 4)
    return min(window, int(tuning.clean_s / load_s)) if load_s > 0 else window


class Cleaner:
    """Stores the blocks that the next steps will evict.

    Args:
        pool: The block pool.
        free: Its free queue.
        table: The slot table.
        draft: The plan that is being built.
        storer: Stores blocks.
        costs: Costs of loads.
        tuning: Limits.

    """

    def __init__(
        self,
        pool: BlockPool,
        free: FreeBlocks,
        table: SlotTable,
        draft: PlanDraft,
        storer: BlockStorer,
        costs: Costs,
        tuning: SchedulingTuning,
    ) -> None:
        self._pool = pool
        self._free = free
        self._table = table
        self._draft = draft
        self._storer = storer
        self._costs = costs
        self._tuning = tuning
        self._num_allocated = 0
        self._num_allocated_for_loads = 0
        self.alloc_rate = 0.0
        """Blocks that steps allocate: a decaying maximum."""
        # Estimated number of clean blocks among the next victims, and the steps for
        # which it was enough. The last of them is the cursor.
        self._num_clean = 0
        self._clean_steps = 0
        self._backlog = 0

    def used(self, blocks: Iterable[KVCacheBlock]) -> None:
        pass

    def allocated(self, num_blocks: int) -> None:
        self._num_allocated += num_blocks

    def allocated_for_loads(self, num_blocks: int) -> None:
        # Hits have any size, and their loads wait for the stores of victims. They say
        # nothing about the next steps.
        self._num_allocated -= num_blocks
        self._num_allocated_for_loads += num_blocks

    def forget(self) -> None:
        pass

    @property
    def backlog(self) -> int:
        return self._backlog

    def write(self, is_idle: bool, is_read: bool) -> None:
        tuning = self._tuning
        self.alloc_rate = max(
            float(self._num_allocated), tuning.alloc_rate_decay * self.alloc_rate
        )
        window = self._window()
        num_gone = self._num_allocated + self._num_allocated_for_loads
        num_first, self._free.num_first = self._free.num_first, 0
        self._num_clean = max(0, self._num_clean + num_first - num_gone)
        # Blocks that are read are loaded into the next victims, so some must be clean.
        leaves_way = is_read and self._num_clean > window // 4
        max_stores, max_looks = self._limits(is_idle, leaves_way)
        self._num_allocated = self._num_allocated_for_loads = 0
        last = self._free.cursor
        is_gone = last is None or last.next_free_block is None
        if is_gone or self._clean_steps > tuning.look_anew_steps:
            self._num_clean = self._clean_steps = 0
            last = None
        num_looks = min(window - self._num_clean, max_looks)
        last = self._clean(self._free.first(num_looks, last), max_stores) or last
        self._free.cursor = last or self._pool.free_block_queue.fake_free_list_head
        self._clean_steps += self._num_clean >= window
        self._backlog = max(0, min(window, len(self._free)) - self._num_clean)

    def _window(self) -> int:
        """How many of the next victims should be clean."""
        num_blocks, num_slots = self._pool.num_gpu_blocks, self._table.num_slots
        window = clean_window(num_blocks, num_slots, self._costs.load_s, self._tuning)
        window = max(int(2 * self.alloc_rate), window)
        # The other half is for blocks that the device no longer has.
        return min(window, num_slots // 2)

    def _limits(self, is_idle: bool, leaves_way: bool) -> tuple[int, int]:
        """How many blocks this step may store, and look at."""
        tuning = self._tuning
        min_stores = tuning.idle_stores if is_idle else tuning.min_stores
        max_looks = max(2 * self._num_allocated, tuning.min_looks)
        if self._draft.loads or leaves_way:
            min_stores = tuning.stores_beside_loads
            max_looks = min(max_looks, tuning.looks_beside_loads)
        return max(2 * self._num_allocated, min_stores), max_looks

    def _clean(
        self, blocks: Iterable[KVCacheBlock], max_stores: int
    ) -> KVCacheBlock | None:
        """Store the dirty ones among `blocks`, up to the first that cannot be stored.

        Returns:
            The last block that is clean then. It and all before it are counted.

        """
        last, num_clean = None, 0
        seq, computed_by = self._draft.seq, self._draft.computed_by
        storer, has_slot = self._storer, self._table.get
        have_one_key = not self._pool.cached_block_hashes_by_block
        admits_all = storer.admits_all
        for block in blocks:
            key = block.block_hash
            is_clean = key is None or (
                has_slot(key) is not None if have_one_key else storer.is_clean(block)
            )
            if not is_clean and (admits_all or storer.is_admitted(block)):
                # Blocks that this step computes come last.
                if computed_by[block.block_id] == seq or max_stores == 0:
                    break
                if not storer.store(block, before_eviction=True):
                    break
                max_stores -= 1
            last = block
            num_clean += 1
        self._num_clean += num_clean
        return last
