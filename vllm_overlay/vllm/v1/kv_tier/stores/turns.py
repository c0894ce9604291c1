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

_lock = threading.Lock()
_num_inside = 0
_usual_s = 0.0


@contextmanager
def short_turns() -> Iterator[None]:
    """While somebody is in here, all threads of the process take turns of `TURN_S`."""
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
