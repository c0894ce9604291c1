# SPDX-License-Identifier: Apache-2.0
"""Ghost caches: which blocks a host would have if it stored others."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

from vllm.v1.kv_tier.eviction.base import EvictionPolicy

_is_pinned = frozenset[object]().__contains__
"""No key is pinned."""


class ShadowHost:
    """A ghost cache of the host, with keys only.

    Args:
        num_slots: Number of keys that it holds.
        policy: Its order of eviction, for `num_slots` keys.
        admits: Which keys may replace others; None for all. Free slots take any key.

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
        """Number of uses of resident keys. The reader may scale it."""
        self._policy = policy
        self._admits = admits

    def use(self, key: Hashable) -> None:
        """Record a use of `key`, which the device lacks."""
        if key in self.keys:
            self._policy.hit(key)
            self.hits += 1

    def take(self, key: Hashable) -> None:
        """Record that the device evicts the block of `key`."""
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
        """Drop all keys and hits, since the content is void."""
        for key in self.keys:
            self._policy.remove(key)
        self.keys.clear()
        self.hits = 0.0

    def wrap_policy(self, wrap: Callable[[EvictionPolicy], EvictionPolicy]) -> None:
        """Replace the policy by `wrap(policy)`."""
        self._policy = wrap(self._policy)

    def release(self, key: Hashable) -> None:
        """Drop `key`, which is not expected to be used again."""
        if key in self.keys:
            self.keys.remove(key)
            self._policy.remove(key)


class Shadow:
    """A ghost cache of the device above several ghost caches of the host.

    It gets a sample of the keys, and is smaller by the same factor, so hit rates are
    those of the full caches (Waldspurger et al., "Cache Modeling and Optimization using
    Miniature Simulations", USENIX ATC 2017). Device hits do not count for a host, or a
    key that all requests share would outweigh the rest of the sample.

    Args:
        num_blocks: Number of keys that the device holds, in LRU order.
        hosts: Each gets what the device evicts.

    """

    def __init__(self, num_blocks: int, hosts: Sequence[ShadowHost]) -> None:
        self._num_blocks = num_blocks
        self._hosts = hosts
        self._device: OrderedDict[Hashable, None] = OrderedDict()

    def use(self, key: Hashable) -> None:
        """Record that a request computes or hits the block of `key`."""
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
        """Drop everything, since the content is void."""
        self._device.clear()
        for host in self._hosts:
            host.clear()

    def release(self, key: Hashable) -> None:
        """Drop `key`, which is not expected to be used again.

        The tier itself keeps it until it needs the room, a little later.
        """
        self._device.pop(key, None)
        for host in self._hosts:
            host.release(key)
