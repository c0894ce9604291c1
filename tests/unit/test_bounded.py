"""A mapping that is bounded in bytes, and names of a fixed size."""

import random
import tracemalloc

import pytest

from vllm.v1.kv_tier.bounded import ENTRY_BYTES, BoundedMap, digest, size_of


def test_the_oldest_entries_go_when_there_are_too_many_bytes():
    kept = BoundedMap[str, int](3 * 100, size=lambda _: (100 - ENTRY_BYTES) // 2)
    for n, name in enumerate("abcd"):
        kept[name] = n
    assert list(kept) == ["b", "c", "d"]
    assert kept.use("b") == 1 and kept.use("x") is None
    kept["e"] = 4
    assert dict(kept) == {"d": 3, "b": 1, "e": 4}


def test_an_entry_that_is_too_large_by_itself_is_not_kept():
    kept = BoundedMap[str, bytes](10_000)
    kept["a"] = b""
    kept["b"] = bytes(1 << 20)
    assert not kept and kept.num_bytes == 0


def test_dropped_entries_are_told_and_others_are_not():
    gone = []
    kept = BoundedMap[int, int](
        3 * ENTRY_BYTES, lambda _: 0, lambda key, value: gone.append((key, value))
    )
    for n in range(5):
        kept[n] = 10 * n
    kept[4] = 41
    del kept[3]
    assert kept.pop(2) == 20
    assert gone == [(0, 0), (1, 10)] and dict(kept) == {4: 41}


def test_bytes_are_those_of_what_is_there():
    rng, kept = random.Random(1), BoundedMap[str, object](100_000)
    values = (b"x" * 300, ["y" * 50] * 4, {"k": ("v" * 99, 1)}, None)
    for _ in range(3000):
        key = "k" * rng.randrange(200)
        if rng.random() < 0.3:
            kept.pop(key, None)
        else:
            kept[key] = rng.choice(values)
        told = sum(ENTRY_BYTES + size_of(k) + size_of(v) for k, v in kept.items())
        assert kept.num_bytes == told <= kept.max_bytes
    kept.clear()
    assert kept.num_bytes == 0 and not kept


@pytest.mark.parametrize("length", [0, 100, 10_000])
def test_the_estimate_is_not_below_what_python_takes(length):
    limit = 4_000_000
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        kept = BoundedMap[str, int](limit)
        for n in range(3 * limit // (ENTRY_BYTES + length)):
            kept[f"{n}".ljust(length)] = n << 40
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.5 * limit < taken <= limit


def test_size_of_something_deep_is_told_without_recursion():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert size_of(deep) > 100_000 * 56


def test_digests_differ_where_names_do_and_have_one_size():
    lists = [
        *(("a", "b"), ("ab",), ("ab", ""), ("", "ab"), ("a", None), ("a",), ("b", "a")),
        *(("a", "None"), (b"a", "b"), ("\ud800",), ("\ud801",), ("x" * 1_000_000,)),
        *((["a"],), (3,), (3, 3), ()),
    ]
    found = {digest(*names) for names in lists}
    assert len(found) == len(lists)
    assert {len(one) for one in found} == {16}
    assert digest("a", None) == digest("a", None)
