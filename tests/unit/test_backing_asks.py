# SPDX-License-Identifier: Apache-2.0
"""When the tier below is asked, and how long an idle step waits for the answer."""

import time

import pytest

from vllm.v1.kv_tier.scheduling.below import keys_are_bytes

from .below import Below, Request, key

pytestmark = pytest.mark.skipif(
    not keys_are_bytes(), reason="refused: hashes are numbers of a process"
)


@pytest.mark.parametrize("always", [False, True])
def test_answers_that_take_longer_than_computing_are_asked_for_seldom(
    always: bool,
) -> None:
    below = Below(fetches_always=always)
    below.tier.begin()
    below.asked(Request("ab"))
    below.tier.end()
    below.pool.costs.prefill_s = 0.1
    for ask_s, seconds, asks in (
        *((0.1, 1.0, True), (0.3, 1.0, always), (0.3, 28.0, always)),
        *((0.3, 2.0, True), (0.1, 0.0, True)),
    ):
        below.asker.ask_s = ask_s
        below.tier.now += seconds
        num_asked = below.store.num_asked
        below.tier.begin()
        below.asked(Request("ab"))
        below.tier.end()
        assert below.store.num_asked == num_asked + asks


def test_an_engine_that_runs_nothing_waits_for_the_answer_and_no_other() -> None:
    below = Below(answer_wait_s=10.0)
    below.store.keys = {key("a")}
    below.tier.begin()
    # A prefix scan finds it in this very step.
    assert not below.pool.is_loading(Request("ab"), False)  # type: ignore[arg-type]
    assert below.where("a") == "below"
    below.tier.end()
    below.tier.begin()
    below.store.answers.clear()
    begun = time.monotonic()
    assert below.pool.is_loading(Request("cd"), True)  # type: ignore[arg-type]
    assert time.monotonic() - begun < 5
    below.store.answers.set()


def test_an_idle_step_waits_for_all_answers_no_longer_than_for_one() -> None:
    below = Below(answer_wait_s=0.1)
    below.store.answers.clear()
    for _ in range(2):
        below.tier.begin()
        begun = time.monotonic()
        requests = [Request(name) for name in "abcd"]
        assert all(below.pool.is_loading(each, False) for each in requests)  # type: ignore[arg-type]
        assert 0.1 <= time.monotonic() - begun < 0.4
        below.tier.end()
    below.store.answers.set()
