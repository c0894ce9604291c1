# SPDX-License-Identifier: Apache-2.0
"""What moves between slots and a secondary tier, where groups need less than a slot."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from vllm.v1.kv_tier.memory.checksums import SlotChecksums
from vllm.v1.kv_tier.plan import SecondaryJob, SecondaryResult, StepPlan
from vllm.v1.kv_tier.stores.base import BlockStore
from vllm.v1.kv_tier.tuning import RankTuning
from vllm.v1.kv_tier.worker.group_bytes import bytes_of_groups
from vllm.v1.kv_tier.worker.report import StepReportBuilder
from vllm.v1.kv_tier.worker.secondary import SecondaryIO
from vllm.v1.kv_tier.worker.slots import RankSlots, SlotChanged

from ...settings import store_config
from ...sim.upstream import model_runner_output
from ..stores.objects import NAMESPACE

SLOT_BYTES = 4096
NEEDS = [SLOT_BYTES, 1024, 2000]
NUM_SLOTS = 6
GROUPS = [0, 1, 2, 1, 2, 0]
KEYS = [f"key {i}".encode() for i in range(NUM_SLOTS)]


class Rank:
    """Slots, all of one byte, and a directory."""

    def __init__(self, root: Path, byte: int, needs: Sequence[int] = NEEDS) -> None:
        self.slots = torch.full((NUM_SLOTS, SLOT_BYTES), byte, dtype=torch.uint8)
        sums = SlotChecksums(self.slots, torch.device("cpu"))
        self.holds = RankSlots(NUM_SLOTS, sums, group_bytes=needs)
        config = store_config({"type": "fs", "root_dir": str(root), "max_gib": 0.01})
        config.check()
        self.store: BlockStore = config.open(NAMESPACE, 0, SLOT_BYTES)
        self.report = StepReportBuilder()
        self.io = SecondaryIO(
            [self.store], self.slots, self.holds, self.report, RankTuning()
        )
        self._num_jobs = 0

    def fill(self) -> None:
        """Stores of blocks of `GROUPS`."""
        self.holds.begin_store(range(NUM_SLOTS), GROUPS)
        for slot, group in enumerate(GROUPS):
            self.slots[slot, : NEEDS[group]] = 10 + slot
        self.holds.mark_stored(range(NUM_SLOTS))

    def move(self, is_put: bool, groups: Sequence[int] = GROUPS) -> list[bool]:
        self._num_jobs += 1
        places = [*range(NUM_SLOTS)]
        number = self._num_jobs
        job = SecondaryJob(number, is_put, KEYS, places, 0, 0, 0, tuple(groups))
        self.io.begin_step(StepPlan(number, secondary=[job]), lambda *_: True)
        results: list[SecondaryResult] = []
        while not results:
            output = self.report.attach(model_runner_output([]), is_last_stage=True)
            if (report := output.kv_tier_report) is not None:
                results += report.secondary
        return list(results[0].done)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """With what a rank has written."""
    rank = Rank(tmp_path / "kv", 1)
    rank.fill()
    assert rank.move(True) == [True] * NUM_SLOTS
    rank.store.close()
    yield tmp_path / "kv"


def test_objects_have_what_groups_need(root: Path) -> None:
    sizes = sorted(path.stat().st_size for path in root.rglob("*.kv"))
    header = 128
    assert sizes == sorted(header + NEEDS[group] for group in GROUPS)


def test_a_fetch_fills_what_the_group_needs_and_no_more(root: Path) -> None:
    rank = Rank(root, 2)
    assert rank.move(False) == [True] * NUM_SLOTS
    for slot, group in enumerate(GROUPS):
        assert (rank.slots[slot, : NEEDS[group]] == 10 + slot).all()
        assert (rank.slots[slot, NEEDS[group] :] == 2).all()


def test_checksums_cover_what_the_group_needs(root: Path) -> None:
    for rank in (Rank(root, 1), Rank(root, 2)):
        rank.fill()
        if rank.slots[1, -1] == 2:
            assert rank.move(False) == [True] * NUM_SLOTS
        for slot, group in enumerate(GROUPS):
            if NEEDS[group] < SLOT_BYTES:
                # No layer of the group reads it.
                rank.slots[slot, NEEDS[group]] += 1
        rank.holds.check([*range(NUM_SLOTS)])
        for slot, group in enumerate(GROUPS):
            rank.slots[slot, NEEDS[group] - 1] += 1
            with pytest.raises(SlotChanged):
                rank.holds.check([slot])


def test_a_slot_of_another_group_has_another_checksum(root: Path) -> None:
    rank = Rank(root, 1)
    rank.fill()
    rank.holds.begin_store([1])
    rank.holds.mark_stored([1])
    rank.slots[1, -1] += 1
    with pytest.raises(SlotChanged):
        rank.holds.check([1])


def test_objects_of_other_lengths_are_refused(root: Path) -> None:
    whole = Rank(root, 2)
    assert whole.move(False, ()) == [group == 0 for group in GROUPS]


def test_a_byte_too_few_is_noticed(root: Path, tmp_path: Path) -> None:
    """Planted bug: groups are taken to need a byte less."""
    less = [NEEDS[0], *(n - 1 for n in NEEDS[1:])]
    writer = Rank(tmp_path / "other", 1, less)
    writer.fill()
    assert writer.move(True) == [True] * NUM_SLOTS
    reader = Rank(tmp_path / "other", 2, less)
    assert reader.move(False) == [True] * NUM_SLOTS
    is_whole = [
        bool((reader.slots[slot, : NEEDS[group]] == 10 + slot).all())
        for slot, group in enumerate(GROUPS)
    ]
    assert is_whole == [group == 0 for group in GROUPS]


def test_bytes_of_groups_on_all_ranks() -> None:
    assert bytes_of_groups([[], []], [100, 100], 1) == ()
    assert bytes_of_groups([[100, 60], []], [100, 100], 1) == (200, 160)
    assert bytes_of_groups([[100, 60], [100, 60]], [100, 100], 2) == (100, 60)
