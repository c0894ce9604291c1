# SPDX-License-Identifier: Apache-2.0
"""How long a request waits for its loads, beside how long they take.

What the pool thinks of the link must follow what the ranks measure: a cost that is off
by a half must not add up, and what one direction carries must not delay the other.
"""

from dataclasses import dataclass
from typing import Any

import pytest

from vllm.v1.kv_tier.plan import CopyTime, StepPlan, StepReport

from ..tier import Asking, Tier, loads_ahead, stores


def ended(plan: StepPlan, load_seconds: float) -> StepReport:
    """What ranks tell when the loads ahead of `plan` have ended."""
    measured = CopyTime(len(plan.ahead_blocks), load_seconds)
    return StepReport(times={("load_ahead", plan.seq): measured})


def names(first: int, number: int) -> str:
    return "".join(chr(0x4E00 + first + i) for i in range(number))


@dataclass
class Waiting:
    """A request for a prefix, by one name for all of its steps."""

    tier: Tier
    prefix: str

    def is_admitted(self) -> bool:
        """Whether a step of other requests takes it in."""
        tier = self.tier
        tier.begin()
        if self._is_loading():
            self.plan = tier.end()
            return False
        found = tier.find(self.prefix)
        promoted = tier.try_promote(found, among_others=True, request=self._request)
        self.plan = tier.end()
        return promoted is not None

    def __post_init__(self) -> None:
        self._request: Any = Asking(num_preemptions=0)
        self.plan = StepPlan(0)

    def _is_loading(self) -> bool:
        return self.tier.pool.is_loading(self._request, True)


def make_tier(num_blocks: int, load_s: float = 1.0, **settings: Any) -> Tier:
    """A step waits for half a second of loads."""
    return Tier(num_blocks, 2000, load_s=load_s, max_load_stall_ms=500, **settings)


# ---------------------------------------------------------------- the closed loop


def test_a_request_joins_when_its_loads_are_said_to_have_ended() -> None:
    """The link was thought to be half as fast as it is."""
    tier = make_tier(300)
    tier.demoted(names(0, 100))
    request = Waiting(tier, names(0, 100))
    assert not request.is_admitted()
    ahead = request.plan
    assert len(loads_ahead(ahead)) == 100
    tier.now = 50.0
    assert not request.is_admitted()
    tier.pool.apply_report(ended(ahead, 50.0))
    assert request.is_admitted()


def test_loads_that_ended_hold_up_none_behind_them() -> None:
    tier = make_tier(300)
    tier.demoted(names(0, 101))
    first = Waiting(tier, names(0, 100))
    assert not first.is_admitted()
    tier.now = 50.0
    tier.pool.apply_report(ended(first.plan, 50.0))
    # The link is idle, and the one block takes no longer than it did for the others.
    second = Waiting(tier, names(100, 1))
    second.is_admitted()
    tier.now = 51.0
    assert second.is_admitted()


def test_what_is_still_on_its_way_counts() -> None:
    """Loads that follow those that ended are not forgotten with them."""
    tier = make_tier(300)
    tier.demoted(names(0, 201))
    first, second = Waiting(tier, names(0, 100)), Waiting(tier, names(100, 100))
    assert not first.is_admitted() and not second.is_admitted()
    tier.now = 50.0
    tier.pool.apply_report(ended(first.plan, 50.0))
    third = Waiting(tier, names(200, 1))
    assert not third.is_admitted()
    tier.now = 60.0
    assert not second.is_admitted() and not third.is_admitted()


@pytest.mark.parametrize("ratio, use", [(1.5, 0.8), (2.0, 0.6), (1.3, 0.95)])
def test_the_wait_does_not_drift_from_the_link(ratio: float, use: float) -> None:
    """A busy link whose cost is thought too high by `ratio`, for good: what a rank
    measures of one load may include a part of another's.

    Each request loads 20 blocks, and its loads are told of in the step after they
    ended.
    """
    real, size, number, tick = 0.04, 20, 50, 0.05
    tier = make_tier(800, load_s=real * ratio)
    prefixes = [names(i * size, size) for i in range(number)]
    for i in range(0, number, number // 2):
        tier.demoted("".join(prefixes[i : i + number // 2]))
    free_at, step = 0.0, 0
    waiting: list[tuple[Waiting, float]] = []
    under_way: list[tuple[float, StepPlan]] = []
    late: list[float] = []
    while len(late) < number:
        step += 1
        tier.now = step * tick
        while under_way and under_way[0][0] <= tier.now - tick:
            _, plan = under_way.pop(0)
            tier.pool.apply_report(ended(plan, size * real * ratio))
        for request, end in [*waiting]:
            if request.is_admitted():
                waiting.remove((request, end))
                late.append(tier.now - end)
        if prefixes and tier.now >= (number - len(prefixes)) * size * real / use:
            request = Waiting(tier, prefixes.pop(0))
            assert not request.is_admitted()
            free_at = max(free_at, tier.now) + size * real
            waiting.append((request, free_at))
            under_way.append((free_at, request.plan))
        assert tier.now < 10 * number, f"{len(waiting)} are never admitted"
    # The limit of a stall before the end at the earliest, some steps after it at most.
    assert -0.5 - tick <= min(late) and max(late) <= 4 * tick


# ------------------------------------------------------------------ both directions


def test_stores_and_loads_pass_each_other() -> None:
    """Two requests in a row load 300 blocks each, into blocks that are stored
    before. The loads of the first run beside the stores of the second."""
    tier = make_tier(2 * 300, tuning={"spare": 0.0})
    one, two = names(0, 300), names(300, 300)
    tier.demoted(one + two)
    tier.computed(names(600, 600))
    first, second = Waiting(tier, one), Waiting(tier, two)
    assert not first.is_admitted() and not second.is_admitted()
    num_stores = [len(r.plan.store_blocks) for r in (first, second)]
    # Some victims of the second are stored ahead of it.
    assert num_stores[0] >= 50 and num_stores[1] >= 50
    assert len(loads_ahead(first.plan)) == len(loads_ahead(second.plan)) == 300
    tier.now = num_stores[0] + 300 - 1.0
    assert not first.is_admitted()
    tier.now += 1.0
    assert first.is_admitted()
    # Its stores, and those ahead of it, have ended when the link is free.
    assert sum(num_stores) + len(first.plan.clean_blocks) <= num_stores[0] + 300
    tier.now = num_stores[0] + 600 - 1.0
    assert not second.is_admitted()
    tier.now += 1.0
    assert second.is_admitted()


def test_stores_that_no_load_waits_for_delay_none() -> None:
    """Ten blocks are stored for a step that computes, and one is loaded elsewhere."""
    tier = make_tier(24)
    tier.demoted("a")
    tier.computed(names(0, 12))
    tier.begin()
    running = tier.pool.get_new_blocks(22)
    assert len(stores(tier.end())) >= 10
    request = Waiting(tier, "a")
    assert not request.is_admitted() and not stores(request.plan)
    tier.now = 0.5
    assert request.is_admitted()
    tier.free(running)
