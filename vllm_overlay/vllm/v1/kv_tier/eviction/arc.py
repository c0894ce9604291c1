# SPDX-License-Identifier: Apache-2.0
"""ARC: adaptive replacement cache."""

from collections import OrderedDict
from collections.abc import Callable

from vllm.v1.kv_tier.eviction.base import EvictionPolicy, Key, pop_oldest


class ARC(EvictionPolicy):
    """Adaptive replacement: balances keys used once against keys used again.

    Keeps two resident lists (`_once`, `_again`), and ghosts of the keys that each
    evicted last. A key that returns while it is a ghost moves the target size of
    `_once` towards the list that evicted it too early. From Megiddo and Modha, "ARC: A
    Self-Tuning, Low Overhead Replacement Cache", FAST 2003.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._once: OrderedDict[Key, None] = OrderedDict()
        self._again: OrderedDict[Key, None] = OrderedDict()
        self._once_ghosts: OrderedDict[Key, None] = OrderedDict()
        self._again_ghosts: OrderedDict[Key, None] = OrderedDict()
        self._once_target = 0.0

    def insert(self, key: Key) -> None:
        once_ghosts, again_ghosts = self._once_ghosts, self._again_ghosts
        if key in once_ghosts:
            step = max(1.0, len(again_ghosts) / len(once_ghosts))
            self._once_target = min(self._once_target + step, self.num_slots)
            del once_ghosts[key]
            self._again[key] = None
        elif key in again_ghosts:
            step = max(1.0, len(once_ghosts) / len(again_ghosts))
            self._once_target = max(self._once_target - step, 0)
            del again_ghosts[key]
            self._again[key] = None
        else:
            self._once[key] = None

    def hit(self, key: Key) -> None:
        self._once.pop(key, None)
        self._again[key] = None
        self._again.move_to_end(key)

    def remove(self, key: Key) -> None:
        if key in self._once:
            del self._once[key]
        else:
            del self._again[key]

    def evict(self, is_pinned: Callable[[Key], bool]) -> Key | None:
        once, again = (self._once, self._once_ghosts), (self._again, self._again_ghosts)
        over_target = len(self._once) > self._once_target or not self._again
        for resident, ghosts in (once, again) if over_target else (again, once):
            if (key := pop_oldest(resident, is_pinned)) is not None:
                ghosts[key] = None
                self._trim_ghosts()
                return key
        return None

    def _trim_ghosts(self) -> None:
        while len(self._once) + len(self._once_ghosts) > self.num_slots:
            if not self._once_ghosts:
                break
            self._once_ghosts.popitem(last=False)
        resident = len(self._once) + len(self._again)
        while resident + len(self._once_ghosts) + len(self._again_ghosts) > (
            2 * self.num_slots
        ):
            (self._again_ghosts or self._once_ghosts).popitem(last=False)
