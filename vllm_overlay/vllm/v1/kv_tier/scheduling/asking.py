# SPDX-License-Identifier: Apache-2.0
"""Asks the tier below what it has, beside the scheduler."""

import queue
import threading
import weakref
from collections.abc import Sequence

from vllm.logger import init_logger
from vllm.v1.kv_tier.scheduling.below import Exists

logger = init_logger(__name__)

Question = tuple[int, Sequence[bytes]]


class Asker:
    """A thread that asks, one question after the other.

    Args:
        exists: Answers.

    """

    def __init__(self, exists: Exists) -> None:
        self._num_asked = 0
        self._questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        # The thread adds entries, and the scheduler takes them away.
        self._answers: dict[int, list[bool]] = {}
        threading.Thread(
            target=_run,
            args=(exists, self._questions, self._answers),
            name="kv-tier-ask",
            daemon=True,
        ).start()
        # The thread keeps no reference to this.
        weakref.finalize(self, self._questions.put, None)

    def ask(self, keys: Sequence[bytes]) -> int:
        """Returns the number of the question, which is not 0."""
        self._num_asked += 1
        self._questions.put((self._num_asked, keys))
        return self._num_asked

    def take_answer(self, number: int) -> list[bool] | None:
        """For each key of a question whether it is there; None: no answer yet."""
        return self._answers.pop(number, None)


def _run(
    exists: Exists,
    questions: "queue.SimpleQueue[Question | None]",
    answers: dict[int, list[bool]],
) -> None:
    while (question := questions.get()) is not None:
        number, keys = question
        try:
            answers[number] = exists(keys)
        except Exception:
            # A store says no where it does not know. This is a fault of its own.
            logger.exception("KV tier: the tier below could not be asked.")
            answers[number] = [False] * len(keys)
