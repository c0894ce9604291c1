# SPDX-License-Identifier: Apache-2.0
"""Steps around loads that run ahead of their request."""

from types import SimpleNamespace
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_tier.plan import StepPlan

from .tier import BLOCK, Tier


def make_tier(num_blocks: int, **settings: Any) -> Tier:
    """A block takes a second to load; a step waits for half of that."""
    return Tier(num_blocks, **{"load_s": 1.0, "max_load_stall_ms": 500, **settings})


def defer(tier: Tier, names: str) -> StepPlan:
    """A step in which a request that hit `names` has to wait."""
    tier.begin()
    assert tier.try_promote(tier.find(names), among_others=True) is None
    assert tier.deferred
    return tier.end()


def block(tier: Tier, names: str) -> StepPlan:
    """A step that lacks blocks for a request that hit `names`."""
    tier.begin()
    assert tier.try_promote(tier.find(names), among_others=True) is None
    assert not tier.deferred
    return tier.end()


def admit(tier: Tier, names: str, among_others: bool = True) -> StepPlan:
    """A step in which a request that hit `names` is admitted."""
    tier.begin()
    (group,) = tier.promote(tier.find(names), among_others=among_others)
    tier.pool.touch(group)
    plan = tier.end()
    tier.free(group)
    return plan


def places(tier: Tier, names: str) -> dict[int, int]:
    """Slot by device block, for blocks that have both."""
    return {b.block_id: tier.slot(n).index for n, b in zip(names, tier.find(names))}


def lack_room(tier: Tier, names: str) -> None:
    """This step has no room to admit a request that hit `names`."""
    managers = [SimpleNamespace(block_size=BLOCK, get_num_skipped_tokens=lambda n: 0)]
    tier.pool.load_ahead(managers, (tier.find(names),), len(names) * BLOCK)


def load_ahead(tier: Tier, names: str) -> StepPlan:
    """A step that has no room to admit a request that hit `names`."""
    tier.begin()
    lack_room(tier, names)
    return tier.end()


def taken(tier: Tier) -> tuple[StepPlan, list[KVCacheBlock]]:
    """A step that takes all blocks, which are free after it."""
    tier.begin()
    blocks = tier.pool.get_new_blocks(tier.pool.get_num_free_blocks())
    plan = tier.end()
    tier.free(blocks)
    return plan, blocks
