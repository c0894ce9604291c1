# SPDX-License-Identifier: Apache-2.0
"""The device's free queue, whose order is that of eviction."""

from collections.abc import Callable, Iterable, Iterator, KeysView

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock


class FreeBlocks:
    """Takes blocks out of upstream's free queue, and puts them back.

    Args:
        pool: Whose queue.

    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.cursor: KVCacheBlock | None = None
        """Where the cleaner stopped. It goes on behind this block, unless that has
        left its place."""
        self.num_first = 0
        """Blocks that were put in front of the cursor and need no store, since the
        cleaner has counted them."""

    def __len__(self) -> int:
        return self._pool.free_block_queue.num_free_blocks

    def first(
        self, num_blocks: int, after: KVCacheBlock | None = None
    ) -> Iterator[KVCacheBlock]:
        """The first of the free blocks, or of those after one; next victim first."""
        queue = self._pool.free_block_queue
        block = (after or queue.fake_free_list_head).next_free_block
        for _ in range(num_blocks):
            if block is None or block is queue.fake_free_list_tail:
                return
            yield block
            block = block.next_free_block

    def hold(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Nobody may take `blocks` until `release`."""
        for block in blocks:
            if block.ref_cnt == 0:
                self._pool.free_block_queue.remove(block)
            block.ref_cnt += 1

    def release(self, blocks: Iterable[KVCacheBlock]) -> None:
        """The opposite of `hold`, or of taking blocks: the free ones come last."""
        freed = []
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                freed.append(block)
        self.append(freed)

    def remove(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Take free blocks out of the order of eviction."""
        for block in blocks:
            self._pool.free_block_queue.remove(block)

    def append(self, blocks: list[KVCacheBlock]) -> None:
        """`blocks`, taken out before, become the last victims."""
        self.leave_place(blocks)
        self._pool.free_block_queue.append_n(blocks)

    def put_first(self, blocks: list[KVCacheBlock], need_no_store: bool) -> None:
        """`blocks`, free, become the next victims, in this order."""
        self.leave_place(blocks)
        if need_no_store:
            self.num_first += len(blocks)
        for block in reversed(blocks):
            self._pool.free_block_queue.remove(block)
            self._insert_first(block)

    def insert_first(self, blocks: list[KVCacheBlock]) -> None:
        """`blocks`, which are in no queue and need no store, become the next victims,
        in this order."""
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
        """`blocks` go elsewhere: the cursor does not go with them."""
        cursor = self.cursor
        if cursor is not None and any(block is cursor for block in blocks):
            self.cursor = None

    def pass_over(
        self,
        num_blocks: int,
        candidates: KeysView[int],
        is_kept: Callable[[KVCacheBlock], bool],
        max_looks: int | None = None,
    ) -> bool:
        """Put what is kept behind the next `num_blocks` victims, if there are others.

        Args:
            num_blocks: That will be taken.
            candidates: Ids of blocks, all that are kept among them.
            is_kept: Whether others shall go before a block.
            max_looks: At so many blocks. None: at all that are free.

        Returns:
            Whether nothing that is kept is among the next victims now.

        """
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        assert block is not None, "the tail of the queue is always there"
        passed = []
        num_looks = len(self) if max_looks is None else min(max_looks, len(self))
        if num_blocks <= num_looks:
            # Each block that is taken comes by here, and mostly none is kept.
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
