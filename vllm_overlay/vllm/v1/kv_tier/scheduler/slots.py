# SPDX-License-Identifier: Apache-2.0
"""The slot table: which KV block is in which host slot."""

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import numpy as np

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.kv_tier.eviction.base import EvictionPolicy, pins_none
from vllm.v1.kv_tier.eviction.places import PlacedPolicy, Places

Policy = TypeVar("Policy", bound=EvictionPolicy)


class Placeholder(KVCacheBlock):
    """Stands for a block without device memory in a prefix scan.

    It is never referenced, so upstream counts it as one block to allocate, like an
    evictable device block.
    """

    # Attributes that are equal for all of them are class attributes.
    __slots__ = ("num_tokens",)
    block_id = -1
    ref_cnt = 0
    prev_free_block = next_free_block = None
    is_null = False
    num_tokens: int | None

    @property
    def block_hash_num_tokens(self) -> int | None:
        return self.num_tokens

    __eq__ = object.__eq__
    __hash__ = object.__hash__
    __repr__ = object.__repr__


class HostSlot(Placeholder):
    """A filled host slot, and the placeholder for it.

    It is a value, made when it is asked for, and says nothing of the slot beyond
    `SlotListener.on_forgotten`.

    Args:
        index: Number of the slot in host memory.
        keys: All prefix-cache keys of the block; the first is the primary one.
        num_tokens: Prefix tokens that the primary key covers.
        store_seq: Plan whose store fills the slot.

    """

    __slots__ = ("index", "keys", "store_seq")

    def __init__(
        self,
        index: int,
        keys: tuple[BlockHashWithGroupId, ...],
        num_tokens: int | None,
        store_seq: int,
    ) -> None:
        self.index = index
        self.keys = keys
        self.num_tokens = num_tokens
        self.store_seq = store_seq

    @property
    def block_hash(self) -> BlockHashWithGroupId:
        return self.keys[0]

    def __eq__(self, other: object) -> bool:
        return type(other) is HostSlot and (
            (self.index, self.keys, self.store_seq)
            == (other.index, other.keys, other.store_seq)
        )

    def __hash__(self) -> int:
        return hash((self.index, self.keys))

    def __repr__(self) -> str:
        return f"HostSlot({self.index}, {self.keys}, {self.num_tokens})"


index_of = attrgetter("index")
"""Of a slot. No Python code for each loaded block."""


class SlotListener(Protocol):
    """Notified of changes of the host's content."""

    def on_filled(self, slot: HostSlot) -> None:
        """A store into `slot` is queued; its keys can be found from now on."""

    def on_loaded(self, slots: Sequence[HostSlot]) -> None:
        """Loads from `slots` are queued; the device has their keys too."""

    def on_forgotten(self, slot: HostSlot) -> None:
        """The keys of `slot` can no longer be found."""


_MAX_PASSED = 8_192
"""Most slots in writes that the victims of one plan skip. Each takes a microsecond, and
the next plan continues after them."""


class SlotTable:
    """The keys of the host tier, and their order of eviction.

    What is known of a slot lies in arrays at its index, since there may be millions.
    Nothing here makes objects for Python's garbage collector.

    Args:
        num_slots: Number of slots in host memory.
        policy: Order of eviction; holds the primary key of every filled slot.
        num_open: Number of slots that may be filled, the first ones; None for all.

    """

    def __init__(
        self, num_slots: int, policy: EvictionPolicy, num_open: int | None = None
    ) -> None:
        self.num_slots = num_slots if num_open is None else num_open
        """Number of slots that may be filled: the first ones."""
        self.num_evicted = 0
        """Number of evicted slots, since the reader reset this."""
        self.listeners: list[SlotListener] = []
        self._policy = policy
        self.places = Places(num_slots)
        """Slots by key, and keys by slot. Public, for those who look up every block."""
        self._parts, self._num_parts = self.places.parts, self.places.num_parts
        # The policy, if it takes places instead of keys.
        self._placed = policy if isinstance(policy, PlacedPolicy) else None
        if self._placed is not None:
            self._placed.use_places(self.places)
        # All keys of slots with several, by index.
        self._several: dict[int, tuple[BlockHashWithGroupId, ...]] = {}
        # Prefix tokens of the primary key, 0 if unknown.
        self._num_tokens = array("i", [0]) * num_slots
        self._num_filled = 0
        self._free = list(range(self.num_slots - 1, -1, -1))
        # When each slot was last read and last stored to. Both outlive its content,
        # since copies for the next content must wait for these. What a secondary tier
        # has filled counts as stored by plan 0: that began after all copies before it,
        # and has ended on all ranks.
        self._load_seq = array("q", [0]) * num_slots
        self._store_seq = array("q", [0]) * num_slots
        self._pinned: set[BlockHashWithGroupId] = set()
        # Pinned keys that the policy evicted. It gets them back when the plan is
        # complete, so that no victim needs a search through pinned keys.
        self._aside: dict[BlockHashWithGroupId, None] = {}
        # Keys that the policy evicted while a secondary tier writes their slots, and
        # those of them that are written by now: the next victims, unless they are used
        # before.
        self._passed: dict[BlockHashWithGroupId, None] = {}
        self._num_passed = 0
        self._next: dict[BlockHashWithGroupId, None] = {}
        # Slots to evict before the policy's, last one first; and those that will be,
        # but are being written.
        self._released: dict[BlockHashWithGroupId, None] = {}
        self._released_later: dict[BlockHashWithGroupId, None] = {}
        # Removed while pinned: the plan still copies from or to them.
        self._free_after_plan: list[int] = []
        # Slots that are being written, by index and primary key, for each secondary
        # tier and for any. They serve loads, but their memory is not reused. Then those
        # of them that were removed meanwhile.
        self._held_by: dict[int, tuple[set[int], set[BlockHashWithGroupId]]] = {}
        self._held: set[int] = set()
        self._held_keys: set[BlockHashWithGroupId] = set()
        self._free_after_hold: set[int] = set()
        # Slots that are being filled from a secondary tier.
        self._reserved: set[int] = set()

    def __len__(self) -> int:
        return self._num_filled

    def get(self, key: BlockHashWithGroupId) -> HostSlot | None:
        """The slot of `key`."""
        # A hot path: each block of each prefix that the device lacks. No calls.
        index = self._parts[hash(key) % self._num_parts].get(key)
        if index is None:
            return None
        keys = self._several.get(index, (key,)) if self._several else (key,)
        num_tokens = self._num_tokens[index] or None
        return HostSlot(index, keys, num_tokens, self._store_seq[index])

    def has(self, key: BlockHashWithGroupId) -> bool:
        """Whether a slot has `key`."""
        return key in self._parts[hash(key) % self._num_parts]

    def at(self, index: int) -> HostSlot | None:
        """The content of slot `index`, if it is filled, and one of this table."""
        key = self.places.keys[index] if index < self.num_slots else None
        return None if key is None else self.get(key)

    def changed_since(self, seq: int) -> list[HostSlot]:
        """Slots with a block that plan `seq` or a later one stores or loads."""
        stored, loaded = (
            np.frombuffer(s, np.int64) for s in (self._store_seq, self._load_seq)
        )
        slots = map(self.at, np.flatnonzero(np.maximum(stored, loaded) >= seq).tolist())
        return [slot for slot in slots if slot is not None]

    def has_room(self) -> bool:
        """Whether a slot can be filled without evicting a block of any use."""
        return bool(self._free or self._released)

    def filled_slots(self) -> list[HostSlot]:
        return [self.get(key) for key in self.places.keys if key is not None]  # type: ignore[misc]

    def pin(self, slots: Sequence[HostSlot]) -> None:
        """Keep `slots` until `unpin_all`, since the current plan reads them. For the
        policy the last one is used first: a prefix is of no use without its beginning.
        """
        # A hot path: each loaded block.
        keys = [slot.keys[0] for slot in slots]
        self._pinned.update(keys)
        self.keep_passed(keys)
        aside, released = self._aside, self._released
        if self._placed is not None and not aside:
            self._placed.hit_places([*map(index_of, reversed(slots))])
        else:
            self._policy.hits([key for key in reversed(keys) if key not in aside])
        for marked in (released, self._released_later):
            if marked:
                for key in keys:
                    marked.pop(key, None)

    def keep_passed(self, keys: Collection[BlockHashWithGroupId]) -> None:
        """Record uses of `keys`: their slots are not the next victims any more."""
        for evicted in (self._passed, self._next):
            if evicted and not evicted.keys().isdisjoint(keys):
                for key in filter(evicted.__contains__, keys):
                    self._forget_passed(key)
                    self._policy.insert(key)

    def unpin_all(self) -> None:
        """Unpin all slots, since the plan is complete."""
        self._pinned.clear()
        self._num_passed = 0
        for key in self._aside:
            self._policy.insert(key)
            self._policy.hit(key)
        self._aside.clear()
        self._free.extend(self._free_after_plan)
        self._free_after_plan.clear()

    def wrap_policy(self, wrap: Callable[[EvictionPolicy], Policy]) -> Policy:
        """Replace the policy by `wrap(policy)`, which must hold the same keys."""
        self._policy, self._placed = (wrapped := wrap(self._policy)), None
        return wrapped

    def is_ordered(self, key: BlockHashWithGroupId) -> bool:
        """Whether the policy has `key` now."""
        index = self.places.find(key)
        if index is None or self.places.keys[index] != key:
            return False
        return not (key in self._aside or key in self._passed or key in self._next)

    def is_pinned(self, slot: HostSlot) -> bool:
        return slot.keys[0] in self._pinned

    def mark_loaded(self, slots: Sequence[HostSlot], seq: int) -> None:
        """Record that plan `seq` loads the blocks of `slots`, which are pinned."""
        load_seq = self._load_seq
        for index in map(index_of, slots):
            load_seq[index] = seq
        for listener in self.listeners:
            listener.on_loaded(slots)

    def last_load(self, indices: Iterable[int]) -> int:
        """Last plan that read the memory of any of these slots, whatever it was."""
        return max(map(self._load_seq.__getitem__, indices))

    def last_copies(self, indices: Sequence[int]) -> tuple[int, int]:
        """Last plans that stored to any of these slots, and that loaded from any."""
        stored = max(map(self._store_seq.__getitem__, indices))
        return stored, self.last_load(indices)

    def insert(
        self,
        keys: tuple[BlockHashWithGroupId, ...],
        num_tokens: int | None,
        seq: int,
    ) -> int | None:
        """Fill a slot, and evict another block if none is free. The slot is pinned.

        Args:
            keys: Keys of the block; none of them may be in the table.
            num_tokens: Prefix tokens that the primary key covers.
            seq: Plan that stores the block.

        Returns:
            The index of the slot, or None if the plan uses every slot.

        """
        indices = self._take(1)
        if not indices:
            return None
        for other in keys[1:]:
            part = self._parts[hash(other) % self._num_parts]
            assert other not in part
            part[other] = indices[0]
        if len(keys) > 1:
            self._several[indices[0]] = keys
        self._pinned.add(keys[0])
        self._fill(indices, keys[:1], (num_tokens,), seq)
        return indices[0]

    def insert_all(
        self,
        keys: Sequence[BlockHashWithGroupId],
        num_tokens: Sequence[int | None],
        seq: int,
    ) -> list[int]:
        """As `insert` for blocks of one key each, the first ones if there are too few
        slots. Returns the indices of their slots."""
        indices = self._take(len(keys))
        keys = keys[: len(indices)]
        self._pinned.update(keys)
        self._fill(indices, keys, num_tokens, seq)
        return indices

    def _fill(
        self,
        indices: Sequence[int],
        keys: Sequence[BlockHashWithGroupId],
        num_tokens: Sequence[int | None],
        store_seq: int,
        is_new: bool = True,
    ) -> None:
        """Fill free slots with blocks of these primary keys, or take over that they
        are."""
        # A hot path: each store.
        parts, num_parts = self._parts, self._num_parts
        of_slots, tokens, seqs = self.places.keys, self._num_tokens, self._store_seq
        for index, key, number in zip(indices, keys, num_tokens):
            part = parts[hash(key) % num_parts]
            assert key not in part
            part[key] = index
            of_slots[index] = key
            tokens[index] = number or 0
            seqs[index] = store_seq
        self._num_filled += len(indices)
        if self._placed is not None:
            self._placed.insert_at(indices, keys)
        else:
            for key in keys:
                self._policy.insert(key)
        for slot in map(self.get, keys) if is_new and self.listeners else ():
            for listener in self.listeners:
                listener.on_filled(slot)  # type: ignore[arg-type]

    def _take(self, num_slots: int) -> list[int]:
        """Take free slots, and evict for the rest; fewer if others are in use."""
        free = self._free
        indices = [free.pop() for _ in range(min(num_slots, len(free)))]
        if len(indices) < num_slots:
            indices += self._evict(num_slots - len(indices))
        return indices

    def _evict(self, num_slots: int) -> list[int]:
        """Evict blocks. Returns their slots, fewer if others are in use."""
        indices: list[int] = []
        while (num_left := num_slots - len(indices)) > 0:
            # Called for the victims of a plan, so avoid a futile search.
            num_unpinned = self._num_filled - len(self._pinned)
            if num_unpinned <= 0:
                break
            if self._released:
                self.num_evicted += 1
                self._remove(self._released.popitem()[0])
                indices.append(self._free.pop())
                continue
            victims = self._victims(most := min(num_left, num_unpinned))
            self.num_evicted += len(victims)
            indices += self._unlist(victims)
            if len(victims) < most:
                break
        return indices

    def _victims(self, num_keys: int) -> list[BlockHashWithGroupId]:
        """The policy's next victims that are not in use."""
        victims: list[BlockHashWithGroupId] = []
        pinned, held = self._pinned, self._held_keys
        while self._next and len(victims) < num_keys:
            for victim in [*islice(self._next, num_keys - len(victims))]:
                del self._next[victim]
                if victim in held:
                    self._passed[victim] = None
                else:
                    victims.append(victim)
        while len(victims) < num_keys and self._num_passed < _MAX_PASSED:
            evicted: Any = self._policy.evict_all(num_keys - len(victims))
            if not evicted:
                break
            if pinned.isdisjoint(evicted) and held.isdisjoint(evicted):
                victims += evicted
                break
            for victim in evicted:
                if victim in pinned:
                    self._aside[victim] = None
                elif victim in held:
                    self._num_passed += 1
                    self._passed[victim] = None
                else:
                    victims.append(victim)
        return victims

    def _forget_passed(self, key: BlockHashWithGroupId) -> bool:
        """Remove `key` from evicted keys that are written. False if it is not there."""
        for keys in (self._passed, self._next):
            if key in keys:
                del keys[key]
                return True
        return False

    # ----------------------------------------------------------- secondary tiers

    def hold(
        self, tier: int, indices: Sequence[int], keys: Sequence[BlockHashWithGroupId]
    ) -> None:
        """Record that a secondary tier begins to write slots, under `keys`.

        It must not be writing any of these already.
        """
        of_tier = self._held_by.setdefault(tier, (set(), set()))
        for held in (of_tier, (self._held, self._held_keys)):
            held[0].update(indices)
            held[1].update(keys)
        if self._released:
            for key in self._released.keys() & keys:
                del self._released[key]
                self._released_later[key] = None

    def end_hold(
        self, tier: int, indices: Sequence[int], keys: Sequence[BlockHashWithGroupId]
    ) -> None:
        """Record that it has written them, even if the slots were removed meanwhile."""
        of_tier = self._held_by[tier]
        of_tier[0].difference_update(indices)
        of_tier[1].difference_update(keys)
        by_others = list(self._held_by.values())
        over = set(indices).difference(*(held for held, _ in by_others))
        self._held -= over
        ended = set(keys).difference(*(held for _, held in by_others))
        self._held_keys -= ended
        if self._released_later:
            for key in self._released_later.keys() & ended:
                del self._released_later[key]
                self._released[key] = None
        if self._passed:
            for key in keys:
                if key in ended and key in self._passed:
                    del self._passed[key]
                    self._next[key] = None
        for index in over & self._free_after_hold:
            self._free_after_hold.remove(index)
            self._free_slot(index)

    def reserve(self, num_slots: int) -> list[int]:
        """Reserve up to `num_slots` slots to be filled from a secondary tier.

        They cannot be found until `fill`; `unreserve` frees them.
        """
        indices = self._take(num_slots)
        self._reserved.update(indices)
        return indices

    def fill(
        self, index: int, key: BlockHashWithGroupId, num_tokens: int | None
    ) -> None:
        """Make reserved slot `index` the slot of `key`, which must have no other."""
        self._reserved.remove(index)
        self._fill((index,), (key,), (num_tokens,), store_seq=0)

    def unreserve(self, index: int) -> None:
        """Free reserved slot `index`."""
        self._reserved.remove(index)
        self._free_slot(index)

    def _free_slot(self, index: int) -> None:
        if index < self.num_slots:
            self._free.append(index)

    def release(self, slot: HostSlot) -> None:
        """Evict `slot` before all others, unless it is used before."""
        key = slot.keys[0]
        if key not in self._pinned:
            is_held = key in self._held_keys
            (self._released_later if is_held else self._released)[key] = None

    def keep(self, key: BlockHashWithGroupId) -> None:
        """Undo `release`: `key` is evicted in the policy's order."""
        if (index := self.places.find(key)) is not None:
            for marked in (self._released, self._released_later):
                marked.pop(self.places.keys[index], None)

    def remove(self, slot: HostSlot) -> None:
        """Remove `slot`, whose content must not be served any more."""
        self._remove(slot.keys[0])

    def _remove(self, key: BlockHashWithGroupId) -> None:
        if key in self._aside:
            del self._aside[key]
        elif not self._forget_passed(key):
            self._policy.remove(key)
        self._forget(key)

    def by_value(self) -> list[HostSlot]:
        """All filled slots, in reverse order of eviction. Empties the policy: only for
        the end of an engine."""
        order = dict.fromkeys(reversed(self._released))
        order.update(self._released_later)
        order.update({**self._next, **self._passed})
        while (key := self._policy.evict(pins_none)) is not None:
            order[key] = None  # type: ignore[index]
        order.update(self._aside)
        slots = map(self.get, reversed(order))
        return [slot for slot in slots if slot is not None]

    def open(self, num_slots: int) -> None:
        """Let the first `num_slots` slots be filled: as many as now, or more."""
        self._free.extend(range(num_slots - 1, self.num_slots - 1, -1))
        self.num_slots = max(num_slots, self.num_slots)

    def expect(self, num_slots: int) -> None:
        """Prepare for calls of `open` or `close_down` until so many are open."""
        # The last slots come first, so that whole runs of them are taken at once.
        self._free.sort(reverse=True)
        self._policy.resize(num_slots)

    def close_down(self, first: int, most: int) -> None:
        """Close the last slots, down to slot `first`, and evict their content. No slot
        may be pinned. Stops at one that a secondary tier uses; it may be closed later.

        Args:
            first: The first slot to close.
            most: Most slots to close.

        """
        free, num_free = self._free, 0
        num_left = max(first, self.num_slots - most)
        for index in reversed(range(num_left, self.num_slots)):
            if index in self._held or index in self._reserved:
                break
            if num_free < len(free) and free[num_free] == index:
                num_free += 1
            elif (key := self.places.keys[index]) is not None:
                self.num_evicted += 1
                # Now it is the last one of those that are free.
                self._remove(key)
                free.pop()
            else:
                # Freed since `expect`, so one of the last.
                del free[
                    next(i for i in reversed(range(len(free))) if free[i] == index)
                ]
            self.num_slots = index
        del free[:num_free]

    def close(self) -> None:
        """Remove all slots, and fill none from now on."""
        for key in self.places.keys:
            if key is not None:
                self._remove(key)
        self.num_slots = 0
        self._free.clear()
        self._free_after_plan.clear()
        self._free_after_hold.clear()

    def _forget(self, key: BlockHashWithGroupId) -> None:
        """Remove the slot of primary `key` from lookups, and free its memory as soon as
        possible."""
        (index,) = self._unlist((key,))
        is_pinned = key in self._pinned
        if is_pinned:
            self._pinned.remove(key)
        if index in self._held:
            self._free_after_hold.add(index)
        elif is_pinned:
            self._free_after_plan.append(index)
        else:
            self._free.append(index)

    def _unlist(self, keys: Sequence[BlockHashWithGroupId]) -> list[int]:
        """Remove the slots of primary `keys` from lookups. Returns their indices."""
        slots = list(map(self.get, keys)) if self.listeners else ()
        parts, num_parts = self._parts, self._num_parts
        indices = [parts[hash(key) % num_parts].pop(key) for key in keys]
        for index in indices:
            self.places.keys[index] = None
        if self._several:
            for index in indices:
                for other in self._several.pop(index, ())[1:]:
                    del parts[hash(other) % num_parts][other]
        for marked in (self._released, self._released_later):
            if marked:
                for key in keys:
                    marked.pop(key, None)
        self._num_filled -= len(indices)
        for slot in slots:
            for listener in self.listeners:
                listener.on_forgotten(slot)  # type: ignore[arg-type]
        return indices
