# SPDX-License-Identifier: Apache-2.0
"""`store_from_use: "auto"`: chooses between storing all blocks and reused ones."""

from collections.abc import Callable, Collection, Hashable, Iterable
from typing import TYPE_CHECKING

from vllm.v1.kv_tier.eviction.base import EvictionPolicy
from vllm.v1.kv_tier.eviction.by_name import make_policy
from vllm.v1.kv_tier.scheduling.admission import Admission, SecondUses
from vllm.v1.kv_tier.scheduling.shadow import Shadow, ShadowHost
from vllm.v1.kv_tier.scheduling.tuning import SchedulingTuning
from vllm.v1.kv_tier.scheduling.writing import clean_window

if TYPE_CHECKING:
    from vllm.v1.kv_tier.config import KVTierLayout


class ChosenAdmission(SecondUses):
    """Admits all blocks, or those used twice, whichever would have had more hits.

    Two ghost caches of the host simulate both, on a sample of the keys. Set dueling,
    with a sample of the real slots, does not work here: a prefix hit ends at its first
    missing block, so each half would break the other's hits. Uses of all keys are
    counted all the time, so that a change takes effect at once. Free slots are given to
    all blocks in any case, as in the ghost caches.

    Args:
        num_blocks: Number of device blocks.
        num_slots: Number of host slots.
        num_ahead: Number of slots whose blocks the device has too.
        eviction_policy: Name or import path.
        num_keys: Keys whose uses are remembered.
        has_room: Whether the host has a free slot.
        tuning: Sizes of the ghost caches, and how often to choose.

    """

    def __init__(
        self,
        num_blocks: int,
        num_slots: int,
        num_ahead: int,
        eviction_policy: str,
        num_keys: int,
        has_room: Callable[[], bool],
        tuning: SchedulingTuning,
    ) -> None:
        super().__init__(num_keys)
        self._has_room = has_room
        one_in = max(1, num_slots // tuning.shadow_slots)
        # At least a quarter, or the two would not differ.
        slots = max(1, max(num_slots - num_ahead, num_slots // 4) // one_in)
        self._all = ShadowHost(slots, make_policy(eviction_policy, slots))
        # `super()`, since the method of this class returns what was chosen.
        self._again = ShadowHost(
            slots, make_policy(eviction_policy, slots), super().admits
        )
        blocks = max(1, num_blocks // one_in)
        self._shadow = Shadow(blocks, (self._all, self._again))
        self._one_in = one_in
        self._tuning = tuning
        self._num_sampled = 0
        # A new tier has room, which waiting for second uses would leave empty.
        self.admits_all = True

    def hit(self, keys: Collection[Hashable]) -> None:
        super().hit(keys)
        self._sample(keys)

    def use(self, key: Hashable) -> None:
        super().use(key)
        # Tested here as well, since most keys are not in the sample.
        if hash(key) % self._one_in == 0:
            self._sample((key,))

    def admits(self, key: Hashable) -> bool:
        return self.admits_all or super().admits(key) or self._has_room()

    def clear(self) -> None:
        # The choice was made for content that is gone.
        self._shadow.clear()
        self._num_sampled = 0
        self.admits_all = True

    def release(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            if hash(key) % self._one_in == 0:
                self._shadow.release(key)

    def wrap_policies(self, wrap: Callable[[EvictionPolicy], EvictionPolicy]) -> None:
        for host in (self._all, self._again):
            host.wrap_policy(wrap)

    def _sample(self, keys: Iterable[Hashable]) -> None:
        # Only the scheduler chooses, so hashes may differ between processes.
        one_in = self._one_in
        for key in keys:
            if hash(key) % one_in == 0:
                self._shadow.use(key)
                self._num_sampled += 1
        if self._num_sampled >= self._tuning.uses_per_choice:
            self._num_sampled = 0
            self._choose()

    def _choose(self) -> None:
        tuning, first, again = self._tuning, self._all, self._again
        enough = tuning.choosy_gain * (first.hits + tuning.choosy_hits)
        self.admits_all = again.hits <= enough
        first.hits *= tuning.hits_kept
        again.hits *= tuning.hits_kept


def make_admission(
    layout: "KVTierLayout",
    num_blocks: int,
    num_keys: int,
    has_room: Callable[[], bool],
) -> Admission | None:
    """The admission that `store_from_use` sets; None to store every block.

    Args:
        layout: Slots and settings of the host tier.
        num_blocks: Number of device blocks.
        num_keys: Keys whose uses are remembered.
        has_room: Whether the host has a free slot.

    """
    config, num_slots = layout.config, layout.num_slots
    if config.debug.store_from_use != "auto":
        from_use = config.debug.store_from_use
        return Admission(from_use, num_keys) if from_use > 1 else None
    if layout.secondary is not None:
        # Blocks reach secondary tiers through the host, and each tier chooses itself.
        return None
    num_ahead = num_blocks
    if config.debug.store_policy == "write_back":
        num_ahead = clean_window(num_blocks, num_slots, layout.load_s, layout.tuning)
    return ChosenAdmission(
        num_blocks,
        num_slots,
        num_ahead,
        config.eviction_policy,
        num_keys,
        has_room,
        layout.tuning,
    )
