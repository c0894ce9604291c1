# SPDX-License-Identifier: Apache-2.0
"""When the tier below is asked, and how long an idle step waits for the answer."""

import threading
import time
from typing import Any

import pytest

from vllm.v1.kv_tier.releases import keys_are_bytes
from vllm.v1.kv_tier.scheduler.secondary.tier import Wanted

from ..secondary_pool import Below, Request, key

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
        below.asker._asker.ask_s = ask_s  # type: ignore[attr-defined]
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
    lookup = below.pool.secondary.reader._lookup  # type: ignore[union-attr]
    find_missing = lookup.find_missing

    def slow(*args: Any) -> tuple[int, int, list[Wanted]]:
        time.sleep(0.6)
        threading.Timer(0.05, below.store.answers.set).start()
        return find_missing(*args)

    lookup.find_missing = slow  # type: ignore[method-assign]
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
    assert not below.pool.is_loading(request, False)  # type: ignore[arg-type]
    assert [below.where(name) for name in "adef"] == ["host"] * 2 + ["nowhere"] * 2
    assert below.stats().late_requests == 1
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


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_fast_tier_is_waited_for_by_who_could_compute_meanwhile(
    is_fast: bool,
) -> None:
    below = Below(num_slots=64, answer_wait_s=10.0)
    below.store.keys = {key(name) for name in "abc"}
    reader = below.backing.reader  # type: ignore[union-attr]
    below.pool.costs.prefill_s, below.pool.costs.join_s = 1.0, {4: 0.3}
    reader._tiers[0].fetch_s = 0.1 if is_fast else 0.9
    request = Request("abc")
    request.num_tokens = 1000
    below.tier.begin()
    assert not reader.look_up(request, True, None, meets=True)
    assert (reader.find(key("a")) is not None) is is_fast
    assert len(reader.meetings) == (not is_fast)
    below.tier.requests.append(request)
    below.tier.end()


def fetched(max_looks: int, num_tiers: int) -> tuple[list[str], int]:
    """What is fetched from each tier for a prompt of which the host has a part, and in
    how many steps."""
    below = Below(
        num_blocks=64,
        num_slots=64,
        max_looks=max_looks,
        answer_wait_s=10.0,
        num_tiers=num_tiers,
    )
    below.tier.demoted("be")
    below.store.keys = {key(name) for name in "acdfgik"}
    below.second.keys = {key(name) for name in "hj"}
    request = Request("abcdefghijklm")
    below.tier.requests.append(request)  # type: ignore[arg-type]
    num_steps = 1
    below.tier.begin()
    while below.pool.is_loading(request, False):  # type: ignore[arg-type]
        below.tier.end()
        below.tier.begin()
        num_steps += 1
    plan = below.is_held_back(request, "abcdefg" if num_tiers == 1 else "abcdefghijk")
    fetches = [job for job in plan.secondary if not job.is_put]
    keys = [
        [chr(each[0]) for job in fetches if job.tier == tier for each in job.keys]
        for tier in range(num_tiers)
    ]
    return ["".join(each) for each in keys], num_steps


@pytest.mark.parametrize("there", [["acdfg"], ["acdfgik", "hj"]])
def test_a_prompt_in_parts_gets_what_it_gets_at_once(there: list[str]) -> None:
    assert fetched(1000, len(there)) == (there, 1)
    # 13 blocks are looked up, and answers come for the 11 that the host lacks.
    for max_looks, at_least in ((4, 8), (1, 20)):
        in_parts, num_steps = fetched(max_looks, len(there))
        assert in_parts == there and num_steps >= at_least


def test_a_step_asks_for_so_many_blocks_only() -> None:
    """Behind those of a long prompt, the others ask in the next steps."""
    below = Below(max_looks=4, tuning={"looks_per_ask": 0})
    below.store.answers.clear()
    requests = [Request("abcdefgh"), Request("i"), Request("k")]
    reader = below.backing.reader  # type: ignore[union-attr]
    nums_asked = []
    for _ in range(5):
        below.tier.begin()
        assert all(below.pool.is_loading(each, True) for each in requests)  # type: ignore[arg-type]
        nums_asked.append(reader.num_asked)
        below.tier.end()
    assert nums_asked == [0, 1, 2, 0, 0]
    below.store.answers.set()


def test_an_answer_that_is_taken_in_in_parts_is_not_late() -> None:
    below = Below(deadline_s=5.0, answer_wait_s=10.0, max_looks=3)
    below.store.keys = {key(name) for name in "abc"}
    request = Request("abc")
    below.tier.begin()
    assert below.pool.is_loading(request, False)  # type: ignore[arg-type]
    below.tier.end()
    below.tier.now = 4.0
    for is_waiting in (True, False):
        below.tier.begin()
        assert below.pool.is_loading(request, False) is is_waiting  # type: ignore[arg-type]
        if is_waiting:
            below.tier.end()
    assert [below.where(name) for name in "abc"] == ["below"] * 3
    assert not below.stats().late_requests
    below.tier.end()


@pytest.mark.parametrize("when", ["looked up", "taken in"])
def test_a_prompt_in_parts_waits_no_more_once_tiers_are_detached(when: str) -> None:
    max_looks = 2 if when == "looked up" else 6
    below = Below(max_looks=max_looks, answer_wait_s=10.0)
    below.store.keys = {key(name) for name in "abcdef"}
    request = Request("abcdef")
    below.tier.begin()
    assert below.pool.is_loading(request, False)  # type: ignore[arg-type]
    below.tier.end()
    below.pool.reset_prefix_cache()
    below.tier.begin()
    assert not below.pool.is_loading(request, False)  # type: ignore[arg-type]
    assert below.where("a") == "nowhere"
    below.tier.end()
