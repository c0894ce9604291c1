# SPDX-License-Identifier: Apache-2.0
"""Numbered places for keys, and what eviction policies keep for them in arrays.

Millions of keys with an object each would be walked by Python's garbage collector, and
an `OrderedDict` of them is rebuilt at once, in a second. Here a key has the number of a
place, and its state lies in arrays at that number.
"""

from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from vllm.v1.kv_tier.eviction.base import EvictionPolicy, Key

_KEYS_PER_PART = 10_500
"""Python rebuilds a dict when its table is used up, with room for three times as many
keys in a table of a power of two: here 2^15 entries, in half a millisecond."""


class Places:
    """Which key is at which place.

    The owner changes `parts` and `keys`. They are public, since every block of every
    prefix is looked up.

    Args:
        num_places: Places are numbered from 0 to `num_places - 1`.

    """

    def __init__(self, num_places: int) -> None:
        self.num_parts = -(-num_places // _KEYS_PER_PART) or 1
        self.parts: tuple[dict[Key, int], ...] = tuple(
            {} for _ in range(self.num_parts)
        )
        """Places by key; a key is in the part of its hash."""
        # Any: a place of a queue has a key.
        self.keys: list[Any] = [None] * num_places
        """Keys by place, None if the place is free. The first one, if it has more."""

    def find(self, key: Key) -> int | None:
        """The place of `key`; None if it has none."""
        return self.parts[hash(key) % self.num_parts].get(key)

    def place(self, key: Key) -> int:
        """The place of `key`, which has one."""
        return self.parts[hash(key) % self.num_parts][key]

    def items(self) -> Iterator[tuple[Key, int]]:
        """All keys with their places."""
        for part in self.parts:
            yield from part.items()


class OwnPlaces(Places):
    """Places that a policy assigns itself, the lowest ones first."""

    def __init__(self, num_places: int) -> None:
        super().__init__(num_places)
        self.keys.clear()
        self._free: list[int] = []

    def enter(self, key: Key) -> None:
        """Give `key` a free place."""
        if self._free:
            self.keys[place := self._free.pop()] = key
        else:
            place = len(self.keys)
            self.keys.append(key)
        self.parts[hash(key) % self.num_parts][key] = place

    def leave(self, key: Key) -> None:
        """Free the place of `key`."""
        place = self.parts[hash(key) % self.num_parts].pop(key)
        self.keys[place] = None
        self._free.append(place)


class Queues:
    """Places in queues: doubly linked lists in two arrays.

    Queues are numbered after the places: `after[queue]` is the first place, or `queue`
    if the queue is empty, and `before[queue]` is the last one.

    Args:
        num_places: Number of places. Each is in one queue at most.
        num_queues: Number of queues.

    """

    __slots__ = ("after", "before", "queues")

    def __init__(self, num_places: int, num_queues: int) -> None:
        numbers = range(num_places + num_queues)
        self.after = array("i", numbers)
        self.before = array("i", numbers)
        self.queues = numbers[num_places:]

    def append(self, queue: int, place: int) -> None:
        """Add `place`, which is in no queue, as the last one."""
        last = self.before[queue]
        self.after[last] = self.before[queue] = place
        self.before[place], self.after[place] = last, queue

    def remove(self, place: int) -> None:
        """Remove `place` from its queue."""
        before, after = self.before[place], self.after[place]
        self.after[before], self.before[after] = after, before

    def move(self, queue: int, place: int) -> None:
        """Make `place`, which is in any queue, the last one of `queue`."""
        self.remove(place)
        self.append(queue, place)


class PlacedPolicy(EvictionPolicy):
    """A policy whose state lies in arrays.

    Args:
        num_slots: Most keys that can be resident.
        num_queues: Queues of places.

    """

    def __init__(self, num_slots: int, num_queues: int) -> None:
        super().__init__(num_slots)
        self._own: OwnPlaces | None = OwnPlaces(num_slots)
        self._places: Places = self._own
        self._queues = Queues(num_slots, num_queues)

    def use_places(self, places: Places) -> None:
        """Take the places of keys from `places`, before the first key is inserted.

        Their owner gives a key its place before it inserts it here, and frees the place
        after the key was evicted or removed.
        """
        self._own, self._places = None, places

    def insert_at(self, places: Sequence[int], keys: Sequence[Key]) -> None:
        """As `insert` for each of `keys`, whose places the caller knows."""
        for key in keys:
            self.insert(key)

    def hit_places(self, places: Collection[int]) -> None:
        """As `hits`, for the keys at `places`."""
        keys = self._places.keys
        self.hits([keys[place] for place in places])

    def _entered(self, key: Key) -> int:
        """The place of `key`, which is about to be resident."""
        if self._own is not None:
            self._own.enter(key)
        return self._places.place(key)

    def _left(self, key: Key) -> None:
        if self._own is not None:
            self._own.leave(key)

    def _pop_first(self, queue: int, is_pinned: Callable[[Key], bool]) -> Key | None:
        """Remove and return the first key of `queue` that is not pinned."""
        place = self._first(queue, is_pinned)
        if place is None:
            return None
        key = self._places.keys[place]
        self._queues.remove(place)
        self._left(key)
        return key

    def _first(self, queue: int, is_pinned: Callable[[Key], bool]) -> int | None:
        """The first place of `queue` whose key is not pinned."""
        keys, after = self._places.keys, self._queues.after
        place = after[queue]
        while place != queue:
            if not is_pinned(keys[place]):
                return place
            place = after[place]
        return None
