# SPDX-License-Identifier: Apache-2.0
"""Which ranks hold the same KV, and the bytes of a slot if they store it once."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vllm.v1.kv_tier import releases

Layout = tuple[int, ...]
"""Bytes of a block in each region of a rank."""


_PLAIN = {"FullAttentionSpec", "SlidingWindowSpec"}


def kv_replicas(vllm_config: Any, kv_cache_config: Any) -> int | None:
    """How many consecutive ranks hold the same KV of every layer; 1 if none do.

    Args:
        vllm_config: Settings of the engine.
        kv_cache_config: The scheduler's KV cache configuration.

    Returns:
        The number, or None if it depends on the heads of each layer, which
        `head_replicas` counts.

    """
    parallel = vllm_config.parallel_config
    num_ranks = parallel.tensor_parallel_size
    if num_ranks == 1:
        return 1
    # Context parallel ranks hold different tokens.
    if releases.decode_context_ranks(parallel) > 1:
        return 1
    if releases.prefill_context_ranks(parallel) > 1:
        return 1
    speculative = vllm_config.speculative_config
    draft = None if speculative is None else speculative.draft_parallel_config
    if draft is not None and draft.tensor_parallel_size != num_ranks:
        return 1
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    is_mla = vllm_config.model_config.use_mla
    replicas = releases.kv_replicas(kv_cache_config)
    if replicas is None and is_mla:
        # Layers of a draft model may be of another kind.
        replicas = num_ranks if speculative is None and _are_latent(specs) else 1
    if replicas is not None and (replicas > 1 or is_mla):
        return replicas if num_ranks % replicas == 0 else 1
    # Specs do not have the total number of heads. Each rank has at least one.
    kinds = {type(spec).__name__ for spec in specs}
    if not specs or not kinds <= _PLAIN:
        return 1
    return None if all(spec.num_kv_heads == 1 for spec in specs) else 1


def _are_latent(specs: Sequence[Any]) -> bool:
    """Whether all layers use MLA, in releases without `kv_tp_replicas`."""
    # Older releases use one spec for MLA and full attention, with a flag.
    kinds = {type(spec).__name__ for spec in specs}
    known = kinds <= {"MLAAttentionSpec", "FullAttentionSpec"}
    return bool(specs) and known and all(map(releases.is_latent, specs))


def head_replicas(modules: Mapping[str, Any], layers: Iterable[str]) -> int:
    """On how many consecutive ranks all layers have the same KV heads.

    Args:
        modules: Modules of the model by name. Projections to queries, keys and values
            know their replicas.
        layers: Names of the layers with KV. A layer of unknown kind counts as not
            replicated.

    """
    found = 0
    projections = {
        name.rpartition(".")[0]: num
        for name, module in modules.items()
        if (num := releases.num_head_replicas(module)) is not None
    }
    for layer in layers:
        found = math.gcd(found, projections.get(layer.rpartition(".")[0], 1))
    return max(found, 1)


def obstacle(
    layouts: Sequence[Layout], replicas: int, is_one_machine: bool, has_below: bool
) -> str | None:
    """Why ranks with the same KV cannot share slots; None if they can.

    Args:
        layouts: Layout of each rank.
        replicas: Number of consecutive ranks that hold the same KV.
        is_one_machine: Whether all ranks are on this machine.
        has_below: Whether there are secondary tiers.

    """
    if not is_one_machine:
        return "they are on several machines"
    if has_below:
        return "each rank reads secondary tiers into its own slots"
    if not all(layouts):
        return "some ranks have no KV memory"
    if len(layouts) % replicas:
        return f"{len(layouts)} ranks do not divide into groups of {replicas}"
    if any(
        layouts[rank] != layouts[owner] for rank, owner in owners(layouts, replicas)
    ):
        return "their KV caches have different layouts"
    return None


def owners(ranks: Sequence[object], replicas: int) -> Iterator[tuple[int, int]]:
    """(rank, owner) for each rank: the owner stores for the ranks with the same KV.

    It is the first of them.
    """
    return ((rank, rank - rank % replicas) for rank in range(len(ranks)))


def held_once(per_rank: Sequence[int], replicas: int) -> int:
    """Bytes of a slot on all ranks together.

    Args:
        per_rank: Bytes of a block on each rank.
        replicas: Number of consecutive ranks that share a slot.

    """
    return sum(per_rank[::replicas])
