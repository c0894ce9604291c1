# SPDX-License-Identifier: Apache-2.0
"""Expiry times of keys, earliest first."""

import heapq
import struct

from vllm.v1.kv_tier.eviction.base import Key

_FLOAT, _INT = struct.Struct("<d"), struct.Struct("<q")
_NUMBER_BITS = 64


def _order(seconds: float) -> int:
    """An integer that is larger where `seconds`, from 0 on, are more."""
    return _INT.unpack(_FLOAT.pack(seconds))[0]


class Ends:
    """Expiry times; at most one for each key.

    Entries of keys that have another end by now, or none, stay in a heap until their
    time has come, or until they are found here: while entries are added to the younger
    of two heaps, the older one is emptied, a few entries for each. So there are no more
    than a few entries for each key, and nothing ever goes through all of them.

    An entry is an integer, of its time and a number of its own. Tuples would be looked
    at by Python's garbage collector: it gathers them while as many others are freed,
    and goes through 100,000 of them at once.
    """

    _MOVED = 4
    """Entries of the older heap that are moved when one is added."""
    _FEW = 64
    """Invalid entries that are tolerated."""

    def __init__(self) -> None:
        # The entry of each key, and the keys of those that hold.
        self._entry: dict[Key, int] = {}
        self._key: dict[int, Key] = {}
        self._num_set = 0
        self._young: list[int] = []
        self._old: list[int] = []

    def __len__(self) -> int:
        return len(self._entry)

    @property
    def num_entries(self) -> int:
        """Number of entries, including invalid ones."""
        return len(self._young) + len(self._old)

    def set(self, key: Key, until: float) -> None:
        """Set the expiry time of `key`, replacing an earlier one."""
        self.discard(key)
        self._num_set += 1
        entry = _order(until) << _NUMBER_BITS | self._num_set
        self._entry[key] = entry
        self._key[entry] = key
        heapq.heappush(self._young, entry)
        for _ in range(min(self._MOVED, len(self._old))):
            # The last entry of a heap can be removed without restoring its order.
            entry = self._old.pop()
            if entry in self._key:
                heapq.heappush(self._young, entry)
        if not self._old and len(self._young) > 2 * len(self._entry) + self._FEW:
            self._old, self._young = self._young, []

    def discard(self, key: Key) -> None:
        """Remove the expiry time of `key`."""
        if (entry := self._entry.pop(key, None)) is not None:
            del self._key[entry]

    def is_due(self, now: float) -> bool:
        """Whether there is a due entry for `pop`."""
        heap = self._first()
        return bool(heap) and heap[0] >> _NUMBER_BITS <= _order(now)

    def pop(self) -> Key | None:
        """Remove the earliest entry.

        Returns its key, or None if the entry is invalid.
        """
        key = self._key.pop(heapq.heappop(self._first()), None)
        if key is not None:
            del self._entry[key]
        return key

    def _first(self) -> list[int]:
        """The heap with the earliest entry."""
        young, old = self._young, self._old
        return old if old and not (young and young[0] < old[0]) else young
