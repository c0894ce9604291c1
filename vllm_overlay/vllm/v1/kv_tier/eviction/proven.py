# SPDX-License-Identifier: Apache-2.0
"""LRU with a protected segment, while protection pays off."""

from collections import OrderedDict
from collections.abc import Callable

from vllm.v1.kv_tier.eviction.base import (
    EvictionPolicy,
    Key,
    drop_oldest,
    most_with_dropped,
)


class Proven(EvictionPolicy):
    """Protects keys that were used again for as long as that brings hits.

    `_new` has keys that were used once, `_proven` those used again, while resident or
    after their eviction; both oldest first. While protection pays off, `_proven` keeps
    half of the slots, so that a scan does not displace it. Otherwise, and beyond that
    half, the least recently used key of both is evicted, as in plain LRU. So keys of an
    old workload do not stay for long.

    `_credit` counts whether it pays off: plus one for a hit that LRU would have missed,
    minus one for a miss that LRU would have hit. LRU evicts a key that was not used for
    as many insertions as there are slots, so age is measured in insertions. While the
    policy acts as LRU, a proven key that returns after its eviction counts as a hit of
    protection. Credit is bounded, so that an old workload does not affect the next one
    for long, and decays, since protected keys that are not used prove nothing.
    """

    _PROVEN = 1 / 2
    _MAX_CREDIT = 1 / 32
    """Part of the number of slots."""
    _INSERTIONS_PER_CREDIT = 128
    """Insertions after which one credit decays."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        # Keys with the insertion count at their last use.
        self._new: OrderedDict[Key, int] = OrderedDict()
        self._proven: OrderedDict[Key, int] = OrderedDict()
        # The same for evicted keys; None for proven keys that LRU evicted.
        self._ghosts: dict[Key, int | None] = {}
        self._max_ghosts = most_with_dropped(num_slots)
        self._num_insertions = 0
        self._credit = 0.0

    def insert(self, key: Key) -> None:
        self._num_insertions = now = self._num_insertions + 1
        if now % self._INSERTIONS_PER_CREDIT == 0 and self._credit > 0:
            self._credit = max(0.0, self._credit - 1)
        if key not in self._ghosts:
            self._new[key] = now
            return
        used = self._ghosts.pop(key)
        if used is None:
            self._earn(1)
        elif now - used < self.num_slots:
            self._earn(-1)
        self._proven[key] = now

    def hit(self, key: Key) -> None:
        proven, now = self._proven, self._num_insertions
        if key in self._new:
            del self._new[key]
        else:
            if now - proven[key] >= self.num_slots:
                self._earn(1)
            proven.move_to_end(key)
        proven[key] = now

    def remove(self, key: Key) -> None:
        del (self._new if key in self._new else self._proven)[key]

    def evict(self, is_pinned: Callable[[Key], bool]) -> Key | None:
        new, proven = self._new, self._proven
        protects = self._credit > 0
        if not new or not proven:
            from_new = not proven
        elif protects and len(proven) <= self._PROVEN * self.num_slots:
            from_new = True
        else:
            # Hits do not count as insertions: of two keys of equal age, the hit is more
            # recent.
            from_new = next(iter(new.values())) <= next(iter(proven.values()))
        for keys in (new, proven) if from_new else (proven, new):
            for key, used in keys.items():
                if is_pinned(key):
                    continue
                del keys[key]
                if keys is new:
                    self._remember(key, used)
                elif not protects:
                    self._remember(key, None)
                return key
        return None

    def _remember(self, key: Key, used: int | None) -> None:
        self._ghosts[key] = used
        # For each victim: no call for nothing.
        if len(self._ghosts) > self._max_ghosts:
            drop_oldest(self._ghosts, self.num_slots)

    def _earn(self, credit: int) -> None:
        most = self._MAX_CREDIT * self.num_slots
        self._credit = min(max(self._credit + credit, -most), most)
