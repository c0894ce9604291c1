# SPDX-License-Identifier: Apache-2.0
"""The thread that asks the tier below, and what it need not ask again."""

import threading
import time
import weakref
from collections.abc import Callable, Sequence

import pytest

from vllm.v1.kv_tier.layout import Answer
from vllm.v1.kv_tier.scheduler.secondary import lookup
from vllm.v1.kv_tier.scheduler.secondary.jobs import object_keys
from vllm.v1.kv_tier.scheduler.secondary.lookup import AsyncLookup


def come(answer: Answer) -> list[bool]:
    found = answer(time.monotonic() + 20)
    assert found is not None, "nobody answers"
    return found


class Asked:
    """A store that remembers what it was asked for, and the time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.there: set[bytes] = set()
        self.questions: list[list[bytes]] = []
        self.asker = AsyncLookup(self.exists, 1.0, lambda: self.now)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        assert b"raise" not in keys
        self.questions.append(list(keys))
        return [key in self.there for key in keys]

    def ask(self, *keys: bytes) -> list[bool]:
        return come(self.asker.ask(keys))


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
    asked.asker.mark_present([b"a", b"c"])
    assert asked.ask(b"a", b"b") == [True, False]


def test_what_is_there_is_asked_for_each_time() -> None:
    """It may be gone since."""
    asked = Asked()
    asked.there = {b"a"}
    assert asked.ask(b"a") == [True]
    asked.there.clear()
    assert asked.ask(b"a") == [False]


def test_the_memory_of_misses_is_bounded() -> None:
    asked, most = Asked(), lookup.MAX_MISSES
    keys = [b"%d" % i for i in range(most + 10)]
    assert not any(asked.ask(*keys[:most]))
    assert not any(asked.ask(*keys[most:]))
    asked.ask(*keys)
    # The oldest had to go.
    assert asked.questions[-1] == keys[:10]


def until(is_true: Callable[[], object]) -> None:
    limit = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < limit, "it never was"
        time.sleep(0.001)


def test_answers_that_nobody_takes_are_dropped() -> None:
    """Of requests that were aborted meanwhile, say."""
    asked = Asked()
    questions = []
    for _ in range(4):
        answer = asked.asker.ask([b"a", b"b"])
        questions.append(weakref.ref(answer.__self__))  # type: ignore[attr-defined]
        del answer
    for _ in range(2):
        assert asked.ask(b"a") == [False]
    assert not any(question() for question in questions)


class Hanging:
    """A store that does not answer until it may."""

    def __init__(self, deadline_s: float = 1000) -> None:
        self.may_answer, self.num_asked = threading.Event(), 0
        self.asker = AsyncLookup(self.exists, deadline_s=deadline_s)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        self.num_asked += 1
        self.may_answer.wait(30)
        return [True] * len(keys)


def test_questions_to_a_store_that_hangs_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookup, "MAX_ASKED", 10)
    store = Hanging()
    asker = store.asker
    answers = [asker.ask([b"a", b"b", b"c"]) for _ in range(9)]
    for _ in range(9):
        asker.mark_present([b"a"])
    assert asker._asker.questions.qsize() <= 4
    # The others go on at once.
    assert [answer(0.0) for answer in answers] == 3 * [None] + 6 * [[]]
    store.may_answer.set()
    for answer in answers[:3]:
        assert come(answer) == [True] * 3
    until(lambda: asker._open[-1].is_over.is_set())
    # The first ones of many.
    assert come(asker.ask([b"a"] * 12)) == [True] * 10
    assert len(asker._open) == 1 and asker._num_open == 10


def test_a_store_that_hangs_is_asked_nothing_more_until_it_answers() -> None:
    store = Hanging(deadline_s=0.05)
    late = store.asker.ask([b"a"])
    until(lambda: store.num_asked)
    queued = store.asker.ask([b"b"])
    time.sleep(0.06)
    for _ in range(5):
        assert store.asker.ask([b"c"])(0.0) == []
    store.may_answer.set()
    assert come(late) == [True]
    # Nobody waits for this one any more.
    assert come(queued) == [] and store.num_asked == 1
    store.asker._deadline_s = 20
    assert come(store.asker.ask([b"d"])) == [True]
    assert store.asker.ask_s >= 0


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_no_exception_of_a_store_ends_the_thread(error: type[BaseException]) -> None:
    def exists(keys: Sequence[bytes]) -> list[bool]:
        if keys == [b"raise"]:
            raise error
        return [True] * len(keys)

    asker = AsyncLookup(exists)
    for keys, answer in (([b"raise"], [False]), ([b"a"], [True])):
        assert come(asker.ask(keys)) == answer


def test_no_answer_of_a_store_ends_the_thread() -> None:
    asker = AsyncLookup(lambda keys: None if keys == [b"none"] else [True])  # type: ignore[return-value]
    for keys, answer in (([b"none"], [False]), ([b"a"], [True])):
        assert come(asker.ask(keys)) == answer


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
