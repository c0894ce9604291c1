# SPDX-License-Identifier: Apache-2.0
"""LRU: least recently used first."""

from collections import OrderedDict
from collections.abc import Callable

from vllm.v1.kv_tier.eviction.base import EvictionPolicy, Key, pop_oldest


class LRU(EvictionPolicy):
    """Evicts the least recently used key."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def insert(self, key: Key) -> None:
        self._keys[key] = None

    def hit(self, key: Key) -> None:
        self._keys.move_to_end(key)

    def remove(self, key: Key) -> None:
        del self._keys[key]

    def evict(self, is_pinned: Callable[[Key], bool]) -> Key | None:
        return pop_oldest(self._keys, is_pinned)
