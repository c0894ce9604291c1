# SPDX-License-Identifier: Apache-2.0
"""Keys that were used last, in a few bytes for each."""

import sys
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.kv_tier.eviction.recent import RecentKeys, SeenKeys

LARGEST = 2**32 - 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 8))))
def test_one_row_keeps_the_last_keys_exactly(calls: list[tuple[bool, int]]) -> None:
    recent, model = RecentKeys(5), dict[int, int]()
    for i, (is_added, key) in enumerate(calls):
        assert recent.pop([key]) == [model.pop(key, None)]
        if is_added:
            recent.add([key], [i])
            model[key] = i
            if len(model) > 5:
                del model[next(iter(model))]
    assert recent.pop(range(9)) == [model.pop(key, None) for key in range(9)]


def test_many_rows_keep_about_the_last_keys() -> None:
    num_keys = 20_000
    draw = Random(1).randbytes
    keys = [draw(36) for _ in range(3 * num_keys)]
    recent = RecentKeys(num_keys)
    recent.add(keys, range(len(keys)))
    found = [number is not None for number in recent.pop(keys)]
    assert 0.95 * num_keys < sum(found) <= num_keys
    recent.add(keys, range(len(keys)))
    late, early = keys[-num_keys // 4 :], keys[: -2 * num_keys]
    assert recent.pop(early) == [None] * len(early)
    assert recent.pop(late) == [*range(len(keys) - len(late), len(keys))]
    assert recent.pop(late) == [None] * len(late)


def test_many_rows_have_seen_about_the_last_keys() -> None:
    num_keys = 20_000
    draw = Random(1).randbytes
    keys = [draw(36) for _ in range(3 * num_keys)]
    seen = SeenKeys(num_keys)
    assert not any(map(seen.add, keys))
    late, early = keys[-num_keys // 4 :], keys[: num_keys // 2]
    assert all(map(seen.add, late)) and not any(map(seen.add, early))


def test_a_key_takes_a_few_bytes() -> None:
    num_keys, draw = 10_000, Random(2).randbytes
    recent, seen = RecentKeys(num_keys), SeenKeys(num_keys)
    for _ in range(3 * num_keys):
        recent.add([key := draw(36)], [LARGEST])
        seen.add(key)
    assert sys.getsizeof(recent._data) < 8.1 * num_keys
    assert sys.getsizeof(seen._data) < 4.1 * num_keys


def test_a_tag_inside_of_other_entries_is_none() -> None:
    """Bytes of one entry and the next may look like a tag."""
    recent = RecentKeys(100)
    # Integers are their own hashes, and there is one row.
    recent.add([0x04030201, 0x0A090807], [5, LARGEST])
    inside = int.from_bytes(bytes([3, 4, 5, 0]), "little")
    assert recent.pop([inside]) == [None]
    recent.add([inside], [7])
    assert recent.pop([inside, 0x0A090807, 0x04030201]) == [7, LARGEST, 5]
