# SPDX-License-Identifier: Apache-2.0
"""Least recently used, with a second chance that must earn its slots."""

from collections import OrderedDict
from collections.abc import Callable

from vllm.v1.kv_tier.eviction.base import (
    EvictionPolicy,
    Key,
    drop_oldest,
    most_with_dropped,
)


class Proven(EvictionPolicy):
    """Keys that came back outlive newer ones for as long as that brings hits.

    `_new` has keys that were used once, `_proven` those that were used again, here or
    since they were evicted; the oldest use first. While protection pays, `_proven`
    keeps half of the slots, whatever else comes: a scan passes it by. Otherwise, and
    beyond that half, the oldest use of all makes room, which is plain LRU: so what was
    of use to a workload that is over gives way at once.

    Whether it pays is counted in `_credit`. A hit that LRU would have missed is one
    more, and one that LRU would have had is one less. Age is told in insertions: LRU
    evicts what was not used for as many as there are slots. While LRU rules, a proven
    key that comes back after its eviction counts as a hit of protection. Credit is
    bounded, or an old workload would have earned too much for the next one; and some is
    lost with time, since protection that nobody asks for is no evidence.
    """

    _PROVEN = 1 / 2
    _MAX_CREDIT = 1 / 32
    """Part of the slots."""
    _INSERTIONS_PER_CREDIT = 128
    """After so many, one is lost."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        # The insertion at which keys were last used.
        self._new: OrderedDict[Key, int] = OrderedDict()
        self._proven: OrderedDict[Key, int] = OrderedDict()
        # The same of keys evicted since; None: proven ones that LRU chose.
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
            # A hit counts no insertion: of two that look as old it is the later one.
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
