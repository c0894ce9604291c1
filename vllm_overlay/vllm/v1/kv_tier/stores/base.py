# SPDX-License-Identifier: Apache-2.0
"""What a store below the host is.

A store keeps bytes under keys and knows nothing else: neither tokens nor slots, nor
what a scheduler is. Each rank has a store of its own, and gives it rows of host memory
to read from and to write to. Calls block, so they are for threads that do nothing else.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple


class MemoryFile(NamedTuple):
    """Memory that is the beginning of a file."""

    fd: int
    """The open file, of which processes of this user can get hold."""
    quiet_at: tuple[int, ...]
    """Bytes of the file from which on an int64 lies each: when it is over that no
    object should be begun to be written, in nanoseconds of `time.monotonic_ns`. For the
    same reasons as `BlockStore.give_way` has."""


class BlockStore(ABC):
    """The objects of one rank under one namespace.

    All methods may be called by several threads at once. None raises for an object that
    is missing or damaged, nor for a store in trouble: the answer is False, and the
    caller counts it. Rows are contiguous bytes of the size of a slot, one for each key.

    **No late writes.** When `get` has returned, nothing writes to its rows any more,
    whatever became of it: the caller gives them to others. A store that cannot promise
    so of an operation that it has given up closes its client, or does whatever else
    makes it impossible, before it returns. Until then the caller keeps the rows away
    from everybody, which is their quarantine.

    **No call hangs.** Of a store that is dead or stands still, a call returns after a
    time that its settings say (`timeout_ms`). What follows is answered at once, until
    the store is tried again (`Breaker`).
    """

    def register(self, memory: memoryview) -> None:  # noqa: B027
        """Take note of the memory in which the rows of all `put` and `get` will lie.

        Called once, before either. The memory outlives the store. A store that moves
        bytes through the kernel has nothing to do here.
        """

    def register_file(self, file: MemoryFile) -> None:  # noqa: B027
        """Take note that this memory is a file, which other processes can map.

        Called at most once, behind `register`. The file is closed afterwards.
        """

    @property
    def is_apart(self) -> bool:
        """Whether other processes move the bytes: then neither `put` nor `get` takes
        much of Python's lock. They are quiet when the file says so."""
        return False

    def give_way(self, wait: Callable[[], None]) -> None:  # noqa: B027
        """Call `wait` before each object of a `put`: it returns when nobody waits for
        what is read and no step is being launched, or has waited for long enough.

        Called once, before all else. A store that writes many objects in one operation
        has nothing to do here.
        """

    @abstractmethod
    def put(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        """Keep rows under keys. True: the object is there and complete, now or before.

        Rows are read until the call returns, and what is read later is never taken for
        an object.
        """

    @abstractmethod
    def get(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        """Fill rows. True: a row has exactly the bytes that were put under its key.

        A row whose answer is False may hold anything.
        """

    @abstractmethod
    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Which objects seem to be there. No promise: only `get` looks at the bytes."""

    def delete(self, keys: Sequence[bytes]) -> None:  # noqa: B027
        """Forget objects. Those that are not there are no trouble.

        For tests and benchmarks: an engine never calls this.
        """

    def take_evicted_bytes(self) -> int:
        """Bytes that this store has removed to make room, since the last call."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Give back threads and connections. Nothing may be called afterwards."""
