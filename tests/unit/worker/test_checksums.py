# SPDX-License-Identifier: Apache-2.0
"""Checksums of host slots: on a CPU, and where stores end late."""

import time
from collections.abc import Callable, Iterator
from random import Random

import pytest
import torch

from tests.sim.fake_cuda import FakeCuda
from vllm.v1.kv_tier.memory.checksums import SlotChecksums
from vllm.v1.kv_tier.plan import StepReport
from vllm.v1.kv_tier.worker.slots import RankSlots, SlotChanged

from ..rank import NUM_SLOTS, Rank, same, verifying

GPU = torch.device("cuda", 0)


@pytest.fixture
def rank() -> Rank:
    return verifying(Rank())


def flip(rank: Rank, slot: int, at: int = 0, bit: int = 0) -> None:
    """As bad memory does."""
    rank.tier.buffer.slots[slot, at] ^= 1 << bit


LOADS = pytest.mark.parametrize("prefix", ["load", "ahead"])


@LOADS
def test_a_slot_that_did_not_change_is_loaded(rank: Rank, prefix: str) -> None:
    rank.run(1, store_blocks=[1, 2], store_slots=[0, 3])
    rank.run(2, **{f"{prefix}_slots": [3, 0], f"{prefix}_blocks": [4, 5]})
    assert rank.report() is None
    assert same(rank.block(4), rank.block(2)) and same(rank.block(5), rank.block(1))


@pytest.mark.compat("faults", "a slot that changed since its store (`verify`)")
@LOADS
@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("at", [0, 59, 64, 155])
def test_a_flipped_bit_never_reaches_the_device(
    rank: Rank, prefix: str, at: int, bit: int, caplog: pytest.LogCaptureFixture
) -> None:
    rank.run(1, store_blocks=[1, 2], store_slots=[0, 1])
    flip(rank, 0, at, bit)
    before = rank.block(4)
    rank.run(2, **{f"{prefix}_slots": [0], f"{prefix}_blocks": [4]})
    assert same(rank.block(4), before)
    assert rank.report() == StepReport(failed_load_seq=2)
    assert "Host slots [0] do not hold what was stored in them" in caplog.text
    # Others are good, and it is good again when it has been stored anew.
    rank.run(3, load_slots=[1], load_blocks=[4])
    assert rank.report() is None and same(rank.block(4), rank.block(2))
    rank.run(4, store_blocks=[1], store_slots=[0])
    rank.run(5, load_slots=[0], load_blocks=[5])
    assert rank.report() is None and same(rank.block(5), rank.block(1))


def test_without_verify_it_does_reach_the_device() -> None:
    """The tests above could fail."""
    rank = Rank()
    rank.run(1, store_blocks=[1], store_slots=[0])
    flip(rank, 0)
    rank.run(2, load_slots=[0], load_blocks=[4])
    assert rank.report() is None and not same(rank.block(4), rank.block(1))


def test_a_slot_that_nothing_was_stored_in(rank: Rank) -> None:
    rank.run(1, load_slots=[2], load_blocks=[1])
    assert rank.report() == StepReport(failed_load_seq=1)


# ------------------------------------------------------------ stores that end late


@pytest.fixture(params=["late", "random", "eager"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda(request.param)
    cuda.install(monkeypatch)
    return cuda


@pytest.fixture
def slots() -> torch.Tensor:
    return torch.zeros(NUM_SLOTS, 256, dtype=torch.uint8)


@pytest.fixture
def sums(cuda: FakeCuda, slots: torch.Tensor) -> Iterator[RankSlots]:
    yield RankSlots(NUM_SLOTS, SlotChecksums(slots, GPU))
    cuda.check()


def writes(slots: torch.Tensor, slot: int, value: int) -> Callable[[], object]:
    return lambda: slots[slot].fill_(value)


def test_a_checksum_is_of_what_the_store_leaves(
    cuda: FakeCuda, slots: torch.Tensor, sums: RankSlots
) -> None:
    rng = Random(0)
    for value in range(1, 50):
        slot = rng.randrange(NUM_SLOTS)
        cuda.launch(writes(slots, slot, value))
        sums.mark_stored([slot])
        time.sleep(rng.choice([0, 0.002]))
        if rng.random() < 0.5:
            # Waits for the store.
            sums.check([slot])
            assert slots[slot, 0] == value
            # What overwrites it comes after the load that this was for.


def test_a_checksum_taken_too_early_is_wrong(
    cuda: FakeCuda,
    slots: torch.Tensor,
    sums: RankSlots,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test above could fail."""
    monkeypatch.setattr(sums.checksums, "_end_of_copies", lambda: lambda: None)
    for value in range(1, 50):
        cuda.launch(writes(slots, 0, value))
        sums.mark_stored([0])
        sums.checksums._sums[0].result()  # type: ignore[union-attr]
        cuda.wait_for_all()
        try:
            sums.check([0])
        except SlotChanged:
            return
    # Whoever is eager has stored it by then.
    assert cuda._pace == "eager"


def test_a_change_after_the_store_is_noticed(
    cuda: FakeCuda, slots: torch.Tensor, sums: RankSlots
) -> None:
    for slot in range(NUM_SLOTS):
        cuda.launch(writes(slots, slot, 7))
        sums.mark_stored([slot])
    sums.check(range(NUM_SLOTS))
    slots[2, 100] += 1
    with pytest.raises(SlotChanged, match=r"\[2\]"):
        sums.check(range(NUM_SLOTS))


def test_the_cost_is_measured(sums: RankSlots) -> None:
    assert sums.checksums is not None
    assert 0 < sums.checksums.seconds_per_slot() < 1


def test_threads_end(cuda: FakeCuda, slots: torch.Tensor) -> None:
    sums = SlotChecksums(slots, GPU)
    sums.compute_after_copies([0])
    assert sums.are_right([0]) == [True]
    threads = [*sums._takers._threads, *sums._checkers._threads]  # type: ignore
    assert threads
    del sums
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
