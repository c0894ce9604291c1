# SPDX-License-Identifier: Apache-2.0
"""Spreads the work of a call over threads."""

import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import monotonic
from typing import TypeVar

MAX_THREADS = 64

_A = TypeVar("_A")
_B = TypeVar("_B")
_Answer = TypeVar("_Answer")


class Threads:
    """Helpers of the threads that call.

    Args:
        num_threads: That work for one call, the one that calls among them.
        name: Of the store, for their names.

    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_helpers = num_threads - 1
        self._helpers = ThreadPoolExecutor(max(self._num_helpers, 1), f"kv-tier-{name}")

    def spread(
        self,
        work: Callable[[_A, _B], _Answer],
        first: Sequence[_A],
        second: Sequence[_B],
    ) -> list[_Answer]:
        """Answers of `work` for all pairs. Returns when all of it is over."""
        assert len(first) == len(second)
        answers: dict[int, _Answer] = {}
        indices = itertools.count()

        def take_turns() -> None:
            while (i := next(indices)) < len(first):
                answers[i] = work(first[i], second[i])

        helpers = []
        with suppress(RuntimeError):  # This process ends: no help any more.
            for _ in range(min(self._num_helpers, len(first) - 1)):
                helpers.append(self._helpers.submit(take_turns))
        try:
            take_turns()
        finally:
            # Nothing is left for those that did not begin. The others are not to touch
            # rows when this has returned, whatever this thread met.
            begun = [helper for helper in helpers if not helper.cancel()]
            for helper in begun:
                helper.exception()
        for helper in begun:
            helper.result()
        return [answers[i] for i in range(len(first))]

    def begin(self, work: Callable[[], _Answer]) -> Callable[[], _Answer]:
        """Have a helper do work. What is returned gives the answer, and does the work
        itself where no helper has begun; it is to be called once."""
        try:
            helped = self._helpers.submit(work)
        except RuntimeError:  # This process ends.
            return work
        return lambda: work() if helped.cancel() else helped.result()

    def spread_batches(
        self,
        work: Callable[[Sequence[bytes], Sequence[memoryview]], list[bool]],
        keys: Sequence[bytes],
        rows: Sequence[memoryview],
        size: int,
        deadline: float = math.inf,
    ) -> list[bool]:
        """Answers of `work`, which takes `size` keys at a time. They are no for all
        that has not begun at the deadline, in seconds of `time.monotonic`."""

        def in_time(keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
            return [False] * len(keys) if monotonic() > deadline else work(keys, rows)

        starts = range(0, len(keys), size)
        answers = self.spread(
            in_time,
            [keys[i : i + size] for i in starts],
            [rows[i : i + size] for i in starts],
        )
        return [answer for batch in answers for answer in batch]

    def close(self) -> None:
        """Nothing may be called afterwards. What hangs is not waited for."""
        self._helpers.shutdown(wait=False, cancel_futures=True)
