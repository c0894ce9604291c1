# SPDX-License-Identifier: Apache-2.0
"""A host that shrinks and grows while it is used changes no answer."""

import pytest

from .compare import assert_same_answers
from .conftest import Results


@pytest.mark.engines("large", "resized")
def test_same_answers_while_the_size_changes(results: Results) -> None:
    found = results("resized")["workloads"]["resized"]
    expected = results("large")["workloads"]["conversations"]
    assert_same_answers(found["answers"], expected["answers"])
    # The last turn found what the host still had.
    assert found["counters"]["kv_tier_host_hit_tokens"] > 0


@pytest.mark.engines("large", "resized")
def test_a_damaged_slot_is_noticed(results: Results) -> None:
    """Else the comparison above would prove nothing."""
    found = results("resized")["workloads"]["corrupt_slot"]["answers"]
    expected = results("large")["workloads"]["conversations"]["answers"]
    with pytest.raises(AssertionError):
        assert_same_answers(found, expected)


@pytest.mark.engines("resized")
def test_ranks_follow_and_give_memory_back(results: Results) -> None:
    found = results("resized")["workloads"]["resized"]
    most = found["num_slots"]
    few = most // 8
    assert found["told"] == [
        {"host_slots": few, "open_slots": most, "engines": 1},
        {"host_slots": most, "open_slots": few, "engines": 1},
    ]
    # In the slot table and on the rank, whose closed slots hold nothing.
    before, shrunk, grown = found["sizes"]
    assert before[:2] == [most, most]
    assert shrunk == [few, few, False]
    assert grown[:2] == [most, most]
    assert "at most" in found["refused"] and "--kv-offloading-size" in found["refused"]
