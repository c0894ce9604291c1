# SPDX-License-Identifier: Apache-2.0
"""Remembers keys that were used or evicted last, in a few bytes for each.

A key is in the row of its hash, with 32 more bits of it as a tag, oldest first: about
one key in a hundred million is mistaken for another. Each row keeps its own last keys,
so with several rows these are about the last ones of all.
"""

from collections.abc import Iterable

from vllm.v1.kv_tier.eviction.base import Key

_TAG_BYTES = 4
_TAG_MASK = (1 << 8 * _TAG_BYTES) - 1
_KEYS_PER_ROW = 32
_KEYS_OF_ONE_ROW = 255
"""Up to so many keys there is one row."""
_EMPTY = b"\xff"


class _Rows:
    """Rows of entries, all in one array, with `_EMPTY` where there is none.

    Args:
        num_keys: Number of keys, at least 1.
        entry_bytes: Bytes of an entry, with its tag in front.

    """

    __slots__ = ("_data", "_entry_bytes", "_num_rows", "_row_bytes")

    def __init__(self, num_keys: int, entry_bytes: int) -> None:
        one_row = num_keys <= _KEYS_OF_ONE_ROW
        self._num_rows = 1 if one_row else num_keys // _KEYS_PER_ROW
        self._entry_bytes = entry_bytes
        self._row_bytes = max(1, num_keys // self._num_rows) * entry_bytes
        self._data = bytearray(_EMPTY) * (self._num_rows * self._row_bytes)


class SeenKeys(_Rows):
    """The last keys that were added.

    Args:
        num_keys: Number of keys, at least 1.

    """

    __slots__ = ()

    def __init__(self, num_keys: int) -> None:
        super().__init__(num_keys, _TAG_BYTES)

    def add(self, key: Key) -> bool:
        """Make `key` the newest one. Returns whether it was remembered."""
        # A hot path: each computed block. What is added again takes two places.
        tag, number = divmod(hash(key), self._num_rows)
        entry = (tag & _TAG_MASK).to_bytes(_TAG_BYTES, "little")
        begin, end = number * self._row_bytes, (number + 1) * self._row_bytes
        row = self._data[begin:end]
        self._data[begin:end] = row[_TAG_BYTES:] + entry
        return entry in row


class RecentKeys(_Rows):
    """The last keys, each with a number of 32 bits.

    Args:
        num_keys: Number of keys, at least 1.

    """

    __slots__ = ()

    def __init__(self, num_keys: int) -> None:
        super().__init__(num_keys, 2 * _TAG_BYTES)

    # Hot paths with few calls: each stored block, and each victim.

    def pop(self, keys: Iterable[Key]) -> list[int | None]:
        """Forget `keys`. Returns their numbers; None for those not remembered."""
        data, num_rows, row_bytes = self._data, self._num_rows, self._row_bytes
        width = self._entry_bytes
        values: list[int | None] = []
        for key in keys:
            tag, number = divmod(hash(key), num_rows)
            entry = (tag & _TAG_MASK).to_bytes(_TAG_BYTES, "little")
            begin, end = number * row_bytes, (number + 1) * row_bytes
            at = data.find(entry, begin, end)
            while at > 0 and (at - begin) % width:
                # Bytes of a number, or of two entries, look like the tag.
                at = data.find(entry, at + 1, end)
            if at < 0:
                values.append(None)
                continue
            value = data[at + _TAG_BYTES : at + width]
            values.append(int.from_bytes(value, "little"))
            data[begin : at + width] = _EMPTY * width + data[begin:at]
        return values

    def add(self, keys: Iterable[Key], values: Iterable[int]) -> None:
        """Remember `keys`, which are not remembered, as the newest ones."""
        data, num_rows, row_bytes = self._data, self._num_rows, self._row_bytes
        width = self._entry_bytes
        for key, value in zip(keys, values):
            tag, number = divmod(hash(key), num_rows)
            entry = (value << 32 | tag & _TAG_MASK).to_bytes(width, "little")
            end = (number + 1) * row_bytes
            begin = end - row_bytes
            data[begin:end] = data[begin + width : end] + entry
