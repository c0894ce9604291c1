# SPDX-License-Identifier: Apache-2.0
"""Several blocks of one key, and several keys of one block."""

from inspect import signature
from types import SimpleNamespace

import pytest

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id

from ..tier import BLOCK, Tier, hash_of, hashes, ids, stores


def test_two_blocks_of_one_key_share_a_slot() -> None:
    tier = Tier(2)
    tier.begin()
    blocks = tier.compute("a") + tier.compute("a")
    tier.end()
    tier.free(blocks)
    tier.begin()
    tier.pool.get_new_blocks(1)
    assert tier.where("a") == "device"
    tier.pool.get_new_blocks(1)
    assert tier.where("a") == "host"
    assert len(stores(tier.end())) == 1 and len(tier.host) == 1


@pytest.mark.skipif(
    "metrics_collector" not in signature(BlockPool).parameters,
    reason="this release has no metrics of single blocks",
)
def test_metrics_of_blocks_hear_of_every_victim() -> None:
    """Of those without content too, or the collector keeps what it knows of them."""
    tier = Tier(2)
    heard: list[int] = []
    tier.pool.metrics_collector = SimpleNamespace(
        on_block_evicted=lambda block: heard.append(block.block_id),
        on_block_allocated=lambda block: None,
    )
    tier.pool._publishes_evictions = True
    blocks = tier.computed("a")
    tier.begin()
    assert ids(tier.pool.get_new_blocks(2)) == {*heard[-2:]} > ids(blocks)


# In some releases a block has one key only.
several_keys = pytest.mark.skipif(
    not hasattr(BlockPool, "cache_partial_block"), reason="blocks have one key"
)


def partial(tier: Tier, name: str, block: KVCacheBlock) -> None:
    """Also make the first half of a block a hit, under `name`."""
    request = SimpleNamespace(block_hashes=hashes(name), mm_features=None)
    tier.pool.cache_partial_block(request, block, BLOCK // 2, 0, BLOCK)


@several_keys
def test_all_keys_of_a_block_share_its_slot() -> None:
    tier = Tier(2, hash_block_size=BLOCK // 2)
    tier.begin()
    blocks = tier.pool.get_new_blocks(1)
    tier.cache("ab", blocks)
    (key,) = [blocks[0].block_hash]
    tier.end()
    partial(tier, "a", blocks[0])
    tier.free(blocks)
    assert blocks[0].block_hash == key
    tier.begin()
    tier.pool.get_new_blocks(2)
    assert len(stores(tier.end())) == 1
    slot = tier.host.filled_slots()[0]
    assert slot.keys == (key, make_block_hash_with_group_id(hash_of("a"), 0))
    assert tier.where("a") == "host" and tier.slot("a") == slot
    # Back on the device, both keys find it again.
    tier.free(tier.pool.blocks[1:])
    tier.begin()
    (group,) = tier.promote([slot])
    assert group[0].block_hash == key
    assert group[0].block_hash_num_tokens == BLOCK
    assert tier.find("a") == list(group)
    tier.end()
    # And both go when it turns out to be wrong.
    tier.pool.evict_blocks({group[0].block_id})
    assert tier.where("a") == "nowhere" and len(tier.host) == 0


@several_keys
def test_a_block_that_got_another_key_is_stored_again() -> None:
    tier = Tier(1, hash_block_size=BLOCK // 2)
    tier.begin()
    blocks = tier.pool.get_new_blocks(1)
    tier.cache("ab", blocks)
    tier.end()
    tier.free(blocks)
    tier.idle()
    assert len(tier.host.filled_slots()[0].keys) == 1
    partial(tier, "a", blocks[0])
    tier.begin()
    tier.pool.get_new_blocks(1)
    assert len(stores(tier.end())) == 1
    (slot,) = tier.host.filled_slots()
    assert len(slot.keys) == 2


@several_keys
def test_a_block_whose_keys_the_host_has_is_not_stored_again() -> None:
    tier = Tier(1, hash_block_size=BLOCK // 2)
    tier.begin()
    blocks = tier.pool.get_new_blocks(1)
    tier.cache("ab", blocks)
    tier.end()
    partial(tier, "a", blocks[0])
    tier.free(blocks)
    assert len(stores(tier.idle()[0])) == 1
    tier.begin()
    tier.pool.get_new_blocks(1)
    assert not stores(tier.end())
