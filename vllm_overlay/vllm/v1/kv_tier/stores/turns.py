# SPDX-License-Identifier: Apache-2.0
"""Short turns of the threads that run Python.

A thread that comes back from the system waits for Python's lock, for 5 ms at a time
(`sys.getswitchinterval`) while another one computes. To open, check, read, compare and
close a file takes five such calls, and the thread that plans steps and launches kernels
computes nearly all the time: beside it, files are read a tenth as fast as they could.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TURN_S = 1e-4
"""Seconds."""

# A finalizer may end turns while the same thread is in here.
_lock = threading.RLock()
_asked: list[float] = []
_usual_s = 0.0


@contextmanager
def short_turns(turn_s: float = TURN_S) -> Iterator[None]:
    """While somebody is in here, all threads of the process take turns of at most
    `turn_s` seconds; the shortest counts."""
    global _usual_s
    with _lock:
        if not _asked:
            _usual_s = sys.getswitchinterval()
        _asked.append(turn_s)
        sys.setswitchinterval(min([_usual_s, *_asked]))
    try:
        yield
    finally:
        with _lock:
            _asked.remove(turn_s)
            sys.setswitchinterval(min([_usual_s, *_asked]))
