# SPDX-License-Identifier: Apache-2.0
"""The device's free queue, whose order is that of eviction."""

from collections.abc import Callable, Iterable, Iterator, KeysView

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock


class FreeBlocks:
    """Removes blocks from upstream's free queue, and puts them back.

    Args:
        pool: The pool with the queue.

    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.cursor: KVCacheBlock | None = None
        """Last block that the cleaner looked at. It continues after it, unless the
        block has moved."""
        self.num_first = 0
        """Blocks put in front of the cursor that need no store, since the last
        count."""

    def __len__(self) -> int:
        return self._pool.free_block_queue.num_free_blocks

    def first(self, num_blocks: int) -> Iterator[KVCacheBlock]:
        """The first free blocks, next victim first."""
        queue = self._pool.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        for _ in range(num_blocks):
            if block is None or block is queue.fake_free_list_tail:
                return
            yield block
            block = block.next_free_block

    def hold(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Keep `blocks` from being allocated until `release`."""
        for block in blocks:
            if block.ref_cnt == 0:
                self._pool.free_block_queue.remove(block)
            block.ref_cnt += 1

    def release(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Undo `hold` or an allocation. Blocks that become free go to the end."""
        blocks = list(blocks)
        for block in blocks:
            block.ref_cnt -= 1
        self.append([block for block in blocks if block.ref_cnt == 0])

    def remove(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Remove free blocks from the queue."""
        for block in blocks:
            self._pool.free_block_queue.remove(block)

    def append(self, blocks: list[KVCacheBlock]) -> None:
        """Add removed `blocks` at the end, as the last victims."""
        self.leave_place(blocks)
        self._pool.free_block_queue.append_n(blocks)

    def put_first(self, blocks: list[KVCacheBlock], need_no_store: bool) -> None:
        """Move free `blocks` to the front, as the next victims in this order."""
        self.leave_place(blocks)
        if need_no_store:
            self.num_first += len(blocks)
        for block in reversed(blocks):
            self._pool.free_block_queue.remove(block)
            self._insert_first(block)

    def insert_first(self, blocks: list[KVCacheBlock]) -> None:
        """Add `blocks` that are in no queue to the front.

        They need no store, and are the next victims in this order.
        """
        self.num_first += len(blocks)
        for block in reversed(blocks):
            self._insert_first(block)

    def _insert_first(self, block: KVCacheBlock) -> None:
        queue = self._pool.free_block_queue
        head = queue.fake_free_list_head
        first = head.next_free_block
        assert first is not None, "the tail of the queue is always there"
        block.prev_free_block, block.next_free_block = head, first
        head.next_free_block = first.prev_free_block = block
        queue.num_free_blocks += 1

    def leave_place(self, blocks: list[KVCacheBlock]) -> None:
        """Forget the cursor if it is one of `blocks`, which move."""
        cursor = self.cursor
        if cursor is not None and id(cursor) in map(id, blocks):
            self.cursor = None

    def pass_over(
        self,
        num_blocks: int,
        candidates: KeysView[int],
        is_kept: Callable[[KVCacheBlock], bool],
        max_looks: int | None = None,
    ) -> bool:
        """Move kept blocks behind the next `num_blocks` victims, if there are others.

        Args:
            num_blocks: Number of blocks that will be allocated.
            candidates: Ids of blocks that include all kept ones.
            is_kept: Whether other blocks should go before this one.
            max_looks: Most blocks to look at; None for all.

        Returns:
            Whether no kept block is among the next victims now.

        """
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        assert block is not None, "the tail of the queue is always there"
        passed = []
        num_looks = len(self) if max_looks is None else min(max_looks, len(self))
        if num_blocks <= num_looks:
            # A hot path: each allocated block passes here, and usually none is kept.
            ids: list[int] = []
            one: KVCacheBlock | None = block
            for _ in range(num_blocks):
                assert one is not None, "so many are free"
                ids.append(one.block_id)
                one = one.next_free_block
            if candidates.isdisjoint(ids):
                return True
        while num_blocks and num_looks:
            if block.block_id in candidates and is_kept(block):
                passed.append(block)
            else:
                num_blocks -= 1
            num_looks -= 1
            block = block.next_free_block
            assert block is not None, "so many are free"
        if passed:
            self.remove(passed)
            self.append(passed)
        return num_blocks == 0


class LostBlocks:
    """Device blocks that a hanging copy may overwrite at any time.

    They must not be allocated again once they are free.
    """

    def __init__(self) -> None:
        self.in_use: set[int] = set()
        """Ids of lost blocks that requests still hold."""
        self.withdrawn: set[int] = set()
        """Ids of lost blocks that were removed from the pool."""

    def add(self, block_ids: Iterable[int]) -> None:
        self.in_use |= {*block_ids} - self.withdrawn

    def take_free(self, blocks: list[KVCacheBlock]) -> list[KVCacheBlock]:
        """Lost blocks that became free. The caller must remove them from the pool.

        Args:
            blocks: All device blocks, by id.

        """
        free = [blocks[i] for i in self.in_use if blocks[i].ref_cnt == 0]
        ids = {block.block_id for block in free}
        self.in_use -= ids
        self.withdrawn |= ids
        return free
