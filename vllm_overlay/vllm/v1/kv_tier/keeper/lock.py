# SPDX-License-Identifier: Apache-2.0
"""A lock between processes that survives the death of its holder: POSIX's robust mutex.

Acquire and release order memory on every processor that Linux runs on, so that code
that holds the lock needs no fences of its own.
"""

import ctypes
import errno
import os
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

LOCK_BYTES = 64
"""Room for glibc's `pthread_mutex_t`: 40 bytes on x86-64, 48 on ARM."""

_PROCESS_SHARED = _ROBUST = 1
# After a wait in vain, calls wait no more for so long: its holder is stopped, and a
# step has many calls.
_REST_S = 0.01


def _libc() -> Any:
    # Calls keep Python's lock: they never block, and another thread of this process
    # must not get its turn between them.
    libc = ctypes.PyDLL(None)
    try:
        libc["pthread_mutex_consistent"]
    except AttributeError:
        # Before glibc 2.34.
        libc = ctypes.PyDLL("libpthread.so.0")
    return libc


class RobustLock:
    """A lock in memory that processes share.

    Args:
        memory: `[LOCK_BYTES]`, uint8, aligned to 16 bytes.

    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        libc, address = _libc(), ctypes.c_void_p(memory.ctypes.data)
        self._address = address
        self._init = libc.pthread_mutex_init
        self._try = libc.pthread_mutex_trylock
        self._unlock = libc.pthread_mutex_unlock
        self._recover = libc.pthread_mutex_consistent
        self._libc = libc
        self.num_recovered = 0
        """How often the holder had died."""
        self._rests_until = 0.0

    def create(self) -> None:
        """Initialize the lock, once, before another process has the memory."""
        attributes = ctypes.create_string_buffer(64)
        call = self._libc.pthread_mutexattr_init
        _check(call(attributes), "pthread_mutexattr_init")
        for name, value in (("pshared", _PROCESS_SHARED), ("robust", _ROBUST)):
            function = f"pthread_mutexattr_set{name}"
            _check(self._libc[function](attributes, value), function)
        _check(self._init(self._address, attributes), "pthread_mutex_init")

    def acquire(self, spin_s: float = 0.0) -> bool:
        """Take the lock if it is free, or comes free within `spin_s` seconds.

        A holder may die between any two writes, so the data that the lock guards must
        be valid after each of them.
        """
        code = self._try(self._address)
        return code == 0 or self._wait(code, spin_s)

    def _wait(self, code: int, spin_s: float) -> bool:
        """As `acquire`, after a first attempt that has given `code`."""
        until = 0.0
        while code:
            if code == errno.EOWNERDEAD:
                _check(self._recover(self._address), "pthread_mutex_consistent")
                self.num_recovered += 1
                return True
            if code != errno.EBUSY:
                _check(code, "pthread_mutex_trylock")
            now = time.monotonic()
            if not until:
                until = now + (spin_s if now >= self._rests_until else 0)
            if now >= until:
                self._rests_until = now + _REST_S
                return False
            time.sleep(0)
            code = self._try(self._address)
        return True

    def release(self) -> None:
        if code := self._unlock(self._address):
            _check(code, "pthread_mutex_unlock")


def _check(code: int, function: str) -> None:
    if code:
        raise OSError(code, f"{function}: {os.strerror(code)}")
