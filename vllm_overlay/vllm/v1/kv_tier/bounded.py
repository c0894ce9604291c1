# SPDX-License-Identifier: Apache-2.0
"""A mapping that clients cannot make larger than so many bytes, and names of a fixed
size for what clients call by names of any length."""

import hashlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

ENTRY_BYTES = 256
"""What an entry takes beside its key and its value: the places of both in a table, the
link of the order, and the size that is remembered. Rounded up."""

_CONTAINERS = (tuple, list, set, frozenset)


def digest(*names: object) -> bytes:
    """16 bytes that stand for `names`, in this order. Never raises.

    No two lists of strings have the same digest, as far as anybody can find out.
    """
    made = hashlib.blake2b(digest_size=16)
    for name in names:
        if isinstance(name, str):
            # A string of Python may have surrogates that no encoding has.
            kind, data = b"s", name.encode("utf-8", "surrogatepass")
        elif isinstance(name, bytes):
            kind, data = b"b", name
        else:
            kind, data = b"o", f"{type(name).__qualname__} {_hash(name)}".encode()
        made.update(b"%s%d:" % (kind, len(data)))
        made.update(data)
    return made.digest()


def _hash(value: object) -> int:
    """The hash of `value`; that of its type if it has none."""
    try:
        return hash(value)
    except Exception:
        return hash(type(value))


def size_of(value: object) -> int:
    """Bytes that `value` takes, with what is in it.

    What is in several places counts for each. Of objects of other types than Python's
    own only the object itself is counted: who keeps such values gives a size of their
    own.
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
    """A mapping that forgets its oldest entries beyond `max_bytes`.

    An entry is as young as its latest assignment or `use`. An entry that is larger than
    `max_bytes` by itself is forgotten at once. A value that grows is to be assigned
    anew, so that it is counted.

    Args:
        max_bytes: Of keys, values and entries together, about.
        size: Bytes of a key or a value. Called once for each, when they are assigned.
        dropped: Is called with each entry that is forgotten for lack of room, after it
            has left. It must not change this mapping.

    """

    def __init__(
        self,
        max_bytes: int,
        size: Callable[[object], int] = size_of,
        dropped: Callable[[K, V], None] | None = None,
    ) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """Of all entries."""
        self._size = size
        self._dropped = dropped
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __getitem__(self, key: K) -> V:
        return self._entries[key][0]

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        """The oldest first."""
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
        """The value of `key`, which is the youngest from now on; None: there is
        none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def clear(self) -> None:
        """Forget all entries."""
        self._entries.clear()
        self.num_bytes = 0
