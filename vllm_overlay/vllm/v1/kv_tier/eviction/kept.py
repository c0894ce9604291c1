# SPDX-License-Identifier: Apache-2.0
"""Orders of kept keys: by priority, and by owner."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator

from vllm.v1.kv_tier.eviction.base import Key


class ByPriority:
    """Keys by priority, and in order of insertion within a priority."""

    def __init__(self) -> None:
        self._priority: dict[Key, int] = {}
        self._queues: dict[int, OrderedDict[Key, None]] = {}

    def __len__(self) -> int:
        return len(self._priority)

    def __contains__(self, key: Key) -> bool:
        return key in self._priority

    def __iter__(self) -> Iterator[Key]:
        return iter(self._priority)

    def add(self, key: Key, priority: int) -> None:
        """Add `key`, which must not be present, as the last of its priority."""
        self._priority[key] = priority
        self._queues.setdefault(priority, OrderedDict())[key] = None

    def discard(self, key: Key) -> bool:
        """Remove `key`. Returns whether it was present."""
        priority = self._priority.pop(key, None)
        if priority is None:
            return False
        queue = self._queues[priority]
        del queue[key]
        if not queue:
            del self._queues[priority]
        return True

    def pop(self) -> Key:
        """Remove and return the first key of the lowest priority. There must be one."""
        # There are few different priorities.
        key = next(iter(self._queues[min(self._queues)]))
        self.discard(key)
        return key


class Kept:
    """Keys of several owners, with equal shares for all.

    An owner with more than its share cannot displace keys of others.
    """

    def __init__(self) -> None:
        self._owner: dict[Key, Hashable] = {}
        self._keys: OrderedDict[Hashable, ByPriority] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owner)

    def __contains__(self, key: Key) -> bool:
        return key in self._owner

    def __iter__(self) -> Iterator[Key]:
        return iter(self._owner)

    def add(self, key: Key, priority: int, owner: Hashable) -> None:
        """Add `key`, which must not be present."""
        self._owner[key] = owner
        self._keys.setdefault(owner, ByPriority()).add(key, priority)

    def discard(self, key: Key) -> bool:
        """Remove `key`. Returns whether it was present."""
        if key not in self._owner:
            return False
        owner = self._owner.pop(key)
        keys = self._keys[owner]
        keys.discard(key)
        if not keys:
            del self._keys[owner]
        return True

    def pop(self) -> Key:
        """Remove and return a key of an owner with at least an equal share.

        There must be one.

        It is the first key of the owner's lowest priority.
        """
        while True:
            owner, keys = next(iter(self._keys.items()))
            if len(keys) * len(self._keys) >= len(self):
                break
            # Rotating the owners avoids a search for the largest.
            self._keys.move_to_end(owner)
        key = keys.pop()
        del self._owner[key]
        if not keys:
            del self._keys[owner]
        return key
