# SPDX-License-Identifier: Apache-2.0
"""Which KV block lies in which host slot."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.kv_tier.eviction.base import EvictionPolicy

Policy = TypeVar("Policy", bound=EvictionPolicy)


class HostSlot(KVCacheBlock):
    """A filled host slot, and the placeholder for it in a prefix scan.

    As a placeholder it is never referenced, so upstream counts it as one block to
    allocate, as it does an evictable device block. A slot that is filled again is the
    same object with other keys, so none is kept beyond `SlotListener.forgotten`.

    Args:
        index: Number of the slot in host memory.
        keys: All prefix-cache keys of the block; the first is its primary one.
        num_tokens: Prefix tokens that the primary key covers.
        store_seq: Plan whose store fills the slot.

    """

    # What is the same for all of them is the class's.
    __slots__ = ("index", "keys", "num_tokens", "store_seq")
    block_id = -1
    ref_cnt = 0
    prev_free_block = next_free_block = None
    is_null = False

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

    @property
    def block_hash_num_tokens(self) -> int | None:
        return self.num_tokens

    __eq__ = object.__eq__
    __hash__ = object.__hash__
    __repr__ = object.__repr__


class SlotListener(Protocol):
    """Whoever must know what the host has."""

    def filled(self, slot: HostSlot) -> None:
        """A store into `slot` is queued; its keys can be found from now on."""

    def loaded(self, slots: Sequence[HostSlot]) -> None:
        """Loads from `slots` are queued; the device has their keys, too."""

    def forgotten(self, slot: HostSlot) -> None:
        """The keys of `slot` cannot be found any more."""


_MAX_PASSED = 8_192
"""Slots that are being written below, and that the victims of one plan pass over. Each
takes a microsecond; the next plan goes on behind them."""

_is_pinned = frozenset[object]().__contains__
"""Of keys in the order of a policy, see `SlotTable._evict`: none. Each victim comes by
here, so this is no function of Python's."""


class SlotTable:
    """Keys of the host tier, and the order in which they make room.

    Args:
        num_slots: Slots in host memory.
        policy: Order of eviction; holds the primary key of every filled slot.

    """

    def __init__(self, num_slots: int, policy: EvictionPolicy) -> None:
        self.num_slots = num_slots
        self.num_evicted = 0
        """Slots that have made room, since whoever reports it set this to 0."""
        self.listeners: list[SlotListener] = []
        self._policy = policy
        self._slots: dict[BlockHashWithGroupId, HostSlot] = {}
        # No method: asked for every block of every prefix, and for every victim.
        self.get: Callable[[BlockHashWithGroupId], HostSlot | None] = self._slots.get
        self._by_index: list[HostSlot | None] = [None] * num_slots
        # All of them from the start, so that filling them makes no objects for Python's
        # garbage collector to look through: vLLM excepts what an engine starts with.
        self._objects = [HostSlot(i, (), None, 0) for i in range(num_slots)]
        self._num_filled = 0
        self._free = list(range(num_slots - 1, -1, -1))
        # When each slot was last read and last stored to; both outlive its content,
        # because what fills a reused slot must wait for that.
        self._load_seq = [0] * num_slots
        self._store_seq = [0] * num_slots
        self._pinned: set[BlockHashWithGroupId] = set()
        # Pinned keys that the policy gave up. It gets them back when the plan is
        # complete, so that no victim costs a search through all that is pinned.
        self._aside: dict[BlockHashWithGroupId, None] = {}
        # Keys that the policy gave up while a tier below writes their slots, and those
        # of them that have been written since: these are the next victims, unless they
        # are used before.
        self._passed: dict[BlockHashWithGroupId, None] = {}
        self._num_passed = 0
        self._next: dict[BlockHashWithGroupId, None] = {}
        # Slots that make room before those that the policy would choose, the last one
        # first. And those that will, and are being written: no victim is searched for
        # among them.
        self._released: dict[BlockHashWithGroupId, None] = {}
        self._released_later: dict[BlockHashWithGroupId, None] = {}
        # Removed while pinned: the plan still copies from or to them.
        self._free_after_plan: list[int] = []
        # Slots that are being written, by index, and their primary keys, to each tier
        # below and to any: they serve loads, and their memory is given to nobody. And
        # those of them that were removed meanwhile.
        self._held_by: dict[int, tuple[set[int], set[BlockHashWithGroupId]]] = {}
        self._held: set[int] = set()
        self._held_keys: set[BlockHashWithGroupId] = set()
        self._free_after_hold: set[int] = set()
        # Slots that are being filled from below.
        self._reserved: set[int] = set()

    def __len__(self) -> int:
        return self._num_filled

    def at(self, index: int) -> HostSlot | None:
        """The content of slot `index`, if it is filled, and one of this table."""
        return self._by_index[index] if index < self.num_slots else None

    def has_room(self) -> bool:
        """Whether a slot can be filled at the cost of nothing that may return."""
        return bool(self._free or self._released)

    def filled(self) -> list[HostSlot]:
        return [slot for slot in self._by_index if slot is not None]

    def pin(self, slots: Iterable[HostSlot]) -> None:
        """Keep `slots` until `unpin_all`: the plan in the making reads them.

        The policy hears of the use now, so that it gives up others first.
        """
        # For each block that is loaded.
        keys = [slot.keys[0] for slot in slots]
        self._pinned.update(keys)
        self.order_passed(keys)
        aside, released = self._aside, self._released
        ordered = [key for key in keys if key not in aside] if aside else keys
        self._policy.hits(ordered)
        for marked in (released, self._released_later):
            if marked:
                for key in keys:
                    marked.pop(key, None)

    def order_passed(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Blocks of `keys` are used again: none of their slots is the next victim."""
        if self._passed or self._next:
            for key in keys:
                if self._forget_passed(key):
                    self._policy.insert(key)

    def unpin_all(self) -> None:
        """The plan is complete."""
        self._pinned.clear()
        self._num_passed = 0
        for key in self._aside:
            self._policy.insert(key)
            self._policy.hit(key)
        self._aside.clear()
        self._free.extend(self._free_after_plan)
        self._free_after_plan.clear()

    def wrap_policy(self, wrap: Callable[[EvictionPolicy], Policy]) -> Policy:
        """From now on the order of eviction is that of what `wrap` makes of the policy,
        which has the same keys."""
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
        """The plan `seq` loads the blocks of `slots`, which are pinned."""
        load_seq = self._load_seq
        for slot in slots:
            load_seq[slot.index] = seq
        for listener in self.listeners:
            listener.loaded(slots)

    def last_load(self, slot: HostSlot) -> int:
        """Last plan that read the memory of `slot`, for whatever content."""
        return self._load_seq[slot.index]

    def last_copies(self, indices: Sequence[int]) -> tuple[int, int]:
        """Last plans that stored to one of these slots and that loaded from one, for
        whatever content."""
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
        """Fill a slot, evicting another one when none is free. It is pinned.

        Args:
            keys: Keys of the block; none of them may be in the table.
            num_tokens: Prefix tokens that the primary key covers.
            seq: Plan that stores the block.

        Returns:
            The slot, or None when every slot is in use by the plan.

        """
        # For each store.
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
            listener.filled(slot)
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
        """Make room. Returns the slot, which is nobody's, or None: all are in use."""
        # For every victim of a plan: no search for nothing.
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
        """What the policy gives up, without what is in use."""
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
        """Whether the policy gave `key` up, which is no victim any more."""
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

    # ------------------------------------------------------------- the tier below

    def hold(
        self, tier: int, indices: Sequence[int], keys: Sequence[BlockHashWithGroupId]
    ) -> None:
        """A tier below begins to write what slots have under `keys`. It writes none of
        these already."""
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
        """It has written, whatever became of the slots meanwhile."""
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
        """Slots that are to be filled from below, as many as can be had. Nobody sees
        them until `fill`, or `unreserve`."""
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
        """Slot `index`, reserved, has the block of `key`, which no other slot has."""
        assert key not in self._slots
        self._reserved.remove(index)
        slot = self._slots[key] = self._filled(index, (key,), num_tokens, store_seq=0)
        self._policy.insert(key)
        for listener in self.listeners:
            listener.filled(slot)

    def unreserve(self, index: int) -> None:
        """Slot `index`, reserved, is of no use."""
        self._reserved.remove(index)
        self._free_slot(index)

    def _free_slot(self, index: int) -> None:
        if index < self.num_slots:
            self._free.append(index)

    def release(self, slot: HostSlot) -> None:
        """Let `slot` make room first, before those that were released until now, unless
        it is used before."""
        key = slot.keys[0]
        if key not in self._pinned:
            is_held = key in self._held_keys
            (self._released_later if is_held else self._released)[key] = None

    def remove(self, slot: HostSlot) -> None:
        """The content of `slot` must not be served any more."""
        key = slot.keys[0]
        if key in self._aside:
            del self._aside[key]
        elif not self._forget_passed(key):
            self._policy.remove(key)
        self._forget(slot)

    def by_value(self) -> list[HostSlot]:
        """All filled slots, those that would make room last first. Only for the end of
        an engine: the policy has given up all of them afterwards."""
        order = dict.fromkeys(reversed(self._released))
        order.update(self._released_later)
        order.update({**self._next, **self._passed})
        while (key := self._policy.evict(_is_pinned)) is not None:
            order[key] = None  # type: ignore[index]
        order.update(self._aside)
        return [self._slots[key] for key in reversed(order) if key in self._slots]

    def close(self) -> None:
        """Forget all slots, and fill none any more."""
        for slot in self.filled():
            self.remove(slot)
        self.num_slots = 0
        self._free.clear()
        self._free_after_plan.clear()
        self._free_after_hold.clear()

    def _forget(self, slot: HostSlot) -> None:
        """Nobody finds `slot` any more, and its memory is free as soon as it can be."""
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
        """Nobody finds `slot` any more."""
        for key in slot.keys:
            del self._slots[key]
        for marked in (self._released, self._released_later):
            if marked:
                marked.pop(slot.keys[0], None)
        self._by_index[slot.index] = None
        self._num_filled -= 1
        for listener in self.listeners:
            listener.forgotten(slot)
