# SPDX-License-Identifier: Apache-2.0
"""Applies hints and quotas around a policy that knows of neither.

Keys with a low priority are evicted before the policy is asked. When the policy evicts
a key that should stay, because it is retained or its tenant is below its quota, the key
leaves the policy and is **kept** here: until it is used (then the policy gets it back),
until its hint expires, or until too many keys are kept. So each key is looked at once
per eviction by the policy, and any policy can be used.

Keeping is not guaranteed. Retained keys can take half of the slots, with equal shares
for all tenants that retain; each tenant with a quota also has its share. Beyond that,
keys are evicted by priority, then by age.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping

from vllm.v1.kv_tier.eviction.base import NO_HINT, EvictionPolicy, Key
from vllm.v1.kv_tier.eviction.ends import Ends
from vllm.v1.kv_tier.eviction.kept import ByPriority, Kept
from vllm.v1.kv_tier.eviction.said import Said

KEPT_PART = 1 / 2
"""Part of the slots for retained keys, beyond the quotas."""

_MAX_ROUNDS = 64
"""Most keys that are kept in a row instead of being evicted, to bound the work of a
step. After that many, one is evicted anyway."""
_MAX_LOOKS = 2048
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
        self, policy: EvictionPolicy, said: Said, quotas: Mapping[str, float]
    ) -> None:
        super().__init__(policy.num_slots)
        self.num_yielded = 0
        """Retained keys that were evicted anyway, since the reader of this count reset
        it."""
        self._policy = policy
        self._said = said
        self.orders_itself = type(policy).told is not EvictionPolicy.told
        """Whether the policy handles hints itself."""
        self._low = ByPriority()
        self._kept = Kept()
        self._max_kept = int(KEPT_PART * self.num_slots)
        self.shares: dict[Hashable, Share] = {
            name: Share(int(part * self.num_slots)) for name, part in quotas.items()
        }
        self._share_of: dict[Key, Share] = {}
        # No set: Python's garbage collector looks at nothing in a dict of plain values.
        self.kept: dict[Key, None] = {}
        """Keys that are resident only because of a hint or a quota. Public, since
        testing each block of a prefix must be cheap."""
        # Expiry times of kept keys.
        self._ends = Ends()
        # Unlimited for users that do not call `begin_step`.
        self._num_looks: float = float("inf")

    def begin_step(self) -> None:
        """Start a step, and reset the number of keys it may look at."""
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

    def changed(self, key: Key) -> None:
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
            # The hint may have changed or expired.
            if self._said.is_low(key):
                self._policy.remove(key)
                return key
        return None

    def _evict(self, is_pinned: Callable[[Key], bool]) -> Key | None:
        """Ask the policy for other victims, after it evicted a key that is kept."""
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
        """Handle a key that the policy evicted.

        Returns:
            The key to evict instead, possibly `key`; None if it is kept at no key's
            expense.

        """
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
        ends, now = self._ends, self._said.clock()
        while self._num_looks > 0 and ends.is_due(now):
            self._num_looks -= 1
            if (key := ends.pop()) is None:
                continue
            about = self._said.about(key)
            if about is not None and about.priority > NO_HINT and about.until > now:
                # Retained again since; `changed` was not called for it.
                if about.until < float("inf"):
                    ends.set(key, about.until)
                continue
            if self._kept.discard(key):
                return key
            share = self._share_of.get(key)
            if share is not None and share.kept.discard(key):
                share.kept.add(key, NO_HINT)
        return None
