# SPDX-License-Identifier: Apache-2.0
"""A circuit breaker: skips a store that fails, and notices when it works again."""

import threading
import time
from collections.abc import Callable

from vllm.logger import init_logger

logger = init_logger(__name__)

RETRY_S = 5.0


class Breaker:
    """Decides whether a store is used.

    Closed, it lets all operations through. A failure opens it. Open, it lets one
    operation through every `retry_s` seconds, and closes when one succeeds. Each change
    logs one line.

    Args:
        name: Name of the store, for the log.
        what: Consequence of an open breaker, for the log.
        retry_s: Seconds between trials.
        clock: Monotonic clock in seconds.

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

    def begin_try(self) -> bool:
        """Whether an operation may run. It then reports `record_failure` or
        `record_success`."""
        if self._next_try_s is None:
            return True
        with self._lock:
            if self._next_try_s is None:
                return True
            # The next trial is due even if this one never reports.
            is_due = self._clock() >= self._next_try_s
            if is_due:
                self._next_try_s = self._clock() + self._retry_s
            return is_due

    def record_failure(self, reason: object) -> None:
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

    def record_success(self) -> None:
        if self._next_try_s is None:
            return
        with self._lock:
            was_open, self._next_try_s = self._next_try_s is not None, None
        if was_open:
            logger.info("KV tier: %s works again.", self._name)
