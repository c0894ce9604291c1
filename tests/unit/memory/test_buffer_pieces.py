# SPDX-License-Identifier: Apache-2.0
"""The pieces of which host memory is made ready: whole slots, without gaps."""

import pytest

from vllm.v1.kv_tier.memory.buffer import GiB, _pieces

MiB = 1 << 20


@pytest.mark.parametrize(
    "num_slots, slot_bytes, piece_bytes",
    [
        (1, 64, GiB),
        (100, 64, 100),
        (7, 3 * MiB, 4 * MiB),
        (50, 3 * MiB, 16 * MiB),
        (1000, 192, 100_000),
        (200_000, 2 * MiB, 1000 * GiB),
        (3, 700 * MiB + 64, GiB // 4),
    ],
)
def test_pieces_are_whole_slots_without_gaps(
    num_slots: int, slot_bytes: int, piece_bytes: int
) -> None:
    pieces = _pieces(num_slots, slot_bytes, piece_bytes)
    end = 0
    for start, size in pieces:
        assert start == end and size > 0
        assert start % slot_bytes == 0 and size % slot_bytes == 0
        assert size <= max(slot_bytes, min(piece_bytes, 64 * GiB))
        end = start + size
    assert end == num_slots * slot_bytes


def test_pieces_are_whole_pages_where_slots_allow_it() -> None:
    def starts(slot_bytes: int, piece_bytes: int) -> list[int]:
        return [start for start, _ in _pieces(10_000, slot_bytes, piece_bytes)]

    assert starts(3 * MiB, 16 * MiB)[:3] == [0, 12 * MiB, 24 * MiB]
    # 64 slots are three small pages; no huge page ends with a slot in 100 kB.
    assert starts(192, 100_000)[:3] == [0, 98_304, 196_608]
