# SPDX-License-Identifier: Apache-2.0
"""Which slots are written to a tier below next."""

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.kv_tier.scheduler.secondary.writer import WriteQueue
from vllm.v1.kv_tier.scheduler.slots import HostSlot

SPAN = 64


def name(key: str) -> BlockHashWithGroupId:
    return cast(BlockHashWithGroupId, key.encode())


def slot(key: str, num_tokens: int, store_seq: int = 0) -> HostSlot:
    return HostSlot(0, (name(key),), num_tokens, store_seq)


def make_due(waits: str = "", **tokens: int) -> WriteQueue:
    """What waits was stored later than what does not."""
    due = WriteQueue(SPAN)
    due.add({name(k): slot(k, num, store_seq=k in waits) for k, num in tokens.items()})
    return due


def take(due: WriteQueue, num: int) -> str:
    return b"".join(due.take(num, settled=0)).decode()


def test_begins_of_prompts_come_before_what_follows_them() -> None:
    tokens = {"c": 2 * SPAN, "b": SPAN, "d": 2 * SPAN + 16, "a": 16}
    assert take(make_due(**tokens), 9) == "abcd"
    due = make_due(**tokens)
    assert take(due, 0) == "" and take(due, 2) == "ab"
    assert take(due, 9) == "cd" and len(due) == 0


def test_at_one_depth_the_oldest_is_next() -> None:
    assert take(make_due(b=48, a=16, c=32), 3) == "bac"


def test_what_may_not_be_written_yet_holds_up_only_its_depth() -> None:
    tokens = {"a": 16, "b": 16, "c": SPAN, "d": SPAN}
    assert take(make_due("a", **tokens), 9) == "cd"
    due = make_due("b", **tokens)
    assert take(due, 2) == "ac" and take(due, 9) == "d"
    assert [*due.depths] == [name("b")]


def test_what_is_removed_is_not_chosen() -> None:
    due = make_due(a=16, b=SPAN)
    assert due.remove(name("a")) and not due.remove(name("a"))
    assert [*due.depths] == [name("b")] and len(due) == 1
    assert take(due, 9) == "b"
    due.add({name("c"): slot("c", 16)})
    due.clear()
    assert len(due) == 0 and take(due, 9) == ""


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 300))))
def test_it_has_what_was_added_and_not_removed(
    calls: list[tuple[bool, int, int]],
) -> None:
    due, model = WriteQueue(SPAN), dict[str, int]()
    for is_added, number, num_tokens in calls:
        key = str(number)
        if is_added and key not in model:
            due.add({name(key): slot(key, num_tokens)})
            model[key] = num_tokens
        elif not is_added:
            assert due.remove(name(key)) == (model.pop(key, None) is not None)
        assert len(due) == len(model)
    chosen = take(due, 99)
    depths = [model[key] // SPAN for key in chosen]
    assert depths == sorted(depths) and set(chosen) == set(model)
    assert len(due) == 0 and take(due, 99) == ""
