# SPDX-License-Identifier: Apache-2.0
"""The eviction policies, and policies by name or import path."""

import inspect
from collections import OrderedDict, deque
from collections.abc import Callable

from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.kv_tier.eviction.base import (
    EvictionPolicy,
    Key,
    drop_oldest,
    most_with_dropped,
    pop_oldest,
)


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


class ARC(EvictionPolicy):
    """Adaptive replacement: balances keys used once against keys used again.

    Keeps two resident lists (`_once`, `_again`), and ghosts of the keys that each
    evicted last. A key that returns while it is a ghost moves the target size of
    `_once` towards the list that evicted it too early. From Megiddo and Modha, "ARC: A
    Self-Tuning, Low Overhead Replacement Cache", FAST 2003.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._once: OrderedDict[Key, None] = OrderedDict()
        self._again: OrderedDict[Key, None] = OrderedDict()
        self._once_ghosts: OrderedDict[Key, None] = OrderedDict()
        self._again_ghosts: OrderedDict[Key, None] = OrderedDict()
        self._once_target = 0.0

    def insert(self, key: Key) -> None:
        once_ghosts, again_ghosts = self._once_ghosts, self._again_ghosts
        if key in once_ghosts:
            step = max(1.0, len(again_ghosts) / len(once_ghosts))
            self._once_target = min(self._once_target + step, self.num_slots)
            del once_ghosts[key]
            self._again[key] = None
        elif key in again_ghosts:
            step = max(1.0, len(once_ghosts) / len(again_ghosts))
            self._once_target = max(self._once_target - step, 0)
            del again_ghosts[key]
            self._again[key] = None
        else:
            self._once[key] = None

    def hit(self, key: Key) -> None:
        self._once.pop(key, None)
        self._again[key] = None
        self._again.move_to_end(key)

    def remove(self, key: Key) -> None:
        if key in self._once:
            del self._once[key]
        else:
            del self._again[key]

    def evict(self, is_pinned: Callable[[Key], bool]) -> Key | None:
        once, again = (self._once, self._once_ghosts), (self._again, self._again_ghosts)
        over_target = len(self._once) > self._once_target or not self._again
        for resident, ghosts in (once, again) if over_target else (again, once):
            if (key := pop_oldest(resident, is_pinned)) is not None:
                ghosts[key] = None
                self._trim_ghosts()
                return key
        return None

    def _trim_ghosts(self) -> None:
        while len(self._once) + len(self._once_ghosts) > self.num_slots:
            if not self._once_ghosts:
                break
            self._once_ghosts.popitem(last=False)
        resident = len(self._once) + len(self._again)
        while resident + len(self._once_ghosts) + len(self._again_ghosts) > (
            2 * self.num_slots
        ):
            (self._again_ghosts or self._once_ghosts).popitem(last=False)


class AdaptiveSLRU(EvictionPolicy):
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


POLICIES: dict[str, type[EvictionPolicy]] = {
    "s3fifo": S3FIFO,
    "lru": LRU,
    "arc": ARC,
    "proven": AdaptiveSLRU,
}


def make_policy(name: str, num_slots: int) -> EvictionPolicy:
    """Make a policy from its name or import path.

    Args:
        name: A name in `POLICIES`, or `package.module.Class`.
        num_slots: Most keys that can be resident.

    Raises:
        ValueError: There is no such policy, or it is not an `EvictionPolicy`.

    """
    policy: object = None
    if isinstance(name, str):
        policy = POLICIES.get(name)
        if policy is None and "." in name:
            try:
                policy = resolve_obj_by_qualname(name)
            except (ImportError, AttributeError, ValueError) as e:
                raise ValueError(
                    f"--kv-offloading-config: eviction_policy {name!r} cannot be "
                    f"imported ({e}). Give the path package.module.Class."
                ) from e
    if (
        not isinstance(policy, type)
        or not issubclass(policy, EvictionPolicy)
        or inspect.isabstract(policy)
    ):
        raise ValueError(
            f"--kv-offloading-config: unknown eviction_policy {name!r}. Use one of "
            f"{', '.join(POLICIES)}, or the import path of an EvictionPolicy."
        )
    return policy(num_slots)
