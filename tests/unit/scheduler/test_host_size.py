# SPDX-License-Identifier: Apache-2.0
"""How many slots may be filled: those of all ranks, as far as they are wanted."""

from typing import Any

from tests.unit.keeper.crowd import IDENTITY, NUM_SLOTS, Shared
from vllm.v1.kv_tier.eviction.base import EvictionPolicy
from vllm.v1.kv_tier.eviction.policies import make_policy
from vllm.v1.kv_tier.keeper.client import Membership
from vllm.v1.kv_tier.layout import KVTierLayout, PoolLayout
from vllm.v1.kv_tier.plan import HostAim, OpenSlots, StepPlan, StepReport, merge_reports
from vllm.v1.kv_tier.scheduler.host_size import HostSize
from vllm.v1.kv_tier.scheduler.plan_builder import StepPlanBuilder
from vllm.v1.kv_tier.scheduler.shared_slots import SharedSlotTable
from vllm.v1.kv_tier.tuning import SchedulingTuning

from ..tier import SLOT_BYTES, Tier, stores


def report(tier: Tier, *, ended: tuple[int, ...] = (), **ranks: OpenSlots) -> None:
    """Ranks `r0`, `r1`, … report."""
    states = {int(name[1:]): state for name, state in ranks.items()}
    tier.pool.apply_report(StepReport(open_slots=states, ended=list(ended)))


def resize(tier: Tier, num_slots: int) -> dict[str, int]:
    return tier.pool.take_call({"host_bytes": num_slots * SLOT_BYTES})


def at(number: int, num_slots: int, is_done: bool = True) -> OpenSlots:
    return OpenSlots(number, num_slots, is_done)


def shrunk(tier: Tier, num_slots: int, num_ranks: int = 1) -> list[StepPlan]:
    """Plans of steps until the ranks are asked to close slots."""
    resize(tier, num_slots)
    plans = tier.idle(2)
    while not plans[-1].report_end:
        plans += tier.idle()
    report(tier, ended=(plans[-1].seq,) * num_ranks)
    return [*plans, *tier.idle(2)]


def test_a_slot_is_filled_once_the_last_rank_has_it_open() -> None:
    tier = Tier(6, num_slots=8, open_slots=(2, 2))
    assert tier.host.num_slots == 2
    report(tier, r0=at(0, 8))
    assert set(stores(tier.demoted_or_dropped("abcdef"))) <= {0, 1}
    assert tier.host.num_slots == 2 and len(tier.host) == 2
    report(tier, r1=at(0, 5, is_done=False))
    tier.idle()
    assert tier.host.num_slots == 5
    assert set(stores(tier.demoted_or_dropped("ghijkl"))) <= {0, 1, 2, 3, 4}
    assert len(tier.host) == 5


def test_reports_of_ranks_are_merged() -> None:
    states = [{0: at(0, 4)}, {1: at(0, 2)}, {1: at(0, 3)}]
    merged = merge_reports(StepReport(open_slots=each) for each in states)
    assert merged is not None and merged.open_slots == {0: at(0, 4), 1: at(0, 3)}


def test_the_metrics_have_what_is_open_and_what_is_reserved() -> None:
    tier = Tier(6, num_slots=8, open_slots=(2,))
    stats = tier.pool.take_stats()
    assert (stats.slots_total, stats.reserved_slots) == (2, 8)


def test_many_slots_are_opened_in_several_steps() -> None:
    tier = Tier(6, num_slots=200_000, open_slots=(1,))
    report(tier, r0=at(0, 200_000))
    tier.idle()
    assert 1 < tier.host.num_slots < 100_000
    tier.idle(4)
    assert tier.host.num_slots == 200_000


def test_closing_evicts_and_waits_for_the_end_of_all_use() -> None:
    tier = Tier(6, num_slots=6, open_slots=(6, 6))
    tier.demoted("abcdef")
    assert resize(tier, 2) == {"host_slots": 2, "open_slots": 6}
    (plan,) = tier.idle()
    # Closed, but the ranks may still read it.
    assert tier.host.num_slots == len(tier.host) == 2 and plan.host_aim is None
    (plan,) = tier.idle()
    assert plan.report_end and plan.host_aim is None
    report(tier, ended=(plan.seq,))
    assert [each.host_aim for each in tier.idle(2)] == [None, None]
    report(tier, ended=(plan.seq,))
    aims = [each.host_aim for each in tier.idle(2)]
    assert aims == [None, HostAim(1, 2)]
    assert tier.pool.host_size.is_moving
    report(tier, r0=at(1, 2), r1=at(1, 2))
    tier.idle()
    assert not tier.pool.host_size.is_moving
    kept = [name for name in "abcdef" if tier.where(name) == "host"]
    assert len(kept) == 2 and all(tier.slot(name).index < 2 for name in kept)


def test_growing_waits_for_all_ranks() -> None:
    tier = Tier(6, num_slots=6, open_slots=(6, 6))
    shrunk(tier, 2, num_ranks=2)
    report(tier, r0=at(1, 2), r1=at(1, 2))
    resize(tier, 5)
    aims = [each.host_aim for each in tier.idle(2)]
    assert HostAim(2, 5) in aims and tier.host.num_slots == 2
    # The second one is from before.
    report(tier, r0=at(2, 6), r1=at(1, 6))
    tier.idle()
    assert tier.host.num_slots == 2
    report(tier, r1=at(2, 6))
    tier.idle()
    assert tier.host.num_slots == 5


def test_a_rank_that_still_closes_has_not_what_it_had() -> None:
    tier = Tier(6, num_slots=6, open_slots=(6,))
    shrunk(tier, 2)
    report(tier, r0=at(1, 4, is_done=False))
    resize(tier, 6)
    tier.idle(2)
    assert tier.host.num_slots == 2


def test_a_change_of_mind_opens_what_no_rank_has_closed() -> None:
    tier = Tier(6, num_slots=6, open_slots=(6,))
    resize(tier, 2)
    tier.idle()
    assert tier.host.num_slots == 2
    resize(tier, 6)
    plans = tier.idle(2)
    assert tier.host.num_slots == 6
    assert all(each.host_aim is None for each in plans)


def test_sizes_stay_within_what_was_reserved() -> None:
    tier = Tier(6, num_slots=6, open_slots=(6,))
    assert resize(tier, 100)["host_slots"] == 6
    assert resize(tier, 0)["host_slots"] == 1


def test_the_order_of_eviction_decides_for_the_size_that_is_wanted() -> None:
    tier = Tier(6, num_slots=6, open_slots=(6,))
    policies: list[EvictionPolicy] = []

    def look(policy: EvictionPolicy) -> EvictionPolicy:
        policies.append(policy)
        return policy

    tier.host.wrap_policy(look)
    for num_slots in (2, 6):
        resize(tier, num_slots)
        assert policies[0].num_slots == num_slots


def test_a_slot_that_a_secondary_tier_writes_is_closed_later() -> None:
    tier = Tier(6, num_slots=6, open_slots=(6,))
    tier.demoted("abcdef")
    slot = tier.host.at(4)
    assert slot is not None
    keys: list[Any] = [slot.keys[0]]
    tier.host.hold(0, [4], keys)
    resize(tier, 2)
    tier.idle(3)
    assert tier.host.num_slots == 5
    tier.host.end_hold(0, [4], keys)
    tier.idle()
    assert tier.host.num_slots == 2


def test_slots_that_are_shared_stay() -> None:
    tier = Tier(6, num_slots=6, open_slots=(6,))
    tier.pool.host_size._can_shrink = False
    assert resize(tier, 2) == {"refused": 1}
    tier.idle(2)
    assert tier.host.num_slots == 6


def test_engine_in_a_pool_steps_until_the_slots_of_neighbours_are_open() -> None:
    """So its first request finds what is there."""
    partitions = [Shared().partition, Shared().partition]
    member = Membership.take(partitions, 0, IDENTITY, stride=NUM_SLOTS + 6)
    pool = PoolLayout(member, (16,), num_ranks=2)
    config: Any = None
    layout = KVTierLayout(config, NUM_SLOTS, SLOT_BYTES, open_slots=(4, 9), pool=pool)
    table = SharedSlotTable(
        make_policy("lru", NUM_SLOTS), member, SchedulingTuning(), num_open=4
    )
    size = HostSize(table, StepPlanBuilder(4), layout)
    assert size.is_moving and (size.num_open, table.num_slots) == (4, 4)
    states = [(7, 9), (NUM_SLOTS, 40), (40, 40), (54, 40), (54, 54)]
    counts = []
    for first, second in states:
        assert size.is_moving
        both = {0: at(0, first, first == 54), 1: at(0, second, second == 54)}
        size.take_report(StepReport(open_slots=both))
        size.end_step()
        counts.append((size.num_open, table.num_slots))
    own = NUM_SLOTS
    assert counts == [(7, 7), (24, own), (40, own), (40, own), (member.end, own)]
    assert not size.is_moving and not size.is_due
    assert "refused" in size.resize(4)


def test_engine_in_a_pool_goes_on_with_what_a_rank_could_open() -> None:
    member = Membership.take([Shared().partition], 0, IDENTITY, stride=NUM_SLOTS)
    pool = PoolLayout(member, (16,), num_ranks=1)
    config: Any = None
    layout = KVTierLayout(config, NUM_SLOTS, SLOT_BYTES, open_slots=(4,), pool=pool)
    table = SharedSlotTable(
        make_policy("lru", NUM_SLOTS), member, SchedulingTuning(), num_open=4
    )
    size = HostSize(table, StepPlanBuilder(4), layout)
    size.take_report(StepReport(open_slots={0: at(0, 11, True)}))
    size.end_step()
    assert not size.is_moving and table.num_slots == 11
