# SPDX-License-Identifier: Apache-2.0
"""`keep_while_asleep`: which resets were for a sleep, and what becomes of the slots."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.v1.kv_tier.plan import StepReport
from vllm.v1.kv_tier.scheduling.asleep import check_asleep, keep_while_asleep
from vllm.v1.kv_tier.scheduling.rank_calls import RankCalls

from .tier import Tier, assert_nothing_leaks, stores


class Ranks:
    """An executor, and its calls as upstream makes them."""

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        pass

    def sleep(self, level: int = 1) -> None:
        self.collective_rpc("sleep", kwargs=dict(level=level))

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.collective_rpc("wake_up", kwargs=dict(tags=tags))


class Sleeper(Tier):
    """A tier of an engine that sleeps, with `ab` on the host."""

    def __init__(self, num_slots: int = 4, **config: Any) -> None:
        super().__init__(2, num_slots=num_slots, keep_while_asleep=True, **config)
        self.ranks, calls = Ranks(), RankCalls()
        calls.listen(self.ranks)
        keep_while_asleep(self.pool, calls)
        self.demoted("ab")

    def reset(self) -> None:
        assert self.pool.reset_prefix_cache()

    def step(self) -> None:
        self.begin()
        self.end()

    def found(self) -> str:
        return "".join(n for n in "abcd" if self.where(n) == "host")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the tier has logged; some releases log resets, too."""
    lines = [record.getMessage() for record in caplog.records]
    return [line for line in lines if line.startswith("KV tier")]


@pytest.fixture
def tier() -> Sleeper:
    return Sleeper()


def test_what_the_host_has_is_found_after_a_sleep(
    tier: Sleeper, caplog: pytest.LogCaptureFixture
) -> None:
    tier.reset()
    assert tier.found() == ""
    tier.ranks.sleep()
    assert tier.found() == ""
    with caplog.at_level(logging.INFO, logger="vllm.v1.kv_tier"):
        tier.ranks.wake_up()
    assert tier.found() == "ab"
    (line,) = said(caplog)
    assert line == "KV tier: 2 host slots were kept while the engine slept."
    tier.begin()
    (blocks,) = tier.promote(tier.find("ab"))
    assert tier.end().load_blocks == [block.block_id for block in blocks]
    assert_nothing_leaks(tier)


def test_slots_are_kept_until_there_is_memory_for_kv(tier: Sleeper) -> None:
    tier.reset()
    tier.ranks.sleep()
    tier.ranks.wake_up(["weights"])
    assert tier.found() == ""
    tier.ranks.wake_up(["kv_cache"])
    assert tier.found() == "ab"


def test_a_reset_without_a_sleep_is_one(tier: Sleeper) -> None:
    tier.reset()
    tier.step()
    assert tier.found() == "" and len(tier.host) == 0
    tier.ranks.sleep()
    tier.ranks.wake_up()
    assert tier.found() == ""
    assert_nothing_leaks(tier)


def test_a_reset_before_that_of_the_sleep_is_one(tier: Sleeper) -> None:
    """It may have been for other weights."""
    tier.reset()
    tier.reset()
    tier.ranks.sleep()
    tier.ranks.wake_up()
    assert tier.found() == "" and len(tier.host) == 0


@pytest.mark.parametrize("level", [0, 2])
def test_other_levels_keep_nothing(tier: Sleeper, level: int) -> None:
    tier.reset()
    tier.ranks.sleep(level)
    tier.ranks.wake_up()
    assert tier.found() == "" and len(tier.host) == 0


@pytest.mark.parametrize("when", ["cleared", "asleep", "with weights only", "awake"])
def test_new_weights_end_all_of_it(
    tier: Sleeper, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    order = ["cleared", "asleep", "with weights only", "awake"]
    calls = [
        tier.reset,
        tier.ranks.sleep,
        lambda: tier.ranks.wake_up(["weights"]),
        tier.ranks.wake_up,
    ]
    until = order.index(when) + 1
    for call in calls[:until]:
        call()
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="vllm.v1.kv_tier"):
        tier.ranks.collective_rpc("load_weights_of_my_trainer")
    (line,) = said(caplog)
    assert "2 host slots are forgotten, since load_weights_of_my_trainer" in line
    for call in calls[until:]:
        call()
    tier.step()
    assert tier.found() == "" and len(tier.host) == 0
    assert_nothing_leaks(tier)


def test_new_weights_after_a_step_are_told_by_a_reset_as_ever(tier: Sleeper) -> None:
    tier.reset()
    tier.ranks.sleep()
    tier.ranks.wake_up()
    tier.step()
    tier.ranks.collective_rpc("load_weights_of_my_trainer")
    # The device is not cleared by it either.
    assert tier.found() == "ab"


def test_calls_that_leave_weights_alone_end_nothing(tier: Sleeper) -> None:
    tier.reset()
    for method in ("check_health", "reset_mm_cache"):
        tier.ranks.collective_rpc(method)
    tier.ranks.sleep()
    tier.ranks.collective_rpc("check_health")
    tier.ranks.wake_up()
    assert tier.found() == "ab"


def test_a_step_while_the_engine_sleeps_finds_no_slot_ever_after(tier: Sleeper) -> None:
    """It does not step then; if it did, stores would meet hidden keys."""
    tier.reset()
    tier.ranks.sleep()
    tier.step()
    tier.ranks.wake_up()
    assert tier.found() == "" and len(tier.host) == 0
    # The tier works on.
    tier.demoted("cd")
    assert tier.found() == "cd"
    assert_nothing_leaks(tier)


def test_a_store_that_was_not_sent_is_not_kept() -> None:
    """It would read what the device has after the sleep."""
    tier = Sleeper()
    tier.computed("cd")
    tier.begin()
    tier.pool.free_blocks(tier.pool.get_new_blocks(2))
    assert tier.found() == "abcd"
    # In the middle of the step, as when running requests are preempted for it.
    tier.reset()
    tier.ranks.sleep()
    tier.ranks.wake_up()
    assert tier.found() == "ab"
    assert not stores(tier.end())


def test_a_store_that_failed_is_not_kept(tier: Sleeper) -> None:
    """Its report comes when the slots are hidden."""
    slot = tier.slot("a")
    failed = {slot.index: slot.store_seq}
    tier.reset()
    tier.pool.apply_report(StepReport(failed_store_slots=failed))
    tier.ranks.sleep()
    tier.ranks.wake_up()
    assert tier.found() == "b"


def test_a_host_that_is_off_stays_off(tier: Sleeper) -> None:
    tier.reset()
    tier.pool.apply_report(StepReport(lost_blocks=frozenset()))
    tier.ranks.sleep()
    tier.ranks.wake_up()
    tier.step()
    assert tier.found() == "" and tier.host.num_slots == 0


@pytest.mark.parametrize(
    ("has_below", "has_events", "dtype", "named"),
    [
        (True, False, "auto", "secondary_tiers"),
        (False, True, "auto", "--kv-events-config"),
        # Releases set its scales anew when they wake up.
        (False, False, "fp8_e5m2", "--kv-cache-dtype fp8_e5m2"),
    ],
)
def test_what_does_not_know_of_it_is_refused(
    has_below: bool, has_events: bool, dtype: str, named: str
) -> None:
    def engine(has_events: bool, dtype: str) -> Any:
        events = SimpleNamespace(enable_kv_cache_events=has_events)
        cache = SimpleNamespace(cache_dtype=dtype)
        return SimpleNamespace(kv_events_config=events, cache_config=cache)

    with pytest.raises(ValueError, match=f"keep_while_asleep and {named} do not go"):
        check_asleep(True, has_below, engine(has_events, dtype))
    check_asleep(False, has_below, engine(has_events, dtype))
    check_asleep(True, False, engine(False, "bfloat16"))
