# SPDX-License-Identifier: Apache-2.0
"""Which blocks only one conversation has used."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable


class Owners:
    """Remembers for keys of blocks the one conversation that has used them.

    The conversation that computes a block owns it until somebody else hits it: from
    then on nobody does, as nobody owns what was there before conversations had names.
    A key is known beyond its block, since what the device has evicted may still lie on
    the host.

    Args:
        num_keys: Keys that are remembered. Beyond that, the conversation that has been
            used least recently is forgotten.

    """

    def __init__(self, num_keys: int) -> None:
        self._num_keys = num_keys
        self._owner: dict[Hashable, Hashable] = {}
        self._keys: OrderedDict[Hashable, dict[Hashable, None]] = OrderedDict()

    def __len__(self) -> int:
        """How many keys have an owner."""
        return len(self._owner)

    def computed(self, key: Hashable, owner: Hashable) -> None:
        """A request of conversation `owner` computes the block of `key`."""
        if key in self._owner and self._owner[key] != owner:
            self._forget(key)
            return
        self._owner[key] = owner
        self._keys.setdefault(owner, {})[key] = None
        self._keys.move_to_end(owner)
        while len(self._owner) > self._num_keys:
            _, keys = self._keys.popitem(last=False)
            for old in keys:
                del self._owner[old]

    def hit(self, keys: Iterable[Hashable], user: Hashable | None) -> None:
        """A request of conversation `user` hits the blocks of `keys`; None: of none."""
        # Each block of a long prefix comes by here.
        if self._owner.keys().isdisjoint(keys):
            return
        get = self._owner.get
        for key in keys:
            if (owner := get(key)) is not None and owner != user:
                self._forget(key)

    def release(self, owner: Hashable) -> list[Hashable]:
        """Forget conversation `owner`.

        Returns:
            The keys that it owned, in the order in which it computed them.

        """
        keys = self._keys.pop(owner, {})
        for key in keys:
            del self._owner[key]
        return list(keys)

    def _forget(self, key: Hashable) -> None:
        owner = self._owner.pop(key)
        keys = self._keys[owner]
        del keys[key]
        if not keys:
            del self._keys[owner]
