# SPDX-License-Identifier: Apache-2.0
"""The part of the Redis protocol that moves bytes without copying them.

The package `redis` connects, with TLS and passwords, but copies values several times.
So this module uses its socket directly: rows are sent from and received into their
place. Commands are pipelined: all commands first, then all answers.
"""

import select
import time
from collections.abc import Iterable
from typing import Any

_SMALL_BYTES = 4096


class Refused(Exception):
    """The server answered with an error."""


def command(*arguments: bytes) -> bytes:
    parts = [b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments]
    return b"*%d\r\n%b" % (len(arguments), b"".join(parts))


class Wire:
    """An open connection. After an exception the caller must close it.

    Answers may still be in flight, and closing the socket discards them.

    Args:
        connection: A connection of the package `redis`, not connected yet.
        timeout_s: Seconds for an operation; it may take twice as long in the worst
            case.

    Raises:
        redis.RedisError, OSError: There is no connection.

    """

    def __init__(self, connection: Any, timeout_s: float) -> None:
        self._connection, self._timeout_s = connection, timeout_s
        connection.connect()
        self._socket = connection._sock
        self._received = b""
        self.begin()

    def begin(self) -> None:
        """Start the time limit of an operation."""
        self._end_s = time.monotonic() + self._timeout_s

    @property
    def is_stale(self) -> bool:
        """Whether the server has closed the connection or sent unexpected data."""
        return bool(self._received or select.select([self._socket], [], [], 0)[0])

    def close(self) -> None:
        self._connection.disconnect()

    def send(self, data: bytes | memoryview) -> None:
        self._check_time()
        self._socket.sendall(data)

    def lines(self, n: int) -> list[bytes]:
        """Receive the next `n` one-line answers."""
        while self._received.count(b"\r\n") < n:
            self._check_time()
            more = self._socket.recv(_SMALL_BYTES)
            if not more:
                raise ConnectionError("the server closed the connection")
            self._received += more
        *lines, self._received = self._received.split(b"\r\n", n)
        return lines

    def ask(self, commands: Iterable[bytes]) -> list[bool]:
        """Send commands, and return for each whether its answer is 1.

        Raises:
            Refused: The server answered one with an error.

        """
        commands = list(commands)
        self.send(b"".join(commands))
        answers = self.lines(len(commands))
        for answer in answers:
            if not answer.startswith(b":"):
                raise Refused(answer.decode(errors="replace"))
        return [answer == b":1" for answer in answers]

    def fill(self, place: memoryview) -> None:
        """Receive bytes into `place`."""
        n = min(len(place), len(self._received))
        place[:n], self._received = self._received[:n], self._received[n:]
        while n < len(place):
            self._check_time()
            received = self._socket.recv_into(place[n:])
            if not received:
                raise ConnectionError("the server closed the connection")
            n += received

    def skip(self, num_bytes: int) -> None:
        place = memoryview(bytearray(min(num_bytes, 1 << 20)))
        while num_bytes:
            self.fill(place[:num_bytes])
            num_bytes -= min(num_bytes, len(place))

    def _check_time(self) -> None:
        if time.monotonic() > self._end_s:
            raise TimeoutError(f"no answer within {self._timeout_s:g} seconds")
