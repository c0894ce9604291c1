# SPDX-License-Identifier: Apache-2.0
"""Which blocks only one conversation has used."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence


class Portions:
    """Keys that are processed in portions, to bound the work of each step.

    Args:
        keys: All keys, in order.
        is_left: Whether a key still needs processing when its turn comes. Called once
            for each key, and may change state.

    """

    def __init__(
        self,
        keys: Sequence[Hashable],
        is_left: Callable[[Hashable], bool] = lambda key: True,
    ) -> None:
        self._keys = keys
        self._is_left = is_left
        self._num_taken = 0

    def __len__(self) -> int:
        """Number of keys that have not been taken."""
        return len(self._keys) - self._num_taken

    def take(self, num_keys: int) -> list[Hashable]:
        """Take the next `num_keys` keys; return those that still need processing."""
        begin = self._num_taken
        self._num_taken = min(begin + num_keys, len(self._keys))
        return list(filter(self._is_left, self._keys[begin : self._num_taken]))


class _Keys(dict[Hashable, None]):
    """Keys of one conversation, in the order in which it computed them."""

    __slots__ = ("is_over", "owner")

    def __init__(self, owner: Hashable) -> None:
        self.owner = owner
        self.is_over = False


class Owners:
    """Remembers, for keys of blocks, the only conversation that has used them.

    The conversation that computes a block owns it until another one hits it. From then
    on it has no owner, like blocks without conversations. A key is remembered after its
    block is gone, since blocks that the device has evicted may still be on the host.

    Args:
        num_keys: Most keys that are remembered. Beyond that, the last keys of the least
            recently used conversation are dropped.

    """

    def __init__(self, num_keys: int) -> None:
        self._num_keys = num_keys
        # Keys of finished conversations stay until they are processed.
        self._keys_of: dict[Hashable, _Keys] = {}
        self._keys: OrderedDict[Hashable, _Keys] = OrderedDict()

    def __len__(self) -> int:
        """Number of keys with an owner."""
        return len(self._keys_of)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._keys_of

    def computed(self, key: Hashable, owner: Hashable) -> None:
        """Record that a request of conversation `owner` computes the block of `key`."""
        mine, old = self._keys.get(owner), self._keys_of.get(key)
        if old is not None and old is not mine and not old.is_over:
            self._forget(key, old)
            return
        if mine is None:
            mine = self._keys[owner] = _Keys(owner)
        else:
            self._keys.move_to_end(owner)
        mine[key] = None
        self._keys_of[key] = mine
        while len(self._keys_of) > self._num_keys:
            oldest = next(iter(self._keys.values()))
            del self._keys_of[oldest.popitem()[0]]
            if not oldest:
                del self._keys[oldest.owner]

    def hit(self, keys: Iterable[Hashable], user: Hashable | None) -> None:
        """Record that a request hits `keys`; `user` is its conversation, or None."""
        # A hot path: each block of a long prefix.
        if self._keys_of.keys().isdisjoint(keys):
            return
        get = self._keys_of.get
        for key in keys:
            if (its := get(key)) is not None and (its.is_over or its.owner != user):
                self._forget(key, its)

    def release(self, owner: Hashable) -> Portions:
        """End conversation `owner`.

        Returns:
            Its keys, in the order in which it computed them, without those that are
            used before they are taken.

        """
        its = self._keys.pop(owner, None)
        if its is None:
            return Portions(())
        its.is_over = True
        get, keys_of = self._keys_of.get, self._keys_of

        def is_left(key: Hashable) -> bool:
            if get(key) is not its:
                return False
            del keys_of[key]
            return True

        return Portions(tuple(its), is_left)

    def clear(self) -> None:
        """Forget all keys."""
        self._keys_of.clear()
        self._keys.clear()

    def _forget(self, key: Hashable, its: _Keys) -> None:
        del self._keys_of[key]
        if its.is_over:
            return
        del its[key]
        if not its:
            del self._keys[its.owner]
