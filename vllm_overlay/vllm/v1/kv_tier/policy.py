# SPDX-License-Identifier: Apache-2.0
"""Which host slot makes room for the next block.

A policy orders keys and nothing else: it knows neither bytes nor slots. A key
is any hashable value; the pool uses the first key of a slot.
"""

import inspect
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable

from vllm.utils.import_utils import resolve_obj_by_qualname

Key = Hashable


class EvictionPolicy(ABC):
    """Order of eviction over the resident keys.

    Args:
        num_slots: Number of keys that can be resident at once.

    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots

    @abstractmethod
    def insert(self, key: Key) -> None:
        """`key`, not resident until now, became resident."""

    @abstractmethod
    def hit(self, key: Key) -> None:
        """Resident `key` was used."""

    @abstractmethod
    def remove(self, key: Key) -> None:
        """Resident `key` was invalidated: forget that it ever was here."""

    @abstractmethod
    def evict(self, is_pinned: Callable[[Key], bool]) -> Key | None:
        """Choose a resident key that is not pinned and drop it.

        Returns:
            The key, no longer resident, or None when every key is pinned.

        """


class LRU(EvictionPolicy):
    """Least recently used first."""

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
        return _pop_oldest(self._keys, is_pinned)


class ARC(EvictionPolicy):
    """Adaptive replacement: balances keys used once against keys used again.

    Two resident lists (`_once`, `_again`) and the ghosts of what each evicted
    last. A key that comes back while its ghost is remembered moves the target
    size of `_once` towards the list that gave it up too early. From Megiddo and
    Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003.
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
            if (key := _pop_oldest(resident, is_pinned)) is not None:
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
        if len(self._first) < self._FIRST * self.num_slots:
            key = self._evict_main(is_pinned)
            if key is not None:
                return key
        key = self._evict_first(is_pinned)
        # It may have moved to the second queue all that could make room.
        return self._evict_main(is_pinned) if key is None else key

    def _evict_first(self, is_pinned: Callable[[Key], bool]) -> Key | None:
        first, pinned, victim = self._first, [], None
        while first:
            key, uses = first.popitem(last=False)
            if uses:
                self._main[key] = 0
            elif is_pinned(key):
                pinned.append(key)
            else:
                victim = key
                break
        for key in reversed(pinned):
            first[key] = 0
            first.move_to_end(key, last=False)
        if victim is not None:
            self._ghosts.add(victim)
            self._ghost_order.append(victim)
            if len(self._ghost_order) > self.num_slots:
                self._ghosts.discard(self._ghost_order.popleft())
        return victim

    def _evict_main(self, is_pinned: Callable[[Key], bool]) -> Key | None:
        main = self._main
        # A round more than uses can earn: then all that is left is pinned.
        for _ in range((self._MAX_USES + 1) * len(main)):
            key, uses = next(iter(main.items()))
            if not uses and not is_pinned(key):
                del main[key]
                return key
            main.move_to_end(key)
            main[key] = max(uses - 1, 0)
        return None


def _pop_oldest(
    keys: "OrderedDict[Key, None]", is_pinned: Callable[[Key], bool]
) -> Key | None:
    for key in keys:
        if not is_pinned(key):
            del keys[key]
            return key
    return None


POLICIES: dict[str, type[EvictionPolicy]] = {
    "s3fifo": S3FIFO,
    "lru": LRU,
    "arc": ARC,
}


def make_policy(name: str, num_slots: int) -> EvictionPolicy:
    """Build a policy from its name or import path.

    Raises:
        ValueError: No such policy, or not an `EvictionPolicy`.

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
