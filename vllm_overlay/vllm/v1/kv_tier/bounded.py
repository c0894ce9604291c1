# SPDX-License-Identifier: Apache-2.0
"""A mapping bounded in bytes, and digests of names.

They bound the memory for data whose names and number clients choose.
"""

import hashlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

ENTRY_BYTES = 256
"""Bytes of an entry besides key and value: table, order and size, rounded up."""

_CONTAINERS = (tuple, list, set, frozenset)


def digest(*names: object) -> bytes:
    """A 16-byte digest of `names`, in this order. Never raises.

    No two lists of strings are known to have the same digest.
    """
    made = hashlib.blake2b(digest_size=16)
    for name in names:
        if isinstance(name, str):
            # Python strings may have surrogates, which UTF-8 cannot encode.
            kind, data = b"s", name.encode("utf-8", "surrogatepass")
        elif isinstance(name, bytes):
            kind, data = b"b", name
        else:
            kind, data = b"o", f"{type(name).__qualname__} {_hash(name)}".encode()
        made.update(b"%s%d:" % (kind, len(data)))
        made.update(data)
    return made.digest()


def _hash(value: object) -> int:
    """The hash of `value`, or that of its type if it is not hashable."""
    try:
        return hash(value)
    except Exception:
        return hash(type(value))


def size_of(value: object) -> int:
    """Bytes of `value` and its content.

    Shared content counts each time. Objects of other than built-in types count without
    content, so users of such values pass their own size function.
    """
    total, left = 0, [value]
    while left:
        one = left.pop()
        total += sys.getsizeof(one)
        if isinstance(one, _CONTAINERS):
            left.extend(one)
        elif isinstance(one, dict):
            left.extend(one.keys())
            left.extend(one.values())
    return total


class BoundedMap(MutableMapping[K, V]):
    """A mapping that drops its oldest entries beyond `max_bytes`.

    The age of an entry is that of its latest assignment or `use`. An entry larger than
    `max_bytes` is dropped at once. A value that grows must be assigned again to be
    counted.

    Args:
        max_bytes: Limit for keys, values and entries together, about.
        size: Bytes of a key or a value. Called once for each, on assignment.
        dropped: Called with each entry that was dropped for lack of room. It must not
            change this mapping.

    """

    def __init__(
        self,
        max_bytes: int,
        size: Callable[[object], int] = size_of,
        dropped: Callable[[K, V], None] | None = None,
    ) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """Bytes of all entries."""
        self._size = size
        self._dropped = dropped
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __getitem__(self, key: K) -> V:
        return self._entries[key][0]

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        """Iterate over the keys, oldest first."""
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __setitem__(self, key: K, value: V) -> None:
        size = ENTRY_BYTES + self._size(key) + self._size(value)
        old = self._entries.pop(key, None)
        if old is not None:
            self.num_bytes -= old[1]
        self._entries[key] = value, size
        self.num_bytes += size
        while self.num_bytes > self.max_bytes:
            oldest, (lost, size) = self._entries.popitem(last=False)
            self.num_bytes -= size
            if self._dropped is not None:
                self._dropped(oldest, lost)

    def __delitem__(self, key: K) -> None:
        self.num_bytes -= self._entries.pop(key)[1]

    def use(self, key: K) -> V | None:
        """The value of `key`, which becomes the newest; None if missing."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def clear(self) -> None:
        """Drop all entries."""
        self._entries.clear()
        self.num_bytes = 0
