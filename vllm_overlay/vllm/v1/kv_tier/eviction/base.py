# SPDX-License-Identifier: Apache-2.0
"""What an eviction policy is.

A policy orders keys and nothing else: it knows neither bytes nor slots. A key
is any hashable value; the tier uses the first key of a slot.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from itertools import islice
from typing import Any, NamedTuple, TypeVar

Key = Hashable
Value = TypeVar("Value")

NO_HINT = 50
"""The priority of a key of which nobody has said anything."""


class About(NamedTuple):
    """What clients have said of a key."""

    priority: int
    """From 0 to 100: what is higher goes later. `NO_HINT` is in the middle."""
    until: float
    """The time until when that holds, in seconds of `time.monotonic`; may be infinite.
    Nobody is told when it has passed."""
    tenant: Hashable
    """Who uses the key; None: nobody has said."""
    turn: int
    """Of its conversation, counted from 1: the request that has used it last."""


class EvictionPolicy(ABC):
    """Order of eviction over the resident keys.

    Args:
        num_slots: Number of keys that can be resident at once.

    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots

    @abstractmethod
    def insert(self, key: Key) -> None:
        """`key`, not resident until now, became resident."""

    @abstractmethod
    def hit(self, key: Key) -> None:
        """Resident `key` is used. It is pinned until the plan in the making ends."""

    def hits(self, keys: Collection[Key]) -> None:
        """As `hit` of each of `keys`, one after another."""
        hit = self.hit
        for key in keys:
            hit(key)

    @abstractmethod
    def remove(self, key: Key) -> None:
        """Resident `key` was invalidated: forget that it ever was here."""

    @abstractmethod
    def evict(self, is_pinned: Callable[[Key], bool]) -> Key | None:
        """Choose a resident key that is not pinned and drop it.

        The slot table calls this for each victim, so thousands of times in one step,
        and says that no key is pinned: a key that is, it puts back later, as one that
        was used.

        Returns:
            The key, no longer resident, or None when every key is pinned.

        """

    def told(self, key: Key, about: About) -> None:  # noqa: B027
        """Clients say `about` of resident `key`, now or before it was inserted.

        Optional. A policy that has this method is left to order keys by priority
        itself. For all others `Hinted` does, and they pay nothing for it.
        """


class Table(dict[Key, Value]):
    """A dict that Python's garbage collector knows from the start, and not from the
    first value on that it tracks: so it is among what an engine has when it starts,
    which upstream excepts from collections. All of 400,000 entries would be looked at
    in each of them, in 30 ms."""

    __slots__ = ()


_MANY = 4096


def most_with_dropped(limit: int) -> int:
    """How many keys there are at most where `drop_oldest` keeps `limit`."""
    return limit + min(_MANY, limit // 16)


def drop_oldest(keys: dict[Key, Any], limit: int) -> None:
    """Drop the first of `keys` beyond `limit`, once there are many of them.

    A dict is rebuilt in a third of the time of an `OrderedDict`, for which a step waits
    where keys come and go. But its first key is slow to find when many before it have
    left, so that it is looked for seldom.
    """
    if len(keys) > most_with_dropped(limit):
        for key in list(islice(keys, len(keys) - limit)):
            del keys[key]


def pop_oldest(
    keys: "OrderedDict[Key, None]", is_pinned: Callable[[Key], bool]
) -> Key | None:
    """Drop the first of `keys`, oldest first, that is not pinned, and return it."""
    for key in keys:
        if not is_pinned(key):
            del keys[key]
            return key
    return None
