# SPDX-License-Identifier: Apache-2.0
"""When blocks are stored before their eviction: the two store policies.

A forward pass that overwrites a block waits for its store. So blocks are stored when
nobody needs the copy yet: `write_through` as soon as they are computed, `write_back`
shortly before their eviction.

**The cleaner** of `write_back` is a loop with one input, the blocks that steps take,
and one output, how many of the next victims are clean. At the end of each step it goes
on from the last clean block in the order of eviction, and stores until its window is
clean or the step has stored enough. Three things bound it. The window, since what is
clean lies on the host, too: no more than what hits may take at once (`clean_window`),
and no more than half of the slots, whose other half is for what the device no longer
has. The stores of a step: twice what steps take, so that it gains on them, and a
minimum, so that it starts early. And the blocks that it looks at, since a device full
of clean blocks must not cost a scan in each step: a cursor stands behind the last clean
block. How many are clean is a guess in between. Hits take blocks out of the window, and
the host drops slots, so from time to time it looks at all of them anew. A victim that
is dirty all the same is stored in its own step.
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
        """Blocks got a key, or were hit."""

    def allocated(self, num_blocks: int) -> None:
        """The step in the making takes so many blocks to compute them."""

    def allocated_for_loads(self, num_blocks: int) -> None:
        """So many of the blocks that were just counted are for loads."""

    def write(self, is_idle: bool, is_read: bool) -> None:
        """The step is complete: store what is due.

        Args:
            is_idle: The step runs nothing, so there is time.
            is_read: It runs nothing, and a request waits for what a tier below brings.

        """

    def forget(self) -> None:
        """Both tiers are cleared."""

    @property
    def backlog(self) -> int:
        """Blocks that are due and not stored yet."""


class WriteThrough:
    """Stores every block in the step after the one that computes it.

    Args:
        draft: The plan in the making.
        storer: Gives blocks slots.

    """

    def __init__(self, draft: PlanDraft, storer: BlockStorer) -> None:
        self._draft = draft
        self._storer = storer
        # Blocks that were hashed or hit since they were last looked at.
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
            # Each block comes by here twice, the first time in the step that hashed it.
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
    """How many of the next victims shall be clean when steps take few.

    Args:
        num_blocks: Of the device.
        num_slots: Of the host.
        load_s: Seconds to load a block; 0: unknown.
        tuning: How much of each.

    """
    window = min(int(tuning.clean_part * num_blocks), num_slots // 4)
    return min(window, int(tuning.clean_s / load_s)) if load_s > 0 else window


class Cleaner:
    """Stores the blocks that the next steps will evict.

    Args:
        pool: Whose victims.
        free: Its free blocks.
        table: The slots.
        draft: The plan in the making.
        storer: Gives blocks slots.
        costs: What a copy of a block takes.
        tuning: How much it does in a step.

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
        """Blocks that steps take, a maximum that decays."""
        # How many of the next victims were clean when last looked at, a guess since
        # then; and in how many steps they were enough. The last of them is the cursor.
        self._num_clean = 0
        self._clean_steps = 0
        self._backlog = 0

    def used(self, blocks: Iterable[KVCacheBlock]) -> None:
        pass

    def allocated(self, num_blocks: int) -> None:
        self._num_allocated += num_blocks

    def allocated_for_loads(self, num_blocks: int) -> None:
        # Hits come in any size, and their loads wait for the stores of victims. What
        # they take says nothing of the steps to come.
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
        # What is read is loaded into the next victims: some must be clean.
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
        """How many of the next victims shall be clean."""
        num_blocks, num_slots = self._pool.num_gpu_blocks, self._table.num_slots
        window = clean_window(num_blocks, num_slots, self._costs.load_s, self._tuning)
        window = max(int(2 * self.alloc_rate), window)
        # The other half is for what the device no longer has.
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
        """Store those of `blocks` that are dirty, up to the first that cannot be.

        Returns:
            The last one that is clean then. All before it are counted.

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
                # Those that this step computes are the last ones.
                if computed_by[block.block_id] == seq or max_stores == 0:
                    break
                if not storer.store(block, before_eviction=True):
                    break
                max_stores -= 1
            last = block
            num_clean += 1
        self._num_clean += num_clean
        return last
