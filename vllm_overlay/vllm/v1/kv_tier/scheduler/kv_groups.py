# SPDX-License-Identifier: Apache-2.0
"""Blocks of KV cache groups: their hashes, and how many of each a prompt takes.

A request has hashes for the smallest unit of tokens of which all groups' blocks are
multiples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId, KVCacheBlock
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec
from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.layout import PrefixEnd, ReachableBlocks
from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def hashes_of_blocks(
    request: Request, hash_size: int | None, block_size: int
) -> Sequence[BlockHash]:
    """The hashes of a request's full blocks, as upstream uses them in keys.

    Args:
        request: The request.
        hash_size: Tokens of each of its hashes; None: of a block.
        block_size: Tokens of a block.

    """
    if hash_size is None or block_size == hash_size:
        return request.block_hashes
    # Older releases have no blocks of several hashes.
    from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize

    blocks = BlockHashListWithBlockSize(request.block_hashes, hash_size, block_size)
    return blocks  # type: ignore[return-value]


class UsedBlocks:
    """The blocks of one group that an admitted request hits, on the device by now.

    Args:
        blocks: From the first block of the request on; null blocks where it needs none.
        block_size: Tokens of a block.

    """

    def __init__(self, blocks: Sequence[KVCacheBlock], block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size

    @cached_property
    def keys(self) -> list[BlockHashWithGroupId]:
        """Keys of the hashed ones."""
        return [key for block in self.blocks if (key := block.block_hash) is not None]


class HitListener(Protocol):
    """Notified of the blocks that requests use, once each has its device block."""

    def on_hit(self, request: Request, used: UsedBlocks) -> None:
        """`request` is admitted with `used`. Called for each group."""


@dataclass(frozen=True)
class GroupBlocks:
    """Blocks of one KV cache group."""

    block_size: int
    """Tokens of a block, over all ranks that share them."""
    num_blocks: int
    """Blocks that a hit of the longest prompt needs."""
    num_tokens: int
    """Tokens of the longest prompt."""
    end: PrefixEnd | None = None
    """What a hit needs of a window or a state; None for all others."""
    is_state: bool = False
    is_cached: bool = True
    """Whether its blocks have keys."""


def group_blocks(vllm_config: "VllmConfig", kv_cache_config: Any) -> list[GroupBlocks]:
    """The blocks of all groups, in order."""
    parallel = vllm_config.parallel_config
    num_shares = releases.num_token_shares(parallel)
    found = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        is_shared = releases.are_tokens_shared(spec)
        size = spec.block_size * (num_shares if is_shared else 1)
        num_tokens = max(vllm_config.model_config.max_model_len, size)
        num_blocks = -(-num_tokens // size)
        num_kept = min(num_blocks, _kept(spec, size))
        found.append(
            GroupBlocks(
                size,
                num_kept,
                num_tokens,
                _end(spec, size),
                isinstance(releases.spec_of_layer(spec), MambaSpec),
                releases.is_prefix_cacheable(spec),
            )
        )
    return found


def tokens_per_block(groups: Sequence[GroupBlocks]) -> float:
    """Tokens whose KV takes one block, over all groups together.

    Taken for a hit of the longest prompt, which needs only the end of a window or
    state.
    """
    return max(g.num_tokens for g in groups) / sum(g.num_blocks for g in groups)


def prefix_ends(groups: Sequence[GroupBlocks]) -> tuple[PrefixEnd | None, ...]:
    """The end of each group; empty where none has one."""
    ends = tuple(group.end for group in groups)
    return ends if any(ends) else ()


def reachable_blocks(
    groups: Sequence[GroupBlocks], has_drafts: bool
) -> tuple[ReachableBlocks, ...]:
    """The blocks of each group that a hit can use; empty if that is all.

    Args:
        groups: All groups.
        has_drafts: Whether EAGLE or the like may look one block further.

    """
    # Hits on states may end inside blocks, and so anywhere.
    if any(group.is_state for group in groups):
        return ()
    alignment = math.lcm(*(group.block_size for group in groups if group.is_cached))
    found = []
    for group in groups:
        period = alignment // group.block_size
        if not group.is_cached:
            found.append(ReachableBlocks(before=0))
        elif group.end is None:
            found.append(ReachableBlocks())
        else:
            found.append(ReachableBlocks(period, group.end.needed, int(has_drafts)))
    return tuple(found) if any(each.part < 1 for each in found) else ()


def _end(spec: Any, size: int) -> PrefixEnd | None:
    spec = releases.spec_of_layer(spec)
    if isinstance(spec, MambaSpec):
        return PrefixEnd(1, 1)
    if isinstance(spec, SlidingWindowSpec) and spec.sliding_window > 1:
        needed = -(-(spec.sliding_window - 1) // size)
        return PrefixEnd(needed, needed + 2)
    return None


def _kept(spec: Any, size: int) -> float:
    """Most blocks that any hit needs of a group; infinite if it needs all."""
    spec = releases.spec_of_layer(spec)
    if isinstance(spec, MambaSpec):
        return 1
    if isinstance(spec, SlidingWindowSpec):
        more = releases.num_retained_tokens(spec)
        return -(-(spec.sliding_window - 1 + more) // size) + 1
    if releases.is_chunked_attention(spec):
        return -(-spec.attention_chunk_size // size)
    # Full attention with a window still loads all blocks.
    return float("inf")
