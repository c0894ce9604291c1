# SPDX-License-Identifier: Apache-2.0
"""Several tiers below, on the scheduler's side; and what counts as a use."""

import pytest

from vllm.v1.kv_tier.opening import labels
from vllm.v1.kv_tier.releases import keys_are_bytes
from vllm.v1.kv_tier.scheduler.secondary.lookup import PromptLookup

from ..secondary_pool import Below, Request, key
from ..tier import BLOCK

pytestmark = pytest.mark.skipif(
    not keys_are_bytes(), reason="refused: hashes are numbers of a process"
)


def test_labels_tell_tiers_of_one_type_apart() -> None:
    assert labels(["fs", "redis", "fs"]) == ["fs-1", "redis", "fs-2"]


def test_each_tier_gets_what_is_written_and_a_slot_is_kept_for_both() -> None:
    below = Below(num_tiers=2, num_blocks=4, num_slots=4)
    below.tier.demoted("a")
    first, second = below.jobs(below.plans())
    assert (first.tier, second.tier) == (0, 1)
    assert first.keys == second.keys and first.slots == second.slots
    below.tier.drop("a")
    below.end(first)
    below.tier.demoted_or_dropped("bcde")
    assert not set(second.slots) & {
        below.tier.slot(n).index for n in "bcde" if below.where(n) == "host"
    }
    below.end(second)
    assert sorted(below.pool.host._free) == second.slots


def test_a_tier_that_stands_still_does_not_keep_another_from_writing() -> None:
    below = Below(num_tiers=2, max_writing=2)
    below.tier.demoted("abcd")
    jobs = below.jobs(below.plans())
    (stands,) = [job for job in jobs if job.tier == 0]
    written = [job for job in jobs if job.tier == 1]
    below.end(written[0])
    written += [job for job in below.jobs(below.plans()) if job.tier == 1]
    assert len(stands.keys) == 2
    assert {each for job in written for each in job.keys} == set(map(key, "abcd"))


def test_a_prefix_comes_from_the_first_tier_that_has_it() -> None:
    below = Below(num_tiers=2)
    below.store.keys, below.second.keys = {key("a"), key("b")}, {key("b"), key("c")}
    request = Request("abc")
    below.tier.begin()
    below.asked(request)
    assert below.tier.try_promote(below.tier.find("abc"), request=request) is None
    first, second = below.tier.end().secondary
    assert (first.tier, first.keys) == (0, [key("a"), key("b")])
    assert (second.tier, second.keys) == (1, [key("c")])
    below.end(first)
    assert below.pool.is_loading(request, False)  # type: ignore[arg-type]
    below.end(second)
    assert not below.pool.is_loading(request, False)  # type: ignore[arg-type]
    assert [below.where(name) for name in "abc"] == 3 * ["host"]
    stats = below.pool.take_stats().secondary
    assert (stats["fs"].loaded_blocks, stats["redis"].loaded_blocks) == (2, 1)
    assert stats["redis"].loaded_tokens == BLOCK


def test_what_came_from_one_tier_is_written_to_the_other_alone() -> None:
    below = Below(num_tiers=2)
    below.second.keys = {key("a")}
    below.end(below.begins_to_fetch(Request("a"), "a"))
    (job,) = below.jobs(below.plans())
    assert (job.tier, job.keys) == (0, [key("a")])


def test_a_tier_that_does_not_answer_costs_its_deadline_and_the_other_serves() -> None:
    below = Below(num_tiers=2, deadline_s=5.0)
    below.second.answers.clear()
    below.store.keys = {key("a")}
    request = Request("ab")
    below.until(lambda: below.where("a") == "below", request)
    below.tier.now = 2.6
    below.end(below.begins_to_fetch(request, "a"))
    assert not below.pool.is_loading(request, False)  # type: ignore[arg-type]
    assert below.where("a") == "host"
    assert below.stats("redis").late_requests == 1
    below.second.answers.set()


def test_who_has_all_is_not_kept_waiting_by_others() -> None:
    below = Below(num_tiers=2)
    below.second.answers.clear()
    below.store.keys = {key("a"), key("b")}
    job = below.begins_to_fetch(Request("ab"), "ab")
    assert (job.tier, len(job.keys)) == (0, 2)
    below.second.answers.set()


@pytest.mark.parametrize("num_uses", [2, 3])
def test_a_hit_is_one_use_wherever_it_is_found(num_uses: int) -> None:
    below = Below(store_from_use=3)
    below.tier.demoted("a")
    plans = [below.hit("a") for _ in range(num_uses - 1)]
    jobs = below.jobs([*plans, *below.plans()])
    assert len(jobs) == (num_uses == 3)


def test_what_leaves_the_host_before_its_turn_is_counted() -> None:
    below = Below()
    below.tier.demoted("ab")
    assert below.stats().due_blocks == 2
    below.tier.drop("a")
    assert below.stats().dropped_blocks == 1


# ------------------------------------------------------------- how much at a time


def test_much_is_written_in_several_jobs() -> None:
    below = Below(max_writing=5, max_job=2)
    below.tier.demoted("abcdef")
    jobs = below.jobs(below.plans())
    assert [len(job.keys) for job in jobs] == [2, 2, 1]
    below.end(jobs[0])
    (last,) = below.jobs(below.plans())
    assert len(last.keys) == 1


def test_a_prefix_comes_in_several_jobs_and_what_came_in_time_is_used() -> None:
    below = Below(max_job=2, deadline_s=5.0)
    below.store.keys = {key(name) for name in "abc"}
    request = Request("abc")
    below.tier.begin()
    below.asked(request)
    assert below.tier.try_promote(below.tier.find("abc"), request=request) is None
    first, second = below.tier.end().secondary
    assert (first.keys, second.keys) == ([key("a"), key("b")], [key("c")])
    below.end(first)
    assert below.pool.is_loading(request, False)  # type: ignore[arg-type]
    below.tier.now = 5.1
    assert not below.pool.is_loading(request, False)  # type: ignore[arg-type]
    assert [below.where(name) for name in "abc"] == ["host", "host", "nowhere"]


def test_what_would_come_too_late_is_not_begun() -> None:
    below = Below(num_slots=64, deadline_s=0.45)
    below.store.keys = {key(name) for name in "abcdefgh"}
    # A block takes 0.1 seconds, as is told.
    below.end(below.begins_to_fetch(Request("a"), "a"))
    request = Request("bcdefgh")
    job = below.begins_to_fetch(request, "bcdefgh")
    assert job.keys == [key(name) for name in "bcde"]
    assert below.where("f") == "nowhere"


def test_short_prompts_do_not_wait_for_a_slow_store() -> None:
    """They do not say what it takes to compute them."""
    below = Below(num_slots=64, deadline_s=5.0, assumed_prefill_s=1e-4)
    below.store.keys = {key(name) for name in "ab"}
    request = Request("a")
    job = below.begins_to_fetch(request, "a")
    below.tier.now += 0.2
    below.outputs(3)
    assert not below.pool.is_loading(request, False)  # type: ignore[arg-type]
    # A tenth of a second for a block, as is told.
    below.end(job)
    num_asked = below.store.num_asked
    below.asked(again := Request("b"))
    assert below.store.num_asked == num_asked
    assert not below.pool.is_loading(again, False)  # type: ignore[arg-type]


def test_a_store_that_is_busy_is_not_taken_for_dead() -> None:
    below = Below(num_slots=64, deadline_s=5.0)
    below.store.keys = {key(name) for name in "abcdz"}
    for name in "abc":
        slow, quick = Request(name), Request("z")
        below.begins_to_fetch(slow, name)
        below.tier.now += 1
        # It brings another request what that one waits for.
        below.end(below.begins_to_fetch(quick, "z"))
        below.tier.drop("z")
        below.tier.now += 5
        assert not below.pool.is_loading(slow, False)  # type: ignore[arg-type]
    stats = below.stats()
    assert stats.late_requests == 3 and not stats.is_closed
    slow = Request("d")
    below.begins_to_fetch(slow, "d")
    below.tier.now += 6
    assert not below.pool.is_loading(slow, False)  # type: ignore[arg-type]
    assert below.stats().is_closed


def test_what_is_computed_again_is_used_again() -> None:
    below = Below(num_blocks=4, num_slots=4, store_from_use=2)
    below.tier.demoted("a")
    below.tier.drop("a")
    assert not below.jobs(below.plans())
    below.tier.demoted("a")
    (job,) = below.jobs(below.plans())
    assert job.keys == [key("a")]


def test_who_is_left_alone_costs_no_scan_of_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    below = Below(deadline_s=5.0)
    below.store.answers.clear()
    request = Request("a")
    assert below.pool.is_loading(request, False)  # type: ignore[arg-type]
    below.tier.now += 5.1
    assert not below.pool.is_loading(request, False)  # type: ignore[arg-type]
    monkeypatch.setattr(PromptLookup, "find_missing", None)
    assert not below.pool.is_loading(Request("b"), False)  # type: ignore[arg-type]
    below.store.answers.set()
