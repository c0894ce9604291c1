# SPDX-License-Identifier: Apache-2.0
"""The interface of eviction policies.

A policy orders keys and knows nothing of bytes or slots. A key is any hashable value;
the tier uses the first key of a slot.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator
from itertools import chain, islice
from typing import Any, Generic, NamedTuple, TypeVar

from vllm.v1.kv_tier.hints.schema import NO_HINT as NO_HINT

Key = Hashable
Name = TypeVar("Name")
Value = TypeVar("Value")


class KeyHint(NamedTuple):
    """What hints say about a key."""

    priority: int
    """From 0 to 100; keys of higher priority are evicted later. `NO_HINT` is in the
    middle."""
    until: float
    """When the hint expires, in seconds of `time.monotonic`; may be infinite. The
    policy is not notified then."""
    tenant: Hashable
    """Tenant whose requests use the key; None if unknown."""
    turn: int
    """Turn, counted from 1, of the conversation whose request used it last."""


pins_none = frozenset[Key]().__contains__
"""No key is pinned. Not a Python function, since it is called for each victim."""


class EvictionPolicy(ABC):
    """Order of eviction of the resident keys.

    Args:
        num_slots: Most keys that can be resident.

    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots

    def resize(self, num_slots: int) -> None:
        """Decide for so many slots from now on: at most those at the start."""
        self.num_slots = num_slots

    @abstractmethod
    def insert(self, key: Key) -> None:
        """Add `key`, which was not resident."""

    @abstractmethod
    def hit(self, key: Key) -> None:
        """Record a use of resident `key`.

        It stays pinned until the plan is complete.
        """

    def hits(self, keys: Collection[Key]) -> None:
        """Call `hit` for each of `keys`, in order."""
        hit = self.hit
        for key in keys:
            hit(key)

    @abstractmethod
    def remove(self, key: Key) -> None:
        """Remove resident `key`, which became invalid. Remember nothing of it."""

    @abstractmethod
    def evict(self, is_pinned: Callable[[Key], bool]) -> Key | None:
        """Remove and return a resident key that is not pinned.

        May be called thousands of times in a step. The slot table reports no key as
        pinned, and inserts a pinned one again later, as a used one.

        Returns:
            The evicted key, or None if every key is pinned.

        """

    def evict_all(self, num_keys: int) -> list[Key]:
        """Call `evict` for `num_keys` keys, or all there are. None is pinned."""
        victims: list[Key] = []
        while len(victims) < num_keys and (key := self.evict(pins_none)) is not None:
            victims.append(key)
        return victims

    def set_hint(self, key: Key, about: KeyHint) -> None:  # noqa: B027
        """Pass the hints for resident `key`, given now or before it was inserted.

        Optional. A policy that overrides this method orders keys by priority itself.
        For all other policies `Hinted` does so, at no cost to them.
        """


class Table(dict[Key, Value]):
    """A dict that Python's garbage collector tracks from its creation. Upstream
    excludes objects that exist when an engine starts from collections; a plain dict
    would be tracked only later, and 400,000 entries add 30 ms to each collection."""

    __slots__ = ()


class PartedDict(Generic[Name, Value]):
    """A mapping in 64 dicts, for several with the same keys.

    Python rebuilds a dict at once when it outgrows its table: 5 ms for 87,000 keys.
    Those with the same keys do so in the same step, which took 31 ms for six of them.
    """

    __slots__ = ("_num", "_parts")

    def __init__(self) -> None:
        self._parts: tuple[dict[Name, Value], ...] = tuple({} for _ in range(64))
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Name]:
        return chain.from_iterable(self._parts)

    def __contains__(self, key: Name) -> bool:
        return key in self._parts[hash(key) & 63]

    def __setitem__(self, key: Name, value: Value) -> None:
        part = self._parts[hash(key) & 63]
        self._num += key not in part
        part[key] = value

    def pop(self, key: Name) -> Value | None:
        """Remove `key`. Returns its value, or None if it is absent."""
        part = self._parts[hash(key) & 63]
        self._num -= key in part
        return part.pop(key, None)


_MANY = 4096


def drop_oldest(keys: dict[Key, Any], limit: int) -> None:
    """Drop the first of `keys` beyond `limit`, once there are many of them.

    A dict is rebuilt in a third of the time of an `OrderedDict`, for which a step waits
    where keys come and go. But its first key is slow to find when many before it have
    left, so that it is looked for seldom.
    """
    if len(keys) > limit + min(_MANY, limit // 16):
        for key in list(islice(keys, len(keys) - limit)):
            del keys[key]
