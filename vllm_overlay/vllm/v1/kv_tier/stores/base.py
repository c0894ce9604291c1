# SPDX-License-Identifier: Apache-2.0
"""What a store below the host is.

A store keeps bytes under keys and knows nothing of tokens, slots or the scheduler. Each
rank has its own store and passes it rows of host memory to read from and write to.
Calls block, so they belong on threads that do nothing else.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple


class MemoryFile(NamedTuple):
    """Memory that is the beginning of a file."""

    fd: int
    """The open file, which other processes of this user can open too."""
    quiet_at: tuple[int, ...]
    """Offsets of int64 numbers in the file. Each is a time of `time.monotonic_ns`
    before which no write of an object should begin, for the reasons given in
    `BlockStore.give_way`."""


class BlockStore(ABC):
    """The objects of one rank in one namespace.

    All methods may be called by several threads at once. None raises for a missing or
    damaged object, nor for a store that fails: the answer is False, and the caller
    counts it. Rows are contiguous bytes, one for each key: the first bytes of a slot,
    as many as the block's KV cache group needs, always the same number for a key. An
    object of another length is a miss.

    **No late writes.** Once `get` has returned, nothing may write to its rows, whether
    it succeeded or not, since the caller reuses them. A store that cannot guarantee
    this for an operation that it gave up must first close its client, or whatever else
    ends the operation.

    **No call hangs.** If the store is down or stalls, a call returns after the time
    that its settings give (`timeout_ms`). Later calls return at once, until the store
    is tried again (`Breaker`).
    """

    def register(self, memory: memoryview) -> None:  # noqa: B027
        """Pass the memory that contains the rows of all later `put` and `get`.

        Called once, before either. The memory outlives the store. Stores that move
        bytes through the kernel need not override it.
        """

    def register_file(self, file: MemoryFile) -> None:  # noqa: B027
        """Pass the file of that memory, which other processes can map.

        Called at most once, after `register`. The caller closes the file afterwards.
        """

    @property
    def is_apart(self) -> bool:
        """Whether other processes move the bytes, so that calls take little of the GIL.

        They pause as the numbers in the registered file say.
        """
        return False

    def give_way(self, wait: Callable[[], None]) -> None:  # noqa: B027
        """Pass a function to call before each object of a `put`.

        It returns when no step is being launched and no request waits for reads, or
        when it has waited long enough. Called once, before all else. Stores that write
        many objects in one operation need not override it.
        """

    @abstractmethod
    def put(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        """Store rows under keys. True: the object exists and is complete.

        Rows are read until the call returns. Bytes read later must never become part of
        an object.
        """

    @abstractmethod
    def get(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        """Fill rows. True: the row has exactly the bytes that were put under its key.

        A row with the answer False may hold anything.
        """

    @abstractmethod
    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Which objects seem to exist. A hint only: `get` alone checks the bytes."""

    def delete(self, keys: Sequence[bytes]) -> None:  # noqa: B027
        """Remove objects; missing ones are ignored.

        For tests and benchmarks. Engines never call it.
        """

    def take_evicted_bytes(self) -> int:
        """Bytes that this store evicted since the last call."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Release threads and connections. No method may be called afterwards."""


class ReadOnlyStore(BlockStore):
    """The store of a rank that holds the same KV as the rank that writes.

    `put` does nothing and answers yes: a block counts as written when all ranks say so,
    and the writing rank is one of them. `delete` does nothing, since the objects belong
    to that rank.

    Args:
        store: A store with the namespace and rank number of the rank that writes.

    """

    def __init__(self, store: BlockStore) -> None:
        self._store = store

    def register(self, memory: memoryview) -> None:
        self._store.register(memory)

    def register_file(self, file: MemoryFile) -> None:
        self._store.register_file(file)

    @property
    def is_apart(self) -> bool:
        return self._store.is_apart

    def put(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        return [True] * len(keys)

    def get(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        return self._store.get(keys, rows)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return self._store.exists(keys)

    def delete(self, keys: Sequence[bytes]) -> None:
        pass

    def take_evicted_bytes(self) -> int:
        return self._store.take_evicted_bytes()

    def close(self) -> None:
        self._store.close()
