# SPDX-License-Identifier: Apache-2.0
"""KV cache groups of the models that the simulator runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch

from vllm.config.cache import MambaCacheMode
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

MAX_MODEL_LEN = 40


@dataclass(frozen=True)
class Group:
    """One KV cache group, and what its layers read."""

    spec: KVCacheSpec
    first_read: Callable[[int], int] | None
    """First position that the token at a given one reads. None: the group keeps
    one state for the whole prefix (Mamba)."""

    @property
    def block_size(self) -> int:
        return self.spec.block_size

    @property
    def keeps_all_states(self) -> bool:
        """Every block has the state at its end, not the last one only."""
        return isinstance(self.spec, MambaSpec) and self.spec.mamba_cache_mode == "all"

    def max_blocks(self, max_in_flight_tokens: int) -> int:
        """Device blocks that one request can hold at once."""
        if isinstance(self.spec, (SlidingWindowSpec, ChunkedLocalAttentionSpec)):
            return self.spec.max_admission_blocks_per_request(
                max_in_flight_tokens, MAX_MODEL_LEN
            )
        if isinstance(self.spec, MambaSpec) and not self.keeps_all_states:
            return 3 + self.spec.num_prefill_checkpoint_blocks
        return cdiv(MAX_MODEL_LEN, self.block_size)


@dataclass(frozen=True)
class Layout:
    name: str
    groups: tuple[Group, ...]
    hash_block_size: int

    def __repr__(self) -> str:
        return repr(self.name)

    @property
    def block_size(self) -> int:
        """Scheduling granularity: a multiple of every group's block size."""
        return max(group.block_size for group in self.groups)

    @property
    def has_states(self) -> bool:
        return any(group.first_read is None for group in self.groups)

    @property
    def mamba_cache_mode(self) -> str:
        modes = [
            group.spec.mamba_cache_mode
            for group in self.groups
            if isinstance(group.spec, MambaSpec)
        ]
        return modes[0] if modes else "none"

    @property
    def hit_alignment(self) -> int:
        """Length of a prefix hit is a multiple of it."""
        return self.hash_block_size if self.has_states else self.block_size

    @property
    def can_retain_less(self) -> bool:
        """Whether some groups may cache a part of their blocks only."""
        return any(
            isinstance(group.spec, (SlidingWindowSpec, MambaSpec))
            for group in self.groups
        )

    def min_blocks(self, max_in_flight_tokens: int) -> int:
        """Device blocks with which the longest request can run alone."""
        # Beside those of the groups: the null block, and copies on write.
        return 1 + sum(
            1 + group.max_blocks(max_in_flight_tokens) for group in self.groups
        )

    def kv_cache_groups(self) -> list[KVCacheGroupSpec]:
        return [
            KVCacheGroupSpec([f"layer{i}"], group.spec)
            for i, group in enumerate(self.groups)
        ]


def _heads(head_size: int) -> dict:
    return {"num_kv_heads": 1, "head_size": head_size, "dtype": torch.float32}


def full(block_size: int = 4, head_size: int = 1) -> Group:
    spec = FullAttentionSpec(block_size=block_size, **_heads(head_size))
    return Group(spec, lambda position: 0)


def window(size: int, block_size: int = 4) -> Group:
    spec = SlidingWindowSpec(block_size=block_size, sliding_window=size, **_heads(1))
    return Group(spec, lambda position: max(0, position - size + 1))


def mla(block_size: int = 4) -> Group:
    spec = MLAAttentionSpec(block_size=block_size, **_heads(1))
    return Group(spec, lambda position: 0)


def mla_window(size: int, block_size: int = 4) -> Group:
    spec = SlidingWindowMLASpec(block_size=block_size, sliding_window=size, **_heads(1))
    return Group(spec, lambda position: max(0, position - size + 1))


def chunked(size: int, block_size: int = 4) -> Group:
    spec = ChunkedLocalAttentionSpec(
        block_size=block_size, attention_chunk_size=size, **_heads(1)
    )
    return Group(spec, lambda position: position // size * size)


def mamba(
    block_size: int = 4, has_checkpoints: bool = False, mode: str = "align"
) -> Group:
    spec = MambaSpec(
        block_size=block_size,
        shapes=((1,),),
        dtypes=(torch.float32,),
        mamba_cache_mode=mode,
        num_prefill_checkpoint_blocks=int(has_checkpoints),
        prefill_checkpoint_alignment=1 if has_checkpoints else None,
    )
    return Group(spec, None)


LAYOUTS: tuple[Layout, ...] = (
    Layout("full", (full(),), 4),
    Layout("window", (window(6),), 4),
    Layout("full+window", (full(), window(6)), 4),
    # Like Gemma 3: several groups of windows, each with blocks of its own.
    Layout("full+2 windows", (full(), window(5), window(5)), 4),
    Layout("full+window, block sizes differ", (full(8), window(9, 4)), 4),
    Layout("full+full, head sizes differ", (full(), full(head_size=2)), 4),
    Layout("full+chunked", (full(), chunked(8)), 4),
    Layout("chunked", (chunked(16),), 4),
    Layout("MLA", (mla(),), 4),
    # Like DeepSeek-V4, whose windows have smaller blocks.
    Layout("MLA+MLA window", (mla(8), mla_window(9, 4)), 4),
    Layout("mamba", (mamba(),), 4),
    Layout("full+mamba", (full(), mamba()), 4),
    Layout("full+2 mamba", (full(), mamba(), mamba()), 4),
    Layout("full+window+mamba", (full(), window(6), mamba()), 4),
    # A forward pass leaves a state inside its chunk, for a block of its own.
    Layout("full+mamba, checkpoints", (full(), mamba(has_checkpoints=True)), 4),
    # Hits end inside blocks: copy-on-write, several keys for a block.
    # Not with checkpoints: there upstream, tier or not, caches a copied block under
    # the key of its end though the chunk that began inside it never wrote that.
    Layout("full+mamba, partial hits", (full(8), mamba(8)), 2),
)
if "all" in get_args(MambaCacheMode):
    # Releases that keep the state of every block, if they are asked to.
    LAYOUTS += (Layout("full+mamba, all states", (full(), mamba(mode="all")), 4),)
