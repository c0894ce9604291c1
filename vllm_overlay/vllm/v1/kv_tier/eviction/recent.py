# SPDX-License-Identifier: Apache-2.0
"""Remembers keys that were used or evicted last, in a few bytes for each."""

from vllm.v1.kv_tier.eviction.base import Key

_TAG_BYTES = 4
_TAG_BITS = 8 * _TAG_BYTES
_TAG_MASK = (1 << _TAG_BITS) - 1
_KEYS_PER_ROW = 128


class RecentKeys:
    """The last keys, each with a small number.

    A key is in the row of its hash, with 32 more bits of it as a tag, oldest first. So
    one key in 10⁷ is taken for another one. A row keeps its own last keys: these are
    the last ones exactly where one row is enough, and about the last ones in more rows.

    Args:
        num_keys: Number of keys, at least 1.
        value_bytes: Bytes of a number.

    """

    __slots__ = ("_max_bytes", "_num_rows", "_rows", "_width")

    def __init__(self, num_keys: int, value_bytes: int) -> None:
        self._num_rows = max(1, num_keys // _KEYS_PER_ROW)
        self._rows = [bytearray() for _ in range(self._num_rows)]
        self._width = _TAG_BYTES + value_bytes
        self._max_bytes = max(1, num_keys // self._num_rows) * self._width

    def __len__(self) -> int:
        return sum(map(len, self._rows)) // self._width

    # Hot paths with few calls: each computed block, each stored one and each victim.

    def get(self, key: Key) -> int | None:
        """The number of `key`; None if it is not remembered."""
        tag, number = divmod(hash(key), self._num_rows)
        row = self._rows[number]
        at = row.find((tag & _TAG_MASK).to_bytes(_TAG_BYTES, "little"))
        if at > 0 and at % self._width:
            at = self._find(row, at)
        return None if at < 0 else self._value(row, at)

    def pop(self, key: Key) -> int | None:
        """Forget `key`. Returns its number, or None if it was not remembered."""
        tag, number = divmod(hash(key), self._num_rows)
        row = self._rows[number]
        at = row.find((tag & _TAG_MASK).to_bytes(_TAG_BYTES, "little"))
        if at < 0 or (at % self._width and (at := self._find(row, at)) < 0):
            return None
        value = self._value(row, at)
        del row[at : at + self._width]
        return value

    def add(self, key: Key, value: int) -> None:
        """Remember `key`, which is not remembered, as the newest one."""
        tag, number = divmod(hash(key), self._num_rows)
        row = self._rows[number]
        row += (value << _TAG_BITS | tag & _TAG_MASK).to_bytes(self._width, "little")
        if len(row) > self._max_bytes:
            del row[: self._width]

    def _find(self, row: bytearray, at: int) -> int:
        """Where the tag at `at`, which is none, really is; -1 if nowhere."""
        tag = row[at : at + _TAG_BYTES]
        while at > 0 and at % self._width:
            at = row.find(tag, at + 1)
        return at

    def _value(self, row: bytearray, at: int) -> int:
        return int.from_bytes(row[at + _TAG_BYTES : at + self._width], "little")
