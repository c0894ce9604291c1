# SPDX-License-Identifier: Apache-2.0
"""Keys that were used last, in a few bytes for each."""

import sys
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.kv_tier.eviction.recent import RecentKeys


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "pop", "get"]), st.integers(0, 9))))
def test_one_row_keeps_the_last_keys_exactly(calls: list[tuple[str, int]]) -> None:
    recent, model = RecentKeys(5, value_bytes=1), dict[int, int]()
    for i, (call, key) in enumerate(calls):
        if call == "add":
            assert recent.pop(key) == model.pop(key, None)
            recent.add(key, i % 256)
            model[key] = i % 256
            if len(model) > 5:
                del model[next(iter(model))]
        elif call == "pop":
            assert recent.pop(key) == model.pop(key, None)
        else:
            assert recent.get(key) == model.get(key)
        assert len(recent) == len(model)


@pytest.mark.parametrize("value_bytes", [1, 4])
def test_many_rows_keep_about_the_last_keys(value_bytes: int) -> None:
    num_keys = 20_000
    draw = Random(1).randbytes
    keys = [draw(36) for _ in range(3 * num_keys)]
    recent = RecentKeys(num_keys, value_bytes)
    for i, key in enumerate(keys):
        recent.add(key, i % 200)
    assert 0.95 * num_keys < len(recent) <= num_keys
    late, early = keys[-num_keys // 2 :], keys[: -2 * num_keys]
    values = [recent.get(key) for key in late]
    first = len(keys) - len(late)
    assert values == [(first + i) % 200 for i in range(len(late))]
    assert not any(recent.get(key) is not None for key in early)


def test_a_key_takes_a_few_bytes() -> None:
    num_keys, draw = 10_000, Random(2).randbytes
    recent = RecentKeys(num_keys, value_bytes=4)
    for _ in range(3 * num_keys):
        recent.add(draw(36), 2**32 - 1)
    assert sum(map(sys.getsizeof, recent._rows)) < 12 * num_keys


def test_a_tag_inside_of_other_entries_is_none() -> None:
    """Bytes of one entry and the next may look like a tag."""
    recent = RecentKeys(100, value_bytes=1)
    # Integers are their own hashes, and there is one row.
    recent.add(0x04030201, 5)
    recent.add(0x0A090807, 6)
    inside = int.from_bytes(bytes([3, 4, 5, 7]), "little")
    assert recent.get(inside) is None and recent.pop(inside) is None
    recent.add(inside, 7)
    assert recent.get(inside) == 7 and recent.get(0x0A090807) == 6
