# SPDX-License-Identifier: Apache-2.0
"""Hints and quotas around a policy that knows of neither.

The policy says what it would give up. What clients want to go first goes before that.
What it gives up and shall stay, since it is retained or its tenant is below its share,
leaves the policy and is **kept** here, until it is used (then the policy has it again),
until its time is over, or until there is too much of it. So each key is looked at once
for each time that the policy gives it up, and any policy will do.

Nothing is sure to stay. All that is retained has half of the slots, and each of those
who retain an equal share of these; each tenant with a quota has its share. Beyond that
the lowest priority goes, the oldest first.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping

from vllm.v1.kv_tier.eviction.base import NO_HINT, EvictionPolicy, Key
from vllm.v1.kv_tier.eviction.ends import Ends
from vllm.v1.kv_tier.eviction.kept import ByPriority, Kept
from vllm.v1.kv_tier.eviction.said import Said

KEPT_PART = 1 / 2
"""Part of the slots for what is retained, beyond the quotas. Others have the rest."""

_MAX_ROUNDS = 64
"""Keys in a row that are kept instead of being evicted. A step must not wait for more:
where a whole bulk of them is the next to go, one in so many goes all the same."""
_MAX_LOOKS = 2048
"""Keys in a step that are looked at beyond those that go: kept, expired, or low no
longer. Then retained keys go as they come."""


class Share:
    """What a tenant with a quota has.

    Args:
        limit: Keys up to which none of them makes room for others.

    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # The first of a dict is slow to find when many before it have left.
        self.resident: OrderedDict[Key, None] = OrderedDict()
        """The oldest first."""
        self.kept = ByPriority()

    @property
    def excess(self) -> int:
        """Keys above the limit."""
        return len(self.resident) - self.limit


class Hinted(EvictionPolicy):
    """Carries hints and quotas out for any policy.

    Args:
        policy: What orders keys of which nothing was said.
        said: What clients say of keys.
        quotas: Parts of the slots, by tenant.

    """

    def __init__(
        self, policy: EvictionPolicy, said: Said, quotas: Mapping[str, float]
    ) -> None:
        super().__init__(policy.num_slots)
        self.num_yielded = 0
        """Retained keys that were given up all the same, since whoever reports it set
        this to 0."""
        self._policy = policy
        self._said = said
        self.orders_itself = type(policy).told is not EvictionPolicy.told
        """Whether the policy wants to be told of all keys."""
        self._low = ByPriority()
        self._kept = Kept()
        self._max_kept = int(KEPT_PART * self.num_slots)
        self.shares: dict[Hashable, Share] = {
            name: Share(int(part * self.num_slots)) for name, part in quotas.items()
        }
        self._share_of: dict[Key, Share] = {}
        # No set: Python's garbage collector looks at nothing in a dict of plain values.
        self.kept: dict[Key, None] = {}
        """Keys that would not be here but for what was said, or for a quota. Public,
        since asking of each block of a prefix must cost nothing."""
        # When what is kept expires.
        self._ends = Ends()
        # Who tells of no steps has no limit.
        self._num_looks: float = float("inf")

    def begin_step(self) -> None:
        """A step begins, in which so many keys can be looked at."""
        self._num_looks = _MAX_LOOKS

    # ------------------------------------------------------------- as a policy

    def insert(self, key: Key) -> None:
        self._policy.insert(key)
        if self._said.get(key) is not None:
            self._classify(key)

    def hit(self, key: Key) -> None:
        if key in self.kept:
            self._discard(key)
            self._policy.insert(key)
        self._policy.hit(key)

    def hits(self, keys: Collection[Key]) -> None:
        # Each block that is loaded comes by here, and mostly none is kept.
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

    def changed(self, key: Key) -> None:
        """Something new was said of resident `key`, which is being used."""
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
                # What was said of a key may be forgotten: a flood says much.
                if self._said.get(key) is None and key not in self._share_of:
                    return key
                key = self._keep(key)
            if key is None:
                key = self._evict(is_pinned)
        if key is not None:
            self._left(key)
            self.num_yielded += self._said.is_retained(key)
        return key

    # -------------------------------------------------------------- what is said

    def _classify(self, key: Key) -> None:
        about = self._said.about(key)
        self._low.discard(key)
        if about is None:
            return
        if self.orders_itself:
            self._policy.told(key, about)
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
            # That may hold no longer.
            if self._said.is_low(key):
                self._policy.remove(key)
                return key
        return None

    def _evict(self, is_pinned: Callable[[Key], bool]) -> Key | None:
        """The policy gave up one that is kept, and gives up others."""
        evict, get, share_of = self._policy.evict, self._said.get, self._share_of
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
        """The policy gave `key` up. Returns what goes instead, maybe `key`; None: it is
        kept, and nothing goes for that."""
        about, share = self._said.about(key), self._share_of.get(key)
        priority = NO_HINT
        if about is not None and not self.orders_itself and self._said.is_retained(key):
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
        """The oldest key of the tenant that is furthest above its share."""
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
        """A key that was kept for no other reason than that it was retained."""
        ends, now = self._ends, self._said.clock()
        while self._num_looks > 0 and ends.is_due(now):
            self._num_looks -= 1
            if (key := ends.pop()) is None:
                continue
            about = self._said.about(key)
            if about is not None and about.priority > NO_HINT and about.until > now:
                # Said again since, while it could not be told.
                if about.until < float("inf"):
                    ends.set(key, about.until)
                continue
            if self._kept.discard(key):
                return key
            share = self._share_of.get(key)
            if share is not None and share.kept.discard(key):
                share.kept.add(key, NO_HINT)
        return None
