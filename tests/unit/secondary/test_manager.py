# SPDX-License-Identifier: Apache-2.0
"""The tier below, on the scheduler's side: what is written, what is fetched."""

import pytest

from vllm.v1.kv_tier.plan import SecondaryResult, StepReport
from vllm.v1.kv_tier.releases import keys_are_bytes
from vllm.v1.kv_tier.scheduler.secondary import tier

from ..hints.test_conversations import Turn
from ..secondary_pool import SETTLED, Below, Request, key
from ..tier import BLOCK, SLOT_BYTES, Tier, hash_of

pytestmark = pytest.mark.skipif(
    not keys_are_bytes(), reason="refused: hashes are numbers of a process"
)

# -------------------------------------------------------------------------- writing


def test_a_slot_is_written_once_its_steps_are_settled() -> None:
    below = Below()
    stored_by = below.tier.demoted("ab").seq
    plans = below.plans(SETTLED + 2)
    (job,) = below.jobs(plans)
    assert job.is_put and set(job.keys) == {key("a"), key("b")}
    by_plan = {plan.seq: plan for plan in plans}
    assert min(s for s, p in by_plan.items() if p.secondary) >= stored_by
    slots = {below.tier.slot(name) for name in "ab"}
    assert {slot.index for slot in slots} == set(job.slots)
    assert job.after_stores == max(slot.store_seq for slot in slots)
    begun = next(s for s, p in by_plan.items() if p.secondary)
    assert begun - job.after_stores >= SETTLED


@pytest.mark.parametrize("group_bytes", [(), (100, 60)])
def test_jobs_name_groups_that_need_less_and_their_bytes_count(
    group_bytes: tuple[int, ...],
) -> None:
    below = Below(group_bytes=group_bytes)
    below.tier.computed("c", group_id=1)
    groups: list[int] = []
    for plan in [below.tier.demoted("de"), *below.plans(SETTLED + 4)]:
        for job in plan.secondary:
            groups += job.groups
            below.end(job)
    stats = below.stats()
    num_bytes = stats.stored_blocks * SLOT_BYTES
    if group_bytes:
        assert sorted(groups) == [0, 0, 1]
        num_bytes = sum(group_bytes[group] for group in groups)
    assert stats.stored_bytes == num_bytes > 0
    below.store.keys = {key("a")}
    job = below.begins_to_fetch(Request("a"), "a")
    assert job.groups == ((0,) if group_bytes else ())
    below.end(job)
    assert below.stats().loaded_bytes == (100 if group_bytes else SLOT_BYTES)


def test_what_is_being_written_serves_loads_and_makes_no_room() -> None:
    below = Below(num_blocks=4, num_slots=4)
    below.tier.demoted("abcd")
    (job,) = below.jobs(below.plans())
    assert len(job.slots) == 4
    # The next four find no slot, since all are held.
    below.tier.demoted_or_dropped("efgh")
    assert all(below.where(name) == "host" for name in "abcd")
    assert below.pool.take_stats().dropped_blocks == 4
    below.end(job)
    below.tier.demoted("efgh")
    assert all(below.where(name) == "nowhere" for name in "abcd")


def test_memory_of_a_slot_that_is_dropped_meanwhile_is_given_to_nobody() -> None:
    below = Below(num_blocks=4, num_slots=4)
    below.tier.demoted("a")
    (job,) = below.jobs(below.plans())
    below.tier.drop("a")
    below.tier.demoted_or_dropped("bcde")
    taken = {below.tier.slot(n).index for n in "bcde" if below.where(n) == "host"}
    assert len(taken) == 3 and not taken & set(job.slots)
    below.end(job)
    assert sorted(below.pool.host._free) == job.slots


def test_nothing_is_written_twice_but_what_the_tier_below_refused() -> None:
    below = Below()
    below.tier.demoted("ab")
    (job,) = below.jobs(below.plans())
    below.end(job, *(name == key("a") for name in job.keys))
    plans = [below.hit("a"), below.hit("b"), *below.plans()]
    (again,) = below.jobs(plans)
    assert again.keys == [key("b")]
    stats = below.stats()
    assert stats.stored_blocks == 1 == stats.refused_blocks


def test_from_the_second_use_on() -> None:
    below = Below(store_from_use=2)
    below.tier.demoted("ab")
    assert not below.jobs(below.plans())
    (job,) = below.jobs([below.hit("a"), *below.plans()])
    assert job.keys == [key("a")]


def test_a_device_hit_is_a_use_too() -> None:
    below = Below(store_from_use=2, store_policy="write_through")
    below.tier.computed("ab")
    assert not below.jobs(below.plans(SETTLED + 2))
    (job,) = below.jobs([below.hit("ab"), *below.plans()])
    assert set(job.keys) == {key("a"), key("b")}


def test_no_more_is_written_at_a_time() -> None:
    below = Below(max_writing=1)
    below.tier.demoted("abc")
    (first,) = below.jobs(below.plans(6))
    assert len(first.slots) == 1
    below.end(first)
    (second,) = below.jobs(below.plans(6))
    assert second.keys != first.keys


def test_what_was_evicted_is_counted_on_all_ranks() -> None:
    below = Below(num_ranks=2)
    below.tier.demoted("a")
    (job,) = below.jobs(below.plans())
    for evicted in (300, 40):
        told = SecondaryResult(job.number, [True], 0.1, evicted)
        below.pool.apply_report(StepReport(secondary=[told]))
    assert [below.stats().evicted_bytes for _ in range(2)] == [340, 0]


@pytest.mark.parametrize("told", [1, 2])
def test_a_job_is_over_when_all_ranks_have_told(told: int) -> None:
    below = Below(num_ranks=2)
    below.tier.demoted("a")
    (job,) = below.jobs(below.plans())
    for _ in range(told):
        below.end(job)
    assert (below.tier.slot("a").index in below.pool.host._held) == (told == 1)


# ------------------------------------------------------------------------- fetching


def test_a_prefix_from_below_becomes_a_host_hit() -> None:
    below = Below()
    below.store.keys = {key("a"), key("b")}
    request = Request("abc")
    job = below.begins_to_fetch(request, "ab")
    assert job.keys == [key("a"), key("b")]
    # Not before it has been told, and the request waits, busy or not.
    assert below.where("a") == "below"
    below.tier.begin()
    assert below.pool.is_loading(request, False)  # type: ignore[arg-type]
    assert not below.tier.end().awaits_secondary
    assert below.pool.take_plan(is_idle=True).awaits_secondary
    below.end(job)
    assert not below.pool.is_loading(request, False)  # type: ignore[arg-type]
    assert below.where("a") == below.where("b") == "host"
    below.tier.begin()
    below.tier.promote(below.tier.find("ab"), request=request)
    plan = below.tier.end()
    assert sorted(plan.load_slots) == sorted(job.slots)
    assert below.stats().loaded_blocks == 2


def test_what_came_is_a_hit_of_the_tier_below_once() -> None:
    below = Below()
    below.store.keys = {key("a"), key("b")}
    below.end(below.begins_to_fetch(Request("abc"), "ab"))
    assert below.stats().hit_tokens == 0
    below.hit("a")
    below.hit("ab")
    below.hit("ab")
    assert below.stats().hit_tokens == 2 * BLOCK


def test_what_did_not_come_whole_is_a_miss_and_its_slot_is_free() -> None:
    below = Below()
    below.store.keys = {key("a"), key("b")}
    request = Request("ab")
    job = below.begins_to_fetch(request, "ab")
    num_free = len(below.pool.host._free)
    below.end(job, True, False)
    assert below.where("a") == "host" and below.where("b") == "nowhere"
    assert len(below.pool.host._free) == num_free + 1
    assert not below.pool.is_loading(request, False)  # type: ignore[arg-type]
    assert below.stats().missed_blocks == 1


def test_one_rank_without_its_part_is_enough_for_a_miss() -> None:
    below = Below(num_ranks=2)
    below.store.keys = {key("a")}
    job = below.begins_to_fetch(Request("a"), "a")
    below.end(job, True)
    assert below.where("a") == "below"
    below.end(job, False)
    assert below.where("a") == "nowhere"


def test_a_request_goes_on_at_its_deadline_and_what_comes_later_is_kept() -> None:
    below = Below(deadline_s=5.0)
    below.store.keys = {key("a")}
    request = Request("a")
    job = below.begins_to_fetch(request, "a")
    below.tier.now = 4.9
    assert below.pool.is_loading(request, False)  # type: ignore[arg-type]
    below.tier.now = 5.1
    assert not below.pool.is_loading(request, False)  # type: ignore[arg-type]
    assert below.where("a") == "nowhere"
    assert below.stats().late_requests == 1
    # The slot is nobody else's until the ranks have told.
    assert not set(job.slots) & set(below.pool.host._free)
    below.end(job)
    assert below.where("a") == "host"


def test_a_store_that_never_answers_is_left_alone_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    below = Below(deadline_s=5.0)
    below.store.answers.clear()
    logged: list[tuple] = []
    monkeypatch.setattr(tier.logger, "warning", lambda *said: logged.append(said))
    requests = [Request("a") for _ in range(8)]
    below.tier.begin()
    assert all(below.pool.is_loading(each, False) for each in requests)  # type: ignore[arg-type]
    below.tier.end()
    # Half of the time is for the answer.
    below.tier.now += 2.6
    for each in requests:
        assert not below.pool.is_loading(each, False)  # type: ignore[arg-type]
    assert len(logged) == 1 and below.stats().late_requests == 8
    # Nobody waits any more, for a while.
    late = Request("a")
    assert not below.pool.is_loading(late, False)  # type: ignore[arg-type]
    assert below.stats().is_closed
    below.tier.now += 11
    assert not below.stats().is_closed
    late = Request("a")
    assert below.pool.is_loading(late, False)  # type: ignore[arg-type]
    below.store.answers.set()


def test_a_step_asks_for_some_requests_and_the_next_one_for_more() -> None:
    below = Below(max_looks=20, tuning={"looks_per_ask": 5})
    below.store.answers.clear()
    requests = [Request(name) for name in "abcdef"]
    waits = below.backing.reader._waits  # type: ignore[union-attr]
    for num_asked in (3, 6, 6):
        below.tier.begin()
        # Whoever was not asked for waits for its turn.
        assert all(below.pool.is_loading(each, True) for each in requests)  # type: ignore[arg-type]
        below.tier.end()
        assert sum(each.is_asked for each in waits.values()) == num_asked
    below.store.answers.set()


def test_those_with_nothing_to_ask_for_are_not_held_back() -> None:
    below = Below(num_blocks=16)
    below.tier.computed("abcdefgh")
    below.store.answers.clear()
    # More than a step asks for: without a full block, with all of them, and others.
    short = [Request("") for _ in range(20)]
    cached = [Request("abcdefgh") for _ in range(20)]
    asking = [Request(f"abcd{n}") for n in "stuvwxyz"]
    below.tier.begin()
    held = [
        [below.pool.is_loading(each, True) for each in group]  # type: ignore[arg-type]
        for group in (asking, short, cached)
    ]
    below.tier.end()
    assert held == [[True] * 8, [False] * 20, [False] * 20]
    assert below.backing.reader.num_asked == 0  # type: ignore[union-attr]
    # Nobody is asked any more, so nobody waits for a turn.
    below.pool.reset_prefix_cache()
    late = [Request("uvw") for _ in range(20)]
    below.tier.begin()
    assert not any(below.pool.is_loading(each, True) for each in late)  # type: ignore[arg-type]
    below.tier.end()
    below.store.answers.set()


def test_a_step_looks_up_so_many_blocks_only() -> None:
    below = Below(max_looks=12)
    below.store.answers.clear()
    requests = [Request("abcdef") for _ in range(4)]
    waits = below.backing.reader._waits  # type: ignore[union-attr]
    for num_asked in (1, 2, 3, 4):
        below.tier.begin()
        assert all(below.pool.is_loading(each, True) for each in requests)  # type: ignore[arg-type]
        below.tier.end()
        assert sum(each.is_asked for each in waits.values()) == num_asked
    below.store.answers.set()


@pytest.mark.parametrize("end", ["it is aborted", "it is admitted without them"])
def test_nothing_is_remembered_of_what_a_request_found(end: str) -> None:
    below = Below(num_blocks=64, num_slots=64)
    waits = below.backing.reader._waits  # type: ignore[union-attr]
    below.store.keys |= {key(name) for name in "bcdefgh"}
    request = Request("abcdefgh")
    below.tier.begin()
    below.asked(request)
    assert len(waits[request].found) == 7  # type: ignore[index]
    if end == "it is aborted":
        below.tier.requests.clear()
        del request
    else:
        # The first block is missing, so the hit ends before the others.
        below.tier.promote([], request=request)
    below.tier.end()
    assert not any(wait.found for wait in waits.values())


def test_a_request_that_shares_what_another_found_keeps_it() -> None:
    below = Below()
    below.store.keys |= {key(name) for name in "ab"}
    first, second = Request("ab"), Request("ab")
    below.tier.begin()
    below.asked(first)
    below.asked(second)
    below.tier.requests.clear()
    del first
    assert below.where("b") == "below"
    del second
    below.tier.end()
    assert below.where("b") == "nowhere"


def test_a_request_that_may_load_nothing_asks_for_nothing() -> None:
    below = Below()
    below.store.keys |= {key(name) for name in "abcd"}
    below.tier.begin()
    nothing = Turn("1", "abcd", max_load_tokens=0)
    assert not below.pool.is_loading(nothing, False)  # type: ignore[arg-type]
    assert below.store.num_asked == 0 and below.where("a") == "nowhere"
    below.asked(Turn("2", "abcd", max_load_tokens=2 * BLOCK))  # type: ignore[arg-type]
    assert [below.where(name) for name in "abc"] == ["below", "below", "nowhere"]


def test_two_requests_with_one_prefix_wait_for_one_job() -> None:
    below = Below()
    below.store.keys = {key("a")}
    first, second = Request("ab"), Request("ac")
    job = below.begins_to_fetch(first, "a")
    below.tier.begin()
    below.asked(second)
    assert below.tier.try_promote(below.tier.find("a"), request=second) is None
    assert not below.tier.end().secondary
    assert below.pool.is_loading(second, False)  # type: ignore[arg-type]
    below.end(job)
    assert not below.pool.is_loading(second, False)  # type: ignore[arg-type]


def test_nobody_waits_twice_for_a_job_that_does_not_end() -> None:
    below = Below(deadline_s=5.0)
    below.store.keys = {key("a")}
    first = Request("ab")
    below.begins_to_fetch(first, "a")
    below.tier.now = 5.1
    assert not below.pool.is_loading(first, False)  # type: ignore[arg-type]
    assert not below.pool.is_loading(first, False)  # type: ignore[arg-type]
    assert below.where("a") == "nowhere"
    # Nor does the next one, for a while.
    assert not below.pool.is_loading(Request("a"), False)  # type: ignore[arg-type]


def test_no_more_than_a_part_of_the_slots_and_its_begin_first() -> None:
    below = Below(num_slots=4)
    below.store.keys = {key(name) for name in "abcd"}
    job = below.begins_to_fetch(Request("abcd"), "abcd")
    assert job.keys == [key("a"), key("b")]
    assert below.where("c") == "nowhere"


def test_what_was_given_up_in_a_step_is_not_taken_for_a_block() -> None:
    below = Below()
    below.store.keys = {key("a"), key("z")}
    below.end(below.begins_to_fetch(Request("z"), "z"))
    request = Request("ab")
    below.tier.begin()
    below.asked(request)
    below.pool.costs.prefill_s = 0.05
    hit = (below.tier.find("a"),)
    assert below.tier.try_promote(*hit, request=request) is None
    assert below.where("a") == "nowhere"
    # What the scheduler calls for whoever was not admitted.
    below.pool.load_ahead([], hit, BLOCK)
    assert not below.tier.end().secondary


def test_a_fetch_waits_for_the_copies_that_used_its_slots_before() -> None:
    below = Below(num_blocks=2, num_slots=2)
    below.tier.demoted("ab")
    plans = [below.hit("ab"), *below.plans()]
    loaded_by = plans[0].seq
    for job in below.jobs(plans):
        below.end(job)
    stored_by = max(below.tier.slot(name).store_seq for name in "ab")
    below.store.keys = {key("c")}
    job = below.begins_to_fetch(Request("c"), "c")
    assert (job.after_stores, job.after_loads) == (stored_by, loaded_by)


# ------------------------------------------------------------------------ what is void


def test_after_a_reset_nothing_is_written_asked_for_or_served() -> None:
    below = Below()
    below.store.keys = {key("a"), key("x")}
    request = Request("a")
    job = below.begins_to_fetch(request, "a")
    below.tier.demoted("bc")
    assert below.pool.reset_prefix_cache()
    assert not below.jobs(below.plans())
    assert not below.pool.is_loading(request, False)  # type: ignore[arg-type]
    below.end(job)
    assert below.where("a") == "nowhere"
    assert not below.pool.is_loading(Request("x"), False)  # type: ignore[arg-type]
    assert len(below.pool.host._free) == below.pool.host.num_slots


def test_a_hang_of_the_host_ends_it_too() -> None:
    below = Below()
    below.store.keys = {key("a")}
    job = below.begins_to_fetch(Request("a"), "a")
    below.pool.apply_report(StepReport(lost_blocks=[]))
    below.end(job)
    assert below.where("a") == "nowhere"
    assert not below.pool.host._free


def test_without_a_tier_below_plans_are_as_before() -> None:
    tier = Tier(8)
    tier.demoted("ab")
    assert all(not plan.secondary for plan in tier.idle(20))
    assert tier.pool.secondary is None


def test_what_a_tier_turns_out_to_have_forgotten_is_written_again() -> None:
    """As by a server that was started anew."""
    below = Below(num_blocks=4, num_slots=4)
    below.tier.demoted("a")
    (job,) = below.jobs(below.plans())
    below.end(job)
    below.tier.demoted("bcde")
    assert below.where("a") == "nowhere"
    below.asked(Request("a"))
    below.tier.demoted("a")
    (again,) = [j for j in below.jobs(below.plans()) if key("a") in j.keys]
    assert again.is_put


def test_fetches_begin_in_portions_in_the_order_of_the_prefix() -> None:
    below = Below(num_blocks=64, num_slots=64, max_job=1, tuning={"max_fetches": 3})
    below.store.keys = {key(name) for name in "abcdefgh"}
    request = Request("abcdefgh")
    below.tier.begin()
    below.asked(request)
    fetched = []
    for there in ("", "abc", "abcdef"):
        plan = below.is_held_back(request, "abcdefgh")
        fetched.append([job.keys[0] for job in plan.secondary])
        assert "".join(n for n in "abcdefgh" if below.where(n) == "host") == there
        assert below.pool.is_loading(request, False)  # type: ignore[arg-type]
        for job in plan.secondary:
            below.end(job)
        below.tier.begin()
    below.tier.end()
    assert fetched == [[key(n) for n in names] for names in ("abc", "def", "gh")]
    assert not below.pool.is_loading(request, False)  # type: ignore[arg-type]
    assert all(below.where(name) == "host" for name in "abcdefgh")


@pytest.mark.parametrize("end", ["it is aborted", "it waits no longer", "a reset"])
def test_portions_end_with_their_request(end: str) -> None:
    below = Below(num_blocks=64, num_slots=64, max_job=1, tuning={"max_fetches": 3})
    below.store.keys = {key(name) for name in "abcdefgh"}
    request = Request("abcdefgh")
    below.tier.begin()
    below.asked(request)
    jobs = below.is_held_back(request, "abcdefgh").secondary
    if end == "it is aborted":
        below.tier.requests.clear()
        del request
    elif end == "a reset":
        assert below.pool.reset_prefix_cache()
    else:
        below.tier.now += 100.0
        assert not below.pool.is_loading(request, False)  # type: ignore[arg-type]
    assert not below.jobs(below.plans())
    for job in jobs:
        below.end(job)
    assert below.where("d") == "nowhere"
    assert below.stats().filling_blocks == 0


def test_a_block_that_another_request_did_not_get_is_not_found() -> None:
    below = Below()
    below.store.keys = {key("a"), key("b")}
    first, second = Request("ab"), Request("ab")
    below.tier.begin()
    below.asked(second)
    below.tier.end()
    job = below.begins_to_fetch(first, "ab")
    below.end(job, True, False)
    below.tier.begin()
    assert not below.pool.is_loading(second, False)  # type: ignore[arg-type]
    assert below.pool.get_cached_block(hash_of("b"), [0]) is None
    below.tier.promote(below.tier.find("a"), request=second)
    assert not below.tier.end().secondary


def test_a_lost_block_is_not_fetched_again_and_ends_the_hit() -> None:
    below = Below(num_blocks=64, num_slots=64, max_job=1, tuning={"max_fetches": 3})
    below.store.keys = {key(name) for name in "abcdefgh"}
    request = Request("abcdefgh")
    below.tier.begin()
    below.asked(request)
    for job in below.is_held_back(request, "abcdefgh").secondary:
        below.end(job, job.keys[0] != key("b"))
    below.tier.begin()
    assert not below.pool.is_loading(request, False)  # type: ignore[arg-type]
    assert below.pool.get_cached_block(hash_of("b"), [0]) is None
    below.tier.promote(below.tier.find("a"), request=request)
    assert not below.tier.end().secondary
    assert not below.jobs(below.plans())


def test_ends_are_taken_in_by_portions_and_in_order() -> None:
    below = Below(num_blocks=64, num_slots=64, max_job=1, tuning={"max_ended": 3})
    below.store.keys = {key(name) for name in "abcdefgh"}
    request = Request("abcdefgh")
    below.tier.begin()
    below.asked(request)
    jobs = below.is_held_back(request, "abcdefgh").secondary
    results = [SecondaryResult(job.number, [True], 0.1) for job in jobs]
    below.pool.apply_report(StepReport(secondary=results))
    for there in ("abc", "abcdef", "abcdefgh"):
        assert "".join(n for n in "abcdefgh" if below.where(n) == "host") == there
        is_waiting = there != "abcdefgh"
        assert below.pool.is_loading(request, False) == is_waiting  # type: ignore[arg-type]
        (plan,) = below.plans(1)
        # Nothing is waited for while there is more to take in.
        assert not plan.awaits_secondary
