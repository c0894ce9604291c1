# SPDX-License-Identifier: Apache-2.0
"""Pauses writing to a directory after a write failed."""

import errno
import os
import threading
import time
from pathlib import Path

from vllm.logger import init_logger
from vllm.v1.kv_tier.stores.space import COUNTER, Locked, NoSpace

logger = init_logger(__name__)

_PAUSE_S = 60.0
_FREE_SPACE = "Free space there, or set max_gib to what it can hold."


class WritePauses:
    """Pauses of a rank's writes. Each change logs one line.

    Args:
        root: The directory.

    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._until: float | None = None

    @property
    def is_paused(self) -> bool:
        """Whether a write failed less than a minute ago."""
        return self._until is not None and time.monotonic() < self._until

    def failed(self, error: OSError) -> None:
        """Record a failed write: none is tried for a while."""
        if isinstance(error, NoSpace):
            reason = "max_gib, or files that are not KV, leave no room for a block"
            mend = _FREE_SPACE
        elif isinstance(error, Locked):
            reason = "a stalled process holds its lock"
            mend = f"End it: fuser -v {self._root / COUNTER} lists the candidates."
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason, mend = "its disk is full", _FREE_SPACE
        else:
            reason = f"a write failed ({error.strerror})"
            mend = (
                f"It must be a directory with mode 700 in which user {os.geteuid()} "
                "can write."
            )
        with self._lock:
            is_new = self._until is None
            self._until = time.monotonic() + _PAUSE_S
        if is_new:
            logger.warning(
                "KV tier: nothing more is written to %s: %s. Its files are still read, "
                "and writing is tried again once a minute. %s",
                self._root,
                reason,
                mend,
            )

    def succeeded(self) -> None:
        """Record a successful write."""
        with self._lock:
            # A write that began before the pause proves nothing.
            if self._until is None or time.monotonic() < self._until:
                return
            self._until = None
        logger.info("KV tier: %s can be written to again.", self._root)
