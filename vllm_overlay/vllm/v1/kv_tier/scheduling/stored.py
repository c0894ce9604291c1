# SPDX-License-Identifier: Apache-2.0
"""Placeholders in a prefix hit for blocks in secondary tiers."""

from collections.abc import Sequence

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
    __slots__ = ("__weakref__", "key", "num_tokens", "source")
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

    @property
    def block_hash(self) -> BlockHashWithGroupId:
        return self.key

    @property
    def block_hash_num_tokens(self) -> int:
        return self.num_tokens

    __eq__ = object.__eq__
    __hash__ = object.__hash__
    __repr__ = object.__repr__


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
