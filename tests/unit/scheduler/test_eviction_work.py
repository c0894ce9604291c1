# SPDX-License-Identifier: Apache-2.0
"""Making room in the host costs the same for every block.

What a plan loads or stores is pinned until the plan is complete, so a policy must pass
it over. If it did that anew for every victim, a step with thousands of loads into
blocks that are not on the host yet would take seconds.
"""

import pytest

from ..counted_policies import COUNTED, Work
from ..tier import Tier, loads, stores

LOADED = 400
"""Blocks of a prefix hit, all on the host."""
VICTIMS = 400
"""Blocks that their loads evict, none of which is on the host."""

LOOKS = 8
"""Keys that a policy may look at for each block that moves, in the mean."""


def names(first: int, number: int) -> str:
    """Names of blocks: one letter each."""
    return "".join(chr(0x4E00 + first + i) for i in range(number))


def fill(policy: str, num_slots: int, num_blocks: int = VICTIMS) -> Tier:
    # Nothing is stored before it is evicted: the device has dirty blocks only.
    return Tier(
        num_blocks, num_slots, eviction_policy=COUNTED[policy], store_from_use=1
    )


def load_into_dirty_blocks(tier: Tier, hit: str, dirty: str) -> tuple[int, int]:
    """A step that loads `hit` into blocks that hold `dirty`. Returns how many blocks
    it loads and stores."""
    tier.begin()
    blocks = tier.compute(dirty)
    # No take_plan in between could store them ahead.
    tier.end()
    tier.free(blocks)
    Work.start()
    tier.begin()
    tier.promote(tier.find(hit))
    plan = tier.end()
    return len(loads(plan)), len(stores(plan))


@pytest.mark.parametrize("policy", COUNTED)
def test_loads_of_the_oldest_slots(policy: str) -> None:
    """Documents in turn: the one that comes back is the next that would go."""
    tier = fill(policy, num_slots=LOADED + VICTIMS // 2)
    hit = names(0, LOADED)
    tier.demoted(hit)
    tier.demoted(names(LOADED, VICTIMS // 2))
    dirty = names(2000, VICTIMS)
    num_loads, num_stores = load_into_dirty_blocks(tier, hit, dirty)
    assert num_loads == LOADED and num_stores >= VICTIMS // 2
    assert Work.num_looks <= LOOKS * (num_loads + VICTIMS)


@pytest.mark.parametrize("policy", COUNTED)
def test_loads_when_every_slot_was_hit_before(policy: str) -> None:
    """What a plan stores is then the only content that was never hit, as policies with
    two lists see it."""
    tier = fill(policy, num_slots=LOADED + VICTIMS)
    hit, others = names(0, LOADED), names(LOADED, VICTIMS)
    for _ in range(2):
        tier.demoted(hit)
        tier.demoted(others)
        for part in (hit, others):
            tier.begin()
            tier.promote(tier.find(part))
            tier.end()
    dirty = names(2000, VICTIMS)
    num_loads, num_stores = load_into_dirty_blocks(tier, hit, dirty)
    assert num_loads == LOADED and num_stores == VICTIMS
    assert Work.num_looks <= LOOKS * (num_loads + VICTIMS)


@pytest.mark.parametrize("policy", COUNTED)
def test_a_host_too_small_for_the_stores_of_a_step(policy: str) -> None:
    """Every slot is in use by the plan: that is seen without a look at each."""
    tier = fill(policy, num_slots=VICTIMS // 2)
    tier.begin()
    blocks = tier.compute(names(0, VICTIMS))
    tier.end()
    tier.free(blocks)
    tier.pool.take_stats()
    Work.start()
    tier.begin()
    tier.pool.get_new_blocks(VICTIMS)
    tier.end()
    stats = tier.pool.take_stats()
    assert stats.refused_no_slot > 0
    assert stats.stored_blocks + stats.dropped_blocks <= VICTIMS
    assert Work.num_looks <= LOOKS * VICTIMS


@pytest.mark.parametrize("policy", COUNTED)
def test_a_host_too_small_for_hit_and_victims(policy: str) -> None:
    """The loads have most of the slots, and the stores of their victims the rest."""
    tier = fill(policy, num_slots=LOADED + 20)
    hit = names(0, LOADED)
    tier.demoted(hit)
    dirty = names(2000, VICTIMS)
    num_loads, num_stores = load_into_dirty_blocks(tier, hit, dirty)
    assert num_loads == LOADED and num_stores <= VICTIMS
    assert Work.num_looks <= LOOKS * (num_loads + VICTIMS)


@pytest.mark.parametrize("policy", COUNTED)
def test_pinned_content_stays(policy: str) -> None:
    """However little a policy looks, it must not take what the plan uses."""
    tier = fill(policy, num_slots=LOADED + 20)
    hit = names(0, LOADED)
    tier.demoted(hit)
    slots = {tier.slot(name).index for name in hit}
    tier.begin()
    tier.compute(names(2000, VICTIMS // 2))
    tier.end()
    tier.begin()
    tier.promote(tier.find(hit[: LOADED // 2]))
    plan = tier.end()
    assert set(loads(plan).values()) <= slots
    assert set(loads(plan).values()).isdisjoint(stores(plan))
    assert all(tier.where(name) != "nowhere" for name in hit[: LOADED // 2])
