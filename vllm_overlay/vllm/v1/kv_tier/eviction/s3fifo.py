# SPDX-License-Identifier: Apache-2.0
"""S3-FIFO: two first-in, first-out queues."""

from collections import OrderedDict, deque
from collections.abc import Callable

from vllm.v1.kv_tier.eviction.base import EvictionPolicy, Key


class S3FIFO(EvictionPolicy):
    """Two queues: keys enter the first, and move to the second when they are used.

    New keys enter `_first`; keys that return while they are ghosts enter `_main`. A
    used key at the end of `_first` moves to `_main` instead of being evicted; in
    `_main` each use earns it another round, at most three. Hits move nothing. From Yang
    et al., "FIFO Queues Are All You Need for Cache Eviction", SOSP 2023.

    Two numbers differ from the paper. `_first` has half of the slots, not a tenth,
    since a conversation returns after minutes and many other keys. One use is enough,
    not two, since uses of device blocks do not appear here.
    """

    _FIRST = 1 / 2
    _MAX_USES = 3

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._min_first = self._FIRST * num_slots
        # Uses since the key entered its queue; oldest key first.
        self._first: OrderedDict[Key, int] = OrderedDict()
        self._main: OrderedDict[Key, int] = OrderedDict()
        # The order may list keys twice, or keys that returned, so some ghosts are
        # dropped early.
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
        # It may have moved all candidates to the second queue.
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
        # One round more than uses can earn; then all remaining keys are pinned.
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
