# SPDX-License-Identifier: Apache-2.0
"""What a pool that publishes makes of the methods in which upstream's tells events."""

from inspect import getsource, signature
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.distributed.kv_events import AllBlocksCleared, BlockStored
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from .test_events import BLOCK, Publisher, hashes, request

HAS_MASKS = "block_mask" in signature(BlockPool.cache_full_blocks).parameters
LEAVES_OUT_NULL = "is_null" in getsource(BlockPool.cache_full_blocks)
partial = pytest.mark.skipif(
    not hasattr(BlockPool, "cache_partial_block"), reason="blocks have one key"
)


def cached_in_two(tier: Publisher, blocks: list[KVCacheBlock], **mask: Any) -> None:
    """The first of three blocks is cached by itself, then the others."""
    one = request(range(12))
    tier.pool.cache_full_blocks(one, blocks, 0, 1, BLOCK, 0)
    tier.pool.cache_full_blocks(one, blocks, 1, 3, BLOCK, 0, **mask)


def held(tier: Publisher, medium: str) -> set[Any]:
    tier.told()
    return {block_hash for _, block_hash in tier.follower.held(medium)}


@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(
            "null",
            marks=pytest.mark.skipif(
                not LEAVES_OUT_NULL, reason="null blocks are told"
            ),
        ),
        pytest.param(
            "masked", marks=pytest.mark.skipif(not HAS_MASKS, reason="no masks")
        ),
    ],
)
def test_blocks_that_upstream_leaves_out(how: str, place: int) -> None:
    tier = Publisher()
    one = request(range(12))
    tier.pool.begin_step()
    taken = tier.pool.get_new_blocks(3)
    blocks = [*taken]
    mask = {}
    if how == "null":
        blocks[place] = tier.pool.null_block
    else:
        mask = {"block_mask": [i != place for i in (1, 2)]}
    cached_in_two(tier, blocks, **mask)
    tier.pool.take_plan()
    expected = {h for i, h in enumerate(hashes(one)) if i != place}
    assert held(tier, "GPU") == expected
    tier.pool.free_blocks(taken)
    tier.evict_all()
    # Each is told on the host as it was on the device.
    assert held(tier, "CPU") == expected and not held(tier, "GPU")


def test_nothing_new_is_cached() -> None:
    tier = Publisher()
    one = request(range(12))
    blocks = tier.compute(one)
    tier.told()
    tier.pool.cache_full_blocks(one, blocks, 3, 3, BLOCK, 0)
    assert tier.told() == []


@partial
def test_a_part_of_a_block_goes_to_the_host() -> None:
    tier = Publisher()
    one = request(range(8))
    tier.pool.begin_step()
    (block,) = tier.pool.get_new_blocks(1)
    key = tier.pool.cache_partial_block(one, block, BLOCK, 0, 2 * BLOCK)
    assert key is not None
    (stored,) = tier.told()
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == hashes(one)[:1]
    # Once more, and none: nothing to tell.
    assert tier.pool.cache_partial_block(one, block, BLOCK, 0, 2 * BLOCK) == key
    null = tier.pool.null_block
    assert tier.pool.cache_partial_block(one, null, BLOCK, 0, 2 * BLOCK) is None
    tier.pool.take_plan()
    tier.pool.free_blocks([block])
    assert tier.told() == []
    tier.evict_all()
    assert held(tier, "CPU") == {*hashes(one)[:1]} and not held(tier, "GPU")


def test_late_subscribers_are_told_anew() -> None:
    tier = Publisher()
    tier.compute(request(range(12)))
    tier.told()
    publisher = SimpleNamespace(has_late_subscribers=False)
    tier.pool.serve_late_subscribers(publisher)
    assert tier.told() == []
    publisher.has_late_subscribers = True
    tier.pool.serve_late_subscribers(publisher)
    assert publisher.has_late_subscribers is False
    assert [type(e) for e in tier.told()] == [AllBlocksCleared, BlockStored]
    assert tier.told() == []
    tier.pool.serve_late_subscribers(publisher)
    assert tier.told() == []


def test_a_reset_empties_the_host() -> None:
    tier = Publisher()
    tier.compute(request(range(12)))
    tier.evict_all()
    assert len(tier.pool.host) == 3
    assert tier.pool.reset_prefix_cache()
    assert len(tier.pool.host) == 0


@pytest.mark.skipif(
    not hasattr(BlockPool, "emit_cached_block_events"), reason="hits are not told again"
)
def test_a_hit_that_is_told_before_its_move_is() -> None:
    """The move is not told once more."""
    tier = Publisher()
    tier.compute(request(range(12)))
    tier.evict_all()
    again = request(range(12))
    has_sessions = "session_id" in BlockStored.__struct_fields__
    if has_sessions:
        again.session_id = "another"
    tier.pool.emit_cached_block_events(again, 3, BLOCK, 0)
    hosted = [e for e in tier.told() if isinstance(e, BlockStored)]
    hosted = [e for e in hosted if e.medium == "CPU"]
    assert [e.block_hashes for e in hosted] == [hashes(again)]
    if has_sessions:
        assert hosted[0].session_id == "another"
