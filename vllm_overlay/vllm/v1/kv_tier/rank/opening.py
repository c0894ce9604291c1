# SPDX-License-Identifier: Apache-2.0
"""Opens the stores of the ranks, and finds out which ranks can share objects."""

from collections.abc import Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.copying.engine import slot_offsets
from vllm.v1.kv_tier.memory.regions import Region, build_regions, flatten
from vllm.v1.kv_tier.memory.replicas import owners
from vllm.v1.kv_tier.rank.sharing import find_replicas
from vllm.v1.kv_tier.stores.elsewhere import WrittenElsewhere
from vllm.v1.kv_tier.stores.identity import environment, rank_namespace
from vllm.v1.kv_tier.stores.settings import StoreConfig

logger = init_logger(__name__)


def common_objects(executor: Any, num_blocks: int, told: int | None) -> int:
    """How many consecutive ranks can share their objects; 1 if none can.

    Args:
        executor: Reaches all ranks.
        num_blocks: Blocks of the device cache.
        told: Result of `kv_replicas`; None to ask the ranks.

    """
    replicas = 1 if told == 1 else find_replicas(executor, num_blocks, told)
    if replicas == 1:
        return 1
    names = executor.collective_rpc(_name, args=("", 0, num_blocks))
    if len(names) % replicas or any(
        names[rank] != names[owner] for rank, owner in owners(names, replicas)
    ):
        logger.info(
            "KV tier: %d ranks hold the same KV each, but every rank stores its own "
            "objects in secondary tiers: their layouts or attention backends differ.",
            replicas,
        )
        return 1
    logger.info(
        "KV tier: %d ranks hold the same KV each, and share one object for each block "
        "in secondary tiers.",
        replicas,
    )
    return replicas


# These functions run on the ranks. `wrapper` is a WorkerWrapperBase.


def open_rank(
    wrapper: Any,
    entries: Sequence[StoreConfig],
    space: str,
    num_blocks: int,
    replicas: int,
) -> tuple[str, int]:
    """Open the stores of this rank, or those of the rank that writes its objects.

    Returns:
        Its namespace, and the bytes of an object; 0 bytes for a rank without KV memory.

    """
    tier, rank = wrapper.kv_tier, wrapper.worker.rank
    num_bytes = tier.buffer.slots.shape[1]
    for entry in entries:
        # Other machines have other directories, packages and variables.
        entry.check()
    # The wrapper's rank counts per machine, and would let ranks of two machines share.
    writer = rank - rank % replicas
    name = _name(wrapper, space, writer, num_blocks)
    if num_bytes and rank == writer:
        tier.open_secondary([each.open(name, rank, num_bytes) for each in entries])
    elif num_bytes:
        tier.open_secondary(
            [
                WrittenElsewhere(each.of_a_reader().open(name, writer, num_bytes))
                for each in entries
            ]
        )
    return name, num_bytes


def _name(wrapper: Any, space: str, rank: int, num_blocks: int) -> str:
    return rank_namespace(space, rank, describe(wrapper.worker, num_blocks))


def describe(worker: Any, num_blocks: int) -> list[object]:
    """What shapes the bytes of a slot beyond the model and its settings.

    That is what writes them, and the order and places in which they lie.
    """
    runner = worker.model_runner
    regions = build_regions(runner.kv_caches, num_blocks)
    places = [
        [offset, region.block_bytes]
        for offset, region in zip(slot_offsets(regions), regions)
    ]
    caches = [
        (
            str(tensor.dtype),
            ["blocks" if n % num_blocks == 0 else n for n in tensor.shape[:2]],
            list(tensor.shape[2:]),
            # Order of the dimensions, slowest first.
            sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d)),
            _place(tensor.data_ptr(), regions),
        )
        for tensor in flatten(runner.kv_caches)
    ]
    layers = worker.vllm_config.compilation_config.static_forward_context
    writers = [
        f"{name}: {type(releases.attention_backend(layer) or layer).__qualname__}"
        for name, layer in layers.items()
    ]
    return [type(runner).__module__, caches, places, writers, environment()]


def _place(address: int, regions: Sequence[Region]) -> list[int]:
    """The region that contains `address` of the first block, and the offset in it."""
    for index, region in enumerate(regions):
        offset = address - region.blocks.data_ptr()
        if 0 <= offset < region.blocks.stride(0):
            return [index, offset]
    raise RuntimeError("A KV cache lies in no region.")
