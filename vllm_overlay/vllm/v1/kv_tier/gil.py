# SPDX-License-Identifier: Apache-2.0
"""Faster switching between Python threads while files are read, or copies launched.

A thread that returns from a system call waits up to 5 ms (`sys.getswitchinterval`) for
the GIL while another thread computes. Reading a file takes five system calls, and the
thread that plans and launches steps computes nearly all the time, so reads next to it
would run at a tenth of their speed.
"""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_S = 1e-4
"""Switch interval in seconds."""

# Reentrant: a finalizer may leave a context while its thread holds the lock.
_lock = threading.RLock()
_asked: Counter[float] = Counter()
_usual_s = 0.0


@contextmanager
def fast_switching(turn_s: float = SWITCH_S) -> Iterator[None]:
    """Let the threads of the process switch at least every `turn_s` seconds.

    Contexts may overlap: the shortest interval counts.
    """
    global _usual_s
    with _lock:
        if not _asked:
            _usual_s = sys.getswitchinterval()
        _asked[turn_s] += 1
        sys.setswitchinterval(min([_usual_s, *_asked]))
    try:
        yield
    finally:
        with _lock:
            _asked[turn_s] -= 1
            if not _asked[turn_s]:
                del _asked[turn_s]
            sys.setswitchinterval(min([_usual_s, *_asked]))
