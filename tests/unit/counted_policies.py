# SPDX-License-Identifier: Apache-2.0
"""Eviction policies that count how many keys they were told about as pinned or not.

`EvictionPolicy.evict` asks for every key that it looks at, so this is its work, on
whatever machine.
"""

from collections.abc import Callable, Hashable
from typing import Any, ClassVar

from vllm.v1.kv_tier.policy import POLICIES, EvictionPolicy


class Work:
    """What all counted policies did since `start`."""

    num_looks: ClassVar[int] = 0
    num_evictions: ClassVar[int] = 0

    @classmethod
    def start(cls) -> None:
        cls.num_looks = cls.num_evictions = 0


def _counted(policy: type[EvictionPolicy]) -> type[EvictionPolicy]:
    class Counted(policy):  # type: ignore[valid-type, misc]
        def evict(self, is_pinned: Callable[[Hashable], bool]) -> Hashable | None:
            Work.num_evictions += 1

            def counted(key: Hashable) -> bool:
                Work.num_looks += 1
                return is_pinned(key)

            return super().evict(counted)

    return Counted


class FIFO(EvictionPolicy):
    """The simplest policy that a user may write: hits do not count."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._keys: dict[Any, None] = {}

    def insert(self, key: Hashable) -> None:
        self._keys[key] = None

    def hit(self, key: Hashable) -> None:
        assert key in self._keys

    def remove(self, key: Hashable) -> None:
        del self._keys[key]

    def evict(self, is_pinned: Callable[[Hashable], bool]) -> Hashable | None:
        for key in self._keys:
            if not is_pinned(key):
                del self._keys[key]
                return key
        return None


_CLASSES = {
    f"Counted_{name}": _counted(policy)
    for name, policy in {**POLICIES, "fifo": FIFO}.items()
}
# Where an import path finds them.
globals().update(_CLASSES)

COUNTED = {name.removeprefix("Counted_"): f"{__name__}.{name}" for name in _CLASSES}
"""Import path by name, as the setting `eviction_policy` takes it."""
