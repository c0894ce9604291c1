# SPDX-License-Identifier: Apache-2.0
"""One engine's part of the pool: which slots it has published, and who reads them.

All of it is in memory that the keeper and all engines map. One lock guards it. The
engine that owns the partition writes the index; readers, each in a column of its own,
write pins.

    free ── the owner stores a block, all ranks report its end ──▶ published
    published ── a neighbour finds it, and pins it in the same critical section ──▶ read
    published, no pin ── the owner claims it in one critical section ──▶ free

So memory that a neighbour reads is never reused, and one that is reused is not found.

A process may die at any instruction, also with the lock held. What it leaves is valid,
since the order of writes is: what an entry says comes before the entry, and an entry
goes before what it says. Entries are aligned words, which are written whole. Pins of a
dead reader are cleared by the keeper.

Looks without the lock (`find`) give candidates only: `pin` looks again, with the lock.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm.v1.kv_tier.keeper.lock import LOCK_BYTES, RobustLock

KEY_BYTES = 40
"""Longest key of a block."""

MAX_ENGINES = 16
"""Most partitions, and readers of each."""

CHECKSUM_BYTES = 8
"""Of a block, where engines take checksums."""

_WORDS = KEY_BYTES // 8
# Slots of a bucket of the index, and buckets for each slot. A block whose bucket is
# full is not published, and neighbours can use nothing of a prompt behind it. With half
# as many buckets as slots, one prompt of 500 blocks in 14 had such a block; now at most
# one in 270,000 has.
_WAYS = 8
_BUCKETS_PER_SLOT = 2
_HEADER_BYTES = 4096
_IDENTITY_AT, _IDENTITY_BYTES = LOCK_BYTES, 32
_NUMBERS_AT = 128
_LOW = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(32)
# Odd, to mix the words of a key.
_FACTORS = np.array(
    [
        0x9E3779B97F4A7C15,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0xD6E8FEB86659FD93,
        0xA0761D6478BD642F,
    ],
    np.uint64,
)
# Critical sections take some 10 us.
_SPIN_S = 100e-6

Rows = NDArray[np.uint64]
"""`[n, 5]`: keys, padded with zeros. All keys of an identity have the same length."""
Slots = NDArray[np.int64]
"""`[n]`: numbers of slots in their partition."""


def rows_of(keys: Sequence[bytes]) -> Rows:
    """Keys of equal length as rows.

    Raises:
        ValueError: They are too long, or differ in length.

    """
    rows = np.zeros((len(keys), _WORDS), np.uint64)
    if keys:
        raw = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)
        rows.view(np.uint8)[:, : raw.shape[1]] = raw
    return rows


def mix(rows: Rows) -> NDArray[np.uint64]:
    """Hashes of keys, from which their places in any partition follow."""
    mixed = (rows * _FACTORS).sum(axis=1, dtype=np.uint64)
    mixed ^= mixed >> _HIGH
    mixed *= _FACTORS[0]
    mixed ^= mixed >> np.uint64(29)
    return mixed


class Claim(enum.Enum):
    """Whether the owner may reuse a slot."""

    FREE = enum.auto()
    """Yes: it is not published any more."""
    PINNED = enum.auto()
    """A neighbour reads it."""
    BUSY = enum.auto()
    """Another process is looking: not now."""


class Published(NamedTuple):
    """What a partition holds."""

    slots: list[int]
    keys: list[bytes]
    num_tokens: list[int | None]


class _Shape(NamedTuple):
    """Offsets of the arrays of a partition."""

    pins: int
    used: int
    keys: int
    num_tokens: int
    places: int
    entries: int
    checksums: int
    end: int

    @classmethod
    def of(cls, capacity: int) -> "_Shape":
        sizes = (
            capacity * MAX_ENGINES,
            capacity,
            capacity * KEY_BYTES,
            capacity * 4,
            capacity * 4,
            _num_buckets(capacity) * _WAYS * 8,
            capacity * CHECKSUM_BYTES,
        )
        at = [_HEADER_BYTES]
        for size in sizes:
            at.append(at[-1] + -(-size // 4096) * 4096)
        return cls(*at)


def partition_bytes(capacity: int) -> int:
    """Bytes of the index of `capacity` slots. Pages that are not used take none."""
    return _Shape.of(capacity).end


def _num_buckets(num_slots: int) -> int:
    return 1 << max(0, num_slots * _BUCKETS_PER_SLOT - 1).bit_length()


class Partition:
    """The index and the pins of one partition.

    Args:
        memory: `[partition_bytes(capacity)]`, uint8, shared and at first zero.
        capacity: Most slots that it can have.

    """

    def __init__(self, memory: NDArray[np.uint8], capacity: int) -> None:
        shape = _Shape.of(capacity)
        self.capacity = capacity
        self.lock = RobustLock(memory[:LOCK_BYTES])
        self._identity = memory[_IDENTITY_AT : _IDENTITY_AT + _IDENTITY_BYTES]
        self._numbers = memory[_NUMBERS_AT : _NUMBERS_AT + 64].view(np.int64)
        self._pins = memory[shape.pins :][: capacity * MAX_ENGINES].reshape(
            capacity, MAX_ENGINES
        )
        self._pin_words = self._pins.view(np.uint64)
        self._used = memory[shape.used :][:capacity].view(np.bool_)
        self._keys = memory[shape.keys :][: capacity * KEY_BYTES].view(np.uint64)
        self._keys = self._keys.reshape(capacity, _WORDS)
        self._num_tokens = memory[shape.num_tokens :][: capacity * 4].view(np.int32)
        # Of each slot, its place among the entries, counted from 1; 0: none.
        self._places = memory[shape.places :][: capacity * 4].view(np.int32)
        # A look at one takes less time here.
        self._place_of = self._places.data
        self._all_entries = memory[shape.entries : shape.checksums].view(np.uint64)
        self._checksums = memory[shape.checksums :][: capacity * CHECKSUM_BYTES]
        self._checksums = self._checksums.reshape(capacity, CHECKSUM_BYTES)
        self._entries = self._all_entries[:0]
        self._num_slots = 0

    # ------------------------------------------------------------------ who owns it

    @property
    def identity(self) -> bytes:
        """Whose content it has; zeros if none."""
        return bytes(self._identity)

    @property
    def num_slots(self) -> int:
        return int(self._numbers[0])

    def open(self) -> None:
        """Look at the slots that the partition has now."""
        self._num_slots = n = min(max(self.num_slots, 0), self.capacity)
        self._entries = self._all_entries[: _num_buckets(n) * _WAYS]

    def assign(self, identity: bytes, num_slots: int) -> bool:
        """Give the partition to an engine, empty. For the keeper.

        Returns:
            False if a neighbour still reads it, or its lock is busy.

        """
        if not self.lock.acquire(_SPIN_S):
            return False
        try:
            # Entries go first, so that none leads to a slot of the new owner.
            self.open()
            self._entries[:] = 0
            self._places[: self._num_slots] = 0
            if self._pin_words[: self._num_slots].any():
                return False
            self._used[: self._num_slots] = False
            self._identity[:] = np.frombuffer(identity, np.uint8)
            self._numbers[0] = num_slots
            self.open()
        finally:
            self.lock.release()
        return True

    def take_over(self, num_empty: int, num_first: int) -> Published | None:
        """What the last owner has left, for the next one with the same identity.

        Args:
            num_empty: Withdraw slots until so many of the first `num_first` are empty.
            num_first: Among how many of the first slots.

        Returns:
            Ends of prefixes come before their beginnings. None if the lock is busy.

        """
        if not self.lock.acquire(_SPIN_S):
            return None
        try:
            self.open()
            n = self._num_slots
            self._places[:n] = 0
            places = np.flatnonzero(self._entries)
            slots = (self._entries[places] & _LOW).astype(np.int64) - 1
            # Ends of prefixes first: without its beginning, a prefix is of no use.
            order = np.argsort(-self._num_tokens[slots], kind="stable")
            (are_first,) = np.nonzero(slots[order] < num_first)
            dropped = are_first[: max(len(are_first) - num_first + num_empty, 0)]
            self._entries[places[order[dropped]]] = 0
            order = np.delete(order, dropped)
            places, slots = places[order], slots[order]
            self._places[slots] = places + 1
            keys = self._keys[slots].view(np.uint8)[:, : self._key_bytes]
            tokens = self._num_tokens[slots].tolist()
            return Published(
                slots.tolist(),
                [bytes(key) for key in keys],
                [None if num < 0 else num for num in tokens],
            )
        finally:
            self.lock.release()

    @property
    def _key_bytes(self) -> int:
        return int(self._numbers[1])

    # ------------------------------------------------------------------ for the owner

    def publish(
        self,
        slots: Sequence[int],
        keys: Sequence[bytes],
        num_tokens: Sequence[int | None],
    ) -> bool:
        """Let neighbours find slots whose bytes are complete and do not change.

        Args:
            slots: Not published.
            keys: The key of each.
            num_tokens: Prefix tokens that the key covers; None or 0 if not known.

        Returns:
            False if the lock is busy.

        """
        rows, values = rows_of(keys), np.array(slots, np.int64)
        tokens = np.array([n or -1 for n in num_tokens], np.int32)
        buckets, tags = self._hashed(rows)
        # Only the owner writes entries, so places can be chosen before.
        places = self._free_places(buckets)
        fits = places >= 0
        rows, values, places = rows[fits], values[fits], places[fits]
        entries = (tags[fits] << _HIGH) | (values.astype(np.uint64) + np.uint64(1))
        if not self.lock.acquire(_SPIN_S):
            return False
        try:
            self._numbers[1] = len(keys[0])
            self._keys[values] = rows
            self._num_tokens[values] = tokens[fits]
            self._used[values] = False
            self._places[values] = places + 1
            self._entries[places] = entries
        finally:
            self.lock.release()
        return True

    def is_published(self, slot: int) -> bool:
        """Whether neighbours may find `slot`, as its owner has left it."""
        return self._place_of[slot] > 0

    def published(self, first: int, end: int) -> list[int]:
        """Slots from `first` to `end`, without `end`, that neighbours may find."""
        return (np.flatnonzero(self._places[first:end]) + first).tolist()

    def take_uses(self, first: int, end: int, most: int) -> list[int]:
        """Slots that neighbours have used since the last call, ends of prefixes first.

        Without the lock: a use at the same time may be lost.

        Args:
            first: The first slot to look at.
            end: The slot after the last one.
            most: How many are returned; the rest with a later call.

        """
        # A hot path: mostly none of them.
        used = self._used[first:end].nonzero()[0][:most] + first
        if not len(used):
            return []
        self._used[used] = False
        return list(used[np.argsort(-self._num_tokens[used], kind="stable")].tolist())

    def claim(self, slots: Sequence[int]) -> list[Claim]:
        """Withdraw slots that no neighbour reads, published or not, so that they can be
        reused."""
        # A hot path: mostly all of them were claimed before.
        if not any(map(self._place_of.__getitem__, slots)):
            return [Claim.FREE] * len(slots)
        numbers = np.array(slots, np.int64)
        published = self._places[numbers] > 0
        claims = np.full(len(slots), Claim.FREE)
        if not self.lock.acquire(_SPIN_S):
            claims[published] = Claim.BUSY
            return list(claims)
        try:
            pinned = self._are_pinned(numbers) & published
            self._withdraw(numbers[published & ~pinned])
        finally:
            self.lock.release()
        claims[pinned] = Claim.PINNED
        return list(claims)

    def withdraw(self, slot: int) -> Claim:
        """Let no neighbour find `slot` from now on.

        Returns:
            `FREE`, `PINNED` (withdrawn, but still being read), or `BUSY` (still there).

        """
        if not self.lock.acquire(_SPIN_S):
            return Claim.BUSY
        try:
            numbers = np.array([slot])
            self._withdraw(numbers)
            return Claim.PINNED if self._are_pinned(numbers)[0] else Claim.FREE
        finally:
            self.lock.release()

    def withdraw_all(self) -> list[int] | None:
        """Let neighbours find nothing.

        Returns:
            Slots that they still read. None if the lock is busy.

        """
        if not self.lock.acquire(_SPIN_S):
            return None
        try:
            self._entries[:] = 0
            self._places[: self._num_slots] = 0
            pins = self._pin_words[: self._num_slots]
            return list(np.flatnonzero(pins.any(axis=1)).tolist())
        finally:
            self.lock.release()

    def unpinned(self, slots: Sequence[int]) -> list[int] | None:
        """Those of `slots` that no neighbour reads. None if the lock is busy."""
        numbers = np.array(slots, np.int64)
        if not self.lock.acquire(_SPIN_S):
            return None
        try:
            numbers = numbers[~self._are_pinned(numbers)]
        finally:
            self.lock.release()
        return list(numbers.tolist())

    def _are_pinned(self, slots: Slots) -> NDArray[np.bool_]:
        words = self._pin_words[slots]
        return (words[:, 0] | words[:, 1]) > 0

    def _withdraw(self, slots: Slots) -> None:
        places = self._places[slots]
        self._entries[places[places > 0] - 1] = 0
        self._places[slots] = 0

    # ------------------------------------------------------------------ for readers

    def find(
        self, rows: Rows, mixed: NDArray[np.uint64] | None = None
    ) -> tuple[NDArray[np.int64], Slots]:
        """Look for keys, without the lock.

        Args:
            rows: The keys.
            mixed: `mix(rows)`, to save time where several partitions are looked at.

        Returns:
            Indices of `rows` that seem to be there, and their slots.

        """
        buckets, tags = self._hashed(rows, mixed)
        table = self._entries.reshape(-1, _WAYS)[buckets]
        # An empty place has the number of no slot.
        found, ways = np.nonzero(table >> _HIGH == tags[:, None])
        slots = (table[found, ways] & _LOW).astype(np.int64) - 1
        is_same = (slots < self._num_slots) & (slots >= 0)
        found, slots = found[is_same], slots[is_same]
        is_same = (self._keys[slots] == rows[found]).all(axis=1)
        return found[is_same], slots[is_same]

    def pin(
        self, rows: Rows, slots: Slots, reader: int, identity: bytes
    ) -> NDArray[np.bool_] | None:
        """Pin those of `slots` that still hold their keys.

        Args:
            rows: Keys.
            slots: From `find`.
            reader: Column of the reader.
            identity: Whose content it may read.

        Returns:
            Which of them are pinned now. None if the lock is busy.

        """
        if not self.lock.acquire(_SPIN_S):
            return None
        try:
            if self.identity != identity:
                return np.zeros(len(slots), np.bool_)
            hold = (self._places[slots] > 0) & (self._keys[slots] == rows).all(axis=1)
            self._pins[slots[hold], reader] = 1
            self._used[slots[hold]] = True
            return hold
        finally:
            self.lock.release()

    def unpin(self, slots: Sequence[int], reader: int) -> bool:
        """End reading `slots`. False if the lock is busy, and they stay pinned."""
        if not self.lock.acquire(_SPIN_S):
            return False
        try:
            self._pins[np.array(slots, np.int64), reader] = 0
        finally:
            self.lock.release()
        return True

    def key_of(self, slot: int) -> bytes:
        """The key of a slot that the caller has pinned, padded."""
        return self._keys[slot].tobytes()

    def checksums(self, rank: int, num_slots: int) -> NDArray[np.uint8]:
        """Checksums of a rank's parts of blocks, which it writes before its engine
        publishes them.

        Args:
            rank: Number of the rank.
            num_slots: Slots of the partition.

        Returns:
            `[num_slots, 8]`; fewer where blocks are smaller than a page on each rank.

        """
        return self._checksums[rank * num_slots :][:num_slots]

    def seems_to_hold(self, slot: int, row: Rows) -> bool:
        """Whether `slot` seems to hold a key still, without the lock."""
        return bool(self._places[slot]) and bool((self._keys[slot] == row).all())

    def clear_reader(self, reader: int) -> bool:
        """Clear the pins of a dead reader. False if the lock is busy."""
        if not self.lock.acquire(_SPIN_S):
            return False
        try:
            self._pins[: self.num_slots, reader] = 0
        finally:
            self.lock.release()
        return True

    # ------------------------------------------------------------------ own

    def _hashed(
        self, rows: Rows, mixed: NDArray[np.uint64] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Bucket and tag of each key."""
        mixed = mix(rows) if mixed is None else mixed
        num_buckets = max(len(self._entries) // _WAYS, 1)
        return (mixed & np.uint64(num_buckets - 1)).astype(np.int64), mixed >> _HIGH

    def _free_places(self, buckets: NDArray[np.int64]) -> NDArray[np.int64]:
        """A free place in each bucket; -1 where it is full."""
        order = np.argsort(buckets, kind="stable")
        ordered = buckets[order]
        # Keys of one bucket take its free places in turn.
        turns = np.empty_like(buckets)
        turns[order] = np.arange(len(buckets)) - np.searchsorted(ordered, ordered)
        are_free = self._entries.reshape(-1, _WAYS)[buckets] == 0
        fits = are_free & (are_free.cumsum(axis=1) == turns[:, None] + 1)
        places = buckets * _WAYS + fits.argmax(axis=1)
        return np.where(fits.any(axis=1), places, -1)
