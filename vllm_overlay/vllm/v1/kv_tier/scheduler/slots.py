# SPDX-License-Identifier: Apache-2.0
"""The slot table: which KV block is in which host slot."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.kv_tier.eviction.base import EvictionPolicy

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

    When a slot is filled again, the object is reused with other keys, so do not keep it
    beyond `SlotListener.on_forgotten`.

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

_is_pinned = frozenset[object]().__contains__
"""Passed to the policy, which sees no key as pinned (`SlotTable._evict`). Not a Python
function, since it is called for each victim."""


class SlotTable:
    """The keys of the host tier, and their order of eviction.

    Args:
        num_slots: Number of slots in host memory.
        policy: Order of eviction; holds the primary key of every filled slot.
        num_open: Number of slots that may be filled, the first ones; None for all.

    """

    first_slot = 0
    """Its number on the ranks, in jobs of secondary tiers."""

    def __init__(
        self, num_slots: int, policy: EvictionPolicy, num_open: int | None = None
    ) -> None:
        self.num_slots = num_slots if num_open is None else num_open
        """Number of slots that may be filled: the first ones."""
        self.num_evicted = 0
        """Number of evicted slots, since the reader reset this."""
        self.listeners: list[SlotListener] = []
        self._policy = policy
        self._slots: dict[BlockHashWithGroupId, HostSlot] = {}
        # Not a method, since it is called for every block of every prefix, and every
        # victim.
        self.get: Callable[[BlockHashWithGroupId], HostSlot | None] = self._slots.get
        self._by_index: list[HostSlot | None] = [None] * num_slots
        # Allocated at the start, so that filling slots makes no objects for the garbage
        # collector; vLLM exempts those of the start.
        self._objects = [HostSlot(i, (), None, 0) for i in range(num_slots)]
        self._num_filled = 0
        self._free = list(range(self.num_slots - 1, -1, -1))
        # When each slot was last read and last stored to. Both outlive its content,
        # since copies for the next content must wait for these.
        self._load_seq = [0] * num_slots
        self._store_seq = [0] * num_slots
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

    def at(self, index: int) -> HostSlot | None:
        """The content of slot `index`, if it is filled, and one of this table."""
        return self._by_index[index] if index < self.num_slots else None

    def has_room(self) -> bool:
        """Whether a slot can be filled without evicting a block of any use."""
        return bool(self._free or self._released)

    def filled_slots(self) -> list[HostSlot]:
        return [slot for slot in self._by_index if slot is not None]

    def pin(self, slots: Iterable[HostSlot]) -> None:
        """Keep `slots` until `unpin_all`, since the current plan reads them.

        Also counts as a use for the policy.
        """
        # A hot path: each loaded block.
        keys = [slot.keys[0] for slot in slots]
        self._pinned.update(keys)
        self.keep_passed(keys)
        aside, released = self._aside, self._released
        ordered = [key for key in keys if key not in aside] if aside else keys
        self._policy.hits(ordered)
        for marked in (released, self._released_later):
            if marked:
                for key in keys:
                    marked.pop(key, None)

    def keep_passed(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Record uses of `keys`: their slots are not the next victims any more."""
        if self._passed or self._next:
            for key in keys:
                if self._forget_passed(key):
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
        self._policy = wrapped = wrap(self._policy)
        return wrapped

    def is_ordered(self, key: BlockHashWithGroupId) -> bool:
        """Whether the policy has `key` now."""
        slot = self._slots.get(key)
        if slot is None or slot.keys[0] != key:
            return False
        return not (key in self._aside or key in self._passed or key in self._next)

    def is_pinned(self, slot: HostSlot) -> bool:
        return slot.keys[0] in self._pinned

    def mark_loaded(self, slots: Sequence[HostSlot], seq: int) -> None:
        """Record that plan `seq` loads the blocks of `slots`, which are pinned."""
        load_seq = self._load_seq
        for slot in slots:
            load_seq[slot.index] = seq
        for listener in self.listeners:
            listener.on_loaded(slots)

    def last_load(self, slot: HostSlot) -> int:
        """Last plan that read the memory of `slot`, whatever its content was."""
        return self._load_seq[slot.index]

    def last_copies(self, indices: Sequence[int]) -> tuple[int, int]:
        """Last plans that stored to any of these slots, and that loaded from any.

        Whatever their content was.
        """
        return (
            max(map(self._store_seq.__getitem__, indices)),
            max(map(self._load_seq.__getitem__, indices)),
        )

    def insert(
        self,
        keys: tuple[BlockHashWithGroupId, ...],
        num_tokens: int | None,
        seq: int,
    ) -> HostSlot | None:
        """Fill a slot, and evict another block if none is free. The slot is pinned.

        Args:
            keys: Keys of the block; none of them may be in the table.
            num_tokens: Prefix tokens that the primary key covers.
            seq: Plan that stores the block.

        Returns:
            The slot, or None if the plan uses every slot.

        """
        # A hot path: each store.
        index = self._free.pop() if self._free else self._evict()
        if index is None:
            return None
        self._store_seq[index] = seq
        slot, slots = self._filled(index, keys, num_tokens, seq), self._slots
        for key in keys:
            assert key not in slots
            slots[key] = slot
        self._policy.insert(keys[0])
        self._pinned.add(keys[0])
        for listener in self.listeners:
            listener.on_filled(slot)
        return slot

    def _filled(
        self,
        index: int,
        keys: tuple[BlockHashWithGroupId, ...],
        num_tokens: int | None,
        store_seq: int,
    ) -> HostSlot:
        self._by_index[index] = slot = self._objects[index]
        slot.keys, slot.num_tokens, slot.store_seq = keys, num_tokens, store_seq
        self._num_filled += 1
        return slot

    def _evict(self) -> int | None:
        """Evict a block. Returns its slot's index, or None if all slots are in use."""
        # Called for every victim of a plan, so avoid a futile search.
        if len(self._pinned) >= self._num_filled:
            return None
        if self._released:
            return self._evict_released()
        victim = self._victim()
        if victim is None:
            return None
        self.num_evicted += 1
        slot = self._slots[victim]  # type: ignore[index]
        self._unlist(slot)
        return slot.index

    def _victim(self) -> BlockHashWithGroupId | None:
        """The policy's next victim that is not in use."""
        held, passed = self._held_keys, self._passed
        while self._next:
            del self._next[victim := next(iter(self._next))]
            if victim not in held:
                return victim
            passed[victim] = None
        pinned, evict = self._pinned, self._policy.evict
        while self._num_passed < _MAX_PASSED:
            victim = evict(_is_pinned)  # type: ignore[assignment]
            if victim in pinned:
                self._aside[victim] = None
            elif victim in held:
                self._num_passed += 1
                passed[victim] = None
            else:
                return victim
        return None

    def _forget_passed(self, key: BlockHashWithGroupId) -> bool:
        """Remove `key` from the evicted keys that are still written.

        False if it is not there.
        """
        for keys in (self._passed, self._next):
            if key in keys:
                del keys[key]
                return True
        return False

    def _evict_released(self) -> int:
        key, _ = self._released.popitem()
        self.num_evicted += 1
        self.remove(self._slots[key])
        return self._free.pop()

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
        indices: list[int] = []
        while len(indices) < num_slots:
            index = self._free.pop() if self._free else self._evict()
            if index is None:
                break
            indices.append(index)
        self._reserved.update(indices)
        return indices

    def fill(
        self, index: int, key: BlockHashWithGroupId, num_tokens: int | None
    ) -> None:
        """Make reserved slot `index` the slot of `key`, which must have no other."""
        assert key not in self._slots
        self._reserved.remove(index)
        slot = self._slots[key] = self._filled(index, (key,), num_tokens, store_seq=0)
        self._policy.insert(key)
        for listener in self.listeners:
            listener.on_filled(slot)

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
        if (slot := self._slots.get(key)) is not None:
            for marked in (self._released, self._released_later):
                marked.pop(slot.keys[0], None)

    def remove(self, slot: HostSlot) -> None:
        """Remove `slot`, whose content must not be served any more."""
        key = slot.keys[0]
        if key in self._aside:
            del self._aside[key]
        elif not self._forget_passed(key):
            self._policy.remove(key)
        self._forget(slot)

    def by_value(self) -> list[HostSlot]:
        """All filled slots, in reverse order of eviction.

        Only for the end of an engine, since it empties the policy.
        """
        order = dict.fromkeys(reversed(self._released))
        order.update(self._released_later)
        order.update({**self._next, **self._passed})
        while (key := self._policy.evict(_is_pinned)) is not None:
            order[key] = None  # type: ignore[index]
        order.update(self._aside)
        return [self._slots[key] for key in reversed(order) if key in self._slots]

    def open(self, num_slots: int) -> None:
        """Let the first `num_slots` slots be filled: as many as now, or more."""
        self._free.extend(range(num_slots - 1, self.num_slots - 1, -1))
        self.num_slots = max(num_slots, self.num_slots)

    def begin_closing(self) -> None:
        """Prepare for calls of `close_down`."""
        # The last slots come first, so that whole runs of them are taken at once.
        self._free.sort(reverse=True)

    def close_down(self, first: int, most: int) -> None:
        """Close the last slots, down to slot `first`, and evict their content.

        Stops at a slot that a secondary tier uses, which may be closed later. Call it
        when no slot is pinned.

        Args:
            first: The first slot to close.
            most: Most slots to close.

        """
        free, num_free = self._free, 0
        for index in range(
            self.num_slots - 1, max(first, self.num_slots - most) - 1, -1
        ):
            if index in self._held or index in self._reserved:
                break
            if num_free < len(free) and free[num_free] == index:
                num_free += 1
            elif (slot := self._by_index[index]) is not None:
                self.num_evicted += 1
                # Now it is the last one of those that are free.
                self.remove(slot)
                free.pop()
            else:
                # Freed since `begin_closing`, so one of the last.
                last = len(free) - 1
                del free[next(i for i in range(last, -1, -1) if free[i] == index)]
            self.num_slots = index
        del free[:num_free]

    def close(self) -> None:
        """Remove all slots, and fill none from now on."""
        for slot in self.filled_slots():
            self.remove(slot)
        self.num_slots = 0
        self._free.clear()
        self._free_after_plan.clear()
        self._free_after_hold.clear()

    def _forget(self, slot: HostSlot) -> None:
        """Remove `slot` from lookups, and free its memory as soon as possible."""
        key, index = slot.keys[0], slot.index
        is_pinned = key in self._pinned
        if is_pinned:
            self._pinned.remove(key)
        if index in self._held:
            self._free_after_hold.add(index)
        elif is_pinned:
            self._free_after_plan.append(index)
        else:
            self._free.append(index)
        self._unlist(slot)

    def _unlist(self, slot: HostSlot) -> None:
        """Remove `slot` from lookups."""
        for key in slot.keys:
            del self._slots[key]
        for marked in (self._released, self._released_later):
            if marked:
                marked.pop(slot.keys[0], None)
        self._by_index[slot.index] = None
        self._num_filled -= 1
        for listener in self.listeners:
            listener.on_forgotten(slot)
