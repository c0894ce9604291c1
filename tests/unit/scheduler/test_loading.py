# SPDX-License-Identifier: Apache-2.0
"""Which device blocks a load takes, and whose they must not be."""

import pytest

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from ..prefetching import make_tier, places
from ..tier import Tier, assert_nothing_leaks, ids, loads

takes_empty_ones_first = pytest.mark.skipif(
    not hasattr(FreeKVCacheBlockQueue, "prepend_n"),
    reason="blocks without keys are not the next there",
)


def one_is_freed_by_the_step(tier: Tier) -> set[int]:
    """A step in the making has freed a block, which a copy on write may still read.
    It is the next in the free queue."""
    tier.begin()
    freed = tier.pool.get_new_blocks(1)
    tier.end()
    tier.begin()
    tier.free(freed)
    return ids(freed)


@takes_empty_ones_first
def test_loads_leave_what_the_step_has_freed() -> None:
    tier = make_tier(3)
    tier.demoted("ab")
    freed = one_is_freed_by_the_step(tier)
    assert ids(tier.pool.free.first(1)) == freed
    tier.promote(tier.find("ab"))
    assert_nothing_leaks(tier)
    plan = tier.end()
    assert len(loads(plan)) == 2 and freed.isdisjoint(loads(plan))
    # The forward pass of the step itself: a load would come before that.
    assert plan.load_after_compute < plan.seq


@takes_empty_ones_first
def test_loads_leave_what_the_step_has_freed_and_taken_again() -> None:
    tier = make_tier(3)
    tier.demoted("ab")
    freed = one_is_freed_by_the_step(tier)
    again = tier.pool.get_new_blocks(1)
    assert ids(again) == freed
    tier.promote(tier.find("ab"))
    tier.free(again)
    assert_nothing_leaks(tier)
    assert freed.isdisjoint(loads(tier.end()))


def test_loads_avoid_the_step_in_flight_where_they_just_can() -> None:
    tier = make_tier(3)
    tier.demoted("a")
    tier.idle()
    tier.begin()
    used = tier.pool.get_new_blocks(2)
    tier.end()
    tier.free(used)
    tier.begin()
    tier.promote(tier.find("a"))
    assert ids(used).isdisjoint(places(tier, "a"))
    tier.end()


@pytest.mark.parametrize("num_blocks", [2, 3])
def test_the_device_part_of_a_hit_takes_room_if_it_is_free(num_blocks: int) -> None:
    tier = make_tier(num_blocks)
    tier.demoted("bc")
    tier.computed("a")
    tier.begin()
    is_admitted = tier.try_promote(tier.find("abc")) is not None
    assert is_admitted == (num_blocks == 3)
    tier.end()


def test_the_device_part_of_a_hit_takes_none_if_it_is_in_use() -> None:
    tier = make_tier(3)
    tier.demoted("bc")
    tier.begin()
    running = tier.compute("a")
    tier.end()
    tier.begin()
    assert tier.try_promote(tier.find("abc")) is not None
    tier.end()
    tier.free(running)


def test_only_stores_from_the_blocks_of_a_load_delay_it() -> None:
    """Ten others are stored by the same plan, for a request that computes."""
    tier = make_tier(24)
    tier.demoted("a")
    tier.computed("bcdefghijklm")
    tier.begin()
    running = tier.pool.get_new_blocks(22)
    assert tier.try_promote(tier.find("a"), among_others=True) is None
    assert tier.deferred
    plan = tier.end()
    # One of them is that of its own block. Then it loads for a second, half of which
    # a step waits.
    assert len(plan.store_blocks) == 11
    tier.now = 1.5
    tier.begin()
    assert tier.try_promote(tier.find("a"), among_others=True) is not None
    tier.end()
    tier.free(running)
