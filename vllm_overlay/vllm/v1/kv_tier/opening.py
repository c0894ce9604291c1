# SPDX-License-Identifier: Apache-2.0
"""What becomes of the settings of secondary tiers when an engine starts."""

from collections.abc import Sequence

from vllm.v1.kv_tier.layout import SecondaryLayout, SecondaryTier
from vllm.v1.kv_tier.scheduler.secondary.lookup import Exists
from vllm.v1.kv_tier.stores.settings import StoreConfig

# For all ranks together: enough for all threads of a rank, but short.
_MAX_JOB_BYTES = 64 << 20
# Part of the slots that may be in writes at a time: steps can be a quarter of a second
# apart, in which gigabytes are written.
_MAX_WRITING = 1 / 4


def secondary_layout(
    tiers: Sequence[SecondaryTier],
    num_ranks: int,
    block_sizes: Sequence[int],
    num_slots: int,
    slot_bytes: int,
    tokens_per_block: float,
) -> SecondaryLayout:
    """Make the description of a host tier's secondary tiers.

    Args:
        tiers: In the order in which they are asked.
        num_ranks: Number of ranks with KV memory.
        block_sizes: Tokens of a block, for each KV cache group.
        num_slots: Number of host slots.
        slot_bytes: Bytes of a slot on all ranks together.
        tokens_per_block: Tokens whose KV takes one block, over all groups together.

    """
    return SecondaryLayout(
        tuple(tiers),
        num_ranks,
        tuple(block_sizes),
        max_writing=max(1, int(_MAX_WRITING * num_slots)),
        max_job=max(1, _MAX_JOB_BYTES // slot_bytes),
        max_known=4 * num_slots,
        tokens_per_block=tokens_per_block,
    )


def labels(types: Sequence[str]) -> list[str]:
    """Labels for metrics: types of the tiers, numbered where a type occurs twice."""
    return [
        kind if types.count(kind) == 1 else f"{kind}-{types[: i + 1].count(kind)}"
        for i, kind in enumerate(types)
    ]


def exists_on_all(
    entry: StoreConfig, writers: Sequence[tuple[str, int]], replicas: int
) -> Exists:
    """A function that tells which objects all ranks have.

    Args:
        entry: The store.
        writers: Namespace and bytes of an object for each rank that writes.
        replicas: Number of ranks for which each of them writes.

    """
    stores = [
        entry.open(rank_space, i * replicas, num_bytes)
        for i, (rank_space, num_bytes) in enumerate(writers)
        if num_bytes
    ]

    def exists(keys: Sequence[bytes]) -> list[bool]:
        return [all(each) for each in zip(*(store.exists(keys) for store in stores))]

    return exists
