# SPDX-License-Identifier: Apache-2.0
"""Which blocks are worth a host slot: from which use on, or whichever of two rules has
more hits in ghost caches.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

from vllm.v1.kv_tier.eviction.base import EvictionPolicy, pins_none
from vllm.v1.kv_tier.eviction.policies import make_policy
from vllm.v1.kv_tier.eviction.recent import SeenKeys
from vllm.v1.kv_tier.scheduler.costs import clean_window
from vllm.v1.kv_tier.scheduler.kv_groups import UsedBlocks
from vllm.v1.kv_tier.tuning import SchedulingTuning
from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm.v1.kv_tier.layout import KVTierLayout

_Key = TypeVar("_Key", bound=Hashable)
# No Python code for each block of a hit.
_block_id_of = attrgetter("block_id")


class Admission:
    """Counts the uses of blocks by their keys.

    Computing a block is a use, and so is every hit. As in LRU-K (O'Neil et al., SIGMOD
    1993), a key is remembered after its block is gone, or there would be no second use.

    Args:
        from_use: Number of the use from which on a block is admitted.
        num_keys: Most keys that are remembered; those used last stay.

    """

    def __init__(self, from_use: int, num_keys: int) -> None:
        self._from_use = from_use
        self._num_keys = num_keys
        self._uses: OrderedDict[Hashable, int] = OrderedDict()

    admits_all = False
    """Whether `admits` is true for every key."""

    def on_hit(self, request: Request, used: UsedBlocks) -> None:
        """A request uses blocks."""
        self.record_hit(used.keys)

    def record_hit(self, keys: Collection[Hashable]) -> None:
        """Record hits of the blocks of `keys`."""
        self.record_uses(keys)

    def record_uses(self, keys: Collection[_Key]) -> Collection[_Key]:
        """As `record_hit`. Returns the keys that are admitted now."""
        uses, from_use = self._uses, self._from_use
        admitted = []
        for key in keys:
            # A hot path: each block of each hit passes here.
            uses[key] = number = uses.pop(key, 0) + 1
            if number >= from_use:
                admitted.append(key)
        while len(uses) > self._num_keys:
            uses.popitem(last=False)
        return admitted

    def record_use(self, key: Hashable, block_id: int = -1) -> None:
        """Record that a block of `key` is computed.

        Args:
            key: A key of the block.
            block_id: Of the device block, if it is its primary key.

        """
        self.record_uses((key,))

    def num_uses(self, key: Hashable) -> int:
        """Number of remembered uses of `key`."""
        return self._uses.get(key, 0)

    def admits(self, key: Hashable, block_id: int = -1) -> bool:
        """Whether a block is worth a slot.

        Args:
            key: Its primary key.
            block_id: Of the device block that has it.

        """
        return self.num_uses(key) >= self._from_use

    def clear(self) -> None:
        """The host was emptied."""

    def release(self, keys: Iterable[Hashable]) -> None:
        """Note that `keys` are not expected to be used again."""

    def wrap_policies(self, wrap: Callable[[EvictionPolicy], EvictionPolicy]) -> None:
        """Apply `wrap` to copies of the host's eviction policy.

        Called when the host's own policy is wrapped.
        """


class SecondUses(Admission):
    """Admits keys that were used twice recently.

    Knows less than `Admission`, but costs less for each block of each prompt. Keys are
    kept in two generations. A use moves a key to the young one; when that is full, it
    becomes the old one, and the old one is dropped.

    Args:
        num_keys: Least number of keys that are remembered; at most twice as many are.

    """

    def __init__(self, num_keys: int) -> None:
        super().__init__(2, num_keys)
        self._max_young = num_keys
        # Whether keys were used a second time.
        self._young: dict[Hashable, bool] = {}
        self._old: dict[Hashable, bool] = {}

    def record_uses(self, keys: Collection[_Key]) -> Collection[_Key]:
        # A hit block was computed before, so this is at least its second use.
        self._young.update(dict.fromkeys(keys, True))
        if len(self._young) >= self._max_young:
            self._grow_old()
        return keys

    def record_use(self, key: Hashable, block_id: int = -1) -> None:
        young = self._young
        young[key] = key in young or key in self._old
        if len(young) >= self._max_young:
            self._grow_old()

    def num_uses(self, key: Hashable) -> int:
        is_second = self._young.get(key, self._old.get(key))
        return 0 if is_second is None else 1 + is_second

    def admits(self, key: Hashable, block_id: int = -1) -> bool:
        return self._young.get(key, False) or self._old.get(key, False)

    def _grow_old(self) -> None:
        self._old, self._young = self._young, {}


def admission_from(use: int, num_keys: int) -> Admission:
    """Admit keys from use number `use` on, of those used recently."""
    return SecondUses(num_keys) if use == 2 else Admission(use, num_keys)


class GhostCache:
    """A ghost cache of the host, with keys only.

    Args:
        num_slots: Number of keys that it holds.
        policy: Its order of eviction, for `num_slots` keys.
        admits: Which keys may replace others; None for all. Free slots take any key.

    """

    def __init__(
        self,
        num_slots: int,
        policy: EvictionPolicy,
        admits: Callable[[Hashable], bool] | None = None,
    ) -> None:
        self.num_slots = num_slots
        self.keys: set[Hashable] = set()
        self.hits = 0.0
        """Number of uses of resident keys. The reader may scale it."""
        self._policy = policy
        self._admits = admits

    def access(self, key: Hashable) -> None:
        """Record a use of `key`, which the device lacks."""
        if key in self.keys:
            self._policy.hit(key)
            self.hits += 1

    def insert(self, key: Hashable) -> None:
        """Record that the device evicts the block of `key`."""
        keys = self.keys
        if key in keys:
            return
        if len(keys) == self.num_slots:
            if self._admits is not None and not self._admits(key):
                return
            keys.remove(self._policy.evict(pins_none))
        self._policy.insert(key)
        keys.add(key)

    def clear(self) -> None:
        """Drop all keys and hits, since the content is void."""
        for key in self.keys:
            self._policy.remove(key)
        self.keys.clear()
        self.hits = 0.0

    def wrap_policy(self, wrap: Callable[[EvictionPolicy], EvictionPolicy]) -> None:
        """Replace the policy by `wrap(policy)`."""
        self._policy = wrap(self._policy)

    def release(self, key: Hashable) -> None:
        """Drop `key`, which is not expected to be used again."""
        if key in self.keys:
            self.keys.remove(key)
            self._policy.remove(key)


class GhostDevice:
    """A ghost cache of the device above several ghost caches of the host.

    It gets a sample of the keys, and is smaller by the same factor, so hit rates are
    those of the full caches (Waldspurger et al., "Cache Modeling and Optimization using
    Miniature Simulations", USENIX ATC 2017). Device hits do not count for a host, or a
    key that all requests share would outweigh the rest of the sample.

    Args:
        num_blocks: Number of keys that the device holds, in LRU order.
        hosts: Each gets what the device evicts.

    """

    def __init__(self, num_blocks: int, hosts: Sequence[GhostCache]) -> None:
        self._num_blocks = num_blocks
        self._hosts = hosts
        self._device: OrderedDict[Hashable, None] = OrderedDict()

    def access(self, key: Hashable) -> None:
        """Record that a request computes or hits the block of `key`."""
        device = self._device
        if key in device:
            device.move_to_end(key)
            return
        for host in self._hosts:
            host.access(key)
        device[key] = None
        if len(device) > self._num_blocks:
            victim = device.popitem(last=False)[0]
            for host in self._hosts:
                host.insert(victim)

    def clear(self) -> None:
        """Drop everything, since the content is void."""
        self._device.clear()
        for host in self._hosts:
            host.clear()

    def release(self, key: Hashable) -> None:
        """Drop `key`, which is not expected to be used again.

        The tier itself keeps it until it needs the room, a little later.
        """
        self._device.pop(key, None)
        for host in self._hosts:
            host.release(key)


class AdaptiveAdmission(Admission):
    """Admits all blocks, or those used twice, whichever would have had more hits.

    Two ghost caches of the host simulate both, on a sample of the keys. Set dueling,
    with a sample of the real slots, does not work here: a prefix hit ends at its first
    missing block, so each half would break the other's hits. Uses of all keys are
    counted all the time, so that a change takes effect at once: whether a block was
    used before is known when it is computed, and by its device block from then on. Free
    slots are given to all blocks in any case, as in the ghost caches.

    Args:
        num_blocks: Number of device blocks.
        num_slots: Number of host slots.
        num_ahead: Number of slots whose blocks the device has too.
        eviction_policy: Name or import path.
        num_keys: Computed keys that are remembered.
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
        super().__init__(2, num_keys)
        self._has_room = has_room
        one_in = max(1, num_slots // tuning.shadow_slots)
        # At least a quarter, or the two would not differ.
        slots = max(1, max(num_slots - num_ahead, num_slots // 4) // one_in)
        self._uses_of_sample = SecondUses(max(1, num_keys // one_in))
        self._all = GhostCache(slots, make_policy(eviction_policy, slots))
        self._again = GhostCache(
            slots, make_policy(eviction_policy, slots), self._uses_of_sample.admits
        )
        blocks = max(1, num_blocks // one_in)
        self._ghosts = GhostDevice(blocks, (self._all, self._again))
        self._one_in = one_in
        self._tuning = tuning
        self._num_sampled = 0
        # As many as two generations have in the mean.
        self._seen = SeenKeys(3 * num_keys // 2)
        # Ids of device blocks whose content was used twice.
        self._second: set[int] = set()
        # A new tier has room, which waiting for second uses would leave empty.
        self.admits_all = True

    def on_hit(self, request: Request, used: UsedBlocks) -> None:
        # What is hit was computed before.
        self._second.update(map(_block_id_of, used.blocks))
        self.record_hit(used.keys)

    def record_hit(self, keys: Collection[Hashable]) -> None:
        # Only the scheduler chooses, so hashes may differ between processes.
        one_in = self._one_in
        if sample := [key for key in keys if hash(key) % one_in == 0]:
            self._uses_of_sample.record_hit(sample)
            self._sample(sample)

    def record_use(self, key: Hashable, block_id: int = -1) -> None:
        # A hot path: each computed block. Most keys are not in the sample.
        if self._seen.add(key):
            self._second.add(block_id)
        else:
            self._second.discard(block_id)
        if hash(key) % self._one_in == 0:
            self._uses_of_sample.record_use(key)
            self._sample((key,))

    def admits(self, key: Hashable, block_id: int = -1) -> bool:
        return self.admits_all or block_id in self._second or self._has_room()

    def clear(self) -> None:
        # The choice was made for content that is gone.
        self._ghosts.clear()
        self._num_sampled = 0
        self.admits_all = True

    def release(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            if hash(key) % self._one_in == 0:
                self._ghosts.release(key)

    def wrap_policies(self, wrap: Callable[[EvictionPolicy], EvictionPolicy]) -> None:
        for host in (self._all, self._again):
            host.wrap_policy(wrap)

    def _sample(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            self._ghosts.access(key)
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
    return AdaptiveAdmission(
        num_blocks,
        num_slots,
        num_ahead,
        config.eviction_policy,
        num_keys,
        has_room,
        layout.tuning,
    )
