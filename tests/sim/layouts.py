# SPDX-License-Identifier: Apache-2.0
"""KV cache groups of the models that the simulator runs."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from ..names import cdiv
from . import upstream

MAX_MODEL_LEN = 40


@dataclass(frozen=True)
class Group:
    """One KV cache group, and what its layers read."""

    # Not all releases can hash it.
    spec: KVCacheSpec = field(hash=False)
    first_read: Callable[[int], int] | None
    """First position that the token at a given one reads. None: the group keeps
    one state for the whole prefix (Mamba)."""
    num_shards: int = 1
    """Ranks that have a part each of the tokens of a block (decode context
    parallelism). The simulated one has all parts."""

    @property
    def block_size(self) -> int:
        return self.spec.block_size * self.num_shards

    @property
    def keeps_all_states(self) -> bool:
        """Every block has the state at its end, not the last one only."""
        return isinstance(self.spec, MambaSpec) and self.spec.mamba_cache_mode == "all"

    def max_blocks(self, max_in_flight_tokens: int, max_in_flight_steps: int) -> int:
        """Device blocks that one request can hold at once."""
        spec = self.spec
        if upstream.HAS_ADMISSION_CAP and isinstance(spec, SlidingWindowSpec):
            num_tokens = spec.sliding_window - 1 + max_in_flight_tokens
            # A window may begin inside a block.
            return cdiv(min(num_tokens, MAX_MODEL_LEN), spec.block_size) + 1
        if upstream.HAS_ADMISSION_CAP and isinstance(
            spec, upstream.ChunkedLocalAttentionSpec
        ):
            num_tokens = spec.attention_chunk_size + max_in_flight_tokens
            return cdiv(min(num_tokens, MAX_MODEL_LEN), spec.block_size)
        if isinstance(spec, MambaSpec) and not self.keeps_all_states:
            # Steps of a pipeline that compute one prompt each leave a state behind,
            # which is more than upstream counts.
            num_states = 3 + max(0, max_in_flight_steps - 2)
            num_states += getattr(spec, "num_speculative_blocks", 0)
            return num_states + upstream.num_checkpoint_blocks(spec)
        return cdiv(MAX_MODEL_LEN, self.block_size)


@dataclass(frozen=True)
class Layout:
    name: str
    groups: tuple[Group, ...]
    hash_block_size: int
    has_checkpoints: bool = False
    """A forward pass leaves a state inside its chunk, for a block of its own."""
    num_shards: int = 1
    """Ranks of decode context parallelism."""

    def __repr__(self) -> str:
        return repr(self.name)

    @property
    def is_known(self) -> bool:
        """Whether the release at hand has models like that."""
        has_partial_hits = all(
            self.hash_block_size < group.block_size for group in self.groups
        )
        return (
            (upstream.HAS_STATES or not self.has_states)
            and (upstream.HAS_PREFILL_CHECKPOINTS or not self.has_checkpoints)
            and (upstream.HAS_PARTIAL_HITS or not has_partial_hits)
            and (upstream.HAS_SEVERAL_BLOCK_SIZES or not self.has_mixed_attention)
        )

    @property
    def has_mixed_attention(self) -> bool:
        """Blocks differ in size, or in what one token takes of full attention."""
        full = [g.spec for g in self.groups if isinstance(g.spec, FullAttentionSpec)]
        sizes = {group.block_size for group in self.groups}
        return len(sizes) > 1 or any(spec != full[0] for spec in full)

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

    def min_blocks(self, max_in_flight_tokens: int, max_in_flight_steps: int) -> int:
        """Device blocks with which the longest request can run alone."""
        # Beside those of the groups: the null block, and copies on write.
        return 1 + sum(
            1 + group.max_blocks(max_in_flight_tokens, max_in_flight_steps)
            for group in self.groups
        )

    def kv_cache_groups(self) -> list[KVCacheGroupSpec]:
        return [
            KVCacheGroupSpec([f"layer{i}"], group.spec)
            for i, group in enumerate(self.groups)
        ]


def full(block_size: int = 4, head_size: int = 1) -> Group:
    spec = FullAttentionSpec(block_size=block_size, **upstream.heads(head_size))
    return Group(spec, lambda position: 0)


def window(size: int, block_size: int = 4) -> Group:
    spec = SlidingWindowSpec(
        block_size=block_size, sliding_window=size, **upstream.heads(1)
    )
    return Group(spec, lambda position: max(0, position - size + 1))


def mla(block_size: int = 4) -> Group:
    spec = upstream.mla_spec(block_size)
    return Group(spec, lambda position: 0)


def mla_window(size: int, block_size: int = 4) -> Group:
    spec = upstream.SlidingWindowMLASpec(
        block_size=block_size, sliding_window=size, **upstream.heads(1)
    )
    return Group(spec, lambda position: max(0, position - size + 1))


def chunked(size: int, block_size: int = 4) -> Group:
    spec = upstream.ChunkedLocalAttentionSpec(
        block_size=block_size, attention_chunk_size=size, **upstream.heads(1)
    )
    return Group(spec, lambda position: position // size * size)


def chunked_as_full(size: int, block_size: int = 4) -> Group:
    """Where groups may not differ: blocks are kept that no layer reads any more."""
    spec = FullAttentionSpec(
        block_size=block_size, attention_chunk_size=size, **upstream.heads(1)
    )
    return Group(spec, lambda position: position // size * size)


def mamba(
    block_size: int = 4, has_checkpoints: bool = False, mode: str = "align"
) -> Group:
    return Group(upstream.mamba_spec(block_size, has_checkpoints, mode), None)


def shards(group: Group, num_shards: int) -> Group:
    """As many ranks have a part each of the tokens of a block."""
    return replace(group, num_shards=num_shards)


def speculating(layout: Layout, num_drafts: int) -> Layout:
    """With room for the states behind guesses."""
    groups = tuple(
        replace(g, spec=replace(g.spec, num_speculative_blocks=num_drafts))
        if isinstance(g.spec, MambaSpec)
        else g
        for g in layout.groups
    )
    return replace(layout, groups=groups)


def _mla_windows() -> tuple[Layout, ...]:
    """Like DeepSeek-V4, whose windows have smaller blocks; not in all releases."""
    if not upstream.HAS_MLA_WINDOWS:
        return ()
    return (Layout("MLA+MLA window", (mla(8), mla_window(9, 4)), 4),)


def _chunks() -> tuple[Layout, ...]:
    """Like Llama 4; not in all releases."""
    if not upstream.HAS_CHUNKS:
        return ()
    return (
        Layout("full+chunked", (full(), chunked(8)), 4),
        Layout("chunked", (chunked(16),), 4),
    )


ALL: tuple[Layout, ...] = (
    Layout("full", (full(),), 4),
    Layout("window", (window(6),), 4),
    Layout("full+window", (full(), window(6)), 4),
    # Like Gemma 3: several groups of windows, each with blocks of its own.
    Layout("full+2 windows", (full(), window(5), window(5)), 4),
    Layout("full+window, block sizes differ", (full(8), window(9, 4)), 4),
    Layout("full+full, head sizes differ", (full(), full(head_size=2)), 4),
    *_chunks(),
    Layout("MLA", (mla(),), 4),
    *_mla_windows(),
    Layout("mamba", (mamba(),), 4),
    Layout("full+mamba", (full(), mamba()), 4),
    Layout("full+2 mamba", (full(), mamba(), mamba()), 4),
    Layout("full+window+mamba", (full(), window(6), mamba()), 4),
    Layout("full+mamba, checkpoints", (full(), mamba(has_checkpoints=True)), 4, True),
    # Hits end inside blocks: copy-on-write, several keys for a block.
    # Not with checkpoints: there upstream, tier or not, caches a copied block under
    # the key of its end though the chunk that began inside it never wrote that.
    Layout("full+mamba, partial hits", (full(8), mamba(8)), 2),
)
if upstream.HAS_ALL_STATES:
    # Releases that keep the state of every block, if they are asked to.
    ALL += (Layout("full+mamba, all states", (full(), mamba(mode="all")), 4),)

LAYOUTS = tuple(layout for layout in ALL if layout.is_known)
