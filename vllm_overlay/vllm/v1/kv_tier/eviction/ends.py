# SPDX-License-Identifier: Apache-2.0
"""When keys expire, the earliest first."""

import heapq

from vllm.v1.kv_tier.eviction.base import Key

_Entry = tuple[float, int, Key]


class Ends:
    """The ends of keys, of which there is one for each at most.

    Entries of keys that have another end by now, or none, stay in a heap until their
    time has come, or until they are found here: while entries are added to the younger
    of two heaps, the older one is emptied, a few entries for each. So there are no more
    than a few entries for each key, and nothing ever goes through all of them.
    """

    _MOVED = 4
    """Entries of the older heap that are looked at when one is added."""
    _FEW = 64
    """Entries with which nothing is done."""

    def __init__(self) -> None:
        self._number: dict[Key, int] = {}
        self._num_entries = 0
        # Keys have no order of their own, so numbers come before them.
        self._young: list[_Entry] = []
        self._old: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._number)

    @property
    def num_entries(self) -> int:
        """With those that are of no use."""
        return len(self._young) + len(self._old)

    def set(self, key: Key, until: float) -> None:
        """`key` expires then, and not when it would have until now."""
        self._num_entries += 1
        self._number[key] = self._num_entries
        heapq.heappush(self._young, (until, self._num_entries, key))
        for _ in range(min(self._MOVED, len(self._old))):
            # The last one of a heap can be taken away.
            entry = self._old.pop()
            if self._is_valid(entry):
                heapq.heappush(self._young, entry)
        if not self._old and len(self._young) > 2 * len(self._number) + self._FEW:
            self._old, self._young = self._young, []

    def discard(self, key: Key) -> None:
        """`key` does not expire."""
        self._number.pop(key, None)

    def is_due(self, now: float) -> bool:
        """Whether there is an entry for `pop`."""
        heap = self._first()
        return bool(heap) and heap[0][0] <= now

    def pop(self) -> Key | None:
        """Take out the earliest entry. Returns its key, or None if that has another
        end, or none."""
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
