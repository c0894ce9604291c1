# SPDX-License-Identifier: Apache-2.0
"""What clients have said of keys."""

import math
from collections.abc import Callable, Collection, Hashable

from vllm.v1.kv_tier.eviction.base import NO_HINT, About, Key, Table, drop_oldest

_Fields = tuple[int, float, Hashable, int]
"""Of `About`."""


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
        """Whether `key` shall be kept longer than others, as of now."""
        return (
            (about := self.get(key)) is not None
            and about[0] > NO_HINT
            and about[1] > self.clock()
        )

    def is_low(self, key: Key) -> bool:
        """Whether `key` shall go before others, as of now."""
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
        """A request says `about`, of a priority above `NO_HINT`, of all of `keys`.

        It is `tell` without what that costs for each block of a long prefix.

        Returns:
            Whether it did. Nothing has changed where somebody else has said something
            of one of them, or that it is to go first.

        """
        abouts = self._about
        known = abouts.keys() & keys
        # There are few that differ.
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
        """A request uses `key` that says nothing. Returns whether that changes what was
        said before."""
        about = self.get(key)
        if about is None or about[0] >= NO_HINT:
            return False
        self.tell(key, None)
        return True
