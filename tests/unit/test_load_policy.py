# SPDX-License-Identifier: Apache-2.0
"""What loads cost, and what follows from it."""

import math

import pytest

from vllm.v1.kv_tier.load_policy import LoadPolicy

TOKENS = 16
NOTHING = (0, 0.0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make_policy(
    load_s: float = 1.0, max_stall_s: float = 0.5
) -> tuple[LoadPolicy, Clock]:
    policy, clock = LoadPolicy(load_s, max_stall_s), Clock()
    policy.clock = clock
    return policy, clock


def prefill(policy: LoadPolicy, seconds_per_block: float) -> None:
    policy.measured(NOTHING, (10 * TOKENS, 10 * seconds_per_block), TOKENS)


# ------------------------------------------------------------------ link queue


def test_loads_run_one_after_the_other() -> None:
    policy, clock = make_policy()
    assert policy.queue(3) == 103.0
    clock.now = 101.0
    assert policy.queue(2) == 105.0
    # The link was idle in between.
    clock.now = 110.0
    assert policy.queue(1) == 111.0


def test_to_ask_is_not_to_queue() -> None:
    policy, _ = make_policy()
    assert policy.end_of(3) == policy.end_of(3) == 103.0
    policy.queue(1)
    assert policy.end_of(3) == 104.0


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
        policy.measured((8, 4.0), NOTHING, TOKENS)
        costs.append(policy.load_s)
    # By and by: one slow or fast load says little.
    assert costs[1] > 0.7 and costs == sorted(costs, reverse=True)
    assert costs[-1] == pytest.approx(0.5, rel=1e-3)
    assert policy.end_of(2) == 100 + 2 * costs[-1]


def test_the_first_prefill_counts_in_full_and_later_ones_by_and_by() -> None:
    policy, _ = make_policy()
    assert policy.prefill_s == 0
    prefill(policy, 0.25)
    assert policy.prefill_s == pytest.approx(0.25)
    prefill(policy, 1.25)
    assert 0.25 < policy.prefill_s < 0.75


def test_nothing_measured_changes_nothing() -> None:
    policy, _ = make_policy()
    prefill(policy, 2.0)
    before = policy.load_s, policy.prefill_s
    policy.measured(NOTHING, NOTHING, TOKENS)
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
        policy.measured((1, 5.0), NOTHING, TOKENS)
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
