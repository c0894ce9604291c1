# SPDX-License-Identifier: Apache-2.0
"""Expiry times of keys, earliest first."""

import heapq

from vllm.v1.kv_tier.eviction.base import Key

_Entry = tuple[float, int, Key]


class Ends:
    """Expiry times; at most one for each key.

    Entries whose key has another expiry time by now, or none, stay in a heap until they
    are due or discarded here: there are two heaps, and whenever an entry is added to
    the younger one, a few entries of the older one are moved or dropped. So there are
    only a few entries for each key, and no operation visits all of them.
    """

    _MOVED = 4
    """Entries of the older heap that are moved when one is added."""
    _FEW = 64
    """Invalid entries that are tolerated."""

    def __init__(self) -> None:
        self._number: dict[Key, int] = {}
        self._num_entries = 0
        # Keys may not be comparable, so a number comes before them.
        self._young: list[_Entry] = []
        self._old: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._number)

    @property
    def num_entries(self) -> int:
        """Number of entries, including invalid ones."""
        return len(self._young) + len(self._old)

    def set(self, key: Key, until: float) -> None:
        """Set the expiry time of `key`, replacing an earlier one."""
        self._num_entries += 1
        self._number[key] = self._num_entries
        heapq.heappush(self._young, (until, self._num_entries, key))
        for _ in range(min(self._MOVED, len(self._old))):
            # The last entry of a heap can be removed without restoring its order.
            entry = self._old.pop()
            if self._is_valid(entry):
                heapq.heappush(self._young, entry)
        if not self._old and len(self._young) > 2 * len(self._number) + self._FEW:
            self._old, self._young = self._young, []

    def discard(self, key: Key) -> None:
        """Remove the expiry time of `key`."""
        self._number.pop(key, None)

    def is_due(self, now: float) -> bool:
        """Whether there is a due entry for `pop`."""
        heap = self._first()
        return bool(heap) and heap[0][0] <= now

    def pop(self) -> Key | None:
        """Remove the earliest entry.

        Returns its key, or None if the entry is invalid.
        """
        entry = heapq.heappop(self._first())
        if not self._is_valid(entry):
            return None
        del self._number[entry[2]]
        return entry[2]

    def _first(self) -> list[_Entry]:
        """The heap with the earliest entry."""
        young, old = self._young, self._old
        return old if old and not (young and young[0] < old[0]) else young

    def _is_valid(self, entry: _Entry) -> bool:
        return self._number.get(entry[2]) == entry[1]
