# SPDX-License-Identifier: Apache-2.0
"""Slots of a rank in the memory of a pool, which it opens while others use them."""

from pathlib import Path

import pytest
import torch

from tests.unit.keeper.crowd import ONE, MiB
from tests.unit.keeper.test_keeper import KeeperThread
from vllm.v1.kv_tier.keeper.client import Member
from vllm.v1.kv_tier.memory.opener import SlotOpener
from vllm.v1.kv_tier.plan import OpenSlots
from vllm.v1.kv_tier.worker import pooled
from vllm.v1.kv_tier.worker.pooled import PooledSlots, join_pool
from vllm.v1.kv_tier.worker.slots import EMPTY, FILLED

CPU = torch.device("cpu")


def joined(folder: Path, sizes: list[int]) -> list[list[PooledSlots]]:
    """Each rank of each of three engines, in the order of their partitions."""
    running = KeeperThread(path := folder / "keeper.sock", 3)
    try:
        members = [Member(str(path), ONE, sizes) for _ in range(3)]
        members.sort(key=lambda member: member.membership.number)
        places = [member.place() for member in members]
        ranks = range(len(sizes))
        return [[join_pool(place, rank, CPU) for rank in ranks] for place in places]
    finally:
        running.close()


def opened(buffer: pooled.HostBuffer, num_slots: int) -> list[int]:
    """Counts of open slots, from one piece to the next."""
    opener = SlotOpener(buffer, piece_bytes=MiB, pause=0.0, available=None)
    opener.begin()
    counts = []
    while opener.step(0, num_slots) is not None:
        state = opener.take()
        assert isinstance(state, OpenSlots)
        counts.append(state.num_slots)
    return [*counts, buffer.num_open]


@pytest.mark.parametrize("sizes", [[4096], [5001], [41984], [5000, 9000]])
def test_opening_keeps_what_engines_have_stored(
    tmp_path: Path, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooled, "FIRST_BYTES", 1)
    engines = joined(tmp_path, sizes)
    num_slots = engines[0][0].buffer.num_open
    for number, ranks in enumerate(engines):
        for rank, slots in enumerate(ranks):
            # The own ones are open, which are one piece here.
            assert slots.buffer.num_open == num_slots
            slots.buffer.slots[:num_slots] = 10 * number + rank + 1
    for number, ranks in enumerate(engines):
        for rank, slots in enumerate(ranks):
            all_slots = slots.buffer.slots
            counts = opened(slots.buffer, len(all_slots))
            stride = (len(all_slots) - num_slots) // 2
            assert counts == sorted(counts) and counts[-1] == len(all_slots)
            assert stride + num_slots in counts
            for distance in range(3):
                owner = (number + distance) % 3
                found = all_slots[distance * stride :][:num_slots]
                assert (found == 10 * owner + rank + 1).all()


def test_small_pool_is_open_from_the_start(tmp_path: Path) -> None:
    for ranks in joined(tmp_path, [4096]):
        (slots,) = ranks
        assert slots.buffer.num_open == len(slots.buffer.slots) == 3 * MiB * 4 // 4096
        is_empty = torch.from_numpy(slots.states == EMPTY)
        assert is_empty.nonzero().flatten().tolist() == [*slots.empty]
        assert set(slots.states.tolist()) == {EMPTY, FILLED}
