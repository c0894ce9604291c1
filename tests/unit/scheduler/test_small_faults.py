# SPDX-License-Identifier: Apache-2.0
"""What mutations of the code showed that no other test sees."""

from typing import Any

import pytest

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from ..tier import Tier, ids, stores
from .test_events import BLOCK, Publisher, request


@pytest.mark.parametrize("from_use", [2, 3])
def test_write_through_stores_on_the_hit_that_is_use_enough(from_use: int) -> None:
    """Nothing computes the blocks again, so their hit is what stores them."""
    tier = Tier(8, store_policy="write_through", store_from_use=from_use)
    blocks = tier.computed("abc")
    assert not any(stores(plan) for plan in tier.idle(2))
    for use in range(2, from_use + 1):
        tier.begin()
        (group,) = tier.promote(tier.find("abc"))
        tier.pool.touch(group)
        plans = [tier.end()]
        tier.free(group)
        plans += tier.idle(2)
        stored = {b for plan in plans for b in stores(plan).values()}
        assert stored == (ids(blocks) if use == from_use else set())
    # Once is enough.
    assert not any(stores(plan) for plan in tier.idle(2))


def test_write_through_stores_what_was_hit_of_a_hit() -> None:
    """The part behind it has one use only."""
    tier = Tier(8, store_policy="write_through", store_from_use=2)
    blocks = tier.computed("abcd")
    tier.begin()
    tier.promote(tier.find("ab"))
    plans = [tier.end(), *tier.idle(2)]
    stored = {b for plan in plans for b in stores(plan).values()}
    assert stored == ids(blocks[:2])


def test_write_through_stores_what_is_used_enough_behind_what_is_not() -> None:
    tier = Tier(8, store_policy="write_through", store_from_use=2)
    tier.computed("b")
    again = tier.computed("ab")[1]
    stored = {b for plan in tier.idle(2) for b in stores(plan).values()}
    assert stored == {again.block_id}


@pytest.mark.skipif(
    not hasattr(BlockPool, "cache_partial_block"), reason="no hits inside blocks"
)
def test_a_partial_block_cached_twice_is_told_as_the_first_time() -> None:
    """Upstream has no event for the second time: the last one is another block's."""
    tier = Publisher(num_blocks=4, num_slots=10)
    pool: Any = tier.pool
    one, two = request(range(8)), request(range(20, 32))
    pool.begin_step()
    (block,) = pool.get_new_blocks(1)
    # The first releases take blocks that hold several hashes only.
    options: dict[str, Any] = {"kv_cache_group_id": 0, "block_size": 2 * BLOCK}
    key = pool.cache_partial_block(one, block, BLOCK, **options)
    assert key is not None
    (first,) = tier.told()
    assert isinstance(first, BlockStored)
    # No event, and none before it either.
    assert pool.cache_partial_block(one, block, BLOCK, **options) == key
    assert tier.told() == []
    others = pool.get_new_blocks(3)
    pool.cache_full_blocks(two, others, 0, 3, BLOCK, 0)
    assert pool.cache_partial_block(one, block, BLOCK, **options) == key
    pool.take_plan()
    pool.free_blocks([block, *others])
    tier.told()
    tier.evict_all()
    on_host = [e for e in tier.told() if isinstance(e, BlockStored)]
    wanted = maybe_convert_block_hash(one.block_hashes[0])
    (told,) = [e for e in on_host if wanted in e.block_hashes]
    assert told.medium == "CPU"
    assert told.token_ids == first.token_ids
    assert told.parent_block_hash == first.parent_block_hash
