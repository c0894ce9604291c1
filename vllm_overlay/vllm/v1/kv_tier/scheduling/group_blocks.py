# SPDX-License-Identifier: Apache-2.0
"""How many blocks of each KV cache group a prompt needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec
from vllm.v1.kv_tier import releases

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class GroupBlocks:
    """Blocks of one KV cache group."""

    block_size: int
    """Tokens of a block, over all ranks that share them."""
    num_blocks: int
    """Blocks that a hit of the longest prompt needs."""
    num_tokens: int
    """Tokens of the longest prompt."""


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
        found.append(GroupBlocks(size, min(num_blocks, _kept(spec, size)), num_tokens))
    return found


def tokens_per_block(groups: Sequence[GroupBlocks]) -> float:
    """Tokens whose KV takes one block, over all groups together.

    Taken for a hit of the longest prompt, which needs only the end of a window or
    state.
    """
    return max(g.num_tokens for g in groups) / sum(g.num_blocks for g in groups)


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
