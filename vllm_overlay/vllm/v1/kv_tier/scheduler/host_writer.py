# SPDX-License-Identifier: Apache-2.0
"""Stores device blocks in host slots: how, and when before their eviction.

A forward pass that overwrites a block waits for its store. So blocks are stored ahead:
by `write_through` as soon as they are computed, by `write_back` shortly before their
eviction.

**The cleaner** of `write_back` is a control loop. Its input is how many blocks steps
allocate, its output how many of the next victims are clean. At the end of each step it
continues after the last clean block in the order of eviction, and stores blocks until
its window is clean or the step has stored enough. Three limits apply:

- The window, since clean blocks take slots too: some times what hits took lately, no
  more than they may take at once (`clean_window`), and at most half of the slots. The
  other half is for blocks that the device no longer has.
- The stores of a step: twice what steps allocate, to gain on them, and a minimum, to
  start early.
- The blocks that a step looks at. A cursor after the last clean block avoids a scan of
  all clean blocks in each step.

The number of clean blocks is an estimate, since hits take blocks from the window and
the host drops slots. So all of them are counted again from time to time. A victim that
is dirty nevertheless is stored in its own step.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.kv_tier.scheduler.admission import Admission
from vllm.v1.kv_tier.scheduler.costs import Costs, clean_window
from vllm.v1.kv_tier.scheduler.free_blocks import FreeBlocks
from vllm.v1.kv_tier.scheduler.kv_groups import UsedBlocks
from vllm.v1.kv_tier.scheduler.plan_builder import StepPlanBuilder
from vllm.v1.kv_tier.scheduler.slots import HostSlot, SlotTable
from vllm.v1.kv_tier.stats import KVTierStats
from vllm.v1.kv_tier.tuning import SchedulingTuning
from vllm.v1.request import Request


class HostWriter:
    """Stores hashed device blocks in slots, in the plan that is being built.

    Args:
        pool: Knows the keys of blocks.
        table: The slot table.
        builder: The plan that is being built.
        admission: Which blocks were used often enough; None for all.
        stats: Counts refused stores.

    """

    def __init__(
        self,
        pool: BlockPool,
        table: SlotTable,
        builder: StepPlanBuilder,
        admission: Admission | None,
        stats: KVTierStats,
    ) -> None:
        self._pool = pool
        self._table = table
        self._builder = builder
        self.admission = admission
        self._stats = stats
        self.released: set[int] = set()
        """Ids of device blocks of finished conversations, which are not stored."""
        self.forbidden: set[int] = set()
        """Ids of device blocks that hints exclude from being stored."""

    def keys(self, block: KVCacheBlock) -> tuple[BlockHashWithGroupId, ...]:
        """All prefix-cache keys of `block`, the primary one first."""
        if (key := block.block_hash) is None:
            return ()
        others = self._pool.cached_block_hashes_by_block.get(block.block_id)
        return (key, *others) if others else (key,)

    def is_clean(self, block: KVCacheBlock) -> bool:
        """Whether the host has every key of a hashed block."""
        if not self._table.has(block.block_hash):  # type: ignore[arg-type]
            return False
        if not self._pool.cached_block_hashes_by_block:
            return True
        others = self._pool.cached_block_hashes_by_block.get(block.block_id, ())
        return all(map(self._table.has, others))

    @property
    def admits_all(self) -> bool:
        """Whether `is_admitted` is true for every block."""
        if self.released or self.forbidden:
            return False
        return self.admission is None or self.admission.admits_all

    @property
    def stores_together(self) -> bool:
        """Whether blocks may be stored in one call: all are admitted, however much room
        is left, and have one key each."""
        return self.admits_all and not self._pool.cached_block_hashes_by_block

    def is_admitted(self, block: KVCacheBlock) -> bool:
        """Whether a hashed block is worth a slot.

        That is: it was used often enough, is not of a finished conversation, and not
        excluded by a hint.
        """
        if block.block_id in self.released or block.block_id in self.forbidden:
            return False
        return self.admission is None or self.admission.admits(
            block.block_hash, block.block_id
        )

    def demote(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Store those of `blocks`, which the plan overwrites, that are worth it.

        They are hashed, and the host lacks their primary keys, or they have several.
        """
        # A hot path with few calls: each block of a long prefix.
        computed_by, seq = self._builder.computed_by, self._builder.seq
        together = self.stores_together
        due: dict[Any, KVCacheBlock] = {}
        for block in blocks:
            if computed_by[block.block_id] >= seq:
                continue
            if together:
                due[block.block_hash] = block
            # Another one of `blocks` may have had the same key.
            elif self.is_clean(block):
                continue
            elif self.is_admitted(block):
                self._store_victims({block.block_hash: block})
            else:
                self._stats.passed_over_blocks += 1
        self._store_victims(due)

    def _store_victims(self, due: dict[Any, KVCacheBlock]) -> None:
        if due:
            num_stored = self.store([*due.values()], before_eviction=False)
            self._stats.dropped_blocks += len(due) - num_stored

    def store(self, blocks: Sequence[KVCacheBlock], before_eviction: bool) -> int:
        """Store `blocks` in slots in this plan, as far as there is room.

        Args:
            blocks: Hashed, computed by earlier plans, and not clean. With different
                keys, and either one of them each, or one block.
            before_eviction: A later plan may overwrite them; otherwise this one does.

        Returns:
            How many are stored: the first ones.

        """
        table, builder = self._table, self._builder
        keys: list[Any] = [block.block_hash for block in blocks]
        num_tokens = [block.block_hash_num_tokens for block in blocks]
        if self._pool.cached_block_hashes_by_block and (
            len(several := self.keys(blocks[0])) > 1
        ):
            if not self._drop_stale(several):
                self._stats.refused_pinned += 1
                return 0
            index = table.insert(several, num_tokens[0], builder.seq)
            indices = [] if index is None else [index]
        else:
            indices = table.insert_all(keys, num_tokens, builder.seq)
        if indices:
            last_load = table.last_load(indices)
            builder.store(blocks[: len(indices)], indices, last_load, before_eviction)
        self._stats.refused_no_slot += len(blocks) - len(indices)
        return len(indices)

    def evict_first(self, num_blocks: int) -> bool:
        """Evict the content of the next victims, if all blocks have one key.

        As the pool does for each of them in `_maybe_evict_cached_block`, in less time.
        """
        if self._pool.cached_block_hashes_by_block or (
            num_blocks > self._pool.get_num_free_blocks()
        ):
            return False
        builder, pop = self._builder, self._pool.cached_block_hash_to_block.pop
        parts, num_parts = self._table.places.parts, self._table.places.num_parts
        calls_off = builder.loads or builder.prefetches
        blocks: list[KVCacheBlock] = []
        dirty: list[KVCacheBlock] = []
        block: Any = self._pool.free_block_queue.fake_free_list_head
        for _ in range(num_blocks):
            block = block.next_free_block
            blocks.append(block)
            if calls_off:
                builder.call_off_load(block)
            key = block.block_hash
            if key is None:
                continue
            if key not in parts[hash(key) % num_parts]:
                dirty.append(block)
            else:
                pop(key, block.block_id)
                block.reset_hash()
        if dirty:
            self.demote(dirty)
            for block in dirty:
                pop(block.block_hash, block.block_id)
                block.reset_hash()
        # Also of blocks without a key: copies that a reset dropped may still run.
        builder.overwrite_all(blocks)
        return True

    def _drop_stale(self, keys: Iterable[BlockHashWithGroupId]) -> bool:
        """Remove slots with some of `keys`, since they may lack bytes of others.

        Returns:
            False if the plan uses one of them.

        """
        for key in keys:
            stale = self._table.get(key)
            if stale is not None:
                if self._table.is_pinned(stale):
                    return False
                self._table.remove(stale)
        return True

    def invalidate(self, block: KVCacheBlock) -> None:
        """Drop the host's copy of `block`, whose content is void."""
        for key in self.keys(block):
            slot = self._table.get(key)
            if slot is not None:
                self.drop(slot)

    def drop(self, slot: HostSlot) -> None:
        """Drop `slot`, and this plan's store to it."""
        self._builder.drop_stores(slot)
        self._table.remove(slot)

    def drop_all(self) -> None:
        """Drop every slot."""
        for slot in self._table.filled_slots():
            self.drop(slot)


class StoreTiming(Protocol):
    """Stores blocks before their eviction."""

    def record_allocated(self, num_blocks: int) -> None:
        """Record that this step allocates blocks to compute."""

    def record_allocated_for_loads(self, num_blocks: int) -> None:
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
        builder: The plan that is being built.
        host_writer: Stores blocks.

    """

    def __init__(self, builder: StepPlanBuilder, host_writer: HostWriter) -> None:
        self._builder = builder
        self._host_writer = host_writer
        # Blocks that were hashed or hit since the last `write`.
        self._fresh: list[KVCacheBlock] = []

    def record_hashed(self, block: KVCacheBlock) -> None:
        """Record that `block` got a key."""
        self._fresh.append(block)

    def on_hit(self, request: Request, used: UsedBlocks) -> None:
        """A request uses blocks, which may be admitted to the host now."""
        self._fresh.extend(b for b in used.blocks if b.block_hash is not None)

    def record_allocated(self, num_blocks: int) -> None:
        pass

    def record_allocated_for_loads(self, num_blocks: int) -> None:
        pass

    def write(self, is_idle: bool, is_read: bool) -> None:
        fresh, self._fresh = self._fresh, []
        host_writer, builder = self._host_writer, self._builder
        seq, computed_by = builder.seq, builder.computed_by
        together = host_writer.stores_together
        due: dict[Any, KVCacheBlock] = {}
        for block in fresh:
            if not (together or host_writer.is_admitted(block)):
                continue
            # Each block passes twice, first in the step that hashed it.
            if computed_by[block.block_id] >= seq:
                self._fresh.append(block)
            elif block.block_hash is not None and not host_writer.is_clean(block):
                due[block.block_hash] = block
                if not together:
                    host_writer.store([*due.values()], before_eviction=True)
                    due.clear()
        if due:
            host_writer.store([*due.values()], before_eviction=True)

    def forget(self) -> None:
        self._fresh.clear()

    @property
    def backlog(self) -> int:
        return len(self._fresh)


class Cleaner:
    """Stores the blocks that the next steps will evict.

    Args:
        pool: The block pool.
        free: Its free queue.
        table: The slot table.
        builder: The plan that is being built.
        host_writer: Stores blocks.
        costs: Costs of loads.
        tuning: Limits.

    """

    def __init__(
        self,
        pool: BlockPool,
        free: FreeBlocks,
        table: SlotTable,
        builder: StepPlanBuilder,
        host_writer: HostWriter,
        costs: Costs,
        tuning: SchedulingTuning,
    ) -> None:
        self._pool = pool
        self._free = free
        self._table = table
        self._builder = builder
        self._host_writer = host_writer
        self._costs = costs
        self._tuning = tuning
        self._num_allocated = 0
        self._num_allocated_for_loads = 0
        self.alloc_rate = 0.0
        """Blocks that steps allocate: a decaying maximum."""
        # The same for loads. Nothing is known yet: a hit may take the whole device.
        self._load_rate = float(pool.num_gpu_blocks)
        # Estimated number of clean blocks among the next victims, and the steps for
        # which it was enough. The last of them is the cursor.
        self._num_clean = 0
        self._clean_steps = 0
        self._backlog = 0

    def record_allocated(self, num_blocks: int) -> None:
        self._num_allocated += num_blocks

    def record_allocated_for_loads(self, num_blocks: int) -> None:
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
        self._load_rate = max(
            float(self._num_allocated_for_loads),
            tuning.load_rate_decay * self._load_rate,
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
        # Not while nothing runs: an engine that steps to publish its stores in a pool
        # would never rest if each look found a block that the one before has evicted.
        if is_gone or (self._clean_steps > tuning.recheck_steps and not is_idle):
            self._num_clean = self._clean_steps = 0
            last = None
        if self._num_clean < window or is_idle:
            # Some more than it needs, so that not every step stores one.
            most = max(window, min(window + tuning.clean_batch, self._most_clean()))
            num_looks = min(most - self._num_clean, max_looks)
            last = self._clean(last, num_looks, max_stores) or last
        self._free.cursor = last or self._pool.free_block_queue.fake_free_list_head
        self._clean_steps += self._num_clean >= window
        self._backlog = max(0, min(window, len(self._free)) - self._num_clean)

    def _window(self) -> int:
        """How many of the next victims should be clean."""
        num_blocks, num_slots = self._pool.num_gpu_blocks, self._table.num_slots
        window = clean_window(num_blocks, num_slots, self._costs.load_s, self._tuning)
        window = min(window, int(self._tuning.clean_loads * self._load_rate))
        window = max(int(2 * self.alloc_rate), window)
        # The other half is for blocks that the device no longer has.
        return min(window, num_slots // 2)

    def _most_clean(self) -> int:
        """How many there may be where steps do not need them."""
        part = int(self._tuning.clean_part * self._pool.num_gpu_blocks)
        return min(part, self._table.num_slots // 2)

    def _limits(self, is_idle: bool, leaves_way: bool) -> tuple[int, int]:
        """How many blocks this step may store, and look at."""
        tuning = self._tuning
        min_stores = tuning.idle_stores if is_idle else tuning.min_stores
        max_looks = max(2 * self._num_allocated, tuning.min_looks)
        if self._builder.loads or leaves_way:
            min_stores = tuning.stores_during_loads
            max_looks = min(max_looks, tuning.looks_during_loads)
        return max(2 * self._num_allocated, min_stores), max_looks

    def _clean(
        self, after: KVCacheBlock | None, num_looks: int, max_stores: int
    ) -> KVCacheBlock | None:
        """Store the dirty ones among the next victims, up to the first that cannot be
        stored.

        Args:
            after: The block in front of them; None for the first victims.
            num_looks: Most blocks to look at.
            max_stores: Most blocks to store.

        Returns:
            The last block that is clean then. It and all before it are counted.

        """
        seq, computed_by = self._builder.seq, self._builder.computed_by
        host_writer, places = self._host_writer, self._table.places
        parts, num_parts = places.parts, places.num_parts
        have_one_key = not self._pool.cached_block_hashes_by_block
        together = host_writer.stores_together
        due: dict[BlockHashWithGroupId, KVCacheBlock] = {}
        queue = self._pool.free_block_queue
        end = queue.fake_free_list_tail
        first: Any = (after or queue.fake_free_list_head).next_free_block
        block, num_clean = first, max(num_looks, 0)
        # A hot path for each block that is about to be evicted.
        for i in range(num_looks):
            key = block.block_hash
            if key is None:
                if block is end:
                    num_clean = i
                    break
            elif not (
                key in parts[hash(key) % num_parts] or key in due
                if have_one_key
                else host_writer.is_clean(block)
            ) and (together or host_writer.is_admitted(block)):
                # Blocks that this step computes come last.
                if computed_by[block.block_id] == seq or max_stores == 0:
                    num_clean = i
                    break
                if together:
                    due[key] = block
                elif not host_writer.store([block], before_eviction=True):
                    num_clean = i
                    break
                max_stores -= 1
            block = block.next_free_block
        if due:
            stored = [*due.values()]
            num_stored = host_writer.store(stored, before_eviction=True)
            if num_stored < len(stored):
                block, num_clean = first, 0
                while block is not stored[num_stored]:
                    block, num_clean = block.next_free_block, num_clean + 1
        last = block.prev_free_block if num_clean else None
        self._num_clean += num_clean
        return last
