# SPDX-License-Identifier: Apache-2.0
"""What subscribers hear of a tier that switches itself off, and of blocks it told of.

See `test_events` for single moves, `tests/sim/test_hangs_with_events` for random ones.
"""

from collections import Counter

import pytest

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_tier.plan import StepReport

from .test_events import Publisher, request


def on_device(tier: Publisher) -> Counter:
    """Blocks of the prompts that are on the device, as followers name them. For a tier
    that is off: what the pool finds is on the device."""
    requests = [request(prompt) for prompt in (FIRST, SECOND, THIRD)]
    found = [
        maybe_convert_block_hash(h)
        for each in requests
        for h in each.block_hashes
        if tier.pool.get_cached_block(h, [0]) is not None
    ]
    return Counter((0, h) for h in found)


FIRST, SECOND, THIRD = range(12), range(20, 32), range(40, 52)
"""Prompts of three blocks."""


def make_tier() -> Publisher:
    tier = Publisher(num_blocks=3, num_slots=10)
    tier.compute(request(FIRST))
    tier.evict_all()
    tier.compute(request(SECOND))
    return tier


@pytest.fixture
def tier() -> Publisher:
    """One prompt is on the host only, another on the device."""
    tier = make_tier()
    tier.told()
    assert sum(tier.follower.held("CPU").values()) >= 3
    assert sum(tier.follower.held("GPU").values()) == 3
    return tier


def test_every_host_block_is_removed_when_the_tier_is_off(tier: Publisher) -> None:
    before = tier.follower.held("CPU")
    tier.pool.apply_report(StepReport(lost_blocks=[]))
    told = tier.told()
    assert not tier.follower.held("CPU")
    removed = Counter(
        (0, h) for e in told if isinstance(e, BlockRemoved) for h in e.block_hashes
    )
    assert removed == before
    # The device's blocks are still there.
    assert tier.follower.held("GPU") == on_device(tier)
    assert sum(tier.follower.held("GPU").values()) == 3


def test_the_medium_of_what_is_removed_is_the_hosts(tier: Publisher) -> None:
    tier.pool.apply_report(StepReport(lost_blocks=[]))
    told = tier.told()
    assert told and {type(e) for e in told} == {BlockRemoved}
    assert {e.medium for e in told} == {"CPU"}


def test_lost_blocks_are_removed_from_the_device_too(tier: Publisher) -> None:
    blocks = [b for b in tier.pool.blocks if b.block_hash is not None]
    tier.pool.apply_report(StepReport(lost_blocks=[blocks[0].block_id]))
    tier.told()
    assert not tier.follower.held("CPU")
    assert tier.follower.held("GPU") == on_device(tier)
    assert sum(tier.follower.held("GPU").values()) == 2


def test_what_comes_after_is_told_of_the_device_only(tier: Publisher) -> None:
    tier.pool.apply_report(StepReport(lost_blocks=[]))
    tier.told()
    tier.compute(request(THIRD))
    told = tier.told()
    assert {e.medium for e in told} == {"GPU"}
    assert [type(e) for e in told].count(BlockStored) == 1
    assert tier.follower.held("GPU") == on_device(tier)
    # Twice is no harm: two ranks may give up, one after the other.
    tier.pool.apply_report(StepReport(lost_blocks=[]))
    assert tier.told() == []


def test_a_reset_after_that_clears_once(tier: Publisher) -> None:
    tier.pool.apply_report(StepReport(lost_blocks=[]))
    assert tier.pool.reset_prefix_cache()
    told = tier.told()
    assert [type(e) for e in told].count(AllBlocksCleared) == 1
    assert isinstance(told[-1], AllBlocksCleared)
    assert not tier.follower.blocks


def test_slots_in_use_by_the_plan_are_removed_too() -> None:
    """The report may come while a step is in the making."""
    tier = make_tier()
    tier.pool.begin_step()
    tier.pool.free_blocks(tier.pool.get_new_blocks(2))
    tier.pool.apply_report(StepReport(lost_blocks=[]))
    tier.pool.take_plan()
    tier.told()
    assert not tier.follower.held("CPU")
