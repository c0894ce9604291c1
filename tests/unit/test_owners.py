# SPDX-License-Identifier: Apache-2.0
"""Which blocks only one conversation has used."""

from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.kv_tier.scheduling.owners import Owners


@pytest.fixture
def owners() -> Owners:
    owners = Owners(10)
    for key in (1, 2, 3):
        owners.computed(key, "a")
    return owners


def test_a_conversation_gets_what_it_computed(owners: Owners) -> None:
    owners.hit([2], "a")
    owners.computed(4, "b")
    assert owners.release("a") == [1, 2, 3]
    assert owners.release("a") == []
    assert owners.release("b") == [4]


@pytest.mark.parametrize("user", ["b", None])
def test_what_others_have_hit_is_nobodys(owners: Owners, user: str | None) -> None:
    owners.hit([2], user)
    owners.hit([2], "a")
    assert owners.release("a") == [1, 3]


def test_what_others_have_computed_too_is_nobodys(owners: Owners) -> None:
    owners.computed(1, "b")
    assert owners.release("a") == [2, 3]
    assert owners.release("b") == []


def test_what_was_there_before_is_nobodys(owners: Owners) -> None:
    owners.hit([9], "a")
    assert owners.release("a") == [1, 2, 3]


def test_those_used_least_recently_are_forgotten(owners: Owners) -> None:
    for key in range(10, 16):
        owners.computed(key, "b")
    owners.computed(4, "a")
    assert len(owners) == 10
    owners.computed(20, "c")
    assert owners.release("b") == []
    assert owners.release("a") == [1, 2, 3, 4]
    assert owners.release("c") == [20]
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
    owners = Owners(100)
    users: dict[int, set[Hashable]] = {}
    for action, key, name in actions:
        if action == "computed":
            owners.computed(key, name)
            users[key] = users.get(key, set()) | {name}
        elif action == "hit":
            owners.hit([key], name)
            if key in users:
                users[key] |= {name}
        else:
            expected = {k for k, by in users.items() if by == {name}}
            assert set(owners.release(name)) == expected
            for k in expected:
                del users[k]
        # One that several have touched begins anew.
        users = {k: by for k, by in users.items() if len(by) == 1}
    assert len(owners) == len(users)
