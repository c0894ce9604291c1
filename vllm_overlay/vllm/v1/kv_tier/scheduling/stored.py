# SPDX-License-Identifier: Apache-2.0
"""Blocks of a prefix hit that lie below the host."""

from collections.abc import Sequence

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.kv_tier.scheduling.sources import Source


class StoredBlock(KVCacheBlock):
    """A block that a tier below has, and the placeholder for it in a prefix scan.

    As a `HostSlot` it is never referenced, and counts as one block to allocate. But it
    stands for no memory: a hit with one of them is not admitted.

    Args:
        key: Of the block.
        num_tokens: Prefix tokens that it covers.
        source: The first tier that has it.

    """

    # Whoever found it keeps it.
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
    """What device and host have of a hit, by group, before the first block below."""
    cut = []
    for group in groups:
        # Every block of a long prefix comes by here.
        types = list(map(type, group))
        is_whole = StoredBlock not in types
        cut.append(group if is_whole else group[: types.index(StoredBlock)])
    return tuple(cut)
