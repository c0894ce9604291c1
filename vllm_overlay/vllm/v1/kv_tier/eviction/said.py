# SPDX-License-Identifier: Apache-2.0
"""Hints by key."""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable

from vllm.v1.kv_tier.eviction.base import NO_HINT, About, Key


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
        self._about: OrderedDict[Key, About] = OrderedDict()
        # Not a method, since it is called for every victim.
        self.get: Callable[[Key], About | None] = self._about.get

    def __len__(self) -> int:
        return len(self._about)

    def is_retained(self, key: Key) -> bool:
        """Whether `key` has a valid priority above `NO_HINT`."""
        about = self.get(key)
        return (
            about is not None
            and about.priority > NO_HINT
            and about.until > self.clock()
        )

    def is_low(self, key: Key) -> bool:
        """Whether `key` has a valid priority below `NO_HINT`."""
        about = self.get(key)
        return (
            about is not None
            and about.priority < NO_HINT
            and about.until > self.clock()
        )

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
            outlives = old.until > self.clock() and old.priority > NO_HINT
            if outlives and priority is None:
                priority, until = old.priority, old.until
            elif outlives and priority is not None and old.tenant != tenant:
                priority = max(priority, old.priority)
                until = max(until, old.until)
            if old.tenant is not None:
                tenant = old.tenant
        if priority is None:
            priority, until = NO_HINT, math.inf
        about = About(priority, until, tenant, turn)
        if priority != NO_HINT or tenant is not None:
            self._about[key] = about
            if len(self._about) > self._num_keys:
                self._about.popitem(last=False)
        return about

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
        for old in set(map(abouts.__getitem__, known)):
            if old.tenant != about.tenant or old.priority < NO_HINT:
                return False
        for key in known:
            del abouts[key]
        abouts.update(dict.fromkeys(keys, about))
        for _ in range(len(abouts) - self._num_keys):
            abouts.popitem(last=False)
        return True

    def used_in_silence(self, key: Key) -> bool:
        """Record that a request without hints uses `key`.

        Returns whether its hint changed.
        """
        about = self.get(key)
        if about is None or about.priority >= NO_HINT:
            return False
        self.tell(key, None)
        return True
