# SPDX-License-Identifier: Apache-2.0
"""Asks the tier below what it has, beside the scheduler."""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from vllm.logger import init_logger
from vllm.v1.kv_tier.scheduling.below import Exists
from vllm.v1.kv_tier.stores.settings import StoreConfig
from vllm.v1.kv_tier.stores.turns import short_turns

logger = init_logger(__name__)

Question = tuple[int, Sequence[bytes], float]
"""Its number, its keys, and until when somebody waits for the answer, in seconds of
`time.monotonic`. Number 0 is no question: these are there now."""
Answer = tuple[int, list[bool], float]
"""The number of the question, whether its keys are there, and the seconds it took;
below 0: it was not asked, or was no question."""

_MISS_S = 1.0
_DEADLINE_S = 5.0
MAX_MISSES = 1 << 16
MAX_ASKED = 1 << 18
"""Keys of questions that have no answer yet: of 64 bytes each at most, with some 70 of
Python's."""
MAX_ANSWERS = 1 << 20
"""Keys of answers that nobody has taken: of requests that were aborted, or did not
wait so long. Eight bytes each."""
_REFUSED = -1


def exists_on_all(
    entry: StoreConfig, writers: Sequence[tuple[str, int]], replicas: int
) -> Exists:
    """What tells which objects all ranks have.

    Args:
        entry: The store.
        writers: Namespace and bytes of an object of each rank that writes.
        replicas: Each of them writes for so many.

    """
    stores = [
        entry.open(rank_space, i * replicas, num_bytes)
        for i, (rank_space, num_bytes) in enumerate(writers)
        if num_bytes
    ]

    def exists(keys: Sequence[bytes]) -> list[bool]:
        return [all(each) for each in zip(*(store.exists(keys) for store in stores))]

    return exists


class Asker:
    """A thread that asks, one question after the other.

    Args:
        exists: Answers.
        miss_s: For how many seconds it is not asked again for what it did not have:
            requests that come together often begin alike.
        clock: Seconds that only grow.
        deadline_s: How long anybody waits for an answer. A question is not asked later,
            and none at all while an earlier one takes longer.

    """

    def __init__(
        self,
        exists: Exists,
        miss_s: float = _MISS_S,
        clock: Callable[[], float] = time.monotonic,
        deadline_s: float = _DEADLINE_S,
    ) -> None:
        self.ask_s = 0.0
        """Seconds that the last answer took."""
        self._deadline_s = deadline_s
        self._num_asked = self._num_dropped = 0
        # Number of keys, and until when it is waited for, of each question that has no
        # answer, in their order; and of what the tier has got meanwhile.
        self._open: dict[int, tuple[int, float]] = {}
        self._num_open = self._num_come = self._num_kept = 0
        self._questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._answers: dict[int, list[bool]] = {}
        threading.Thread(
            target=_run,
            args=(_Misses(exists, miss_s, clock), self._questions, self._told),
            name="kv-tier-ask",
            daemon=True,
        ).start()
        # The thread keeps no reference to this.
        weakref.finalize(self, self._questions.put, None)

    def ask(self, keys: Sequence[bytes]) -> int:
        """Returns the number of the question, which is not 0. One that cannot be asked
        now has an empty answer at once, and one with very many keys has an answer for
        the first of them."""
        self._hear()
        now, keys = time.monotonic(), keys[:MAX_ASKED]
        _, oldest_until = next(iter(self._open.values()), (0, now))
        if now > oldest_until or self._num_open + len(keys) > MAX_ASKED:
            return _REFUSED
        self._num_asked += 1
        until = now + self._deadline_s
        self._open[self._num_asked] = len(keys), until
        self._num_open += len(keys)
        self._questions.put((self._num_asked, keys, until))
        return self._num_asked

    def has(self, keys: Sequence[bytes]) -> None:
        """The tier has `keys` now: they are asked for again."""
        self._hear()
        # Else they are found a moment later.
        if self._num_come + len(keys) <= MAX_ASKED:
            self._num_come += len(keys)
            self._questions.put((0, keys, 0.0))

    def take_answer(self, number: int, until: float = 0.0) -> list[bool] | None:
        """For each key of a question whether it is there; None: no answer yet. One that
        was not taken for long is empty.

        Args:
            number: Of the question.
            until: How long to wait for the answer, as `time.monotonic` tells it.

        """
        self._hear()
        while number not in self._answers and number > self._num_dropped:
            # Earlier questions are answered before.
            if (left := until - time.monotonic()) <= 0:
                return None
            self._hear(left)
        answer = self._answers.pop(number, None)
        if answer is None:
            return []
        self._num_kept -= len(answer) + 1
        return answer

    def _hear(self, wait_s: float = 0.0) -> None:
        """Take what the thread has told, and wait for the first of it if need be."""
        with suppress(queue.Empty):
            while True:
                number, answer, seconds = self._told.get(wait_s > 0, wait_s)
                wait_s = 0.0
                if number == 0:
                    self._num_come -= len(answer)
                    continue
                num_keys, _ = self._open.pop(number)
                self._num_open -= num_keys
                if seconds >= 0:
                    self.ask_s = seconds
                self._answers[number] = answer
                # Of one at least: there may be any number of empty ones.
                self._num_kept += len(answer) + 1
                if self._num_kept > MAX_ANSWERS:
                    self._drop()

    def _drop(self) -> None:
        """Drop half of the answers. They come in the order of the questions."""
        while self._num_kept > MAX_ANSWERS // 2:
            self._num_dropped = next(iter(self._answers))
            self._num_kept -= len(self._answers.pop(self._num_dropped)) + 1


class _Misses:
    """Answers no for what was not there a moment ago, and asks for the rest."""

    def __init__(
        self, exists: Exists, miss_s: float, clock: Callable[[], float]
    ) -> None:
        self._exists = exists
        self._miss_s, self._clock = miss_s, clock
        # Until when, the oldest first.
        self._until: dict[bytes, float] = {}

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        now, until = self._clock(), self._until
        while until and until[first := next(iter(until))] <= now:
            del until[first]
        asked = [key for key in keys if key not in until]
        there = {key for key, is_there in zip(asked, self._exists(asked)) if is_there}
        if self._miss_s:
            # An answer may have taken its time.
            end = self._clock() + self._miss_s
            missing = [key for key in asked if key not in there]
            until.update(dict.fromkeys(missing[:MAX_MISSES], end))
            while len(until) > MAX_MISSES:
                del until[next(iter(until))]
        return [key in there for key in keys]

    def have_come(self, keys: Sequence[bytes]) -> None:
        """What was not there may be now."""
        for key in keys:
            self._until.pop(key, None)


def _run(
    misses: _Misses,
    questions: "queue.SimpleQueue[Question | None]",
    told: "queue.SimpleQueue[Answer]",
) -> None:
    while (question := questions.get()) is not None:
        number, keys, until = question
        if number == 0:
            misses.have_come(keys)
            told.put((0, [True] * len(keys), -1.0))
            continue
        begun = time.monotonic()
        if begun > until:
            told.put((number, [], -1.0))
            continue
        try:
            with short_turns():
                answer = misses.exists(keys)
        except BaseException:
            # A store says no where it does not know. This is a fault of its own, which
            # may be any exception, and must not end this thread.
            logger.exception("KV tier: a secondary tier could not be asked.")
            answer = [False] * len(keys)
        told.put((number, answer, time.monotonic() - begun))
