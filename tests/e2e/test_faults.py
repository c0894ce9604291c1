# SPDX-License-Identifier: Apache-2.0
"""Damage: what must be noticed by the tests, and what the engine must survive."""

import pytest

from .compare import assert_same_answers
from .conftest import Results
from .jobs import BURSTS, CONTROLS, JOBS, REFUSED, SMALL, TIERED, marks_of

tiered = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=marks_of(name, "large")) for name in TIERED],
)


@tiered
def test_one_corrupted_slot_is_noticed(results: Results, name: str) -> None:
    """The negative control: this comparison can fail."""
    found = results(name)["workloads"]["corrupt_slot"]
    expected = results("large")["workloads"]["conversations"]["answers"]
    assert found["reads"] > 0
    # Before the damage.
    assert_same_answers(found["answers"][:6], expected[:6])
    with pytest.raises(AssertionError, match="other tokens"):
        assert_same_answers(found["answers"], expected)


@tiered
@pytest.mark.compat("faults", "a copy that fails, on any rank; its report lost")
@pytest.mark.parametrize("fault", [f for f in CONTROLS if f != "corrupt_slot"])
def test_a_failed_copy_changes_no_answer(
    results: Results, name: str, fault: str
) -> None:
    found = results(name)["workloads"][fault]
    *good_ranks, last_rank = found["failures"]
    assert last_rank == 1 and not any(good_ranks)
    expected = results("large")["workloads"][CONTROLS[fault]]["answers"]
    assert_same_answers(found["answers"], expected)


@tiered
@pytest.mark.parametrize("fault", ["load_fails", "load_fails_in_a_crowd"])
def test_a_failed_load_makes_running_requests_start_over(
    results: Results, name: str, fault: str
) -> None:
    workloads = results(name)["workloads"]
    undamaged = workloads[CONTROLS[fault]]["counters"]["num_preemptions"]
    assert workloads[fault]["counters"]["num_preemptions"] > undamaged


@pytest.mark.compat("faults", "a slot that changed since its store (`verify`)")
@pytest.mark.engines("large", "verify")
@pytest.mark.parametrize("workload", ["conversations", "overcommit"])
def test_verify_changes_no_answer(results: Results, workload: str) -> None:
    found = results("verify")["workloads"][workload]
    assert found["counters"]["kv_tier_loaded_blocks"] > 0
    expected = results("large")["workloads"][workload]["answers"]
    assert_same_answers(found["answers"], expected)


@pytest.mark.compat("faults", "a slot that changed since its store (`verify`)")
@pytest.mark.engines("large", "verify")
@pytest.mark.parametrize("fault", REFUSED)
def test_verify_refuses_a_changed_slot(results: Results, fault: str) -> None:
    """What `test_one_corrupted_slot_is_noticed` shows to be wrong without it."""
    workloads = results("verify")["workloads"]
    found = workloads[fault]
    assert found["failed_loads"] == 1
    (line,) = (line for line in found["log"] if "blocks failed" in line)
    assert "do not hold what was stored in them" in line
    counters, undamaged = found["counters"], workloads["conversations"]["counters"]
    assert counters["num_preemptions"] > undamaged["num_preemptions"]
    expected = results("large")["workloads"]["conversations"]["answers"]
    assert_same_answers(found["answers"], expected)


bursting = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=marks_of(name, "large"))
        for name in TIERED
        if BURSTS[0] in JOBS[name].workloads
    ],
)


@bursting
@pytest.mark.compat("faults", "20 times the device cache at once")
def test_twenty_times_the_device_cache(results: Results, name: str) -> None:
    """`make soak` does so for ten minutes, over HTTP."""
    found = results(name)["workloads"]["flood"]
    expected = results("large")["workloads"]["flood"]["answers"]
    assert found["blocks"] > 20 * (SMALL - 1)
    assert found["counters"]["kv_tier_stored_blocks"] > 0
    if results(name)["facts"]["num_host_slots"] > found["blocks"]:
        assert found["counters"]["kv_tier_host_hit_tokens"] > 0
    assert_same_answers(found["answers"], expected)
    assert found["blocks_in_use"] == 0 and found["below_zero"] == []


@bursting
@pytest.mark.compat("faults", "aborts of 1,000 requests in one step")
def test_a_thousand_aborts_in_one_step(results: Results, name: str) -> None:
    found = results(name)["workloads"]["thousand_aborts"]
    expected = results("large")["workloads"]["thousand_aborts"]["answers"]
    assert found["aborted"] == 1000
    assert_same_answers(found["answers"], expected)
    assert found["blocks_in_use"] == 0 and found["below_zero"] == []
