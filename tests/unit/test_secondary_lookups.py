# SPDX-License-Identifier: Apache-2.0
"""When the tier below is asked, and how long an idle step waits for the answer."""

import threading
import time

import pytest

from vllm.v1.kv_tier.releases import keys_are_bytes
from vllm.v1.kv_tier.scheduler.secondary.tier import Wanted

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


def test_a_tier_that_is_slower_than_computing_counts_as_closed_for_a_while() -> None:
    below = Below()
    below.store.keys = {key("a"), key("b")}
    below.end(below.begins_to_fetch(Request("a"), "a"))
    assert not below.stats().is_closed
    # The job took 0.1 s.
    below.pool.costs.prefill_s = 0.05
    assert below.stats().is_closed
    num_asked = below.store.num_asked
    below.tier.begin()
    below.asked(Request("b"))
    below.tier.end()
    assert below.store.num_asked == num_asked
    below.tier.now += 11
    assert not below.stats().is_closed
    below.end(below.begins_to_fetch(Request("b"), "b"))
    assert below.stats().is_closed


def test_an_engine_that_runs_nothing_waits_for_the_answer_and_no_other() -> None:
    below = Below(answer_wait_s=10.0)
    below.store.keys = {key("a")}
    below.tier.begin()
    # A prefix scan finds it in this very step.
    request = Request("ab")
    assert not below.pool.is_loading(request, False)  # type: ignore[arg-type]
    assert below.where("a") == "below"
    below.tier.end()
    below.tier.begin()
    below.store.answers.clear()
    begun = time.monotonic()
    assert below.pool.is_loading(Request("cd"), True)  # type: ignore[arg-type]
    assert time.monotonic() - begun < 5
    below.store.answers.set()


def test_the_look_up_of_a_prompt_is_no_part_of_the_wait_for_an_answer() -> None:
    below = Below(answer_wait_s=0.5)
    below.store.keys = {key("a")}
    below.store.answers.clear()
    missing = below.pool.secondary.reader._missing  # type: ignore[union-attr]

    def slow(request: Request, may_load: None) -> list[Wanted]:
        time.sleep(0.6)
        threading.Timer(0.05, below.store.answers.set).start()
        return missing(request, may_load)  # type: ignore[arg-type]

    below.pool.secondary.reader._missing = slow  # type: ignore[method-assign, union-attr, assignment]
    below.tier.begin()
    request = Request("ab")
    assert not below.pool.is_loading(request, False)  # type: ignore[arg-type]
    assert below.where("a") == "below"
    below.tier.end()


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


def test_computing_is_not_waited_for_where_it_is_cheaper() -> None:
    below = Below()
    below.store.keys = {key(name) for name in "abcd"}
    below.end(below.begins_to_fetch(Request("a"), "a"))
    request = Request("b")
    below.tier.begin()
    below.asked(request)
    # A block takes 0.1 seconds to come, as was told.
    below.pool.costs.prefill_s = 0.05
    assert below.tier.try_promote(below.tier.find("b"), request=request) is None
    assert not below.tier.end().secondary
    assert below.where("b") == "nowhere"
    assert not below.pool.is_loading(request, False)  # type: ignore[arg-type]
    # Nor is it asked what it has.
    num_asked = below.store.num_asked
    other = Request("c")
    assert not below.pool.is_loading(other, False)  # type: ignore[arg-type]
    # Not even its blocks are looked up.
    assert other not in below.pool.secondary.reader._waits  # type: ignore[union-attr, operator]
    below.pool.costs.prefill_s = 0.2
    assert below.store.num_asked == num_asked
    below.asked(Request("c"))
    assert below.store.num_asked == num_asked + 1


def test_who_waits_goes_on_when_a_tier_turns_out_to_be_slow() -> None:
    below = Below()
    below.store.keys = {key(name) for name in "abcdef"}
    below.pool.costs.prefill_s = 0.02
    request = Request("abcdef")
    below.tier.begin()
    below.asked(request)
    assert below.tier.try_promote(below.tier.find("abcdef"), request=request) is None
    # Nobody knows its speed, so a few tell it.
    first, rest = below.tier.end().secondary
    assert first.keys == [key(name) for name in "abcd"]
    assert below.pool.is_loading(request, False)  # type: ignore[arg-type]
    # A tenth of a second for four.
    below.end(first)
    assert below.pool.is_loading(request, False)  # type: ignore[arg-type]
    below.tier.now += 0.11
    assert not below.pool.is_loading(request, False)  # type: ignore[arg-type]
    assert [below.where(name) for name in "adef"] == ["host"] * 2 + ["nowhere"] * 2
    assert not below.stats().late_requests
    assert not set(rest.slots) & set(below.pool.host._free)
    below.end(rest)
    assert below.where("f") == "host"


@pytest.mark.parametrize("always", [False, True])
def test_a_tier_is_waited_for_no_longer_than_computing_takes(always: bool) -> None:
    below = Below(fetches_always=always)
    below.store.keys = {key(name) for name in "ab"}
    below.pool.costs.prefill_s = 1.0
    request = Request("ab")
    job = below.begins_to_fetch(request, "ab")
    below.tier.now += 1.9
    assert below.pool.is_loading(request, False)  # type: ignore[arg-type]
    below.tier.now += 0.2
    # Ranks tell of it with the output of a step or two later, however long these take.
    for _ in range(3):
        assert below.pool.is_loading(request, False)  # type: ignore[arg-type]
        below.outputs(1)
    assert below.pool.is_loading(request, False) is always  # type: ignore[arg-type]
    assert below.stats().late_requests == (not always)
    below.end(job)
    assert below.where("a") == below.where("b") == "host"


def test_a_tier_that_was_slow_is_tried_again() -> None:
    below = Below()
    below.store.keys = {key(name) for name in "abcdef"}
    # A tenth of a second for one.
    below.end(below.begins_to_fetch(Request("a"), "a"))
    below.pool.costs.prefill_s = 0.05
    for seconds, sizes in ((29.0, []), (2.0, [4, 1])):
        below.tier.now += seconds
        request = Request("bcdef")
        below.tier.begin()
        below.asked(request)
        if sizes:
            below.tier.try_promote(below.tier.find("bcdef"), request=request)
        jobs = below.tier.end().secondary
        assert [len(job.keys) for job in jobs] == sizes
    # By now it is for four.
    below.end(jobs[0])
    assert below.pool.is_loading(request, False)  # type: ignore[arg-type]


def two_seconds_until_a_block_is_used(names: str, is_idle: bool = True) -> Below:
    """A tier with blocks of these names. One takes a tenth of a second, and the step
    that can use it comes two seconds later; to compute one takes a second."""
    below = Below(num_slots=64, deadline_s=50.0)
    below.store.keys = {key(name) for name in "yz" + names}
    below.pool.costs.prefill_s = 1.0
    # One could have met something else.
    for name in "yz":
        request = Request(name)
        job = below.begins_to_fetch(request, name)
        assert below.pool.is_loading(request, not is_idle)  # type: ignore[arg-type]
        below.tier.now += 2.1
        below.end(job)
        below.asked(request)
    return below


def test_a_prompt_does_not_wait_where_the_wait_itself_takes_longer() -> None:
    below = two_seconds_until_a_block_is_used("abcdef")
    below.tier.begin()
    below.asked(Request("a"))
    assert below.where("a") == "nowhere"
    below.asked(Request("bcdef"))
    assert below.where("b") == "below"
    below.tier.end()


def test_nor_for_the_few_blocks_of_it_that_are_there() -> None:
    below = two_seconds_until_a_block_is_used("a")
    request = Request("abcdef")
    below.tier.begin()
    below.asked(request)
    assert below.where("a") == "below"
    assert below.tier.try_promote(below.tier.find("a"), request=request) is None
    assert not below.tier.end().secondary
    assert below.where("a") == "nowhere"


def test_what_requests_wait_for_while_others_run_is_not_the_wait_itself() -> None:
    below = two_seconds_until_a_block_is_used("abcdef", is_idle=False)
    below.tier.begin()
    below.asked(Request("a"))
    assert below.where("a") == "below"
    below.tier.end()


def test_outputs_before_a_job_is_late_say_nothing() -> None:
    below = Below()
    below.store.keys = {key("a")}
    below.pool.costs.prefill_s = 1.0
    request = Request("a")
    below.begins_to_fetch(request, "a")
    below.outputs(9)
    below.tier.now += 1.1
    assert below.pool.is_loading(request, False)  # type: ignore[arg-type]


def test_time_in_the_queue_is_not_time_that_a_tier_takes() -> None:
    below = Below(deadline_s=5.0)
    below.store.keys = {key("a")}
    request = Request("a")
    below.tier.begin()
    below.asked(request)
    # Its turn comes long after it asked.
    below.tier.now += 60.0
    assert below.tier.try_promote(below.tier.find("a"), request=request) is None
    below.tier.end()
    assert below.pool.is_loading(request, False)  # type: ignore[arg-type]
    below.tier.now += 2.4
    assert below.pool.is_loading(request, False)  # type: ignore[arg-type]
    below.tier.now += 0.2
    assert not below.pool.is_loading(request, False)  # type: ignore[arg-type]


def test_only_a_step_that_runs_nothing_makes_writes_leave_the_way() -> None:
    below = Below()
    for is_idle in (True, False):
        assert not below.pool.take_plan(is_idle=True).asks_secondary
        below.tier.begin()
        assert below.pool.is_loading(Request("a"), False)  # type: ignore[arg-type]
        assert below.pool.take_plan(is_idle).asks_secondary is is_idle
