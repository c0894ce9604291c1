# SPDX-License-Identifier: Apache-2.0
"""KV memory of a rank as rows of bytes, one row per block.

Layouts differ by backend and release: blocks may be the first or the second dimension,
layers may lie next to or inside one another, and groups of a hybrid model may alias the
same bytes. All layouts are strided: block `b` of a tensor lies `b * stride` bytes after
block 0. So each tensor is a set of tiles (offset of block 0, stride), and overlapping
tiles of one stride form one region.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Region:
    """KV memory in which each block is one contiguous row of bytes."""

    blocks: torch.Tensor
    """`[num_blocks, bytes]`, uint8, rows strided; a view of the KV cache."""

    @property
    def block_bytes(self) -> int:
        return self.blocks.shape[1]


def build_regions(kv_caches: Any, num_blocks: int) -> list[Region]:
    """The regions of a model runner's KV caches.

    Args:
        kv_caches: Tensors, or nested lists of them, whose first or second dimension is
            `num_blocks` or a multiple of it (kernel blocks).
        num_blocks: Number of the scheduler's blocks.

    Returns:
        Regions that do not overlap. Copying row `b` of each copies block `b`.

    Raises:
        RuntimeError: The layout cannot be copied block by block.

    """
    tiles: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    storages: dict[int, torch.UntypedStorage] = {}
    device = torch.device("cpu")
    for tensor in flatten(kv_caches):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        device = tensor.device
        for offset, stride, width in find_tiles(tensor, num_blocks):
            tiles[storage.data_ptr(), stride].append((offset, width))

    regions = []
    for pointer, storage in storages.items():
        rows = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        extents: list[tuple[int, int]] = []
        for (base, stride), found in tiles.items():
            if base != pointer:
                continue
            for start, end in _merge(sorted(set(found)), stride):
                # The whole stride: padding or quantization scales between the views
                # belong to the block too.
                last = start + (num_blocks - 1) * stride
                width = min(stride, storage.nbytes() - last)
                if end - start > width:
                    raise RuntimeError("KV cache blocks overlap one another.")
                extents.append((start, last + width))
                regions.append(
                    Region(rows.as_strided((num_blocks, width), (stride, 1), start))
                )
        extents.sort()
        if any(a[1] > b[0] for a, b in itertools.pairwise(extents)):
            raise RuntimeError("KV caches of different block strides share memory.")
    return regions


def flatten(kv_caches: Any) -> Iterator[torch.Tensor]:
    """All tensors with content in nested lists."""
    if isinstance(kv_caches, torch.Tensor):
        if kv_caches.numel():
            yield kv_caches
        return
    for item in kv_caches:
        yield from flatten(item)


def find_tiles(tensor: torch.Tensor, num_blocks: int) -> Iterator[tuple[int, int, int]]:
    """(offset, stride, width) in bytes of each contiguous part of a block."""
    dim = _block_dim(tensor, num_blocks)
    size = tensor.element_size()
    kernel_blocks = tensor.shape[dim] // num_blocks
    kernel_stride = tensor.stride(dim) * size
    stride = kernel_stride * kernel_blocks
    base = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
    others = [
        (n, tensor.stride(d) * size)
        for d, n in enumerate(tensor.shape)
        if d != dim and n > 1
    ]
    inner = [(n, s) for n, s in others if s < stride]
    outer = [(n, s) for n, s in others if s >= stride]
    width = size + sum((n - 1) * s for n, s in inner)
    width += (kernel_blocks - 1) * kernel_stride
    for indices in itertools.product(*(range(n) for n, _ in outer)):
        yield base + sum(i * s for i, (_, s) in zip(indices, outer)), stride, width


def _block_dim(tensor: torch.Tensor, num_blocks: int) -> int:
    """Index of the dimension, 0 or 1, that counts blocks or parts of them."""
    first, second = tensor.shape[:2]
    keys_and_values = first == 2 and second % num_blocks == 0
    if first % num_blocks == 0 and not keys_and_values:
        return 0
    if second % num_blocks == 0:
        return 1
    raise RuntimeError(
        f"Neither of the first two dimensions of a KV cache of shape "
        f"{tuple(tensor.shape)} counts {num_blocks} blocks."
    )


def _merge(tiles: Iterable[tuple[int, int]], stride: int) -> Iterator[tuple[int, int]]:
    """Join sorted (offset, width) within one stride to (start, end)."""
    start, end = -1, -1
    for offset, width in tiles:
        if start >= 0 and offset < start + stride:
            end = max(end, offset + width)
            continue
        if start >= 0:
            yield start, end
        start, end = offset, offset + width
    if start >= 0:
        yield start, end
