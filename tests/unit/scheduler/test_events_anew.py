# SPDX-License-Identifier: Apache-2.0
"""KV events that are told in several steps, in several groups, or before others.

Random ones are in tests/sim.
"""

from typing import Any

import pytest

from vllm.distributed.kv_events import AllBlocksCleared, BlockStored
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_tier.scheduler.events import REPUBLISHED_PER_STEP

from .test_events import BLOCK, Publisher, hashes, request


def stored(events: list[Any], medium: str = "GPU") -> list[list[Any]]:
    """Hashes of each event that stores."""
    found = [e for e in events if isinstance(e, BlockStored)]
    return [e.block_hashes for e in found if e.medium == medium]


def num_stored(events: list[Any]) -> int:
    return sum(map(len, stored(events)))


LONG = range(BLOCK * (2 * REPUBLISHED_PER_STEP + 10))


@pytest.fixture
def behind() -> Publisher:
    """A tier that tells all anew, and has told the first part of it."""
    tier = Publisher(num_blocks=2 * REPUBLISHED_PER_STEP + 30, num_slots=40)
    host = request(range(-BLOCK * 30, -BLOCK * 10))
    tier.compute(host)
    tier.evict_all()
    tier.compute(request(LONG))
    tier.told()
    tier.pool.events.republish_all()
    told = tier.told()
    assert isinstance(told[0], AllBlocksCleared)
    # As many keys as the host's and so many of the device's.
    assert num_stored(told) == REPUBLISHED_PER_STEP - len(host.block_hashes)
    return tier


def test_all_is_told_anew_part_by_part(behind: Publisher) -> None:
    assert num_stored(behind.told()) == REPUBLISHED_PER_STEP
    assert num_stored(behind.told()) == 30
    assert behind.told() == []
    assert sum(behind.follower.held("GPU").values()) == 2 * REPUBLISHED_PER_STEP + 10
    assert sum(behind.follower.held("CPU").values()) == 20


def test_all_who_come_late_meanwhile_are_told_once(behind: Publisher) -> None:
    """Whoever asks again and again keeps no other follower from knowing all."""
    events = behind.pool.events
    clears, all_known = 0, 0
    for _ in range(40):
        events.republish_all()
        told = behind.told()
        clears += any(isinstance(e, AllBlocksCleared) for e in told)
        known = sum(behind.follower.held("GPU").values())
        all_known += known == 2 * REPUBLISHED_PER_STEP + 10
    # It takes three steps, and as many are a rest.
    assert clears <= 7 and all_known >= 20


def test_those_who_can_replay_it_are_told_nothing_anew(behind: Publisher) -> None:
    """The batches since followers were told to forget all are kept: two so far."""
    events = behind.pool.events
    behind.told()
    events.republish_all(num_kept=2)
    assert not any(isinstance(e, AllBlocksCleared) for e in behind.told())
    for _ in range(8):
        events.republish_all(num_kept=20)
        assert not any(isinstance(e, AllBlocksCleared) for e in behind.told())
    events.republish_all(num_kept=9)
    assert any(isinstance(e, AllBlocksCleared) for e in behind.told())


def test_a_reset_is_a_begin_for_those_who_come_late(behind: Publisher) -> None:
    assert behind.pool.reset_prefix_cache()
    for _ in range(3):
        behind.told()
    # The batch of the reset, and two more.
    behind.pool.events.republish_all(num_kept=3)
    assert behind.told() == []
    behind.pool.events.republish_all(num_kept=3)
    assert [type(e) for e in behind.told()] == [AllBlocksCleared]


def test_what_a_step_computes_is_told_behind_the_rest(behind: Publisher) -> None:
    """Its parents may not have been told yet."""
    one = request(range(-8 * BLOCK, -5 * BLOCK))
    behind.compute(one)
    # As much more is told as has changed: three new blocks, and what made room.
    told = behind.told()
    assert num_stored(told) == REPUBLISHED_PER_STEP + 6 and hashes(one) not in stored(
        told
    )
    assert hashes(one) in stored(behind.told())
    assert behind.told() == []


def test_what_is_loaded_meanwhile_is_told_behind_the_rest(behind: Publisher) -> None:
    host = request(range(-BLOCK * 30, -BLOCK * 10))
    behind.promote(host)
    assert hashes(host) not in stored(behind.told())
    assert hashes(host) in stored(behind.told())
    assert behind.told() == []


def test_a_reset_ends_it(behind: Publisher) -> None:
    assert behind.pool.reset_prefix_cache()
    assert [type(e) for e in behind.told()] == [AllBlocksCleared]
    assert behind.told() == [] and behind.pool.events.num_described == 0


def test_what_is_loaded_is_told_before_what_is_computed_behind_it() -> None:
    tier = Publisher(num_blocks=4)
    short, long = request(range(8)), request(range(12))
    tier.compute(short)
    tier.evict_all()
    tier.told()
    tier.promote(short)
    blocks = [tier.pool.get_cached_block(h, [0]) for h in short.block_hashes]
    hit = [found[0] for found in blocks if found]
    tier.pool.touch(hit)
    tier.pool.begin_step()
    new = tier.pool.get_new_blocks(1)
    tier.pool.cache_full_blocks(long, [*hit, *new], 2, 3, BLOCK, 0)
    tier.pool.take_plan()
    assert stored(tier.told()) == [hashes(short), hashes(long)[2:]]
    tier.pool.free_blocks([*hit, *new])
    tier.evict_all()
    tier.told()
    assert not tier.follower.held("GPU")


def test_a_store_of_what_the_device_still_has() -> None:
    tier = Publisher(store_policy="write_through")
    one = request(range(12))
    tier.compute(one)
    tier.told()
    tier.pool.begin_step()
    tier.pool.take_plan()
    assert stored(tier.told(), "CPU") == [hashes(one)]
    assert sum(tier.follower.held("GPU").values()) == 3
    # And nothing is left to look at again.
    assert not tier.pool.events._touched


def test_the_same_is_told_again_after_a_reset() -> None:
    tier = Publisher(store_policy="write_through")
    one = request(range(12))
    for _ in range(2):
        tier.compute(one)
        tier.pool.begin_step()
        tier.pool.take_plan()
        told = tier.told()
        assert stored(told) == stored(told, "CPU") == [hashes(one)]
        assert tier.pool.reset_prefix_cache()
        tier.told()


def test_a_computation_that_is_told_already_takes_back_its_own_event() -> None:
    tier = Publisher(num_blocks=9, num_slots=0)
    one, two, three = (request(range(s, s + 8)) for s in (0, 20, 40))
    for each in (one, two, three, two):
        tier.compute(each)
    assert stored(tier.told()) == [hashes(one), hashes(two), hashes(three)]


@pytest.mark.skipif(
    not hasattr(BlockStored, "group_idx"), reason="events do not name groups"
)
def test_groups_are_told_apart() -> None:
    """Their blocks have the same hashes."""
    tier = Publisher(num_blocks=4)
    one = request(range(8))
    tier.pool.begin_step()
    blocks = tier.pool.get_new_blocks(4)
    for group in (0, 1):
        own = blocks[2 * group : 2 * group + 2]
        tier.pool.cache_full_blocks(one, own, 0, 2, BLOCK, group)
    tier.pool.take_plan()
    # Children first.
    tier.pool.free_blocks([blocks[i] for i in (3, 1, 2, 0)])
    tier.evict_all()
    assert stored(tier.told(), "CPU") == 2 * [hashes(one)]


@pytest.mark.skipif(
    not hasattr(kv_cache_utils, "BlockHashListWithBlockSize"),
    reason="all groups have blocks of one size",
)
def test_a_group_with_larger_blocks() -> None:
    tier = Publisher(num_blocks=2)
    one = request(range(16))
    tier.pool.begin_step()
    blocks = tier.pool.get_new_blocks(2)
    tier.pool.cache_full_blocks(one, blocks, 0, 2, 2 * BLOCK, 0)
    tier.pool.take_plan()
    tier.pool.free_blocks(blocks)
    (on_device,) = stored(tier.told())
    tier.evict_all()
    assert stored(tier.told(), "CPU") == [on_device]


@pytest.mark.skipif(
    "session_id" not in BlockStored.__struct_fields__, reason="no sessions"
)
def test_blocks_of_several_sessions_are_told_apart() -> None:
    tier = Publisher(num_blocks=3)
    first, second = request(range(8)), request(range(12))
    first.session_id, second.session_id = "first", "second"
    tier.pool.begin_step()
    blocks = tier.pool.get_new_blocks(3)
    tier.pool.cache_full_blocks(first, blocks, 0, 2, BLOCK, 0)
    tier.pool.cache_full_blocks(second, blocks, 2, 3, BLOCK, 0)
    tier.pool.take_plan()
    tier.pool.free_blocks(blocks)
    tier.told()
    tier.evict_all()
    assert stored(tier.told(), "CPU") == [hashes(first), hashes(second)[2:]]


@pytest.mark.skipif(
    not hasattr(BlockPool, "emit_cached_block_events"), reason="hits are not told again"
)
def test_a_hit_that_is_told_before_the_rest_is_removed_with_its_blocks(
    behind: Publisher,
) -> None:
    long = request(LONG)
    behind.pool.emit_cached_block_events(long, len(long.block_hashes), BLOCK, 0)
    behind.evict_all()
    # Such a hit is stored twice, so a follower that counts is of no use.
    known: set[Any] = set()
    event: Any
    while events := behind.pool.take_events():
        for event in events:
            if event.medium == "GPU":
                is_stored = isinstance(event, BlockStored)
                change = known.update if is_stored else known.difference_update
                change(event.block_hashes)
    assert not known
