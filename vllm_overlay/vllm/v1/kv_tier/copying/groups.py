# SPDX-License-Identifier: Apache-2.0
"""Copies of what a block's KV cache group needs, where groups need less than a slot.

Groups of a hybrid model alias the same device blocks, and a slot has room for the
largest. The others use the first bytes of a block, so an engine for them has the first
regions, and a part of the last of these. No layer of the group reads what is behind.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.v1.kv_tier.copying.dma import BlockDmaCopyEngine, DmaCopyEngine
from vllm.v1.kv_tier.copying.engine import (
    BySizeCopyEngine,
    CopyEngine,
    CopyEngineUnavailable,
    Transfer,
    slot_bytes,
    slot_offsets,
)
from vllm.v1.kv_tier.memory.regions import Region

_ALIGN = 64
"""Pieces have a width of which this is a divisor, or that of their region."""


def first_bytes(regions: Sequence[Region], num_bytes: int) -> list[Region]:
    """Regions of at least the first `num_bytes` of a slot. They keep their offsets."""
    found = []
    for region, start in zip(regions, slot_offsets(regions), strict=True):
        width = -(-(num_bytes - start) // _ALIGN) * _ALIGN
        if width <= 0:
            break
        found.append(region)
        if width < region.block_bytes:
            found[-1] = Region(region.blocks[:, :width])
    return found


class GroupCopyEngine(CopyEngine):
    """Copies of each block what its group needs.

    Args:
        whole: Copies whole slots.
        by_group: By KV cache group, an engine for the first bytes of a slot; None for
            groups that need all of them.

    """

    def __init__(
        self, whole: CopyEngine, by_group: Sequence[CopyEngine | None]
    ) -> None:
        super().__init__(whole.regions, whole.slots)
        self._whole = whole
        self._by_group = {i: engine or whole for i, engine in enumerate(by_group)}

    def launch_s(self, num_pieces: int) -> float:
        return self._whole.launch_s(num_pieces)

    def transfer(self, pairs: NDArray[np.int64], to_device: bool) -> Transfer:
        return self._whole.transfer(pairs, to_device)

    def transfer_groups(
        self, pairs: NDArray[np.int64], groups: Sequence[int], to_device: bool
    ) -> Transfer:
        if len(groups) != pairs.shape[1]:
            raise ValueError(f"{pairs.shape[1]} blocks, but {len(groups)} groups.")
        engines = [self._by_group.get(group, self._whole) for group in groups]
        parts = []
        for engine in {id(engine): engine for engine in engines}.values():
            chosen = np.array([each is engine for each in engines])
            some = np.ascontiguousarray(pairs[:, chosen])
            parts.append((engine.transfer(some, to_device), len(engine.regions)))
        return _GroupTransfer(parts)


class _GroupTransfer(Transfer):
    def __init__(self, parts: Sequence[tuple[Transfer, int]]) -> None:
        self._parts = parts

    def copy(self, regions: range) -> None:
        for transfer, num_regions in self._parts:
            some = range(regions.start, min(regions.stop, num_regions))
            if some:
                transfer.copy(some)


def copy_by_group(
    engine: CopyEngine,
    group_bytes: Sequence[int],
    prove: Callable[[CopyEngine], None],
) -> CopyEngine:
    """An engine that copies of each block what its group needs.

    Args:
        engine: Copies whole slots.
        group_bytes: By group, how many of the first bytes of a slot it needs.
        prove: Raises unless an engine copies what it is asked to.

    """
    regions = engine.regions
    total = slot_bytes(regions)
    made: dict[int, CopyEngine | None] = {}
    for num_bytes in group_bytes:
        cut = first_bytes(regions, num_bytes)
        if num_bytes not in made:
            made[num_bytes] = None
            if cut and slot_bytes(cut) < total:
                made[num_bytes] = alike = _alike(engine, cut, engine.slots)
                prove(alike)
    if not any(made.values()):
        return engine
    return GroupCopyEngine(engine, [made[num_bytes] for num_bytes in group_bytes])


def _alike(
    engine: CopyEngine, regions: Sequence[Region], slots: torch.Tensor
) -> CopyEngine:
    """An engine of the same kind for other regions."""
    if isinstance(engine, BySizeCopyEngine):
        few = _alike(engine.few, regions, slots)
        many = _alike(engine.many, regions, slots)
        return BySizeCopyEngine(few, many, engine.max_pieces)
    try:
        return type(engine)(regions, slots)
    except CopyEngineUnavailable:
        # Too few regions lie next to one another.
        if not isinstance(engine, BlockDmaCopyEngine):
            raise
        return DmaCopyEngine(regions, slots)
