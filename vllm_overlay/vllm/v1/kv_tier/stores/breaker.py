# SPDX-License-Identifier: Apache-2.0
"""Leaves a store alone that does not answer, and notices when it does again."""

import threading
import time
from collections.abc import Callable

from vllm.logger import init_logger

logger = init_logger(__name__)

RETRY_S = 5.0


class Breaker:
    """Whether a store is asked.

    Closed, it lets everything through. It opens when an operation says that the store
    was in trouble, and then lets one operation through every few seconds: the first of
    them that goes well closes it. Each change of state is one line in the log.

    Args:
        name: Of the store, for the log.
        what: What is left alone meanwhile, for the log.
        retry_s: How long the store is left alone at a time.
        clock: Seconds that only grow.

    """

    def __init__(
        self,
        name: str,
        what: str = "requests are computed without it",
        retry_s: float = RETRY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._what = name, what
        self._retry_s, self._clock = retry_s, clock
        self._lock = threading.Lock()
        self._next_try_s: float | None = None

    @property
    def is_open(self) -> bool:
        return self._next_try_s is not None

    def allows(self) -> bool:
        """Whether to go on. What goes on says afterwards how it went."""
        if self._next_try_s is None:
            return True
        with self._lock:
            if self._next_try_s is None:
                return True
            # A trial that never says how it went holds up the next one no longer.
            is_due = self._clock() >= self._next_try_s
            if is_due:
                self._next_try_s = self._clock() + self._retry_s
            return is_due

    def failed(self, reason: object) -> None:
        with self._lock:
            is_new = self._next_try_s is None
            self._next_try_s = self._clock() + self._retry_s
        if is_new:
            logger.warning(
                "KV tier: %s is in trouble (%s): %s. It is tried again every %g "
                "seconds.",
                self._name,
                reason,
                self._what,
                self._retry_s,
            )

    def succeeded(self) -> None:
        if self._next_try_s is None:
            return
        with self._lock:
            was_open, self._next_try_s = self._next_try_s is not None, None
        if was_open:
            logger.info("KV tier: %s works again.", self._name)
