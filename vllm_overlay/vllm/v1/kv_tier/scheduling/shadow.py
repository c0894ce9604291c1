# SPDX-License-Identifier: Apache-2.0
"""What a tier would have had, had it stored from another use on."""

from collections import OrderedDict
from collections.abc import Hashable

from vllm.v1.kv_tier.eviction.base import EvictionPolicy
from vllm.v1.kv_tier.scheduling.admission import Admission

_is_pinned = frozenset[object]().__contains__
"""Nothing is."""


class Shadow:
    """Device and host as keys only: which of them would be hits.

    It is told a sample of the keys, and made smaller by as much, so that it has the
    hits of the whole (Waldspurger et al., "Cache Modeling and Optimization using
    Miniature Simulations", USENIX ATC 2017).

    Args:
        num_blocks: Keys that the device holds.
        num_slots: Keys that the host holds.
        policy: Order of eviction of the host, for `num_slots` keys.
        admission: Which keys the host gets; None: all.

    """

    def __init__(
        self,
        num_blocks: int,
        num_slots: int,
        policy: EvictionPolicy,
        admission: Admission | None,
    ) -> None:
        self._num_blocks = num_blocks
        self._num_slots = num_slots
        self._policy = policy
        self._admission = admission
        self._device: OrderedDict[Hashable, None] = OrderedDict()
        self._host: set[Hashable] = set()
        self.hits = 0.0
        """Uses of keys that were there. Whoever compares may scale it."""

    def use(self, key: Hashable) -> None:
        """A request computes or hits the block of `key`."""
        if self._admission is not None:
            self._admission.use(key)
        device, host = self._device, self._host
        if key in device:
            device.move_to_end(key)
            self.hits += 1
            return
        if key in host:
            self._policy.hit(key)
            self.hits += 1
        device[key] = None
        if len(device) > self._num_blocks:
            self._demote(device.popitem(last=False)[0])

    def _demote(self, key: Hashable) -> None:
        if key in self._host:
            return
        if self._admission is not None and not self._admission.admits(key):
            return
        if len(self._host) == self._num_slots:
            self._host.remove(self._policy.evict(_is_pinned))
        self._policy.insert(key)
        self._host.add(key)
