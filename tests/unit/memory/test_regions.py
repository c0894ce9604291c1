# SPDX-License-Identifier: Apache-2.0
"""KV memory as rows of bytes, for every layout a runner may have."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm.v1.kv_tier.copying.engine import TorchCopyEngine, slot_bytes
from vllm.v1.kv_tier.memory.regions import build_regions

NUM_BLOCKS = 5

# A layout: the tensors a runner has, and for each of them the index of block b.
Layout = tuple[list[torch.Tensor], list[Callable[[int], Any]]]


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def blocks_first() -> Layout:
    """MLA, or [blocks, 2, ...] with keys and values side by side."""
    caches = [rand(NUM_BLOCKS, 2, 8, 3, 4, dtype=torch.bfloat16) for _ in range(3)]
    return caches, 3 * [lambda b: b]


def keys_then_values() -> Layout:
    caches = [rand(2, NUM_BLOCKS, 8, 3, 4) for _ in range(2)]
    return caches, 2 * [lambda b: (slice(None), b)]


def heads_before_tokens() -> Layout:
    """A permuted view: logically tokens before heads, in memory the reverse."""
    caches = [rand(2, NUM_BLOCKS, 3, 8, 4).permute(0, 1, 3, 2, 4) for _ in range(2)]
    return caches, 2 * [lambda b: (slice(None), b)]


def packed_layers() -> Layout:
    """[blocks, layers, ...]: one run of bytes holds a block of all layers."""
    packed = rand(NUM_BLOCKS, 4, 2, 8, 6)
    return [packed[:, i] for i in range(4)], 4 * [lambda b: b]


def layers_then_heads_outermost() -> Layout:
    """[layers, blocks, heads, ...] seen as [heads, blocks, ...] by each layer."""
    memory = rand(3, 2, NUM_BLOCKS, 8, 4)
    return [memory[i] for i in range(3)], 3 * [lambda b: (slice(None), b)]


def heads_outermost_behind_blocks_first() -> Layout:
    """Logically [blocks, heads, ...], in memory [heads, blocks, ...]."""
    caches = [rand(3, NUM_BLOCKS, 8, 4).transpose(0, 1) for _ in range(2)]
    return caches, 2 * [lambda b: b]


def kernel_blocks() -> Layout:
    """Kernels that want blocks of half the size that the scheduler counts."""
    caches = [rand(2, 2 * NUM_BLOCKS, 4, 3), rand(2 * NUM_BLOCKS, 4, 3)]
    return caches, [
        lambda b: (slice(None), slice(2 * b, 2 * b + 2)),
        lambda b: slice(2 * b, 2 * b + 2),
    ]


def as_many_tokens_as_blocks() -> Layout:
    return [rand(NUM_BLOCKS, NUM_BLOCKS, 6)], [lambda b: b]


def kernel_blocks_of_as_many_tokens_as_blocks() -> Layout:
    caches = [rand(2 * NUM_BLOCKS, NUM_BLOCKS, 6)]
    return caches, [lambda b: slice(2 * b, 2 * b + 2)]


def mamba_states() -> Layout:
    """Convolution and state of one page, with padding behind them."""
    page = 256
    memory = torch.randint(0, 255, (NUM_BLOCKS * page,), dtype=torch.uint8)
    halves, words = memory.view(torch.bfloat16), memory.view(torch.float32)
    conv = halves.as_strided((NUM_BLOCKS, 4, 6), (page // 2, 6, 1), 0)
    ssm = words.as_strided((NUM_BLOCKS, 3, 5), (page // 4, 5, 1), 48 // 4)
    return [conv, ssm], 2 * [lambda b: b]


def aliased_groups() -> Layout:
    """Two groups see the same memory, one as attention, one as state."""
    memory = rand(NUM_BLOCKS, 2, 8, 4)
    state = memory.view(NUM_BLOCKS, 64)[:, :40].view(NUM_BLOCKS, 4, 10)
    return [memory, state], 2 * [lambda b: b]


def shared_layers() -> Layout:
    """Layers that read the cache of another layer."""
    cache = rand(2, NUM_BLOCKS, 8, 3)
    return [cache, cache, cache.view(2, NUM_BLOCKS, 24)], 3 * [
        lambda b: (slice(None), b)
    ]


def one_allocation() -> Layout:
    """Separate layers in one storage."""
    memory = rand(4 * NUM_BLOCKS * 12)
    layers = [
        memory[i * NUM_BLOCKS * 12 : (i + 1) * NUM_BLOCKS * 12].view(NUM_BLOCKS, 12)
        for i in range(4)
    ]
    return layers, 4 * [lambda b: b]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, also where random bytes make a NaN."""
    a, b = (t.contiguous().flatten().view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


LAYOUTS = [
    blocks_first,
    keys_then_values,
    heads_before_tokens,
    packed_layers,
    layers_then_heads_outermost,
    heads_outermost_behind_blocks_first,
    kernel_blocks,
    as_many_tokens_as_blocks,
    kernel_blocks_of_as_many_tokens_as_blocks,
    mamba_states,
    aliased_groups,
    shared_layers,
    one_allocation,
]


@pytest.mark.parametrize("make", LAYOUTS, ids=lambda f: f.__name__)
def test_blocks_survive_a_trip_through_host_slots(make: Callable[[], Layout]) -> None:
    torch.manual_seed(1)
    caches, index = make()
    regions = build_regions(caches, NUM_BLOCKS)
    slots = torch.randint(0, 255, (3, slot_bytes(regions)), dtype=torch.uint8)
    engine, everything = TorchCopyEngine(regions, slots), range(len(regions))
    block_1, block_3 = (
        [c[i(b)].clone() for c, i in zip(caches, index)] for b in (1, 3)
    )

    engine.stores([1, 3], [2, 0]).copy(everything)
    for cache in caches:
        cache.copy_(torch.randn(cache.shape))
    before = [c.clone() for c in caches]
    engine.loads([2, 0], [4, 1]).copy(everything)

    for c, i, one, three, old in zip(caches, index, block_1, block_3, before):
        assert same_bytes(c[i(4)], one)
        assert same_bytes(c[i(1)], three)
        for neighbour in (0, 2, 3):
            assert same_bytes(c[i(neighbour)], old[i(neighbour)])


@pytest.mark.parametrize("make", LAYOUTS, ids=lambda f: f.__name__)
def test_no_byte_is_in_two_rows(make: Callable[[], Layout]) -> None:
    caches, _ = make()
    seen: set[int] = set()
    for region in build_regions(caches, NUM_BLOCKS):
        assert region.blocks.dtype == torch.uint8
        assert region.blocks.shape == (NUM_BLOCKS, region.block_bytes)
        for row in region.blocks:
            addresses = range(row.data_ptr(), row.data_ptr() + region.block_bytes)
            assert seen.isdisjoint(addresses)
            seen.update(addresses)


@pytest.mark.parametrize(
    "make, num_regions, block_bytes",
    [
        (blocks_first, 3, 3 * 2 * 8 * 3 * 4 * 2),
        (keys_then_values, 4, 2 * 2 * 8 * 3 * 4 * 4),
        (packed_layers, 1, 4 * 2 * 8 * 6 * 4),
        (layers_then_heads_outermost, 6, 3 * 2 * 8 * 4 * 4),
        (heads_outermost_behind_blocks_first, 6, 2 * 3 * 8 * 4 * 4),
        (kernel_blocks, 3, 3 * 2 * 4 * 3 * 4),
        # The page with its padding.
        (mamba_states, 1, 256),
        (aliased_groups, 1, 2 * 8 * 4 * 4),
        (shared_layers, 2, 2 * 8 * 3 * 4),
        (one_allocation, 4, 4 * 12 * 4),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_shared_bytes_are_counted_once(
    make: Callable[[], Layout], num_regions: int, block_bytes: int
) -> None:
    regions = build_regions(make()[0], NUM_BLOCKS)
    assert len(regions) == num_regions
    assert sum(r.block_bytes for r in regions) == block_bytes


def test_kv_caches_may_be_nested_and_empty() -> None:
    nested = [[rand(NUM_BLOCKS, 4)], (rand(NUM_BLOCKS, 4), [rand(0)])]
    assert len(build_regions(nested, NUM_BLOCKS)) == 2
    assert build_regions([], NUM_BLOCKS) == []


def test_slot_regions_start_at_cache_lines() -> None:
    regions = build_regions([rand(NUM_BLOCKS, 1), rand(NUM_BLOCKS, 17)], NUM_BLOCKS)
    assert [r.block_bytes for r in regions] == [4, 68]
    assert slot_bytes(regions) == 64 + 128


def test_a_cache_without_a_block_dimension_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"shape \(7, 9, 5\) counts"):
        build_regions([rand(7, 9, 5)], NUM_BLOCKS)


def test_overlapping_blocks_are_refused() -> None:
    sliding = rand(100).as_strided((NUM_BLOCKS, 8), (4, 1))
    with pytest.raises(RuntimeError, match="overlap"):
        build_regions([sliding], NUM_BLOCKS)


def test_aliases_of_different_strides_are_refused() -> None:
    memory = rand(NUM_BLOCKS * 16)
    half = memory[: NUM_BLOCKS * 8]
    views = [memory.view(NUM_BLOCKS, 16), half.view(NUM_BLOCKS, 8)]
    with pytest.raises(RuntimeError, match="different block strides"):
        build_regions(views, NUM_BLOCKS)


@pytest.mark.parametrize("num_blocks", [2, 3])
def test_keys_and_values_are_not_mistaken_for_blocks(num_blocks: int) -> None:
    cache = rand(2, num_blocks, 8, 3)
    regions = build_regions([cache], num_blocks)
    engine = TorchCopyEngine(
        regions, torch.zeros(1, slot_bytes(regions), dtype=torch.uint8)
    )
    one = cache[:, 1].clone()
    everything = range(len(regions))
    engine.stores([1], [0]).copy(everything)
    engine.loads([0], [0]).copy(everything)
    assert torch.equal(cache[:, 0], one)
