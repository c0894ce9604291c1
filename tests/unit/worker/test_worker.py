# SPDX-License-Identifier: Apache-2.0
"""A rank's host tier on CPU memory: copies, failures and their reports."""

import time
from collections import Counter
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.v1.kv_tier.copying.engine import slot_bytes
from vllm.v1.kv_tier.memory.regions import build_regions
from vllm.v1.kv_tier.plan import SecondaryResult, StepPlan, StepReport
from vllm.v1.kv_tier.tuning import RankTuning
from vllm.v1.kv_tier.worker.copies import Copies, CopyHangs, InOrder
from vllm.v1.kv_tier.worker.report import StepReportBuilder
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
)
from vllm.v1.worker.worker_base import WorkerBase

from ...names import WorkerWrapperBase
from ...sim import upstream
from ..rank import (
    NUM_BLOCKS,
    NUM_SLOTS,
    Rank,
    fail_once,
    failed,
    output,
    same,
    step,
    with_order,
)
from ..rank import rank as rank


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


def test_loads_ahead_are_loads(rank: Rank) -> None:
    one, two = rank.block(1), rank.block(2)
    rank.run(1, store_blocks=[1, 2], store_slots=[3, 0])
    rank.run(
        2, load_slots=[3], load_blocks=[4], ahead_slots=[0, 3], ahead_blocks=[5, 2]
    )
    assert same(rank.block(4), one) and same(rank.block(5), two)
    assert same(rank.block(2), one) and rank.report() is None


def test_a_plan_that_cannot_be_is_not_carried_out(rank: Rank) -> None:
    before = rank.block(1)
    with pytest.raises(AssertionError, match="differ"):
        rank.run(1, load_slots=[0], load_blocks=[1, 2])
    with pytest.raises(AssertionError, match="later plan"):
        rank.run(1, load_slots=[0], load_blocks=[1], load_after_stores=2)
    assert same(rank.block(1), before)


def test_a_step_without_a_plan_is_none_of_the_tiers_business(rank: Rank) -> None:
    """Such as the dummy steps of a profiler."""
    rank.run(4)
    rank.tier.begin_step(upstream.empty_step())
    assert rank.report() is None


@pytest.mark.parametrize("name, prefix", [("step_loads", "load"), ("loads", "ahead")])
def test_a_failed_load_is_reported_once(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, name: str, prefix: str
) -> None:
    copies = {f"{prefix}_slots": [0], f"{prefix}_blocks": [2]}
    rank.run(1, store_blocks=[1], store_slots=[0])
    fail_once(monkeypatch, rank, name)
    rank.run(2, **copies)
    assert rank.report() == StepReport(failed_load_seq=2)
    assert rank.report() is None
    rank.run(3, **copies)
    assert rank.report() is None and same(rank.block(2), rank.block(1))


def test_the_earliest_failed_load_is_reported(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.run(1, store_blocks=[1], store_slots=[0])
    for seq in (2, 3):
        fail_once(monkeypatch, rank, "step_loads")
        rank.run(seq, load_slots=[0], load_blocks=[2])
    assert rank.report() == StepReport(failed_load_seq=2)


def test_a_failed_store_fails_later_loads_of_its_slots(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler may have planned them before it heard of the failure."""
    fail_once(monkeypatch, rank, "stores")
    rank.run(1, store_blocks=[1, 2], store_slots=[0, 1])
    before = rank.block(3)
    rank.run(2, load_slots=[1], load_blocks=[3])
    assert same(rank.block(3), before)
    assert rank.report() == StepReport(2, {0: 1, 1: 1})
    rank.run(3, ahead_slots=[0], ahead_blocks=[3])
    assert same(rank.block(3), before)
    assert rank.report() == StepReport(3)


def test_a_slot_is_good_again_after_a_good_store(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, rank, "stores")
    rank.run(1, store_blocks=[1, 2], store_slots=[0, 1])
    rank.report()
    rank.run(2, store_blocks=[1], store_slots=[0])
    rank.run(3, load_slots=[0], load_blocks=[4])
    assert rank.report() is None and same(rank.block(4), rank.block(1))
    rank.run(4, load_slots=[1], load_blocks=[4])
    assert rank.report() == StepReport(4)


def fail(rank: Rank, seq: int) -> None:
    """A plan that loads from a slot that was never filled."""
    rank.run(seq, load_slots=[0], load_blocks=[1])


def failed_rank() -> Rank:
    rank = Rank()
    fail(rank, 9)
    return rank


def test_a_report_waits_for_an_output() -> None:
    rank = failed_rank()
    assert rank.tier.attach_report(None) is None
    assert rank.report() == StepReport(9)


def test_a_report_of_an_early_pipeline_stage_goes_alone() -> None:
    """A pooling model there has None for every step."""
    rank = failed_rank()
    rank.tier.is_last_stage = False
    assert failed(rank.tier.end_step(None).kv_tier_report) == StepReport(9)
    assert EMPTY_MODEL_RUNNER_OUTPUT.kv_tier_report is None
    assert rank.tier.end_step(None) is None


def test_a_report_never_lands_on_the_shared_empty_output() -> None:
    found = failed_rank().tier.attach_report(EMPTY_MODEL_RUNNER_OUTPUT)
    assert failed(found.kv_tier_report) == StepReport(9)
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
    fail(rank, 10)
    assert failed(later.get_output().kv_tier_report) == StepReport(9)
    assert EMPTY_MODEL_RUNNER_OUTPUT.kv_tier_report is None
    assert rank.report() == StepReport(10)


def test_jobs_that_end_while_a_step_runs_are_told_with_its_output() -> None:
    class Later(AsyncModelRunnerOutput):
        def get_output(self) -> ModelRunnerOutput:
            report.record_job(SecondaryResult(7, [True], 0.1))
            report.record_load_failure("load", 10)
            return EMPTY_MODEL_RUNNER_OUTPUT

        def get_kv_connector_output(self) -> Any:
            return None

    report = StepReportBuilder()
    assert type(report.attach(Later(), True)) is Later
    report.reports_late = True
    told = report.attach(Later(), True).get_output().kv_tier_report
    assert [result.number for result in told.secondary] == [7]
    # What fails belongs to the output of its own step.
    assert told.failed_load_seq is None and not report.is_empty
    told = report.attach(output(), True).kv_tier_report
    assert told.failed_load_seq == 10 and not told.secondary


def test_writing_leaves_the_way_to_steps_that_run_something(rank: Rank) -> None:
    waits: list[Any] = []
    store: Any = SimpleNamespace(
        register=lambda memory: None, give_way=waits.append, close=lambda: None
    )
    gate_s = 0.5
    rank.tier._tuning = RankTuning(put_gate_s=gate_s)
    rank.tier.open_secondary([store])

    def wait_s() -> float:
        begun = time.monotonic()
        waits[0]()
        return time.monotonic() - begun

    assert wait_s() < gate_s
    rank.tier.begin_step(step(1, tokens=[3]))
    assert wait_s() >= gate_s
    rank.tier.end_step(output())
    assert wait_s() < gate_s
    rank.tier.begin_step(step(2))
    assert wait_s() < gate_s


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


class Hanging(InOrder):
    """A copy of the second step hangs."""

    def begin_step(self, plan: StepPlan, copies: Copies, layerwise: bool) -> None:
        if plan.seq == 2:
            raise CopyHangs
        super().begin_step(plan, copies, layerwise)

    def give_up(self) -> dict[int, list[int]]:
        return {1: [4, 3]}


def test_after_a_copy_that_hangs_nothing_is_copied(rank: Rank) -> None:
    tier = with_order(rank, Hanging())

    def run(seq: int, **plan: Any) -> StepReport | None:
        tier.begin_step(step(seq, **plan))
        return tier.end_step(output()).kv_tier_report

    assert failed(run(1, store_blocks=[1], store_slots=[0])) is None
    # What the loads of step 1 fill, and all that came since, is void.
    report = run(2, store_blocks=[2], store_slots=[1])
    assert report == StepReport(1, lost_blocks=[3, 4], failures=Counter(hang=1))
    assert run(3) is None
    before = rank.block(5)
    # The scheduler did not know yet.
    report = run(4, load_slots=[0], load_blocks=[5])
    assert failed(report) == StepReport(4)
    report = run(5, ahead_slots=[0], ahead_blocks=[5])
    assert failed(report) == StepReport(5)
    assert same(rank.block(5), before)


def test_a_store_that_hangs_voids_nothing(rank: Rank) -> None:
    order = Hanging()
    order.give_up = dict  # type: ignore[method-assign]
    tier = with_order(rank, order)
    tier.begin_step(step(2))
    assert tier.end_step(output()).kv_tier_report == StepReport(lost_blocks=[])


def a_wrapper() -> WorkerWrapperBase:
    config = {"vllm_config": SimpleNamespace(model_config=None)}
    known = signature(WorkerWrapperBase).parameters
    return WorkerWrapperBase(**{k: v for k, v in config.items() if k in known})


def test_copies_are_queued_before_the_step() -> None:
    calls: list[str] = []
    wrapper = a_wrapper()
    wrapper.mm_receiver_cache = None
    wrapper.worker = SimpleNamespace(  # type: ignore[assignment]
        execute_model=lambda step: calls.append("step")
    )
    wrapper.execute_model(upstream.empty_step())
    wrapper.kv_tier = SimpleNamespace(  # type: ignore[assignment]
        begin_step=lambda step: calls.append("copies"),
        end_step=lambda output: calls.append("report"),
    )
    wrapper.execute_model(upstream.empty_step())
    assert calls == ["step", "copies", "step", "report"]


def test_copies_end_before_the_engine_sleeps() -> None:
    """A pause promises an idle device; sleep then takes its memory away."""
    # Not all releases have a call that waits for the device: sleep itself does there.
    waits = hasattr(WorkerBase, "synchronize_device")
    name = "synchronize_device" if waits else "sleep"
    calls: list[str] = []
    wrapper = a_wrapper()
    wrapper.worker = SimpleNamespace(  # type: ignore[assignment]
        **{name: lambda *level: calls.append("device")}
    )
    getattr(wrapper, name)()
    wrapper.kv_tier = SimpleNamespace(  # type: ignore[assignment]
        finish=lambda: calls.append("copies")
    )
    getattr(wrapper, name)()
    assert calls == ["device", "copies", "device"]
