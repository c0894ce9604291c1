# SPDX-License-Identifier: Apache-2.0
"""Placeholders in a prefix hit for blocks in secondary tiers."""

from collections import deque
from collections.abc import Sequence
from weakref import WeakValueDictionary

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.kv_tier.scheduling.sources import Source


class StoredBlock(KVCacheBlock):
    """A block that a secondary tier has, and the placeholder for it in a prefix scan.

    Like a `HostSlot` it is never referenced, and counts as one block to allocate. But
    it has no memory, so a hit with one cannot be admitted.

    Args:
        key: Key of the block.
        num_tokens: Prefix tokens up to its end.
        source: The first tier that has it.

    """

    # Weakly referenced; the request that found it keeps it alive.
    __slots__ = ("__weakref__", "is_found", "key", "num_tokens", "source")
    block_id = -1
    ref_cnt = 0
    prev_free_block = next_free_block = None
    is_null = False

    def __init__(
        self, key: BlockHashWithGroupId, num_tokens: int, source: Source
    ) -> None:
        self.key = key
        self.num_tokens = num_tokens
        self.source = source
        self.is_found = True
        """Whether lookups find it, as long as anybody keeps it."""

    @property
    def block_hash(self) -> BlockHashWithGroupId:
        return self.key

    @property
    def block_hash_num_tokens(self) -> int:
        return self.num_tokens

    __eq__ = object.__eq__
    __hash__ = object.__hash__
    __repr__ = object.__repr__


class FoundBlocks:
    """What lookups find below the host. Nothing is kept here: who found a block keeps
    it.

    Args:
        max_taken: Of blocks that are forgotten at once, so many leave in a step: no
            fewer than a step finds, so that they do not pile up.

    """

    def __init__(self, max_taken: int) -> None:
        self._max_taken = max_taken
        self._blocks: WeakValueDictionary[BlockHashWithGroupId, StoredBlock]
        self._blocks = WeakValueDictionary()
        # Parts of what no lookup finds any more and `_blocks` still has.
        self._forgotten: deque[Sequence[StoredBlock]] = deque()

    def __len__(self) -> int:
        """Blocks, with those that are forgotten and not removed yet."""
        return len(self._blocks)

    def get(self, key: BlockHashWithGroupId) -> StoredBlock | None:
        """What stands for `key` in a prefix hit."""
        block = self._blocks.get(key)
        return block if block is not None and block.is_found else None

    def add(self, block: StoredBlock) -> StoredBlock:
        """`block` stands for its key from now on, and nothing else does."""
        self._blocks[block.key] = block
        return block

    def remove(self, block: StoredBlock) -> None:
        """Nothing stands for the key of `block` any more."""
        block.is_found = False
        self._blocks.pop(block.key, None)

    def forget(self, blocks: Sequence[StoredBlock]) -> None:
        """No lookup finds `blocks`, which do not change any more."""
        for block in blocks:
            block.is_found = False
        if blocks:
            self._forgotten.append(blocks)

    def begin_step(self) -> None:
        """Remove some of what is forgotten."""
        num_left = self._max_taken
        while self._forgotten and num_left > 0:
            blocks = self._forgotten.popleft()
            for block in blocks[:num_left]:
                if self._blocks.get(block.key) is block:
                    del self._blocks[block.key]
            if len(blocks) > num_left:
                self._forgotten.appendleft(blocks[num_left:])
            num_left -= len(blocks)

    def clear(self) -> None:
        """No lookup finds anything any more."""
        self._blocks.clear()
        self._forgotten.clear()


def before_stored(
    groups: Sequence[Sequence[KVCacheBlock]],
) -> tuple[Sequence[KVCacheBlock], ...]:
    """The part of a hit, by group, before the first block of a secondary tier."""
    cut = []
    for group in groups:
        # A hot path: every block of a long prefix.
        types = list(map(type, group))
        is_whole = StoredBlock not in types
        cut.append(group if is_whole else group[: types.index(StoredBlock)])
    return tuple(cut)
