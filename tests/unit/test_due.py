# SPDX-License-Identifier: Apache-2.0
"""Which slots are written to a tier below next."""

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.kv_tier.scheduling.due import Due

SPAN = 64


def name(key: str) -> BlockHashWithGroupId:
    return cast(BlockHashWithGroupId, key.encode())


def make_due(**tokens: int) -> Due:
    due = Due(SPAN)
    for key, num_tokens in tokens.items():
        due.add(name(key), num_tokens)
    return due


def first(due: Due, num: int, waits: str = "") -> str:
    keys = due.first(num, lambda key: key.decode() not in waits)
    return b"".join(keys).decode()


def test_begins_of_prompts_come_before_what_follows_them() -> None:
    due = make_due(c=2 * SPAN, b=SPAN, d=2 * SPAN + 16, a=16)
    assert first(due, 9) == "abcd"
    assert first(due, 2) == "ab"
    assert first(due, 0) == ""


def test_at_one_depth_the_oldest_is_next() -> None:
    due = make_due(b=48, a=16, c=32)
    due.add(name("b"), 48)
    assert first(due, 3) == "bac"


def test_what_may_not_be_written_yet_holds_up_only_its_depth() -> None:
    due = make_due(a=16, b=16, c=SPAN, d=SPAN)
    assert first(due, 9, waits="a") == "cd"
    assert first(due, 9, waits="b") == "acd"
    assert first(due, 2, waits="b") == "ac"


def test_what_is_removed_is_not_chosen() -> None:
    due = make_due(a=16, b=SPAN)
    assert due.remove(name("a")) and not due.remove(name("a"))
    assert name("a") not in due and name("b") in due and len(due) == 1
    assert first(due, 9) == "b"
    due.clear()
    assert len(due) == 0 and first(due, 9) == ""


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 300))))
def test_it_has_what_was_added_and_not_removed(
    calls: list[tuple[bool, int, int]],
) -> None:
    due, model = Due(SPAN), dict[str, int]()
    for is_added, number, num_tokens in calls:
        key = str(number)
        if is_added:
            due.add(name(key), num_tokens)
            model.setdefault(key, num_tokens)
        else:
            assert due.remove(name(key)) == (model.pop(key, None) is not None)
        assert len(due) == len(model)
        chosen = first(due, 99)
        depths = [model[key] // SPAN for key in chosen]
        assert depths == sorted(depths) and set(chosen) == set(model)
