# SPDX-License-Identifier: Apache-2.0
"""When the tier below is asked, and how long an idle step waits for the answer."""

import time

import pytest

from vllm.v1.kv_tier.scheduling import sources
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
    below = Below(answer_wait_s=0.5)
    below.store.answers.clear()
    for _ in range(2):
        below.tier.begin()
        begun = time.monotonic()
        requests = [Request(name) for name in "abcd"]
        assert all(below.pool.is_loading(each, False) for each in requests)  # type: ignore[arg-type]
        assert 0.5 <= time.monotonic() - begun < 2.0
        below.tier.end()
    below.store.answers.set()


def test_a_store_that_never_answers_is_left_alone_after_a_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    below = Below(deadline_s=5.0)
    below.store.answers.clear()
    logged: list[tuple] = []
    monkeypatch.setattr(sources.logger, "error", lambda *said: logged.append(said))
    # Eight wait at once: two steps ask for four each.
    requests = [Request("a") for _ in range(8)]
    for _ in range(2):
        below.tier.begin()
        assert all(below.pool.is_loading(each, False) for each in requests)  # type: ignore[arg-type]
        below.tier.end()
    below.tier.now += 5.1
    for each in requests:
        assert not below.pool.is_loading(each, False)  # type: ignore[arg-type]
    assert len(logged) == 1 and below.stats().late_requests == 8
    # Nobody waits any more, for a while.
    late = Request("a")
    assert not below.pool.is_loading(late, False)  # type: ignore[arg-type]
    below.tier.now += 31
    late = Request("a")
    assert below.pool.is_loading(late, False)  # type: ignore[arg-type]
    below.store.answers.set()


def test_a_step_asks_for_some_requests_and_the_next_one_for_more() -> None:
    below = Below()
    below.store.answers.clear()
    requests = [Request(name) for name in "abcdef"]
    fetching = below.pool.backing.fetching  # type: ignore[union-attr]
    for num_asked in (4, 6, 6):
        below.tier.begin()
        # Whoever was not asked for waits for its turn.
        assert all(below.pool.is_loading(each, True) for each in requests)  # type: ignore[arg-type]
        below.tier.end()
        assert len(fetching._waits) == num_asked
    below.store.answers.set()
