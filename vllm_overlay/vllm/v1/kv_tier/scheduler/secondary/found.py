# SPDX-License-Identifier: Apache-2.0
"""What stands for blocks of secondary tiers in prefix hits."""

from collections import deque
from collections.abc import Sequence
from weakref import WeakValueDictionary

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.kv_tier.releases import weak_reference_slots
from vllm.v1.kv_tier.scheduler.secondary.tier import Tier


class SecondaryBlock(KVCacheBlock):
    """A block that a secondary tier has, and the placeholder for it in a prefix scan.

    Like a `HostSlot` it is never referenced, and counts as one block to allocate. But
    it has no memory, so a hit with one cannot be admitted.

    Args:
        key: Key of the block.
        num_tokens: Prefix tokens up to its end.
        tier: The first tier that has it.

    """

    # Weakly referenced; the request that found it keeps it alive.
    __slots__ = (
        *weak_reference_slots(KVCacheBlock),
        "is_found",
        "key",
        "num_tokens",
        "tier",
    )
    block_id = -1
    ref_cnt = 0
    prev_free_block = next_free_block = None
    is_null = False

    def __init__(self, key: BlockHashWithGroupId, num_tokens: int, tier: Tier) -> None:
        self.key = key
        self.num_tokens = num_tokens
        self.tier = tier
        self.is_found = True
        """Whether lookups find it, as long as it is referenced."""

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
    """The blocks of secondary tiers that lookups find, by weak references.

    Args:
        max_taken: Most forgotten and released blocks that a step lets go. At least as
            many as a step finds, so that they do not pile up.

    """

    def __init__(self, max_taken: int) -> None:
        self._max_taken = max_taken
        self._blocks: WeakValueDictionary[BlockHashWithGroupId, SecondaryBlock]
        self._blocks = WeakValueDictionary()
        # Forgotten and released blocks, which may still be in `_blocks`.
        self._gone: deque[Sequence[SecondaryBlock]] = deque()

    def __len__(self) -> int:
        """Blocks, with those that are forgotten or released, and not let go yet."""
        return len(self._blocks)

    def get(self, key: BlockHashWithGroupId) -> SecondaryBlock | None:
        """What stands for `key` in a prefix hit."""
        block = self._blocks.get(key)
        return block if block is not None and block.is_found else None

    def add(self, block: SecondaryBlock) -> SecondaryBlock:
        """Let `block` be the only one for its key."""
        self._blocks[block.key] = block
        return block

    def remove(self, block: SecondaryBlock) -> None:
        """Let no block stand for the key of `block`."""
        block.is_found = False
        self._blocks.pop(block.key, None)

    def forget(self, blocks: Sequence[SecondaryBlock]) -> None:
        """Let no lookup find `blocks`. The sequence must not change afterwards."""
        for block in blocks:
            block.is_found = False
        self.release(blocks)

    def release(self, blocks: Sequence[SecondaryBlock]) -> None:
        """Let go of `blocks` in the next steps, since freeing all blocks of a long
        prompt takes too long for one. The sequence must not change afterwards."""
        if blocks:
            self._gone.append(blocks)

    def begin_step(self) -> None:
        """Let go of some of what is forgotten or released."""
        num_left = self._max_taken
        while self._gone and num_left > 0:
            blocks = self._gone.popleft()
            for block in blocks[:num_left]:
                if not block.is_found and self._blocks.get(block.key) is block:
                    del self._blocks[block.key]
            if len(blocks) > num_left:
                self._gone.appendleft(blocks[num_left:])
            num_left -= len(blocks)

    def clear(self) -> None:
        """Let lookups find nothing."""
        self._blocks.clear()
        self._gone.clear()


def before_secondary(
    groups: Sequence[Sequence[KVCacheBlock]],
) -> tuple[Sequence[KVCacheBlock], ...]:
    """The part of a hit, by group, before the first block of a secondary tier."""
    cut = []
    for group in groups:
        # A hot path: every block of a long prefix.
        types = list(map(type, group))
        is_whole = SecondaryBlock not in types
        cut.append(group if is_whole else group[: types.index(SecondaryBlock)])
    return tuple(cut)
