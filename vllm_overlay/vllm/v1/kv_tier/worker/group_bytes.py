# SPDX-License-Identifier: Apache-2.0
"""How many of the first bytes of a slot the blocks of each KV cache group need."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.copying.engine import slot_bytes, slot_offsets
from vllm.v1.kv_tier.memory.regions import Region, find_tiles, flatten

_LEAST_BYTES = 64


def group_bytes(
    groups: Sequence[Any],
    layers: Mapping[str, Any],
    regions: Sequence[Region],
    num_blocks: int,
) -> list[int]:
    """Bytes by group, as they lie in memory; empty if any layer is unknown.

    Args:
        groups: `KVCacheGroupSpec`s of the rank.
        layers: Its layers by name.
        regions: Its KV memory.
        num_blocks: Number of the scheduler's blocks.

    """
    found = []
    for group in groups:
        # By region, where each layer of the group ends in it.
        ends: dict[int, list[int]] = defaultdict(list)
        for name in group.layer_names:
            tensors = [*flatten(releases.kv_caches_of(layers.get(name)))]
            if not tensors:
                return []
            page = releases.spec_of_named(group.kv_cache_spec, name).page_size_bytes
            for region, start, end in _parts(tensors, regions, num_blocks):
                if region is None:
                    return []
                ends[region].append(max(end, start + page))
        found.append(_last_byte(ends, regions))
    return found if any(n < slot_bytes(regions) for n in found) else []


def _parts(
    tensors: Sequence[Any], regions: Sequence[Region], num_blocks: int
) -> list[tuple[int | None, int, int]]:
    """(region, start, end) of each contiguous part of a block; None: no known one."""
    found: list[tuple[int | None, int, int]] = []
    for tensor in tensors:
        storage = tensor.untyped_storage().data_ptr()
        for offset, _, width in find_tiles(tensor, num_blocks):
            places = [
                (i, start, start + width)
                for i, region in enumerate(regions)
                if 0
                <= (start := storage + offset - region.blocks.data_ptr())
                <= region.block_bytes - width
            ]
            found.append(places[0] if len(places) == 1 else (None, 0, 0))
    return found


def _last_byte(ends: Mapping[int, Sequence[int]], regions: Sequence[Region]) -> int:
    if not ends:
        # The rank has no layer of the group, and no object is empty.
        return min(_LEAST_BYTES, slot_bytes(regions))
    last = max(ends)
    width = regions[last].block_bytes
    # Alone in its region a layer may have more there than its view shows.
    if len(ends[last]) > 1:
        width = min(max(ends[last]), width)
    return slot_offsets(regions)[last] + width


def bytes_of_groups(
    needs: Sequence[Sequence[int]], slots: Sequence[int], replicas: int
) -> tuple[int, ...]:
    """Bytes by group, on all ranks together; empty if all groups need whole slots.

    Args:
        needs: For each rank, bytes by group; empty where all need whole slots.
        slots: For each rank, the bytes of a slot.
        replicas: Number of consecutive ranks that share a slot.

    """
    num_groups = max(map(len, needs), default=0)
    return tuple(
        sum(
            each[group] if each else size
            for each, size in [*zip(needs, slots)][::replicas]
        )
        for group in range(num_groups)
    )
