# SPDX-License-Identifier: Apache-2.0
"""A rank's host tier on CPU memory: copies, failures and their reports."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm.v1.kv_tier.copy_engine import slot_bytes
from vllm.v1.kv_tier.host_buffer import HostBuffer, _pieces
from vllm.v1.kv_tier.plan import StepPlan, StepReport
from vllm.v1.kv_tier.regions import build_regions
from vllm.v1.kv_tier.worker import HostTier
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
)

NUM_BLOCKS, NUM_SLOTS = 6, 4


class Rank:
    """A host tier and the device memory it works on."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.caches = [torch.randn(2, NUM_BLOCKS, 3, 5), torch.randn(NUM_BLOCKS, 7)]
        regions = build_regions(self.caches, NUM_BLOCKS)
        self.tier = HostTier(regions, NUM_SLOTS, torch.device("cpu"))

    def block(self, block_id: int) -> list[torch.Tensor]:
        return [self.caches[0][:, block_id].clone(), self.caches[1][block_id].clone()]

    def run(self, seq: int, **copies: Any) -> None:
        self.tier.begin_step(StepPlan(seq, **copies))

    def report(self) -> StepReport | None:
        return self.tier.attach_report(output()).kv_tier_report


@pytest.fixture
def rank() -> Rank:
    return Rank()


def output() -> ModelRunnerOutput:
    return ModelRunnerOutput(req_ids=[], req_id_to_index={})


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b))


def fail_once(monkeypatch: pytest.MonkeyPatch, rank: Rank, name: str) -> None:
    real: Callable = getattr(rank.tier.engine, name)

    def failing(*args: Any) -> None:
        monkeypatch.setattr(rank.tier.engine, name, real)
        raise RuntimeError("a copy fails for the test")

    monkeypatch.setattr(rank.tier.engine, name, failing)


def test_stored_blocks_come_back_elsewhere(rank: Rank) -> None:
    one, two, other = rank.block(1), rank.block(2), rank.block(4)
    rank.run(1, store_blocks=[1, 2], store_slots=[3, 0])
    for cache in rank.caches:
        cache.mul_(-2)
    other = rank.block(4)
    rank.run(2, load_slots=[0, 3], load_blocks=[5, 2])
    assert same(rank.block(5), two) and same(rank.block(2), one)
    assert same(rank.block(4), other)
    assert rank.report() is None


def test_stores_of_a_plan_come_before_its_loads(rank: Rank) -> None:
    one, two = rank.block(1), rank.block(2)
    rank.run(1, store_blocks=[1], store_slots=[0])
    # Block 2 goes to a slot and gets block 1's content, in one plan.
    rank.run(
        2, store_blocks=[2], store_slots=[1], load_slots=[0, 1], load_blocks=[2, 3]
    )
    assert same(rank.block(2), one) and same(rank.block(3), two)


def test_no_plan_is_no_work(rank: Rank) -> None:
    rank.tier.begin_step(None)
    assert rank.report() is None


def test_a_failed_load_is_reported_once(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.run(1, store_blocks=[1], store_slots=[0])
    fail_once(monkeypatch, rank, "load")
    rank.run(2, load_slots=[0], load_blocks=[2])
    assert rank.report() == StepReport(failed_load_seq=2)
    assert rank.report() is None
    rank.run(3, load_slots=[0], load_blocks=[2])
    assert rank.report() is None and same(rank.block(2), rank.block(1))


def test_the_earliest_failed_load_is_reported(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.run(1, store_blocks=[1], store_slots=[0])
    for seq in (2, 3):
        fail_once(monkeypatch, rank, "load")
        rank.run(seq, load_slots=[0], load_blocks=[2])
    assert rank.report() == StepReport(failed_load_seq=2)


def test_a_failed_store_fails_later_loads_of_its_slots(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler may have planned them before it heard of the failure."""
    fail_once(monkeypatch, rank, "store")
    rank.run(1, store_blocks=[1, 2], store_slots=[0, 1])
    before = rank.block(3)
    rank.run(2, load_slots=[1], load_blocks=[3])
    assert same(rank.block(3), before)
    assert rank.report() == StepReport(2, {0: 1, 1: 1})


def test_a_slot_is_good_again_after_a_good_store(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, rank, "store")
    rank.run(1, store_blocks=[1, 2], store_slots=[0, 1])
    rank.report()
    rank.run(2, store_blocks=[1], store_slots=[0])
    rank.run(3, load_slots=[0], load_blocks=[4])
    assert rank.report() is None and same(rank.block(4), rank.block(1))
    rank.run(4, load_slots=[1], load_blocks=[4])
    assert rank.report() == StepReport(4)


def failed_rank() -> Rank:
    rank = Rank()
    rank.tier._failed().failed_load_seq = 9
    return rank


def test_a_report_waits_for_an_output() -> None:
    rank = failed_rank()
    assert rank.tier.attach_report(None) is None
    assert rank.report() == StepReport(9)


def test_a_report_never_lands_on_the_shared_empty_output() -> None:
    found = failed_rank().tier.attach_report(EMPTY_MODEL_RUNNER_OUTPUT)
    assert found.kv_tier_report == StepReport(9)
    assert EMPTY_MODEL_RUNNER_OUTPUT.kv_tier_report is None


def test_a_report_travels_with_an_async_output() -> None:
    class Later(AsyncModelRunnerOutput):
        def get_output(self) -> ModelRunnerOutput:
            return EMPTY_MODEL_RUNNER_OUTPUT

        # Abstract in some releases.
        def get_kv_connector_output(self) -> Any:
            return "of the connector"

    rank = failed_rank()
    later = rank.tier.attach_report(Later())
    assert isinstance(later, AsyncModelRunnerOutput)
    assert later.get_kv_connector_output() == "of the connector"  # type: ignore
    # What fails from now on belongs to the next output.
    rank.tier._failed().failed_load_seq = 10
    assert later.get_output().kv_tier_report == StepReport(9)
    assert EMPTY_MODEL_RUNNER_OUTPUT.kv_tier_report is None
    assert rank.report() == StepReport(10)


def test_outputs_pass_as_they_are_without_a_report(rank: Rank) -> None:
    plain = output()
    assert rank.tier.attach_report(plain) is plain


def test_host_memory_is_exact_and_slots_are_aligned(rank: Rank) -> None:
    slots = rank.tier.buffer.slots
    size = slot_bytes(build_regions(rank.caches, NUM_BLOCKS))
    # Two halves of 60 bytes and one row of 28, each from a cache line on.
    assert size == 3 * 64
    assert slots.shape == (NUM_SLOTS, size) and slots.is_contiguous()
    assert slots.untyped_storage().nbytes() == NUM_SLOTS * size
    assert not rank.tier.buffer.pinned


def test_memory_that_cannot_be_had_is_an_error_with_the_flag() -> None:
    with pytest.raises(MemoryError, match="--kv-offloading-size.*Lower the size"):
        HostBuffer(num_slots=1 << 30, slot_bytes=1 << 30, pin=False)


def test_memory_is_registered_in_pieces_without_gaps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vllm.v1.kv_tier.host_buffer._REGISTER_BYTES", 100)
    memory = torch.empty(250, dtype=torch.uint8)
    start = memory.data_ptr()
    assert list(_pieces(memory)) == [
        (start, 100),
        (start + 100, 100),
        (start + 200, 50),
    ]
