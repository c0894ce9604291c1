# SPDX-License-Identifier: Apache-2.0
"""What loads cost, and what follows from it."""

import math

import pytest

from vllm.v1.kv_tier.plan import CopyTime, PrefillTime, StepReport
from vllm.v1.kv_tier.scheduler.costs import Costs

TOKENS = 16


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make_policy(load_s: float = 1.0, max_stall_s: float = 0.5) -> tuple[Costs, Clock]:
    policy, clock = Costs(load_s, max_stall_s, tokens_per_block=TOKENS), Clock()
    policy.clock = clock
    return policy, clock


def loaded(
    num_blocks: int, seconds: float, kind: str = "load_ahead", seq: int = 1
) -> StepReport:
    return StepReport(times={(kind, seq): CopyTime(num_blocks, seconds)})


def prefill(policy: Costs, seconds_per_block: float) -> None:
    time = PrefillTime(10 * TOKENS, 10 * seconds_per_block)
    policy.take_report(StepReport(prefill=time))


# ------------------------------------------------------------------ link queue


def queue(policy: Costs, num_blocks: int, seq: int = 1, num_stores: int = 0) -> float:
    return policy.queue(seq, num_blocks, num_stores, prefetch=True).end


def test_loads_run_one_after_the_other() -> None:
    policy, clock = make_policy()
    assert queue(policy, 3) == 103.0
    clock.now = 101.0
    assert queue(policy, 2) == 105.0
    # The link was idle in between.
    clock.now = 110.0
    assert queue(policy, 1) == 111.0


def test_stores_of_victims_go_the_other_way() -> None:
    policy, _ = make_policy()
    assert queue(policy, 3) == 103.0
    # They are over before the loads ahead of these are.
    assert queue(policy, 2, num_stores=2) == 105.0
    assert queue(policy, 2, num_stores=9) == 111.0


def test_what_a_report_says_to_have_ended_is_not_waited_for() -> None:
    policy, clock = make_policy()
    loads = [policy.queue(seq, 4, 0, prefetch=True) for seq in (1, 2, 3)]
    assert [load.end for load in loads] == [104.0, 108.0, 112.0]
    clock.now = 101.0
    policy.take_report(loaded(4, 4.0, seq=1))
    assert [load.end for load in loads] == [101.0, 105.0, 109.0]
    # Those before have ended, too.
    policy.take_report(loaded(4, 4.0, seq=3))
    assert [load.end for load in loads] == 3 * [101.0] and queue(policy, 1) == 102.0


def test_a_late_report_makes_nothing_later() -> None:
    policy, clock = make_policy()
    load = policy.queue(1, 4, 0, prefetch=True)
    clock.now = 110.0
    policy.take_report(loaded(4, 4.0, seq=1))
    assert load.end == 104.0 and queue(policy, 1) == 111.0


def test_to_ask_is_not_to_queue() -> None:
    policy, _ = make_policy()
    assert policy.end_of(3) == policy.end_of(3) == 103.0
    policy.queue(1, 1, 0, prefetch=False)
    assert policy.end_of(3) == 104.0


def test_loads_of_a_step_overtake_those_ahead_of_one() -> None:
    policy, clock = make_policy()
    first, second = (policy.queue(seq, 4, 0, prefetch=True) for seq in (1, 2))
    clock.now = 105.0
    assert policy.end_of(2) == 107.0
    assert policy.queue(3, 2, 0, prefetch=False).end == 107.0
    # What has ended is not later, and what has not is.
    assert (first.end, second.end) == (104.0, 110.0)
    assert policy.end_of(1) == 108.0 and queue(policy, 1, seq=4) == 111.0
    # A report that a load of a step has ended corrects those behind.
    clock.now = 106.0
    policy.take_report(loaded(2, 1.0, seq=3, kind="load"))
    assert policy.end_of(1) == 107.0 and second.end == 110.0


def test_a_report_of_loads_ahead_says_nothing_of_those_of_a_step() -> None:
    policy, clock = make_policy()
    ahead = policy.queue(1, 4, 0, prefetch=True)
    own = policy.queue(2, 2, 0, prefetch=False)
    assert (own.end, ahead.end) == (102.0, 106.0)
    clock.now = 101.0
    policy.take_report(loaded(4, 4.0, seq=1))
    assert ahead.end == 101.0 and policy.end_of(0) == 102.0


@pytest.mark.parametrize(
    "max_stall_s, wait, stalls",
    [(0.5, 0.5, False), (0.5, 0.75, True), (0.0, 0.0, False), (0.0, 0.25, True)]
    + [(0.5, -3.0, False), (math.inf, 1e9, False)],
)
def test_stalls(max_stall_s: float, wait: float, stalls: bool) -> None:
    policy, clock = make_policy(max_stall_s=max_stall_s)
    assert policy.stalls(clock.now + wait) == stalls


# ----------------------------------------------------------------------- costs


def test_the_cost_of_loads_follows_what_is_measured() -> None:
    policy, _ = make_policy(load_s=1.0)
    costs = [policy.load_s]
    for _ in range(40):
        policy.take_report(loaded(8, 4.0))
        costs.append(policy.load_s)
    # By and by: one slow or fast load says little.
    assert costs[1] > 0.7 and costs == sorted(costs, reverse=True)
    assert costs[-1] == pytest.approx(0.5, rel=1e-3)
    assert policy.end_of(2) == 100 + 2 * costs[-1]


def test_all_loads_ahead_of_a_report_count_together() -> None:
    policy, _ = make_policy(load_s=1.0)
    times = {("load_ahead", 1): CopyTime(1, 3.0), ("load_ahead", 2): CopyTime(9, 2.0)}
    policy.take_report(StepReport(times=times))
    other, _ = make_policy(load_s=1.0)
    other.take_report(loaded(10, 5.0))
    assert policy.load_s == other.load_s == pytest.approx(0.9)


@pytest.mark.parametrize(
    "report",
    [
        # Layers wait for its parts, and others load beside it.
        loaded(8, 4.0, "load"),
        loaded(8, 4.0, "store"),
        # It failed.
        loaded(0, 4.0),
    ],
)
def test_other_copies_say_nothing_of_the_cost(report: StepReport) -> None:
    policy, _ = make_policy(load_s=1.0)
    policy.take_report(report)
    assert policy.load_s == 1.0


def test_the_first_prefill_counts_in_full_and_later_ones_by_and_by() -> None:
    policy, _ = make_policy()
    assert policy.prefill_s == 0
    prefill(policy, 0.25)
    assert policy.prefill_s == pytest.approx(0.25)
    prefill(policy, 1.25)
    assert 0.25 < policy.prefill_s < 0.75


def test_a_slow_first_prefill_is_soon_forgotten() -> None:
    policy, _ = make_policy()
    prefill(policy, 9.0)
    for _ in range(4):
        prefill(policy, 1.0)
    assert policy.prefill_s < 2.0


def test_nothing_measured_changes_nothing() -> None:
    policy, _ = make_policy()
    prefill(policy, 2.0)
    before = policy.load_s, policy.prefill_s
    policy.take_report(StepReport())
    assert (policy.load_s, policy.prefill_s) == before


# --------------------------------------------------------------- load or compute


@pytest.mark.parametrize("prefill_s, recompute", [(0.9, True), (1.1, False)])
def test_what_is_cheaper(prefill_s: float, recompute: bool) -> None:
    policy, _ = make_policy(load_s=1.0)
    # Nothing is known of prefill yet.
    assert not policy.recompute
    prefill(policy, prefill_s)
    assert policy.recompute == recompute


def test_a_busy_link_is_forgotten() -> None:
    """While slots are passed over, nothing is loaded that would tell."""
    policy, _ = make_policy(load_s=1.0)
    prefill(policy, 2.0)
    for _ in range(40):
        policy.take_report(loaded(1, 5.0))
    assert policy.recompute
    for _ in range(40):
        prefill(policy, 2.0)
    assert not policy.recompute
    # No further than that: there are loads again, and they are measured.
    assert 1.5 < policy.load_s <= 2.0


def test_a_link_that_is_slow_by_nature_is_not_tried_again() -> None:
    policy, _ = make_policy(load_s=3.0)
    for _ in range(100):
        prefill(policy, 2.0)
    assert policy.recompute and policy.load_s == pytest.approx(3.0)


# ------------------------------------------------------- what a step hides of it


def join(policy: Costs, *seconds: float) -> None:
    for s in seconds:
        policy.take_report(StepReport(joins={2: s}))


def test_a_step_hides_as_much_as_it_computes() -> None:
    policy = Costs(1.0, 0.5, layerwise=True, tokens_per_block=TOKENS)
    policy.clock = Clock()
    join(policy, 3.0)
    assert policy.hidden_s(2) == 3.0
    assert not policy.stalls(103.5, hidden_s=3.0)
    assert policy.stalls(103.6, hidden_s=3.0)
    prefill(policy, 0.5)
    assert policy.hidden_s(6 * TOKENS) == 3.0
    assert policy.hidden_s(8 * TOKENS) == 4.0


def test_steps_of_other_sizes_take_other_times() -> None:
    policy = Costs(1.0, 0.5, layerwise=True, tokens_per_block=TOKENS)
    policy.take_report(StepReport(joins={6: 3.0, 9: 7.0}))
    hidden = [policy.hidden_s(n) for n in (31, 32, 255, 256, 1000)]
    assert hidden == [0.0, 3.0, 3.0, 7.0, 7.0]


def test_where_steps_wait_for_all_loads_they_hide_none() -> None:
    policy, _ = make_policy()
    join(policy, 3.0)
    assert policy.hidden_s(1000) == 0.0


def test_a_step_without_prefill_hides_none() -> None:
    policy = Costs(1.0, 0.5, layerwise=True, tokens_per_block=TOKENS)
    join(policy, 3.0)
    assert policy.hidden_s(1) == 0.0


def test_launches_that_were_held_up_count_little() -> None:
    policy, _ = make_policy()
    join(policy, 9.0, 3.0, 9.0)
    assert 3.0 < policy.join_s[2] < 3.5
