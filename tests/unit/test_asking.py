# SPDX-License-Identifier: Apache-2.0
"""The thread that asks the tier below, and what it need not ask again."""

import time
from collections.abc import Sequence

import pytest

from vllm.v1.kv_tier.scheduling import asking
from vllm.v1.kv_tier.scheduling.asking import Asker
from vllm.v1.kv_tier.scheduling.below import object_keys


class Asked:
    """A store that remembers what it was asked for, and the time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.there: set[bytes] = set()
        self.questions: list[list[bytes]] = []
        self.asker = Asker(self.exists, 1.0, lambda: self.now)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        assert b"raise" not in keys
        self.questions.append(list(keys))
        return [key in self.there for key in keys]

    def ask(self, *keys: bytes) -> list[bool]:
        number, limit = self.asker.ask(keys), time.monotonic() + 10
        while (answer := self.asker.take_answer(number)) is None:
            assert time.monotonic() < limit, "nobody answers"
            time.sleep(0.001)
        return answer


def test_what_was_not_there_is_not_asked_for_again_for_a_moment() -> None:
    asked = Asked()
    asked.there = {b"a"}
    assert asked.ask(b"a", b"b", b"c") == [True, False, False]
    asked.now += 0.9
    # Another engine has written it since: it is found a moment later.
    asked.there.add(b"b")
    assert asked.ask(b"b", b"a", b"d") == [False, True, False]
    assert asked.questions[-1] == [b"a", b"d"]
    asked.now += 0.1
    assert asked.ask(b"b", b"c", b"d") == [True, False, False]
    assert asked.questions[-1] == [b"b", b"c"]


def test_what_this_engine_has_written_meanwhile_is_asked_for_at_once() -> None:
    asked = Asked()
    assert asked.ask(b"a", b"b") == [False, False]
    asked.there = {b"a", b"b"}
    asked.asker.has([b"a", b"c"])
    assert asked.ask(b"a", b"b") == [True, False]


def test_what_is_there_is_asked_for_each_time() -> None:
    """It may be gone since."""
    asked = Asked()
    asked.there = {b"a"}
    assert asked.ask(b"a") == [True]
    asked.there.clear()
    assert asked.ask(b"a") == [False]


def test_the_memory_of_misses_is_bounded() -> None:
    asked, most = Asked(), asking.MAX_MISSES
    keys = [b"%d" % i for i in range(most + 10)]
    assert not any(asked.ask(*keys[:most]))
    assert not any(asked.ask(*keys[most:]))
    asked.ask(*keys)
    # The oldest had to go.
    assert asked.questions[-1] == keys[:10]


def test_answers_that_nobody_takes_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of requests that were aborted meanwhile, say."""
    monkeypatch.setattr(asking, "MAX_ANSWERS", 8)
    asked = Asked()
    asked.there = {b"a"}
    first = [asked.asker.ask([b"a"]) for _ in range(9)]
    limit = time.monotonic() + 10
    while asked.asker._told.qsize() < 9:
        assert time.monotonic() < limit, "nobody answers"
        time.sleep(0.001)
    assert asked.ask(b"a") == [True]
    assert len(asked.asker._answers) == 5
    # Who comes for one all the same waits for nothing.
    assert [asked.asker.take_answer(n) for n in first] == 4 * [[]] + 5 * [[True]]
    assert not asked.asker._answers and asked.asker.take_answer(99) is None


def test_a_store_that_fails_has_nothing() -> None:
    asked = Asked()
    assert asked.ask(b"raise", b"a") == [False, False]
    asked.there = {b"a"}
    assert asked.ask(b"a") == [True]


def test_keys_of_many_hashes_are_short_names() -> None:
    short, long, other = bytes(36), bytes(33 * 32 + 4), bytes(33 * 32 + 3) + b"1"
    assert object_keys([short]) == [short] and object_keys([]) == []
    named = object_keys([short, long, other])
    assert named[0] == short and len(set(named)) == 3
    assert [len(key) for key in named[1:]] == [64, 64]
    assert object_keys([other, short]) == [named[2], short]
