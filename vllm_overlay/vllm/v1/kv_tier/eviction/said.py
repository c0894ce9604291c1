# SPDX-License-Identifier: Apache-2.0
"""What clients have said of keys."""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable

from vllm.v1.kv_tier.eviction.base import NO_HINT, About, Key


class Said:
    """Remembers what was said of keys, beyond their blocks.

    A key has one tenant, the first that uses it: else who floods could take over what
    others share. A tenant cannot make less of what another has said, while it holds;
    what was said below `NO_HINT` holds until somebody uses the key who does not say so.

    Args:
        num_keys: Keys that are remembered, those of which something was said last.
        clock: The time, in seconds.

    """

    def __init__(self, num_keys: int, clock: Callable[[], float]) -> None:
        self._num_keys = num_keys
        self.clock = clock
        self._about: OrderedDict[Key, About] = OrderedDict()
        # No method: asked for every victim.
        self.get: Callable[[Key], About | None] = self._about.get

    def __len__(self) -> int:
        return len(self._about)

    def clear(self) -> None:
        """Forget all that was said."""
        self._about.clear()

    def is_retained(self, key: Key) -> bool:
        """Whether `key` shall be kept longer than others, as of now."""
        about = self.get(key)
        return (
            about is not None
            and about.priority > NO_HINT
            and about.until > self.clock()
        )

    def is_low(self, key: Key) -> bool:
        """Whether `key` shall go before others, as of now."""
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
        """A request uses `key`.

        Args:
            key: Of a block.
            priority: None: the request says nothing of it.
            until: How long that holds.
            tenant: Of the request.
            turn: Of its conversation.

        Returns:
            What holds from now on.

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
        """A request says `about`, of a priority above `NO_HINT`, of all of `keys`.

        It is `tell` without what that costs for each block of a long prefix.

        Returns:
            Whether it did. Nothing has changed where somebody else has said something
            of one of them, or that it is to go first.

        """
        abouts = self._about
        known = abouts.keys() & keys
        # There are few that differ.
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
        """A request uses `key` that says nothing. Returns whether that changes what was
        said before."""
        about = self.get(key)
        if about is None or about.priority >= NO_HINT:
            return False
        self.tell(key, None)
        return True
