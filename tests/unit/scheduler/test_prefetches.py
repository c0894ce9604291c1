# SPDX-License-Identifier: Apache-2.0
"""Blocks loaded ahead: how many wait for their request, and for how long."""

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_tier.scheduler.costs import QueuedLoad
from vllm.v1.kv_tier.scheduler.load_admission import Prefetches

from ..tier import Tier


def prefetched(tier: Tier, num_blocks: int) -> tuple[Prefetches, list[KVCacheBlock]]:
    """They come at 3, and are kept until 4."""
    blocks = [KVCacheBlock(i) for i in range(num_blocks)]
    prefetches = tier.pool.prefetches
    prefetches.add(QueuedLoad("load_ahead", 1, num_blocks, 3.0), blocks)
    return prefetches, blocks


def are_kept(prefetches: Prefetches, blocks: list[KVCacheBlock]) -> list[bool]:
    is_kept = prefetches.kept()
    return [is_kept is not None and is_kept(block) for block in blocks]


def test_what_is_claimed_is_not_kept_any_more() -> None:
    prefetches, blocks = prefetched(Tier(8), 4)
    prefetches.claim(blocks[:1])
    assert prefetches.num_kept() == 3
    assert are_kept(prefetches, blocks) == [False, True, True, True]
    # Twice is as good as once.
    prefetches.claim(blocks[:2])
    assert prefetches.num_kept() == 2
    assert prefetches.num_kept(without=blocks[:3]) == 1


def test_each_and_all_are_kept_equally_long() -> None:
    tier = Tier(8)
    prefetches, blocks = prefetched(tier, 2)
    for now, is_kept in ((3.9, True), (4.0, False), (4.1, False)):
        tier.now = now
        assert are_kept(prefetches, blocks) == [is_kept] * 2
        assert prefetches.num_kept() == 2 * is_kept


def test_what_a_plan_adds_after_all_was_claimed_is_kept() -> None:
    prefetches, blocks = prefetched(Tier(8), 2)
    prefetches.claim(blocks)
    assert prefetches.kept() is None
    more = [KVCacheBlock(5)]
    prefetches.add(QueuedLoad("load_ahead", 1, 1, 3.0), more)
    assert are_kept(prefetches, more) == [True] and prefetches.num_kept() == 1
