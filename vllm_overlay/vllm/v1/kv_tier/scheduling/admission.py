# SPDX-License-Identifier: Apache-2.0
"""Decides which blocks were used often enough for a host slot."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import TypeVar

from vllm.v1.kv_tier.eviction.base import EvictionPolicy

_Key = TypeVar("_Key", bound=Hashable)


class Admission:
    """Counts the uses of blocks by their keys.

    Computing a block is a use, and so is every hit. As in LRU-K (O'Neil et al., SIGMOD
    1993), a key is remembered after its block is gone, or there would be no second use.

    Args:
        from_use: Number of the use from which on a block is admitted.
        num_keys: Most keys that are remembered; those used last stay.

    """

    def __init__(self, from_use: int, num_keys: int) -> None:
        self._from_use = from_use
        self._num_keys = num_keys
        self._uses: OrderedDict[Hashable, int] = OrderedDict()

    admits_all = False
    """Whether `admits` is true for every key."""

    def hit(self, keys: Collection[Hashable]) -> None:
        """Record hits of the blocks of `keys`."""
        self.used(keys)

    def used(self, keys: Collection[_Key]) -> Collection[_Key]:
        """As `hit`. Returns the keys that are admitted now."""
        uses, from_use = self._uses, self._from_use
        admitted = []
        for key in keys:
            # A hot path: each block of each hit passes here.
            uses[key] = number = uses.pop(key, 0) + 1
            if number >= from_use:
                admitted.append(key)
        while len(uses) > self._num_keys:
            uses.popitem(last=False)
        return admitted

    def use(self, key: Hashable) -> None:
        """Record that the block of `key` is computed."""
        self.used((key,))

    def uses(self, key: Hashable) -> int:
        """Number of remembered uses of `key`."""
        return self._uses.get(key, 0)

    def admits(self, key: Hashable) -> bool:
        return self.uses(key) >= self._from_use

    def clear(self) -> None:
        """The host was emptied."""

    def release(self, keys: Iterable[Hashable]) -> None:
        """Note that `keys` are not expected to be used again."""

    def wrap_policies(self, wrap: Callable[[EvictionPolicy], EvictionPolicy]) -> None:
        """Apply `wrap` to copies of the host's eviction policy.

        Called when the host's own policy is wrapped.
        """


class SecondUses(Admission):
    """Admits keys that were used twice recently.

    Knows less than `Admission`, but costs less for each block of each prompt. Keys are
    kept in two generations. A use moves a key to the young one; when that is full, it
    becomes the old one, and the old one is dropped.

    Args:
        num_keys: Least number of keys that are remembered; at most twice as many are.

    """

    def __init__(self, num_keys: int) -> None:
        super().__init__(2, num_keys)
        self._max_young = num_keys
        # Whether keys were used a second time.
        self._young: dict[Hashable, bool] = {}
        self._old: dict[Hashable, bool] = {}

    def used(self, keys: Collection[_Key]) -> Collection[_Key]:
        # A hit block was computed before, so this is at least its second use.
        self._young.update(dict.fromkeys(keys, True))
        if len(self._young) >= self._max_young:
            self._grow_old()
        return keys

    def use(self, key: Hashable) -> None:
        young = self._young
        young[key] = key in young or key in self._old
        if len(young) >= self._max_young:
            self._grow_old()

    def uses(self, key: Hashable) -> int:
        is_second = self._young.get(key, self._old.get(key))
        return 0 if is_second is None else 1 + is_second

    def admits(self, key: Hashable) -> bool:
        return self._young.get(key, False) or self._old.get(key, False)

    def _grow_old(self) -> None:
        self._old, self._young = self._young, {}


def admission_from(use: int, num_keys: int) -> Admission:
    """Admit keys from use number `use` on, of those used recently."""
    return SecondUses(num_keys) if use == 2 else Admission(use, num_keys)
