# SPDX-License-Identifier: Apache-2.0
"""A breaker: what is in trouble is left alone, and tried now and then."""

import logging

import pytest

from vllm.v1.kv_tier.stores.breaker import Breaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker("the store", retry_s=5, clock=clock)


def test_closed_it_lets_everything_through(breaker: Breaker) -> None:
    for _ in range(3):
        assert breaker.begin_try() and not breaker.is_open
        breaker.record_success()


def test_open_it_lets_one_trial_through_at_a_time(
    breaker: Breaker, clock: Clock
) -> None:
    breaker.record_failure("no answer")
    for _ in range(3):
        assert breaker.is_open and not breaker.begin_try()
        clock.now += 4.9
        assert not breaker.begin_try()
        clock.now += 0.2
        assert breaker.begin_try() and not breaker.begin_try()
        breaker.record_failure("no answer")


def test_a_trial_that_goes_well_closes_it(breaker: Breaker, clock: Clock) -> None:
    breaker.record_failure("no answer")
    clock.now += 5
    assert breaker.begin_try()
    breaker.record_success()
    assert not breaker.is_open and breaker.begin_try() and breaker.begin_try()


def test_a_trial_that_never_ends_is_not_the_last(
    breaker: Breaker, clock: Clock
) -> None:
    breaker.record_failure("no answer")
    clock.now += 5
    assert breaker.begin_try() and not breaker.begin_try()
    clock.now += 5
    assert breaker.begin_try() and not breaker.begin_try()


def test_each_change_of_state_is_one_line(
    breaker: Breaker, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="vllm.v1.kv_tier"):
        for _ in range(3):
            for _ in range(3):
                breaker.record_failure("no answer")
            clock.now += 5
            assert breaker.begin_try()
            breaker.record_failure("no answer")
            breaker.record_success()
            breaker.record_success()
    lines = [record.getMessage() for record in caplog.records]
    assert lines == 3 * [
        "KV tier: the store is in trouble (no answer): requests are computed without "
        "it. It is tried again every 5 seconds.",
        "KV tier: the store works again.",
    ]
