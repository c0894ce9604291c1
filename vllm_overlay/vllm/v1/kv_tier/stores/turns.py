# SPDX-License-Identifier: Apache-2.0
"""Faster switching between Python threads while files are read.

A thread that returns from a system call waits up to 5 ms (`sys.getswitchinterval`) for
the GIL while another thread computes. Reading a file takes five system calls, and the
thread that plans and launches steps computes nearly all the time, so reads next to it
would run at a tenth of their speed.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TURN_S = 1e-4
"""Switch interval in seconds."""

_lock = threading.Lock()
_num_inside = 0
_usual_s = 0.0


@contextmanager
def short_turns() -> Iterator[None]:
    """Use a switch interval of `TURN_S` in the whole process while in this block."""
    global _num_inside, _usual_s
    with _lock:
        if not _num_inside:
            _usual_s = sys.getswitchinterval()
            sys.setswitchinterval(min(_usual_s, TURN_S))
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if not _num_inside:
                sys.setswitchinterval(_usual_s)
