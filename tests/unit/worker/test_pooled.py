# SPDX-License-Identifier: Apache-2.0
"""Slots of a rank in the memory of a pool, which it opens while others use them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.unit.keeper.crowd import ONE, MiB
from tests.unit.keeper.test_keeper import KeeperThread
from vllm.v1.kv_tier.keeper.client import Member
from vllm.v1.kv_tier.memory.checksums import SlotChecksums
from vllm.v1.kv_tier.memory.opener import SlotOpener
from vllm.v1.kv_tier.memory.regions import build_regions
from vllm.v1.kv_tier.plan import OpenSlots, StepPlan
from vllm.v1.kv_tier.worker import pooled
from vllm.v1.kv_tier.worker.host_tier import HostTier
from vllm.v1.kv_tier.worker.pooled import PooledSlots, join_pool
from vllm.v1.kv_tier.worker.slots import EMPTY, FILLED, RankSlots, SlotChanged

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


def checked(slots: PooledSlots) -> RankSlots:
    sums = SlotChecksums(slots.buffer.slots, CPU, slots.checksums)
    return RankSlots(len(slots.states), sums, slots.states, num_own=slots.num_own)


def test_block_of_a_neighbour_that_has_changed_is_noticed(tmp_path: Path) -> None:
    """On each rank by its own checksum, and only until it is stored again."""
    owner, _, reader = joined(tmp_path, [4096, 8192])
    stride = (len(owner[0].states) - owner[0].num_own) // 2
    slot = owner[0].num_own - 1
    seen = stride + slot
    for rank in range(2):
        mine, theirs = checked(owner[rank]), checked(reader[rank])
        memory = owner[rank].buffer.slots[slot]
        for _ in range(2):
            mine.begin_store([slot])
            memory[:] = rank + 1
            mine.mark_stored([slot])
            theirs.check([seen])
            memory[-1] += 1
            with pytest.raises(SlotChanged, match=f"{seen}"):
                theirs.check([seen])


def test_end_of_a_plan_is_reported_when_its_checksums_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours find a block then, and compare them."""
    ((slots,), *_) = joined(tmp_path, [4096])
    regions = build_regions([torch.zeros(4, 4096, dtype=torch.uint8)], 4)
    tier = HostTier.allocate(
        regions, slots.num_own, CPU, verify=True, pooled=slots, num_mapped=4
    )
    output = SimpleNamespace(total_num_scheduled_tokens=0, num_scheduled_tokens={})

    def ended(seq: int) -> list[int]:
        """After a step of plan `seq`, which stores one block."""
        plan = StepPlan(seq, store_blocks=[1], store_slots=[seq], report_end=True)
        output.kv_tier_plan = plan
        tier.begin_step(output)
        report = tier.report.take()
        return report.ended if report is not None else []

    assert ended(1) == []
    assert ended(2) == [1]
    monkeypatch.setattr(tier.slots, "are_checked", lambda slots: slots != [2])
    assert ended(3) == ended(4) == []
    monkeypatch.undo()
    assert ended(5) == [2, 3, 4]
