# SPDX-License-Identifier: Apache-2.0
"""Sets up shared memory for the slots of ranks that hold the same KV, at start.

Either all such ranks share it, or each has its own slots as if they held different KV.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vllm.logger import init_logger
from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.copying.engine import slot_bytes
from vllm.v1.kv_tier.memory.buffer import HostBuffer, shared_buffer
from vllm.v1.kv_tier.memory.numa import gpu_node
from vllm.v1.kv_tier.memory.regions import build_regions, flatten
from vllm.v1.kv_tier.memory.replicas import Layout, head_replicas, obstacle, owners
from vllm.v1.kv_tier.memory.shared import Address, NotShared, SharedMemory

logger = init_logger(__name__)


@dataclass(frozen=True)
class SharedSlots:
    """Host slots that a rank shares with others."""

    buffer: HostBuffer
    memory: SharedMemory
    index: int
    """The rank's index among them. The first one stores."""


class RankFacts(NamedTuple):
    """What a rank reports about itself before ranks share."""

    layout: Layout
    node: int | None
    """NUMA node of its GPU."""
    head_replicas: int
    """Number of ranks with the same heads in every layer, if asked for."""


def may_share(
    executor: Any,
    num_blocks: int,
    replicas: int | None,
    is_one_machine: bool,
    has_below: bool,
) -> tuple[int, list[RankFacts]] | None:
    """Ask the ranks whether those that hold the same KV can share slots.

    Args:
        executor: Reaches all ranks.
        num_blocks: Blocks of the device cache.
        replicas: Result of `kv_replicas`; None to ask the ranks.
        is_one_machine: Whether all ranks are on this machine.
        has_below: Whether there are secondary tiers.

    Returns:
        How many consecutive ranks hold the same KV, and the facts of each rank. None if
        none do, or if they cannot share; the log explains why.

    """
    asks = replicas is None
    facts = executor.collective_rpc(_facts, args=(num_blocks, asks))
    if replicas is None:
        replicas = math.gcd(*(each.head_replicas for each in facts))
    if replicas == 1:
        return None
    layouts = [each.layout for each in facts]
    reason = obstacle(layouts, replicas, is_one_machine, has_below)
    if reason is None:
        return replicas, facts
    _tell_why_not(replicas, reason)
    return None


def find_replicas(executor: Any, num_blocks: int, replicas: int | None) -> int:
    """How many consecutive ranks hold the same KV; 1 if none do.

    Args:
        executor: Reaches all ranks.
        num_blocks: Blocks of the device cache.
        replicas: Result of `kv_replicas`; None to ask the ranks.

    """
    if replicas is None:
        facts = executor.collective_rpc(_facts, args=(num_blocks, True))
        replicas = math.gcd(*(each.head_replicas for each in facts))
    return replicas


def share_slots(
    executor: Any,
    num_blocks: int,
    num_slots: int,
    replicas: int,
    facts: Sequence[RankFacts],
) -> bool:
    """Let groups of ranks share the memory of their slots, with all pages touched.

    Args:
        executor: Reaches all ranks.
        num_blocks: Blocks of the device cache.
        num_slots: Number of host slots.
        replicas: Number of consecutive ranks that hold the same KV.
        facts: From `may_share`.

    Returns:
        Whether they share. If not, everything is undone, and the log explains why.

    Raises:
        MemoryError: There is not enough host memory.

    """
    nodes = [
        {each.node for each in facts[owner : owner + replicas]} - {None}
        for _, owner in owners(facts, replicas)
    ]
    args = (num_blocks, num_slots, replicas, nodes)
    found = executor.collective_rpc(_create, args=args)
    if not (reasons := _reasons(found)):
        args = (num_blocks, num_slots, replicas, found)
        reasons = _reasons(executor.collective_rpc(_join, args=args))
    if not reasons:
        return True
    executor.collective_rpc(_drop_shared)
    _tell_why_not(replicas, reasons[0])
    return False


def _tell_why_not(replicas: int, reason: str) -> None:
    logger.info(
        "KV tier: %d ranks hold the same KV each, but every rank keeps a copy of its "
        "own on the host: %s.",
        replicas,
        reason,
    )


def _reasons(found: Sequence[Any]) -> list[str]:
    return [each for each in found if isinstance(each, str)]


# These functions run on the ranks. `wrapper` is a WorkerWrapperBase.


def _facts(wrapper: Any, num_blocks: int, asks_heads: bool) -> RankFacts:
    runner = wrapper.worker.model_runner
    regions = build_regions(runner.kv_caches, num_blocks)
    node = gpu_node(runner.device) if runner.device.type == "cuda" else None
    layout = tuple(region.block_bytes for region in regions)
    heads = _head_replicas(wrapper.worker) if asks_heads else 1
    return RankFacts(layout, node, heads)


def _head_replicas(worker: Any) -> int:
    layers = worker.vllm_config.compilation_config.static_forward_context
    with_kv = [
        name
        for name, layer in layers.items()
        if next(flatten(releases.kv_caches_of(layer)), None) is not None
    ]
    return head_replicas(dict(worker.get_model().named_modules()), with_kv)


def _create(
    wrapper: Any,
    num_blocks: int,
    num_slots: int,
    replicas: int,
    nodes: Sequence[set[int]],
) -> Address | str | None:
    """Create the memory on the ranks that store.

    Returns:
        Where the others find it, or why it could not be made; None on other ranks.

    """
    rank = wrapper.rpc_rank
    if rank % replicas:
        return None
    regions = build_regions(wrapper.worker.model_runner.kv_caches, num_blocks)
    try:
        memory = SharedMemory.create(num_slots, slot_bytes(regions), replicas)
        wrapper.kv_tier_shared = _slots(wrapper, memory, num_slots, 0, nodes[rank])
    except NotShared as e:
        return str(e)
    return memory.address


def _join(
    wrapper: Any,
    num_blocks: int,
    num_slots: int,
    replicas: int,
    addresses: Sequence[Address | None],
) -> str | None:
    """Map the memory on the other ranks. Returns the reason if that failed."""
    rank = wrapper.rpc_rank
    index = rank % replicas
    address = addresses[rank - index]
    if not index or address is None:
        return None
    regions = build_regions(wrapper.worker.model_runner.kv_caches, num_blocks)
    try:
        memory = SharedMemory.join(address, num_slots, slot_bytes(regions), replicas)
        wrapper.kv_tier_shared = _slots(wrapper, memory, num_slots, index, None)
    except NotShared as e:
        return str(e)
    return None


def _slots(
    wrapper: Any,
    memory: SharedMemory,
    num_slots: int,
    index: int,
    nodes: set[int] | None,
) -> SharedSlots:
    device: torch.device = wrapper.worker.model_runner.device
    return SharedSlots(shared_buffer(memory, num_slots, device, nodes), memory, index)


def _drop_shared(wrapper: Any) -> None:
    """Undo sharing on this rank."""
    taken = take_shared(wrapper)
    if taken is not None:
        taken.memory.close()


def take_shared(wrapper: Any) -> SharedSlots | None:
    """Take the shared slots of this rank, if any. Later calls return None."""
    return vars(wrapper).pop("kv_tier_shared", None)
