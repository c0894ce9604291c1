# SPDX-License-Identifier: Apache-2.0
"""Two first-in, first-out queues."""

from collections import OrderedDict, deque
from collections.abc import Callable

from vllm.v1.kv_tier.eviction.base import EvictionPolicy, Key


class S3FIFO(EvictionPolicy):
    """Two queues: keys prove themselves in the first, and stay in the second.

    New keys go to `_first`, those that come back while remembered to `_main`. A key
    that was used leaves `_first` for `_main` instead of the cache; in `_main` each use
    earns it another round, three at most. Hits move nothing. From Yang et al., "FIFO
    Queues Are All You Need for Cache Eviction", SOSP 2023.

    Two numbers are not the paper's. `_first` has half of the slots, not a tenth: a
    conversation comes back minutes later, after much else. One use is proof enough,
    not two: uses that the device serves are not seen here.
    """

    _FIRST = 1 / 2
    _MAX_USES = 3

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._min_first = self._FIRST * num_slots
        # Uses since a key came to where it is, oldest key first.
        self._first: OrderedDict[Key, int] = OrderedDict()
        self._main: OrderedDict[Key, int] = OrderedDict()
        # The order may have keys twice, or that came back: some are forgotten early.
        self._ghosts: set[Key] = set()
        self._ghost_order: deque[Key] = deque()

    def insert(self, key: Key) -> None:
        if key in self._ghosts:
            self._ghosts.remove(key)
            self._main[key] = 0
        else:
            self._first[key] = 0

    def hit(self, key: Key) -> None:
        queue = self._first
        if (uses := queue.get(key)) is None:
            queue = self._main
            uses = queue[key]
        if uses < self._MAX_USES:
            queue[key] = uses + 1

    def remove(self, key: Key) -> None:
        del (self._first if key in self._first else self._main)[key]

    def evict(self, is_pinned: Callable[[Key], bool]) -> Key | None:
        if len(self._first) < self._min_first:
            key = self._evict_main(is_pinned)
            if key is not None:
                return key
        key = self._evict_first(is_pinned)
        # It may have moved to the second queue all that could make room.
        return self._evict_main(is_pinned) if key is None else key

    def _evict_first(self, is_pinned: Callable[[Key], bool]) -> Key | None:
        first, victim = self._first, None
        pinned: list[Key] = []
        while first:
            key, uses = first.popitem(last=False)
            if uses:
                self._main[key] = 0
            elif is_pinned(key):
                pinned.append(key)
            else:
                victim = key
                break
        if pinned:
            for key in reversed(pinned):
                first[key] = 0
                first.move_to_end(key, last=False)
        if victim is not None:
            self._ghosts.add(victim)
            order = self._ghost_order
            order.append(victim)
            if len(order) > self.num_slots:
                self._ghosts.discard(order.popleft())
        return victim

    def _evict_main(self, is_pinned: Callable[[Key], bool]) -> Key | None:
        main = self._main
        pop, num_left = main.popitem, (self._MAX_USES + 1) * len(main)
        # A round more than uses can earn: then all that is left is pinned.
        while num_left:
            key, uses = pop(last=False)
            if uses:
                main[key] = uses - 1
            elif is_pinned(key):
                main[key] = 0
            else:
                return key
            num_left -= 1
        return None
