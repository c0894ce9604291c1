# SPDX-License-Identifier: Apache-2.0
"""`store_from_use: "auto"`: whether to store all, or what is used a second time."""

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
    """Admits every block, or those used twice, whichever would have had more hits.

    Two shadows of the host try both, on a sample of the keys. The sample cannot be of
    the tier's own slots, as caches of single objects have it (set dueling): a prefix is
    a hit up to its first block that is missing, and either half would break those of
    the other. Uses of all keys are counted meanwhile, so that a change finds them.
    Room that nobody has is for every block, whatever was chosen, as in the shadows.

    Args:
        num_blocks: Of the device.
        num_slots: Of the host.
        num_ahead: How many of them have what the device has, too.
        eviction_policy: By name or import path.
        num_keys: Keys whose uses are remembered.
        has_room: Whether the host can take a block that takes no other's place.
        tuning: How large the shadows are, and how often it chooses.

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
        # Never less than a quarter: shadows need room to differ.
        slots = max(1, max(num_slots - num_ahead, num_slots // 4) // one_in)
        self._all = ShadowHost(slots, make_policy(eviction_policy, slots))
        # Not the method of this class, which says what was chosen.
        self._again = ShadowHost(
            slots, make_policy(eviction_policy, slots), super().admits
        )
        blocks = max(1, num_blocks // one_in)
        self._shadow = Shadow(blocks, (self._all, self._again))
        self._one_in = one_in
        self._tuning = tuning
        self._num_sampled = 0
        # A new tier has room, and waiting for second uses would leave it empty.
        self.admits_all = True

    def hit(self, keys: Collection[Hashable]) -> None:
        super().hit(keys)
        self._sample(keys)

    def use(self, key: Hashable) -> None:
        super().use(key)
        # Asked here as well, since most keys are in no sample.
        if hash(key) % self._one_in == 0:
            self._sample((key,))

    def admits(self, key: Hashable) -> bool:
        return self.admits_all or super().admits(key) or self._has_room()

    def clear(self) -> None:
        # What was chosen, was chosen for what is gone.
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
        # Only the scheduler chooses, so hashes need not be the same in two processes.
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
    """What the settings say of `store_from_use`; None: store every block.

    Args:
        layout: Slots and settings of the host tier.
        num_blocks: Of the device.
        num_keys: Keys whose uses are remembered.
        has_room: Whether the host can take a block that takes no other's place.

    """
    config, num_slots = layout.config, layout.num_slots
    if config.debug.store_from_use != "auto":
        from_use = config.debug.store_from_use
        return Admission(from_use, num_keys) if from_use > 1 else None
    if layout.secondary is not None:
        # What a tier below gets comes by the host: it chooses by itself.
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
