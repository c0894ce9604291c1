# SPDX-License-Identifier: Apache-2.0
"""Hints and quotas around a policy that knows of neither.

Keys with a low priority are evicted before the policy is asked. When the policy evicts
a key that should stay, because it is retained or its tenant is below its quota, the key
leaves the policy and is **kept** here: until it is used (then the policy gets it back),
until its hint expires, or until too many keys are kept. So each key is looked at once
per eviction by the policy, and any policy can be used.

Keeping is not guaranteed. Retained keys can take half of the slots, with equal shares
for all tenants that retain; each tenant with a quota also has its share. Beyond that,
keys are evicted by priority, then by age.
"""

import heapq
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping

from vllm.v1.kv_tier.eviction.base import (
    NO_HINT,
    EvictionPolicy,
    Key,
    KeyHint,
    PartedDict,
    Table,
    drop_oldest,
)

_MANY = 1 << 16
"""Keys from which on a table is in parts."""

_Fields = tuple[int, float, Hashable, int]
"""Of `KeyHint`."""


class RetentionHints:
    """Remembers the hints for keys, also after their blocks are gone.

    A key belongs to the first tenant that uses it, so that a flood of requests cannot
    take over shared keys. Another tenant cannot lower a hint while it is valid. A
    priority below `NO_HINT` is valid until a request uses the key without that hint.

    Args:
        num_keys: Most keys that are remembered; those with the latest hints stay.
        clock: Time in seconds.

    """

    def __init__(self, num_keys: int, clock: Callable[[], float]) -> None:
        # In parts, since Python rebuilds a dict of 400,000 keys in 20 ms or more.
        num_parts = 64 if num_keys >= _MANY else 1
        self._max_in_part = num_keys // num_parts
        self._last_part = num_parts - 1
        self.clock = clock
        # Plain tuples: once Python's garbage collector has seen them, it looks at none
        # of them again. It would at each `KeyHint`, of which there may be as many as
        # there are keys: 400,000 of them took it 90 ms.
        self._parts: list[Table[_Fields]] = [Table() for _ in range(num_parts)]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def clear(self) -> None:
        """Forget all that was said."""
        for part in self._parts:
            part.clear()

    def get(self, key: Key) -> _Fields | None:
        """The hints for a key, as the fields of `KeyHint`; None if there are none."""
        return self._parts[hash(key) & self._last_part].get(key)

    def is_retained(self, key: Key) -> bool:
        """Whether `key` has a valid priority above `NO_HINT`."""
        return (
            (about := self.get(key)) is not None
            and about[0] > NO_HINT
            and about[1] > self.clock()
        )

    def is_low(self, key: Key) -> bool:
        """Whether `key` has a valid priority below `NO_HINT`."""
        return (
            (about := self.get(key)) is not None
            and about[0] < NO_HINT
            and about[1] > self.clock()
        )

    def about(self, key: Key) -> KeyHint | None:
        """As `get`, with names."""
        fields = self.get(key)
        return None if fields is None else KeyHint(*fields)

    def update(
        self,
        key: Key,
        priority: int | None,
        until: float = math.inf,
        tenant: Hashable = None,
        turn: int = 1,
    ) -> KeyHint:
        """Record that a request uses `key`.

        Args:
            key: Key of a block.
            priority: Priority that the request gives; None if it gives none.
            until: When the priority expires.
            tenant: Tenant of the request.
            turn: Turn of its conversation.

        Returns:
            The hints that are valid from now on.

        """
        part = self._parts[hash(key) & self._last_part]
        old = part.pop(key, None)
        if old is not None:
            old_priority, old_until, old_tenant, _ = old
            outlives = old_until > self.clock() and old_priority > NO_HINT
            if outlives and priority is None:
                priority, until = old_priority, old_until
            elif outlives and priority is not None and old_tenant != tenant:
                priority = max(priority, old_priority)
                until = max(until, old_until)
            if old_tenant is not None:
                tenant = old_tenant
        if priority is None:
            priority, until = NO_HINT, math.inf
        if priority != NO_HINT or tenant is not None:
            part[key] = priority, until, tenant, turn
            drop_oldest(part, self._max_in_part)
        return KeyHint(priority, until, tenant, turn)

    def renew(self, keys: Collection[Key], about: KeyHint) -> bool:
        """Give all of `keys` the hints `about`, whose priority is above `NO_HINT`.

        Faster than `update` for the blocks of a long prefix.

        Returns:
            Whether it did. Nothing changes if another tenant has a hint for one of
            them, or if one has a low priority.

        """
        # Keys of a prefix have few different hints.
        for priority, _, tenant, _ in set(filter(None, map(self.get, keys))):
            if tenant != about.tenant or priority < NO_HINT:
                return False
        fields = about.priority, about.until, about.tenant, about.turn
        parts, last = self._parts, self._last_part
        for key in keys:
            part = parts[hash(key) & last]
            part.pop(key, None)
            part[key] = fields
        for part in parts:
            drop_oldest(part, self._max_in_part)
        return True

    def record_plain_use(self, key: Key) -> bool:
        """Record that a request without hints uses `key`.

        Returns whether its hint changed.
        """
        about = self.get(key)
        if about is None or about[0] >= NO_HINT:
            return False
        self.update(key, None)
        return True


_FLOAT, _INT = struct.Struct("<d"), struct.Struct("<q")
_NUMBER_BITS = 64


def _order(seconds: float) -> int:
    """An integer that is larger where `seconds`, from 0 on, are more."""
    return _INT.unpack(_FLOAT.pack(seconds))[0]


class ExpiryQueue:
    """Expiry times; at most one for each key.

    Entries of keys that have another end by now, or none, stay in a heap until their
    time has come, or until they are found here: while entries are added to the younger
    of two heaps, the older one is emptied, a few entries for each. So there are no more
    than a few entries for each key, and nothing ever goes through all of them.

    An entry is an integer, of its time and a number of its own. Python's garbage
    collector would track tuples, and scan 100,000 of them at once.
    """

    _MOVED = 4
    """Entries of the older heap that are moved when one is added."""
    _FEW = 64
    """Invalid entries that are tolerated."""

    def __init__(self) -> None:
        # The entry of each key, and the keys of those that hold.
        self._entry: PartedDict[Key, int] = PartedDict()
        self._key: PartedDict[int, Key] = PartedDict()
        self._num_set = 0
        self._young: list[int] = []
        self._old: list[int] = []

    def __len__(self) -> int:
        return len(self._entry)

    @property
    def num_entries(self) -> int:
        """Number of entries, including invalid ones."""
        return len(self._young) + len(self._old)

    def set(self, key: Key, until: float) -> None:
        """Set the expiry time of `key`, replacing an earlier one."""
        self.discard(key)
        self._num_set += 1
        entry = _order(until) << _NUMBER_BITS | self._num_set
        self._entry[key] = entry
        self._key[entry] = key
        heapq.heappush(self._young, entry)
        for _ in range(min(self._MOVED, len(self._old))):
            # The last entry of a heap can be removed without restoring its order.
            entry = self._old.pop()
            if entry in self._key:
                heapq.heappush(self._young, entry)
        if not self._old and len(self._young) > 2 * len(self._entry) + self._FEW:
            self._old, self._young = self._young, []

    def discard(self, key: Key) -> None:
        """Remove the expiry time of `key`."""
        if (entry := self._entry.pop(key)) is not None:
            self._key.pop(entry)

    def is_due(self, now: float) -> bool:
        """Whether there is a due entry for `pop`."""
        heap = self._first()
        return bool(heap) and heap[0] >> _NUMBER_BITS <= _order(now)

    def pop(self) -> Key | None:
        """Remove the earliest entry.

        Returns its key, or None if the entry is invalid.
        """
        key = self._key.pop(heapq.heappop(self._first()))
        if key is not None:
            self._entry.pop(key)
        return key

    def _first(self) -> list[int]:
        """The heap with the earliest entry."""
        young, old = self._young, self._old
        return old if old and not (young and young[0] < old[0]) else young


class ByPriority:
    """Keys by priority, and in order of insertion within a priority."""

    def __init__(self) -> None:
        self._priority: PartedDict[Key, int] = PartedDict()
        self._queues: dict[int, OrderedDict[Key, None]] = {}

    def __len__(self) -> int:
        return len(self._priority)

    def __contains__(self, key: Key) -> bool:
        return key in self._priority

    def __iter__(self) -> Iterator[Key]:
        return iter(self._priority)

    def add(self, key: Key, priority: int) -> None:
        """Add `key`, which must not be present, as the last of its priority."""
        self._priority[key] = priority
        self._queues.setdefault(priority, OrderedDict())[key] = None

    def discard(self, key: Key) -> bool:
        """Remove `key`. Returns whether it was present."""
        priority = self._priority.pop(key)
        if priority is None:
            return False
        queue = self._queues[priority]
        del queue[key]
        if not queue:
            del self._queues[priority]
        return True

    def pop(self) -> Key:
        """Remove and return the first key of the lowest priority. There must be one."""
        # There are few different priorities.
        key = next(iter(self._queues[min(self._queues)]))
        self.discard(key)
        return key


class ProtectedKeys:
    """Keys of several owners, with equal shares for all.

    An owner with more than its share cannot displace keys of others.
    """

    def __init__(self) -> None:
        self._owner: PartedDict[Key, Hashable] = PartedDict()
        self._keys: OrderedDict[Hashable, ByPriority] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owner)

    def __contains__(self, key: Key) -> bool:
        return key in self._owner

    def __iter__(self) -> Iterator[Key]:
        return iter(self._owner)

    def add(self, key: Key, priority: int, owner: Hashable) -> None:
        """Add `key`, which must not be present."""
        self._owner[key] = owner
        self._keys.setdefault(owner, ByPriority()).add(key, priority)

    def discard(self, key: Key) -> bool:
        """Remove `key`. Returns whether it was present."""
        if key not in self._owner:
            return False
        owner = self._owner.pop(key)
        keys = self._keys[owner]
        keys.discard(key)
        if not keys:
            del self._keys[owner]
        return True

    def pop(self) -> Key:
        """Remove and return a key of an owner with at least an equal share.

        There must be one.

        It is the first key of the owner's lowest priority.
        """
        while True:
            owner, keys = next(iter(self._keys.items()))
            if len(keys) * len(self._keys) >= len(self):
                break
            # Rotating the owners avoids a search for the largest.
            self._keys.move_to_end(owner)
        key = keys.pop()
        self._owner.pop(key)
        if not keys:
            del self._keys[owner]
        return key


KEPT_PART = 1 / 2
"""Part of the slots for retained keys, beyond the quotas."""

_MAX_ROUNDS = 64
"""Most keys that are kept in a row instead of being evicted, to bound the work of a
step. After that many, one is evicted anyway."""
_MAX_LOOKS = 1024
"""Most keys that a step looks at beyond its victims: kept, expired, or no longer low.
After that, keys are evicted in the policy's order."""


class Share:
    """Keys of a tenant with a quota.

    Args:
        limit: Number of keys that other tenants cannot evict.

    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # An OrderedDict, since finding the first key of a dict is slow after many
        # removals.
        self.resident: OrderedDict[Key, None] = OrderedDict()
        """Oldest first."""
        self.kept = ByPriority()

    @property
    def excess(self) -> int:
        """Number of keys above the limit."""
        return len(self.resident) - self.limit


class Hinted(EvictionPolicy):
    """Applies hints and quotas to any policy.

    Args:
        policy: Orders keys without hints.
        said: Hints by key.
        quotas: Parts of the slots, by tenant.

    """

    def __init__(
        self, policy: EvictionPolicy, said: RetentionHints, quotas: Mapping[str, float]
    ) -> None:
        super().__init__(policy.num_slots)
        self.num_yielded = 0
        """Retained keys that were evicted anyway, since the reader of this count reset
        it."""
        self._policy = policy
        self._hints = said
        self.orders_itself = type(policy).set_hint is not EvictionPolicy.set_hint
        """Whether the policy handles hints itself."""
        self._low = ByPriority()
        self._kept = ProtectedKeys()
        self._quotas = quotas
        self.shares: dict[Hashable, Share] = {name: Share(0) for name in quotas}
        self._set_limits()
        self._share_of: dict[Key, Share] = {}
        # No set: Python's garbage collector looks at nothing in a dict of plain values.
        self.kept: dict[Key, None] = {}
        """Keys that are resident only because of a hint or a quota. Public, since
        testing each block of a prefix must be cheap."""
        # Expiry times of kept keys.
        self._ends = ExpiryQueue()
        # Unlimited for users that do not call `begin_step`.
        self._num_looks: float = float("inf")

    def resize(self, num_slots: int) -> None:
        super().resize(num_slots)
        self._policy.resize(num_slots)
        self._set_limits()

    def _set_limits(self) -> None:
        self._max_kept = int(KEPT_PART * self.num_slots)
        for name, part in self._quotas.items():
            self.shares[name].limit = int(part * self.num_slots)

    def begin_step(self) -> None:
        """Start a step, and reset the number of keys it may look at."""
        self._num_looks = _MAX_LOOKS

    # ------------------------------------------------------------- as a policy

    def insert(self, key: Key) -> None:
        self._policy.insert(key)
        if self._hints.get(key) is not None:
            self._classify(key)

    def hit(self, key: Key) -> None:
        if key in self.kept:
            self._discard(key)
            self._policy.insert(key)
        self._policy.hit(key)

    def hits(self, keys: Collection[Key]) -> None:
        # A hot path: each loaded block passes here, and usually none is kept.
        if self.kept.keys().isdisjoint(keys):
            self._policy.hits(keys)
        else:
            super().hits(keys)

    def remove(self, key: Key) -> None:
        if key in self.kept:
            self._discard(key)
        else:
            self._policy.remove(key)
        self._left(key)

    def update(self, key: Key) -> None:
        """Apply new hints for resident `key`, which is in use."""
        if key in self.kept:
            self._discard(key)
            self._policy.insert(key)
        self._classify(key)

    def evict(self, is_pinned: Callable[[Key], bool]) -> Key | None:
        key = self._pop_expired() if self._ends.num_entries else None
        if key is None and self._low:
            key = self._pop_low()
        if key is None:
            key = self._policy.evict(is_pinned)
            if key is not None:
                # The hint of a key may have been dropped, since their number is
                # limited.
                if self._hints.get(key) is None and key not in self._share_of:
                    return key
                key = self._keep(key)
            if key is None:
                key = self._evict(is_pinned)
        if key is not None:
            self._left(key)
            self.num_yielded += self._hints.is_retained(key)
        return key

    # -------------------------------------------------------------- what is said

    def _classify(self, key: Key) -> None:
        about = self._hints.about(key)
        self._low.discard(key)
        if about is None:
            return
        if self.orders_itself:
            self._policy.set_hint(key, about)
        elif about.priority < NO_HINT:
            self._low.add(key, about.priority)
        if key not in self._share_of and (share := self.shares.get(about.tenant)):
            self._share_of[key] = share
            share.resident[key] = None

    def _left(self, key: Key) -> None:
        if self._low:
            self._low.discard(key)
        self.kept.pop(key, None)
        self._ends.discard(key)
        if (share := self._share_of.pop(key, None)) is not None:
            del share.resident[key]

    # ---------------------------------------------------------------- who goes

    def _pop_low(self) -> Key | None:
        while self._low and self._num_looks > 0:
            self._num_looks -= 1
            key = self._low.pop()
            # The hint may have changed or expired.
            if self._hints.is_low(key):
                self._policy.remove(key)
                return key
        return None

    def _evict(self, is_pinned: Callable[[Key], bool]) -> Key | None:
        """Ask the policy for other victims, after it evicted a key that is kept."""
        evict, get, share_of = self._policy.evict, self._hints.get, self._share_of
        for _ in range(_MAX_ROUNDS):
            if self._num_looks <= 0:
                break
            self._num_looks -= 1
            key = evict(is_pinned)
            if key is None:
                break
            if get(key) is None and key not in share_of:
                return key
            if (victim := self._keep(key)) is not None:
                return victim
        if (key := self._pop_above_share()) is not None:
            return key
        if self._kept:
            return self._kept.pop()
        if (key := evict(is_pinned)) is not None:
            return key
        full = max(
            self.shares.values(), key=lambda share: len(share.kept), default=None
        )
        return full.kept.pop() if full is not None and full.kept else None

    def _keep(self, key: Key) -> Key | None:
        """Handle a key that the policy evicted.

        Returns:
            The key to evict instead, possibly `key`; None if it is kept at no key's
            expense.

        """
        about, share = self._hints.about(key), self._share_of.get(key)
        priority = NO_HINT
        if (
            about is not None
            and not self.orders_itself
            and self._hints.is_retained(key)
        ):
            priority = about.priority
            if about.until < float("inf"):
                self._ends.set(key, about.until)
            if share is None:
                self.kept[key] = None
                self._kept.add(key, priority, about.tenant)
                return self._kept.pop() if len(self._kept) > self._max_kept else None
        elif share is None:
            return key
        self.kept[key] = None
        share.kept.add(key, priority)
        return share.kept.pop() if share.excess > 0 else None

    def _pop_above_share(self) -> Key | None:
        """Remove the oldest key of the tenant furthest above its share, if any."""
        most = max(self.shares.values(), key=lambda share: share.excess, default=None)
        if most is None or most.excess <= 0:
            return None
        key = next(iter(most.resident))
        if not most.kept.discard(key):
            self._policy.remove(key)
        return key

    # -------------------------------------------------------------- what is kept

    def _discard(self, key: Key) -> None:
        del self.kept[key]
        self._ends.discard(key)
        if not self._kept.discard(key):
            self._share_of[key].kept.discard(key)

    def _pop_expired(self) -> Key | None:
        """Remove a key that was kept only because of a hint that has expired."""
        ends, now = self._ends, self._hints.clock()
        while self._num_looks > 0 and ends.is_due(now):
            self._num_looks -= 1
            if (key := ends.pop()) is None:
                continue
            about = self._hints.about(key)
            if about is not None and about.priority > NO_HINT and about.until > now:
                # Retained again since; `update` was not called for it.
                if about.until < float("inf"):
                    ends.set(key, about.until)
                continue
            if self._kept.discard(key):
                return key
            share = self._share_of.get(key)
            if share is not None and share.kept.discard(key):
                share.kept.add(key, NO_HINT)
        return None
