# SPDX-License-Identifier: Apache-2.0
"""How many blocks of each KV cache group a prompt takes."""

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
    """Tokens of a block, of all ranks that share its tokens together."""
    num_blocks: int
    """That a hit of the longest prompt needs."""
    num_tokens: int
    """Of the longest prompt."""


def group_blocks(vllm_config: "VllmConfig", kv_cache_config: Any) -> list[GroupBlocks]:
    """The blocks of all groups, in their order."""
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
    """Tokens whose KV takes one block, over all groups together, as a hit of the
    longest prompt loads it: of a window or a state it needs only the end."""
    return max(g.num_tokens for g in groups) / sum(g.num_blocks for g in groups)


def _kept(spec: Any, size: int) -> float:
    """Blocks that a hit of any length needs of a group; infinite if that is all."""
    spec = releases.spec_of_layer(spec)
    if isinstance(spec, MambaSpec):
        return 1
    if isinstance(spec, SlidingWindowSpec):
        more = releases.num_retained_tokens(spec)
        return -(-(spec.sliding_window - 1 + more) // size) + 1
    if releases.is_chunked_attention(spec):
        return -(-spec.attention_chunk_size // size)
    # Full attention may have a window, too: its blocks are loaded all the same.
    return float("inf")
