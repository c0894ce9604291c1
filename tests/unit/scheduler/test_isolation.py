# SPDX-License-Identifier: Apache-2.0
"""What was in host memory before a reset, or before a slot was taken anew, is out of
reach: bytes are not wiped, keys are."""

import pytest
import torch

from vllm.v1.kv_tier.plan import StepReport
from vllm.v1.kv_tier.scheduler.slots import HostSlot

from ..rank import NUM_SLOTS, Rank, same
from ..tier import Tier, assert_nothing_leaks, is_empty, loads, loads_ahead, stores

NAMES = "abcd"


@pytest.fixture(params=["write_back", "write_through"])
def tier(request: pytest.FixtureRequest) -> Tier:
    """All blocks are on the host only, and there are no more slots than they take."""
    tier = Tier(4, num_slots=4, store_policy=request.param)
    tier.demoted(NAMES)
    return tier


def used_slots(tier: Tier) -> dict[str, int]:
    return {name: tier.slot(name).index for name in NAMES}


@pytest.mark.compat("engine modes", "`reset_prefix_cache`")
def test_no_slot_is_served_after_a_reset(tier: Tier) -> None:
    assert [tier.where(name) for name in NAMES] == ["host"] * 4
    assert tier.pool.reset_prefix_cache()
    assert [tier.where(name) for name in NAMES] == ["nowhere"] * 4
    assert tier.host.filled_slots() == []
    assert all(tier.host.at(index) is None for index in range(4))
    # Nor by a plan that was in the making.
    assert all(is_empty(plan) for plan in tier.idle(3))
    assert_nothing_leaks(tier)


@pytest.mark.compat("engine modes", "`reset_prefix_cache`")
def test_a_slot_taken_anew_is_served_under_its_new_key_after_its_store(
    tier: Tier,
) -> None:
    before = used_slots(tier)
    assert tier.pool.reset_prefix_cache()
    # Other tenants' blocks take the same slots.
    tier.computed("wxyz")
    tier.begin()
    taken = tier.pool.get_new_blocks(4)
    plan = tier.end()
    tier.free(taken)
    tier.idle(2)
    slots = [tier.slot(name) for name in "wxyz"]
    assert {slot.index for slot in slots} == set(before.values())
    assert [tier.where(name) for name in NAMES] == ["nowhere"] * 4
    # A load waits for the store that filled the slot since.
    tier.begin()
    found = tier.find("wxyz")
    assert all(isinstance(block, HostSlot) for block in found)
    held = tier.promote(found)[0]
    plan = tier.end()
    assert set((loads(plan) | loads_ahead(plan)).values()) == set(before.values())
    assert plan.load_after_stores >= max(slot.store_seq for slot in slots)
    assert not stores(plan)
    assert len(held) == 4


def test_a_slot_whose_new_store_failed_does_not_serve_the_old_bytes() -> None:
    """On the rank, whatever is planned; and in the pool, once it has heard of it."""
    rank = Rank()
    secret = rank.block(1)
    rank.run(1, store_blocks=[1], store_slots=[0])
    rank.tier.engines.stores.transfer = _refuse  # type: ignore[method-assign]
    rank.run(2, store_blocks=[2], store_slots=[0])
    before = rank.block(4)
    rank.run(3, load_slots=[0], load_blocks=[4])
    assert same(rank.block(4), before) and not same(rank.block(4), secret)
    report = rank.report()
    assert report == StepReport(3, {0: 2})

    tier = Tier(2)
    plan = tier.demoted("ab")
    index = tier.slot("a").index
    seq = tier.slot("a").store_seq
    assert index in stores(plan) or seq < plan.seq
    tier.pool.apply_report(StepReport(failed_store_slots={index: seq}))
    assert tier.where("a") == "nowhere" and tier.where("b") == "host"


def _refuse(*args: object) -> None:
    raise RuntimeError("a copy fails for the test")


def test_bytes_are_not_wiped() -> None:
    """As docs/security.md says: a reset never reaches the ranks."""
    rank = Rank()
    rank.run(1, store_blocks=[1], store_slots=[NUM_SLOTS - 1])
    kept = rank.tier.buffer.slots[NUM_SLOTS - 1].clone()
    rank.run(2)
    assert torch.equal(rank.tier.buffer.slots[NUM_SLOTS - 1], kept)
    assert kept.any()
