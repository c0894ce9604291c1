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
    """Helper threads for callers.

    Args:
        num_threads: Threads that work on one call, including the caller.
        name: Name of the store, for the names of the threads.

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
        """Run `work` for all pairs and return the answers, when all have ended."""
        assert len(first) == len(second)
        answers: dict[int, _Answer] = {}
        indices = itertools.count()

        def take_turns() -> None:
            while (i := next(indices)) < len(first):
                answers[i] = work(first[i], second[i])

        helpers = []
        with suppress(RuntimeError):  # The process ends, and has no helpers.
            for _ in range(min(self._num_helpers, len(first) - 1)):
                helpers.append(self._helpers.submit(take_turns))
        try:
            take_turns()
        finally:
            # Cancel helpers that did not begin; nothing is left for them. Wait for the
            # others even after an error: none may touch rows once this has returned.
            begun = [helper for helper in helpers if not helper.cancel()]
            for helper in begun:
                helper.exception()
        for helper in begun:
            helper.result()
        return [answers[i] for i in range(len(first))]

    def begin(self, work: Callable[[], _Answer]) -> Callable[[], _Answer]:
        """Start work on a helper.

        Returns:
            A function that returns the answer. It does the work itself if no helper has
            begun it. Call it once.

        """
        try:
            helped = self._helpers.submit(work)
        except RuntimeError:  # The process ends.
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
        """Run `work` on batches of `size` keys, and return all answers.

        Batches that have not begun by the deadline, in seconds of `time.monotonic`, are
        answered with False.
        """

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
        """Release the threads without waiting. No method may be called afterwards."""
        self._helpers.shutdown(wait=False, cancel_futures=True)
