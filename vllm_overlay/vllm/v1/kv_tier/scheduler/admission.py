# SPDX-License-Identifier: Apache-2.0
"""Which blocks are worth a host slot: from which use on, or whichever of two rules has
more hits in ghost caches.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from vllm.v1.kv_tier.eviction.base import EvictionPolicy
from vllm.v1.kv_tier.eviction.policies import make_policy
from vllm.v1.kv_tier.eviction.recent import RecentKeys
from vllm.v1.kv_tier.scheduler.costs import clean_window
from vllm.v1.kv_tier.scheduler.kv_groups import UsedBlocks
from vllm.v1.kv_tier.tuning import SchedulingTuning
from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm.v1.kv_tier.layout import KVTierLayout

_Key = TypeVar("_Key", bound=Hashable)


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

    def record_use(self, key: Hashable) -> None:
        """Record that the block of `key` is computed."""
        self.record_uses((key,))

    def num_uses(self, key: Hashable) -> int:
        """Number of remembered uses of `key`."""
        return self._uses.get(key, 0)

    def admits(self, key: Hashable) -> bool:
        return self.num_uses(key) >= self._from_use

    def record_loss(self, key: Hashable) -> None:
        """Record that the device evicts the block of `key`, which is not admitted."""

    def clear(self) -> None:
        """The host was emptied."""

    def release(self, keys: Iterable[Hashable]) -> None:
        """Note that `keys` are not expected to be used again."""

    def wrap_policies(self, wrap: Callable[[EvictionPolicy], EvictionPolicy]) -> None:
        """Apply `wrap` to copies of the host's eviction policy.

        Called when the host's own policy is wrapped.
        """


_MAX_HITS = 1 << 16
"""Hits that are remembered at least."""


class SecondUses(Admission):
    """Admits keys that were used twice recently.

    Knows less than `Admission`, but costs less for each block of each prompt, and a few
    bytes for each key. Hits are remembered apart and not as long: a block that was hit
    is on the device, which evicts it soon or not at all. They are kept in two
    generations. A hit moves a key to the young one; when that is full, it becomes the
    old one, and the old one is dropped.

    Args:
        num_keys: Number of computed keys that are remembered.

    """

    def __init__(self, num_keys: int) -> None:
        super().__init__(2, num_keys)
        self._max_young = min(num_keys, _MAX_HITS)
        # Keys of hits. Values mean nothing.
        self._young: dict[Hashable, None] = {}
        self._old: dict[Hashable, None] = {}
        # Whether computed keys were used before that.
        self._computed = RecentKeys(num_keys, value_bytes=1)

    def record_uses(self, keys: Collection[_Key]) -> Collection[_Key]:
        # A hit block was computed before, so this is at least its second use.
        self._young.update(dict.fromkeys(keys))
        if len(self._young) >= self._max_young:
            self._old, self._young = self._young, {}
        return keys

    def record_use(self, key: Hashable) -> None:
        # No call for hits: each computed block passes here.
        computed = self._computed
        computed.add(
            key,
            computed.pop(key) is not None or key in self._young or key in self._old,
        )

    def _was_hit(self, key: Hashable) -> bool:
        return key in self._young or key in self._old

    def num_uses(self, key: Hashable) -> int:
        if self._was_hit(key):
            return 2
        is_second = self._computed.get(key)
        return 0 if is_second is None else 1 + is_second

    def admits(self, key: Hashable) -> bool:
        return self._was_hit(key) or self._computed.get(key) == 1


def admission_from(use: int, num_keys: int) -> Admission:
    """Admit keys from use number `use` on, of those used recently."""
    return SecondUses(num_keys) if use == 2 else Admission(use, num_keys)


_is_pinned = frozenset[object]().__contains__
"""No key is pinned."""


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
            keys.remove(self._policy.evict(_is_pinned))
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


class Host(Protocol):
    """What the slot table knows."""

    def has_room(self) -> bool:
        """Whether a slot can be filled without evicting a block of any use."""

    def has_evicted(self, key: Hashable) -> bool:
        """Whether the eviction policy remembers to have evicted `key`."""


class AdaptiveAdmission(SecondUses):
    """Admits all blocks, or those used twice, whichever would have had more hits.

    A block that a tier has needs no memory of its use. So uses are counted for the
    sample only, and of all other keys those are remembered that were used once and are
    gone: here, if they were not admitted, and by the eviction policy of the host.

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
        host: The slot table.
        tuning: Sizes of the ghost caches, and how often to choose.

    """

    def __init__(
        self,
        num_blocks: int,
        num_slots: int,
        num_ahead: int,
        eviction_policy: str,
        num_keys: int,
        host: "Host",
        tuning: SchedulingTuning,
    ) -> None:
        super().__init__(num_keys)
        self._host = host
        one_in = max(1, num_slots // tuning.shadow_slots)
        # At least a quarter, or the two would not differ.
        slots = max(1, max(num_slots - num_ahead, num_slots // 4) // one_in)
        self._all = GhostCache(slots, make_policy(eviction_policy, slots))
        # `super()`, since the method of this class returns what was chosen.
        self._again = GhostCache(
            slots, make_policy(eviction_policy, slots), super().admits
        )
        blocks = max(1, num_blocks // one_in)
        self._ghosts = GhostDevice(blocks, (self._all, self._again))
        self._one_in = one_in
        self._tuning = tuning
        self._num_sampled = 0
        # A new tier has room, which waiting for second uses would leave empty.
        self.admits_all = True

    def record_hit(self, keys: Collection[Hashable]) -> None:
        super().record_hit(keys)
        self._sample(keys)

    def record_use(self, key: Hashable) -> None:
        # A hot path: each computed block. Most keys are not in the sample.
        if hash(key) % self._one_in == 0:
            super().record_use(key)
            self._sample((key,))

    def record_loss(self, key: Hashable) -> None:
        if hash(key) % self._one_in:
            super().record_use(key)

    def admits(self, key: Hashable) -> bool:
        if self.admits_all or self._host.has_room() or super().admits(key):
            return True
        # Used before, if it was computed again after both tiers had lost it.
        return hash(key) % self._one_in != 0 and (
            self._computed.get(key) is not None or self._host.has_evicted(key)
        )

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
        # Only the scheduler chooses, so hashes may differ between processes.
        one_in = self._one_in
        for key in keys:
            if hash(key) % one_in == 0:
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
    host: "Host",
) -> Admission | None:
    """The admission that `store_from_use` sets; None to store every block.

    Args:
        layout: Slots and settings of the host tier.
        num_blocks: Number of device blocks.
        num_keys: Keys whose uses are remembered.
        host: The slot table.

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
        host,
        layout.tuning,
    )
