# SPDX-License-Identifier: Apache-2.0
"""Which blocks have been used often enough for a host slot."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable

from vllm.v1.kv_tier.eviction.base import EvictionPolicy


class Admission:
    """Counts the uses of blocks by their keys.

    Computing a block is a use, and so is every hit. As in LRU-K (O'Neil et al., SIGMOD
    1993), a key is remembered beyond its block, or the second use would never come.

    Args:
        from_use: The use from which on a block is admitted.
        num_keys: Keys that are remembered, those of the latest uses.

    """

    def __init__(self, from_use: int, num_keys: int) -> None:
        self._from_use = from_use
        self._num_keys = num_keys
        self._uses: OrderedDict[Hashable, int] = OrderedDict()

    admits_all = False
    """Whether `admits` is true of every key."""

    def hit(self, keys: Iterable[Hashable]) -> None:
        """A request hits the blocks of `keys`."""
        for key in keys:
            self.use(key)

    def use(self, key: Hashable) -> None:
        """The block of `key` is computed."""
        self._uses[key] = self._uses.pop(key, 0) + 1
        if len(self._uses) > self._num_keys:
            self._uses.popitem(last=False)

    def uses(self, key: Hashable) -> int:
        """Of `key`, as far as they are remembered."""
        return self._uses.get(key, 0)

    def admits(self, key: Hashable) -> bool:
        return self.uses(key) >= self._from_use

    def clear(self) -> None:
        """The host was emptied."""

    def release(self, keys: Iterable[Hashable]) -> None:
        """Clients say that nobody will ask for `keys` again."""

    def wrap_policies(self, wrap: Callable[[EvictionPolicy], EvictionPolicy]) -> None:
        """The host's order of eviction becomes that of what `wrap` makes of its policy:
        whoever imitates the host does the same."""
