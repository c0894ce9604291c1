# SPDX-License-Identifier: Apache-2.0
"""Remembers keys that were used or evicted last, in a few bytes for each.

A key is in the row of its hash, with 32 more bits of it as a tag, oldest first: one key
in ten million is taken for another one. A row keeps its own last keys: these are the
last ones exactly where one row is enough, and about the last ones in more rows.
"""

from collections.abc import Iterable

from vllm.v1.kv_tier.eviction.base import Key

_TAG_BYTES = 4
_TAG_MASK = (1 << 8 * _TAG_BYTES) - 1
_VALUE_BITS = 32
_ENTRY_BYTES = _TAG_BYTES + _VALUE_BITS // 8
_KEYS_PER_ROW = 128


def _rows(num_keys: int) -> tuple[list[bytearray], int]:
    """Empty rows, and how many keys each of them keeps."""
    num_rows = max(1, num_keys // _KEYS_PER_ROW)
    return [bytearray() for _ in range(num_rows)], max(1, num_keys // num_rows)


class SeenKeys:
    """The last keys that were added.

    Args:
        num_keys: Number of keys, at least 1.

    """

    __slots__ = ("_max_bytes", "_num_rows", "_rows")

    def __init__(self, num_keys: int) -> None:
        self._rows, keys_per_row = _rows(num_keys)
        self._num_rows = len(self._rows)
        self._max_bytes = keys_per_row * _TAG_BYTES

    def add(self, key: Key) -> bool:
        """Make `key` the newest one. Returns whether it was remembered."""
        # A hot path: each computed block. What is added again takes two places.
        tag, number = divmod(hash(key), self._num_rows)
        row = self._rows[number]
        entry = (tag & _TAG_MASK).to_bytes(_TAG_BYTES, "little")
        was_seen = entry in row
        row += entry
        if len(row) > self._max_bytes:
            del row[:_TAG_BYTES]
        return was_seen


class RecentKeys:
    """The last keys, each with a number of 32 bits.

    Args:
        num_keys: Number of keys, at least 1.

    """

    __slots__ = ("_max_bytes", "_num_rows", "_rows")

    def __init__(self, num_keys: int) -> None:
        self._rows, keys_per_row = _rows(num_keys)
        self._num_rows = len(self._rows)
        self._max_bytes = keys_per_row * _ENTRY_BYTES

    def __len__(self) -> int:
        return sum(map(len, self._rows)) // _ENTRY_BYTES

    # Hot paths with few calls: each stored block, and each victim.

    def pop(self, keys: Iterable[Key]) -> list[int | None]:
        """Forget `keys`. Returns their numbers; None for those not remembered."""
        rows, num_rows = self._rows, self._num_rows
        values: list[int | None] = []
        for key in keys:
            tag, number = divmod(hash(key), num_rows)
            row = rows[number]
            at = row.find(entry := (tag & _TAG_MASK).to_bytes(_TAG_BYTES, "little"))
            while at > 0 and at % _ENTRY_BYTES:
                # Bytes of a number, or of two entries, look like the tag.
                at = row.find(entry, at + 1)
            if at < 0:
                values.append(None)
            else:
                end = at + _ENTRY_BYTES
                values.append(int.from_bytes(row[at + _TAG_BYTES : end], "little"))
                del row[at:end]
        return values

    def add(self, keys: Iterable[Key], values: Iterable[int]) -> None:
        """Remember `keys`, which are not remembered, as the newest ones."""
        rows, num_rows, max_bytes = self._rows, self._num_rows, self._max_bytes
        for key, value in zip(keys, values):
            tag, number = divmod(hash(key), num_rows)
            row = rows[number]
            row += (value << 32 | tag & _TAG_MASK).to_bytes(_ENTRY_BYTES, "little")
            if len(row) > max_bytes:
                del row[:_ENTRY_BYTES]
