# SPDX-License-Identifier: Apache-2.0
"""Hints by key."""

import math
from collections.abc import Callable, Collection, Hashable

from vllm.v1.kv_tier.eviction.base import NO_HINT, About, Key, Table, drop_oldest

_Fields = tuple[int, float, Hashable, int]
"""Of `About`."""


class Said:
    """Remembers the hints for keys, also after their blocks are gone.

    A key belongs to the first tenant that uses it, so that a flood of requests cannot
    take over shared keys. Another tenant cannot lower a hint while it is valid. A
    priority below `NO_HINT` is valid until a request uses the key without that hint.

    Args:
        num_keys: Most keys that are remembered; those with the latest hints stay.
        clock: Time in seconds.

    """

    def __init__(self, num_keys: int, clock: Callable[[], float]) -> None:
        self._num_keys = num_keys
        self.clock = clock
        # Plain tuples: once Python's garbage collector has seen them, it looks at none
        # of them again. It would at each `About`, of which there may be as many as
        # there are keys: 400,000 of them took it 90 ms.
        self._about: Table[_Fields] = Table()
        # No method: asked for every victim.
        self.get: Callable[[Key], _Fields | None] = self._about.get
        """What holds of a key, as the fields of `About`; None: nothing was said."""

    def __len__(self) -> int:
        return len(self._about)

    def clear(self) -> None:
        """Forget all that was said."""
        self._about.clear()

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

    def about(self, key: Key) -> About | None:
        """As `get`, with names."""
        fields = self.get(key)
        return None if fields is None else About(*fields)

    def tell(
        self,
        key: Key,
        priority: int | None,
        until: float = math.inf,
        tenant: Hashable = None,
        turn: int = 1,
    ) -> About:
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
        old = self._about.pop(key, None)
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
            self._about[key] = priority, until, tenant, turn
            drop_oldest(self._about, self._num_keys)
        return About(priority, until, tenant, turn)

    def renew(self, keys: Collection[Key], about: About) -> bool:
        """Give all of `keys` the hints `about`, whose priority is above `NO_HINT`.

        Faster than `tell` for the blocks of a long prefix.

        Returns:
            Whether it did. Nothing changes if another tenant has a hint for one of
            them, or if one has a low priority.

        """
        abouts = self._about
        known = abouts.keys() & keys
        # Keys of a prefix have few different hints.
        for priority, _, tenant, _ in set(map(abouts.__getitem__, known)):
            if tenant != about.tenant or priority < NO_HINT:
                return False
        for key in known:
            del abouts[key]
        fields = about.priority, about.until, about.tenant, about.turn
        abouts.update(dict.fromkeys(keys, fields))
        drop_oldest(abouts, self._num_keys)
        return True

    def used_in_silence(self, key: Key) -> bool:
        """Record that a request without hints uses `key`.

        Returns whether its hint changed.
        """
        about = self.get(key)
        if about is None or about[0] >= NO_HINT:
            return False
        self.tell(key, None)
        return True
