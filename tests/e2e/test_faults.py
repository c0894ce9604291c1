# SPDX-License-Identifier: Apache-2.0
"""Damage: what must be noticed by the tests, and what the engine must survive."""

import pytest

from .compare import assert_same_answers
from .conftest import Results
from .jobs import CONTROLS, TIERED

tiered = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.engines("large", name)) for name in TIERED],
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
