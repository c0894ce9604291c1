# SPDX-License-Identifier: Apache-2.0
"""Which blocks only one conversation has used."""

from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.kv_tier.hints.retention import Portions
from vllm.v1.kv_tier.hints.tracker import SoleUserIndex


def released(owners: SoleUserIndex, owner: Hashable) -> list[Hashable]:
    keys = owners.release(owner)
    return keys.take(len(keys))


@pytest.fixture
def owners() -> SoleUserIndex:
    owners = SoleUserIndex(10)
    for key in (1, 2, 3):
        owners.record_computed(key, "a")
    return owners


def test_a_conversation_gets_what_it_computed(owners: SoleUserIndex) -> None:
    owners.record_hit([2], "a")
    owners.record_computed(4, "b")
    assert released(owners, "a") == [1, 2, 3]
    assert released(owners, "a") == []
    assert released(owners, "b") == [4]


@pytest.mark.parametrize("user", ["b", None])
def test_what_others_have_hit_is_nobodys(
    owners: SoleUserIndex, user: str | None
) -> None:
    owners.record_hit([2], user)
    owners.record_hit([2], "a")
    assert released(owners, "a") == [1, 3]


def test_what_others_have_computed_too_is_nobodys(owners: SoleUserIndex) -> None:
    owners.record_computed(1, "b")
    assert released(owners, "a") == [2, 3]
    assert released(owners, "b") == []


def test_what_was_there_before_is_nobodys(owners: SoleUserIndex) -> None:
    owners.record_hit([9], "a")
    assert released(owners, "a") == [1, 2, 3]


def test_those_used_least_recently_are_forgotten(owners: SoleUserIndex) -> None:
    for key in range(10, 16):
        owners.record_computed(key, "b")
    owners.record_computed(4, "a")
    assert len(owners) == 10
    owners.record_computed(20, "c")
    assert len(owners) == 10
    # As many as there is no room for, the ends of prompts before their begins.
    assert released(owners, "b") == [10, 11, 12, 13, 14]
    assert released(owners, "a") == [1, 2, 3, 4]
    assert released(owners, "c") == [20]
    assert len(owners) == 0


_NAMES = st.sampled_from("abc")
_ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["computed", "hit", "release"]), st.integers(0, 5), _NAMES
    ),
    max_size=60,
)


@given(_ACTIONS)
def test_as_a_plain_model_says(actions: list[tuple[str, int, str]]) -> None:
    """A key is a conversation's while nobody else has touched it since."""
    owners = SoleUserIndex(100)
    users: dict[int, set[Hashable]] = {}
    for action, key, name in actions:
        if action == "computed":
            owners.record_computed(key, name)
            users[key] = users.get(key, set()) | {name}
        elif action == "hit":
            owners.record_hit([key], name)
            if key in users:
                users[key] |= {name}
        else:
            expected = {k for k, by in users.items() if by == {name}}
            assert set(released(owners, name)) == expected
            for k in expected:
                del users[k]
        # One that several have touched begins anew.
        users = {k: by for k, by in users.items() if len(by) == 1}
    assert len(owners) == len(users)


def test_keys_are_taken_in_portions(owners: SoleUserIndex) -> None:
    for key in range(4, 10):
        owners.record_computed(key, "a")
    keys = owners.release("a")
    assert (len(keys), keys.take(4), len(keys)) == (9, [1, 2, 3, 4], 5)
    # What somebody uses meanwhile is not over, whoever it is.
    owners.record_hit([5], None)
    owners.record_hit([6], "a")
    owners.record_computed(7, "b")
    owners.record_computed(8, "a")
    assert (keys.take(9), len(keys), keys.take(9)) == ([9], 0, [])
    assert released(owners, "b") == [7] and released(owners, "a") == [8]
    assert len(owners) == 0 and 1 not in owners


def test_one_conversation_does_not_outgrow_all() -> None:
    owners = SoleUserIndex(10)
    for key in range(1000):
        owners.record_computed(key, "a")
    assert len(owners) == 10
    assert released(owners, "a")[:9] == list(range(9))


def test_of_portions_only_what_is_left_is_taken() -> None:
    keys = Portions([1, 2, 3, 4], lambda key: key != 2)
    assert [keys.take(2), keys.take(2), keys.take(2)] == [[1], [3, 4], []]
    assert not Portions([])
