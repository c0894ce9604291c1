# SPDX-License-Identifier: Apache-2.0
"""The eviction policies, and policies by name or import path."""

import inspect
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence

from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.kv_tier.eviction.base import EvictionPolicy, Key
from vllm.v1.kv_tier.eviction.places import PlacedPolicy
from vllm.v1.kv_tier.eviction.recent import RecentKeys


class LRU(PlacedPolicy):
    """Evicts the least recently used key."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, num_queues=1)
        (self._all,) = self._queues.queues

    def insert(self, key: Key) -> None:
        self._queues.append(self._all, self._entered(key))

    def hit(self, key: Key) -> None:
        self._queues.move(self._all, self._places.place(key))

    def remove(self, key: Key) -> None:
        self._queues.remove(self._places.place(key))
        self._left(key)

    def evict(self, is_pinned: Callable[[Key], bool]) -> Key | None:
        return self._pop_first(self._all, is_pinned)


class ARC(PlacedPolicy):
    """Adaptive replacement: balances keys used once against keys used again.

    Keeps two resident lists (`_once`, `_again`), and ghosts of the keys that each
    evicted last. A key that returns while it is a ghost moves the target size of
    `_once` towards the list that evicted it too early. From Megiddo and Modha, "ARC: A
    Self-Tuning, Low Overhead Replacement Cache", FAST 2003.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, num_queues=2)
        self._once, self._again = self._queues.queues
        self._is_again = bytearray(num_slots)
        self._num_once = self._num_again = 0
        self._once_ghosts: OrderedDict[Key, None] = OrderedDict()
        self._again_ghosts: OrderedDict[Key, None] = OrderedDict()
        self._once_target = 0.0

    def insert(self, key: Key) -> None:
        once_ghosts, again_ghosts = self._once_ghosts, self._again_ghosts
        if key in once_ghosts:
            step = max(1.0, len(again_ghosts) / len(once_ghosts))
            self._once_target = min(self._once_target + step, self.num_slots)
            del once_ghosts[key]
        elif key in again_ghosts:
            step = max(1.0, len(once_ghosts) / len(again_ghosts))
            self._once_target = max(self._once_target - step, 0)
            del again_ghosts[key]
        else:
            place = self._entered(key)
            self._is_again[place] = False
            self._num_once += 1
            self._queues.append(self._once, place)
            return
        place = self._entered(key)
        self._is_again[place] = True
        self._num_again += 1
        self._queues.append(self._again, place)

    def hit(self, key: Key) -> None:
        place = self._places.place(key)
        self._queues.move(self._again, place)
        if not self._is_again[place]:
            self._is_again[place] = True
            self._num_once -= 1
            self._num_again += 1

    def remove(self, key: Key) -> None:
        place = self._places.place(key)
        self._queues.remove(place)
        self._left(key)
        if self._is_again[place]:
            self._num_again -= 1
        else:
            self._num_once -= 1

    def evict(self, is_pinned: Callable[[Key], bool]) -> Key | None:
        over_target = self._num_once > self._once_target or not self._num_again
        for from_once in (over_target, not over_target):
            queue = self._once if from_once else self._again
            if (key := self._pop_first(queue, is_pinned)) is None:
                continue
            if from_once:
                self._num_once -= 1
                self._once_ghosts[key] = None
            else:
                self._num_again -= 1
                self._again_ghosts[key] = None
            self._trim_ghosts()
            return key
        return None

    def _trim_ghosts(self) -> None:
        while self._num_once + len(self._once_ghosts) > self.num_slots:
            if not self._once_ghosts:
                break
            self._once_ghosts.popitem(last=False)
        # More keys are resident than that while the number of slots is shrinking.
        resident = self._num_once + self._num_again
        most = max(2 * self.num_slots - resident, 0)
        while len(self._once_ghosts) + len(self._again_ghosts) > most:
            (self._again_ghosts or self._once_ghosts).popitem(last=False)


class AdaptiveSLRU(PlacedPolicy):
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
    _WAS_PROVEN = (1 << 32) - 1
    """Of a ghost: LRU evicted it from `_proven`. Insertions are counted modulo this
    number, so that they take four bytes."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, num_queues=2)
        self._new, self._proven = self._queues.queues
        self._is_proven = bytearray(num_slots)
        self._num_proven = 0
        # The insertion count at the last use of the key at each place.
        self._used = array("I", [0]) * num_slots
        self._ghosts = RecentKeys(num_slots)
        self._num_insertions = 0
        self._credit = 0.0
        self._after, self._before = self._queues.after, self._queues.before

    # Hot paths with few calls: each stored block, each loaded one and each victim.

    def insert(self, key: Key) -> None:
        self.insert_at((self._entered(key),), (key,))

    def insert_at(self, places: Sequence[int], keys: Sequence[Key]) -> None:
        before, after, used = self._before, self._after, self._used
        is_proven, now = self._is_proven, self._num_insertions
        for place, last_use in zip(places, self._ghosts.pop(keys), strict=True):
            now = (now + 1) % self._WAS_PROVEN
            if self._credit > 0 and now % self._INSERTIONS_PER_CREDIT == 0:
                self._credit = max(0.0, self._credit - 1)
            used[place] = now
            if last_use is None:
                is_proven[place] = False
                queue = self._new
            else:
                if last_use == self._WAS_PROVEN:
                    self._earn(1)
                elif (now - last_use) % self._WAS_PROVEN < self.num_slots:
                    self._earn(-1)
                self._num_proven += 1
                is_proven[place] = True
                queue = self._proven
            # As `Queues.append`.
            before[place] = last = before[queue]
            after[last] = before[queue] = place
            after[place] = queue
        self._num_insertions = now

    def hit(self, key: Key) -> None:
        self.hit_places((self._places.place(key),))

    def hits(self, keys: Collection[Key]) -> None:
        self.hit_places([self._places.place(key) for key in keys])

    def hit_places(self, places: Collection[int]) -> None:
        after, before = self._after, self._before
        used, is_proven, modulus = self._used, self._is_proven, self._WAS_PROVEN
        now, last = self._num_insertions, before[self._proven]
        num_new = 0
        for place in places:
            if not is_proven[place]:
                is_proven[place] = True
                num_new += 1
            elif (now - used[place]) % modulus >= self.num_slots:
                self._earn(1)
            used[place] = now
            if place != last:
                # As `Queues.move`, but the queue's own end is set once.
                one, other = before[place], after[place]
                after[one], before[other] = other, one
                after[last], before[place] = place, last
                last = place
        after[last] = self._proven
        before[self._proven] = last
        self._num_proven += num_new

    def remove(self, key: Key) -> None:
        place = self._places.place(key)
        self._queues.remove(place)
        self._left(key)
        self._num_proven -= self._is_proven[place]

    def evict(self, is_pinned: Callable[[Key], bool]) -> Key | None:
        new, proven = self._new, self._proven
        from_new = self._evicts_new(self._after[new], self._after[proven])
        for queue in (new, proven) if from_new else (proven, new):
            if (place := self._first(queue, is_pinned)) is not None:
                key = self._places.keys[place]
                self._queues.remove(place)
                self._gone([key], [place])
                return key
        return None

    def evict_all(self, num_keys: int) -> list[Key]:
        new, proven, keys = self._new, self._proven, self._places.keys
        before, after, used = self._before, self._after, self._used
        now, modulus = self._num_insertions, self._WAS_PROVEN
        num_proven = self._num_proven
        # Among few proven keys, new ones go first.
        num_few = self._PROVEN * self.num_slots if self._credit > 0 else 0
        victims, places = [], []
        for _ in range(num_keys):
            # As `_evicts_new`, `_first` and `Queues.remove`.
            place, other = after[new], after[proven]
            if place == new:
                if other == proven:
                    break
                queue, place, num_proven = proven, other, num_proven - 1
            elif (
                num_proven <= num_few
                or (now - used[place]) % modulus >= (now - used[other]) % modulus
            ):
                queue = new
            else:
                queue, place, num_proven = proven, other, num_proven - 1
            after[queue] = other = after[place]
            before[other] = queue
            victims.append(keys[place])
            places.append(place)
        self._gone(victims, places)
        return victims

    def _evicts_new(self, new: int, proven: int) -> bool:
        """Whether the first key of `_new` goes before that of `_proven`.

        Args:
            new: Its place.
            proven: That of the other one.

        """
        is_few = self._credit > 0 and (
            self._num_proven <= self._PROVEN * self.num_slots
        )
        if new == self._new or proven == self._proven or is_few:
            return new != self._new
        # Hits do not count as insertions: of two keys of equal age, the hit is more
        # recent.
        return self._age(new) >= self._age(proven)

    def _age(self, place: int) -> int:
        """Insertions since the last use of the key at `place`."""
        return (self._num_insertions - self._used[place]) % self._WAS_PROVEN

    def _gone(self, keys: list[Key], places: list[int]) -> None:
        """Remember `keys`, which were evicted from `places`."""
        used, is_proven = self._used, self._is_proven
        for key in keys if self._own is not None else ():
            self._left(key)
        num_proven = sum(map(is_proven.__getitem__, places))
        self._num_proven -= num_proven
        if num_proven == 0:
            self._ghosts.add(keys, map(used.__getitem__, places))
        elif self._credit > 0:
            new = [i for i, place in enumerate(places) if not is_proven[place]]
            self._ghosts.add([keys[i] for i in new], [used[places[i]] for i in new])
        else:
            values = [self._WAS_PROVEN if is_proven[i] else used[i] for i in places]
            self._ghosts.add(keys, values)

    def _earn(self, credit: int) -> None:
        most = self._MAX_CREDIT * self.num_slots
        self._credit = min(max(self._credit + credit, -most), most)


class S3FIFO(PlacedPolicy):
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
        super().__init__(num_slots, num_queues=2)
        self._fresh, self._main = self._queues.queues
        self._is_main = bytearray(num_slots)
        self._num_first = self._num_main = 0
        # Uses since the key entered its queue.
        self._uses = bytearray(num_slots)
        # The order may list keys twice, or keys that returned, so some ghosts are
        # dropped early.
        self._ghosts: set[Key] = set()
        self._ghost_order: deque[Key] = deque()

    def insert(self, key: Key) -> None:
        place = self._entered(key)
        self._uses[place] = 0
        if key in self._ghosts:
            self._ghosts.remove(key)
            self._enter_main(place)
        else:
            self._is_main[place] = False
            self._num_first += 1
            self._queues.append(self._fresh, place)

    def _enter_main(self, place: int) -> None:
        self._is_main[place] = True
        self._num_main += 1
        self._queues.append(self._main, place)

    def hit(self, key: Key) -> None:
        place = self._places.place(key)
        if self._uses[place] < self._MAX_USES:
            self._uses[place] += 1

    def remove(self, key: Key) -> None:
        place = self._places.place(key)
        self._take(place)
        self._left(key)

    def _take(self, place: int) -> None:
        """Remove `place` from its queue."""
        self._queues.remove(place)
        if self._is_main[place]:
            self._num_main -= 1
        else:
            self._num_first -= 1

    def evict(self, is_pinned: Callable[[Key], bool]) -> Key | None:
        if self._num_first < self._FIRST * self.num_slots:
            key = self._evict_main(is_pinned)
            if key is not None:
                return key
        key = self._evict_first(is_pinned)
        # It may have moved all candidates to the second queue.
        return self._evict_main(is_pinned) if key is None else key

    def _evict_first(self, is_pinned: Callable[[Key], bool]) -> Key | None:
        keys, after = self._places.keys, self._queues.after
        place = after[self._fresh]
        while place != self._fresh:
            following, key = after[place], keys[place]
            if self._uses[place]:
                self._take(place)
                self._uses[place] = 0
                self._enter_main(place)
            elif not is_pinned(key):
                self._take(place)
                self._left(key)
                self._remember(key)
                return key
            place = following
        return None

    def _remember(self, victim: Key) -> None:
        self._ghosts.add(victim)
        order = self._ghost_order
        order.append(victim)
        if len(order) > self.num_slots:
            self._ghosts.discard(order.popleft())

    def _evict_main(self, is_pinned: Callable[[Key], bool]) -> Key | None:
        keys, queues, main = self._places.keys, self._queues, self._main
        # One round more than uses can earn; then all remaining keys are pinned.
        for _ in range((self._MAX_USES + 1) * self._num_main):
            place = queues.after[main]
            key = keys[place]
            if self._uses[place]:
                self._uses[place] -= 1
            elif not is_pinned(key):
                self._take(place)
                self._left(key)
                return key
            queues.move(main, place)
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
