# SPDX-License-Identifier: Apache-2.0
"""Which blocks a host would have had, had it stored other ones."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

from vllm.v1.kv_tier.eviction.base import EvictionPolicy

_is_pinned = frozenset[object]().__contains__
"""Nothing is."""


class ShadowHost:
    """A host as keys only.

    Args:
        num_slots: Keys that it holds.
        policy: Its order of eviction, for `num_slots` keys.
        admits: Which keys may take the place of others; None: all. Room that nobody
            has is for every key.

    """

    def __init__(
        self,
        num_slots: int,
        policy: EvictionPolicy,
        admits: Callable[[Hashable], bool] | None = None,
    ) -> None:
        self.num_slots = num_slots
        self.keys: set[Hashable] = set()
        self.hits = 0.0
        """Uses of keys that were there. Whoever compares may scale it."""
        self._policy = policy
        self._admits = admits

    def use(self, key: Hashable) -> None:
        """A request asks for the block of `key`, which the device lacks."""
        if key in self.keys:
            self._policy.hit(key)
            self.hits += 1

    def take(self, key: Hashable) -> None:
        """The device evicts the block of `key`."""
        keys = self.keys
        if key in keys:
            return
        if len(keys) == self.num_slots:
            if self._admits is not None and not self._admits(key):
                return
            keys.remove(self._policy.evict(_is_pinned))
        self._policy.insert(key)
        keys.add(key)

    def clear(self) -> None:
        """All that was stored is void, and so are its hits."""
        for key in self.keys:
            self._policy.remove(key)
        self.keys.clear()
        self.hits = 0.0

    def wrap_policy(self, wrap: Callable[[EvictionPolicy], EvictionPolicy]) -> None:
        """From now on the order of eviction is that of what `wrap` makes of it."""
        self._policy = wrap(self._policy)

    def release(self, key: Hashable) -> None:
        """Clients say that nobody will ask for `key` again."""
        if key in self.keys:
            self.keys.remove(key)
            self._policy.remove(key)


class Shadow:
    """A device, as keys only, above several hosts that are compared.

    It is told a sample of the keys, and made smaller by as much, so that hosts have the
    hits of the whole (Waldspurger et al., "Cache Modeling and Optimization using
    Miniature Simulations", USENIX ATC 2017). What the device has is no hit of a host:
    one key that all requests begin with would outweigh the rest of the sample.

    Args:
        num_blocks: Keys that the device holds, the least recently used go first.
        hosts: Each gets what the device evicts.

    """

    def __init__(self, num_blocks: int, hosts: Sequence[ShadowHost]) -> None:
        self._num_blocks = num_blocks
        self._hosts = hosts
        self._device: OrderedDict[Hashable, None] = OrderedDict()

    def use(self, key: Hashable) -> None:
        """A request computes or hits the block of `key`."""
        device = self._device
        if key in device:
            device.move_to_end(key)
            return
        for host in self._hosts:
            host.use(key)
        device[key] = None
        if len(device) > self._num_blocks:
            victim = device.popitem(last=False)[0]
            for host in self._hosts:
                host.take(victim)

    def clear(self) -> None:
        """All that was computed is void."""
        self._device.clear()
        for host in self._hosts:
            host.clear()

    def release(self, key: Hashable) -> None:
        """Clients say that nobody will ask for `key` again. The tier keeps it until it
        needs the room, which is later, but soon."""
        self._device.pop(key, None)
        for host in self._hosts:
            host.release(key)
