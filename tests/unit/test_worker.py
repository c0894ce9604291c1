# SPDX-License-Identifier: Apache-2.0
"""A rank's host tier on CPU memory: copies, failures and their reports."""

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_tier import worker
from vllm.v1.kv_tier.copy_engine import CopyEngine, Transfer, slot_bytes
from vllm.v1.kv_tier.layer_waits import LayerWaits
from vllm.v1.kv_tier.plan import StepPlan, StepReport
from vllm.v1.kv_tier.regions import build_regions
from vllm.v1.kv_tier.streams import Copies, CopyHangs, CopyOrder, InOrder
from vllm.v1.kv_tier.worker import HostTier
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
)
from vllm.v1.worker.worker_base import WorkerBase

from ..names import WorkerWrapperBase
from ..sim import upstream

NUM_BLOCKS, NUM_SLOTS = 6, 4


def step(
    seq: int, tokens: Sequence[int] = (), copies_on_write: Any = None, **plan: Any
) -> SchedulerOutput:
    """What the scheduler sends: `tokens` of each request, and a plan."""
    output = upstream.empty_step()
    output.num_scheduled_tokens = {f"r{i}": n for i, n in enumerate(tokens)}
    output.total_num_scheduled_tokens = sum(tokens)
    output.kv_cache_block_copies = copies_on_write
    output.kv_tier_plan = StepPlan(seq, **plan)
    return output


class Rank:
    """A host tier and the device memory it works on."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.caches = [torch.randn(2, NUM_BLOCKS, 3, 5), torch.randn(NUM_BLOCKS, 7)]
        self.regions = build_regions(self.caches, NUM_BLOCKS)
        cpu = torch.device("cpu")
        self.tier = HostTier.allocate(self.regions, NUM_SLOTS, cpu)

    def block(self, block_id: int) -> list[torch.Tensor]:
        return [self.caches[0][:, block_id].clone(), self.caches[1][block_id].clone()]

    def run(self, seq: int, **plan: Any) -> None:
        self.tier.begin_step(step(seq, **plan))

    def report(self) -> StepReport | None:
        """What failed, as the next output tells it."""
        return failed(self.tier.end_step(output()).kv_tier_report)


@pytest.fixture
def rank() -> Rank:
    return Rank()


def output() -> ModelRunnerOutput:
    return upstream.model_runner_output([])


def verifying(rank: Rank) -> Rank:
    """With a tier that checks slots before it loads them."""
    cpu = torch.device("cpu")
    rank.tier = HostTier.allocate(rank.regions, NUM_SLOTS, cpu, verify=True)
    return rank


def failed(report: StepReport | None) -> StepReport | None:
    """`report` without what was measured; None if nothing is left."""
    if report is None:
        return None
    only = StepReport(report.failed_load_seq, report.failed_store_slots)
    return only if only != StepReport() else None


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b))


def fail_once(monkeypatch: pytest.MonkeyPatch, rank: Rank, name: str) -> None:
    """Let the next copy of `step_loads`, `loads` (ahead) or `stores` stop half-way."""
    engine: CopyEngine = getattr(rank.tier.engines, name)
    real = engine.transfer

    class Failing(Transfer):
        def __init__(self, pairs: Any, to_device: bool) -> None:
            self.transfer = real(pairs, to_device)

        def copy(self, regions: range) -> None:
            monkeypatch.setattr(engine, "transfer", real)
            self.transfer.copy(regions[:1])
            raise RuntimeError("a copy fails for the test")

    monkeypatch.setattr(engine, "transfer", Failing)


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
    rank.tier._bad_slots.add(0)
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


# -------------------------------------------------------------- layers and times


class Recorder(InOrder):
    """Keeps what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.layerwise: list[bool] = []
        self.num_tokens: list[int] = []
        self.num_parts = [0, 0, 0]
        self.times: tuple[tuple[int, float], tuple[int, float]] = (0, 0.0), (0, 0.0)
        self.all_waited = True

    def begin_step(self, plan: StepPlan, copies: Copies, layerwise: bool) -> None:
        self.layerwise.append(layerwise)
        self.copies = copies
        for i, copy in enumerate((copies.store, copies.load, copies.load_ahead)):
            copy(partial(self._count, i))

    def _count(self, i: int) -> None:
        self.num_parts[i] += 1

    def end_step(self) -> bool:
        return self.all_waited

    def take_times(
        self, num_tokens: int
    ) -> tuple[tuple[int, float], tuple[int, float]]:
        self.num_tokens.append(num_tokens)
        return self.times


def with_order(
    rank: Rank, order: CopyOrder, waits: LayerWaits | None = None
) -> HostTier:
    """Another tier on the memory of `rank`."""
    return HostTier(rank.regions, rank.tier.engines, order, waits)


LOAD = {"load_slots": [0], "load_blocks": [1]}


def test_copies_go_by_layers_where_a_step_waits_else_by_blocks(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Keys, values, and the other layer: 60, 60 and 28 bytes of each block.
    order, waits = Recorder(), LayerWaits({}, max_decode_tokens=1)
    tier = with_order(rank, order, waits)
    monkeypatch.setattr(worker, "_PART_BYTES", 130)
    monkeypatch.setattr(worker, "_LOAD_CHUNK_BYTES", 150)
    monkeypatch.setattr(worker, "_STORE_CHUNK_BYTES", 150)
    one, two = rank.block(1), rank.block(2)
    tier.begin_step(step(1, store_slots=[0, 1], store_blocks=[1, 2]))
    tier.begin_step(step(2, ahead_slots=[0], ahead_blocks=[3]))
    tier.begin_step(step(3, [5], load_slots=[1, 0], load_blocks=[4, 5]))
    # Two blocks of two regions are more than a part, one block of all is a chunk.
    assert order.num_parts == [2, 2, 1]
    assert order.copies.load_parts == [range(0, 2), range(2, 3)]
    assert same(rank.block(3), one)
    assert same(rank.block(4), two) and same(rank.block(5), one)
    monkeypatch.setattr(worker, "_PART_BYTES", 1)
    tier.begin_step(step(4, [5], **LOAD))
    assert order.copies.load_parts == [range(0, 1), range(1, 2), range(2, 3)]


@pytest.mark.parametrize("num_blocks, is_long", [(2, False), (3, True)])
def test_long_launches_are_left_to_a_thread(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, num_blocks: int, is_long: bool
) -> None:
    # 5 us a piece, of three regions.
    monkeypatch.setattr(worker, "_LONG_LAUNCH_S", 40e-6)
    order = Recorder()
    ids = list(range(num_blocks))
    with_order(rank, order).begin_step(step(1, load_slots=ids, load_blocks=ids))
    assert order.copies.load_launches_long == is_long


@pytest.mark.parametrize(
    "output, is_layerwise",
    [
        (step(1, [5], **LOAD), True),
        (step(1, [1, 2], **LOAD), True),
        # One CUDA graph may hold such a step.
        (step(1, [1, 1], **LOAD), False),
        (step(1, **LOAD), False),
        # They come before the first layer.
        (step(1, [5], copies_on_write=["a copy"], **LOAD), False),
        (step(1, [5], ahead_slots=[0], ahead_blocks=[1]), False),
        (step(1, [5]), False),
    ],
)
def test_when_layers_wait_for_their_own_loads(
    rank: Rank, output: SchedulerOutput, is_layerwise: bool
) -> None:
    order = Recorder()
    with_order(rank, order, LayerWaits({}, max_decode_tokens=1)).begin_step(output)
    with_order(rank, order).begin_step(output)
    assert order.layerwise == [is_layerwise, False]


def test_a_layer_that_did_not_wait_fails_its_step(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    order = Recorder()
    tier = with_order(rank, order, LayerWaits({}, max_decode_tokens=1))
    tier.begin_step(step(1, [5], **LOAD))
    report = tier.end_step(output()).kv_tier_report
    assert report is not None and report.failed_load_seq is None
    tier.begin_step(step(2, [5], **LOAD))
    order.all_waited = False
    # No model output yet: `sample_tokens` brings it.
    assert tier.end_step(None) is None
    assert "layerwise_loads" in caplog.text
    found = tier.attach_report(output()).kv_tier_report
    assert found is not None and found.failed_load_seq == 2
    assert found.failures == Counter(layer_wait=1)
    # Once is enough.
    order.all_waited = True
    tier.begin_step(step(3, [5], **LOAD))
    assert tier.end_step(output()).kv_tier_report is None
    assert order.layerwise == [True, True, False]


@pytest.mark.parametrize(
    "output, num_tokens",
    [
        (step(1, [1024]), 1024),
        (step(1, [1023]), 0),
        (step(1, [1000, 80, 80]), 1160),
        # Most of its requests decode.
        (step(1, [1024, *[1] * 16]), 0),
        # It waits for loads.
        (step(1, [1024], **LOAD), 0),
        (step(1, [1024], compute_after_loads=1), 0),
        # Beside which others load.
        (step(1, [1024], ahead_slots=[0], ahead_blocks=[1]), 1024),
    ],
)
def test_which_steps_tell_what_prefill_costs(
    rank: Rank, output: SchedulerOutput, num_tokens: int
) -> None:
    order = Recorder()
    with_order(rank, order).begin_step(output)
    assert order.num_tokens == [num_tokens]


def test_times_travel_with_the_next_output(rank: Rank) -> None:
    order = Recorder()
    tier = with_order(rank, order)
    for times in (((3, 0.5), (0, 0.0)), ((0, 0.0), (2048, 0.25))):
        order.times = times
        tier.begin_step(step(1))
        found = tier.end_step(output()).kv_tier_report
        assert found == StepReport(loads=times[0], prefill=times[1])
    order.times = (0, 0.0), (0, 0.0)
    tier.begin_step(step(2))
    assert tier.end_step(output()).kv_tier_report is None


@pytest.mark.parametrize(
    "tokens, counts",
    [([5], True), ([1, 1, 5], True), ([1, 1], False), ([2000], False)],
)
def test_what_it_takes_a_request_to_join(
    rank: Rank, tokens: list[int], counts: bool
) -> None:
    tier = with_order(rank, Recorder(), LayerWaits({}, max_decode_tokens=1))
    tier.begin_step(step(1, tokens))
    time.sleep(0.01)
    report = tier.end_step(output()).kv_tier_report
    assert (report is not None) == counts
    if report is not None:
        (size, seconds), *others = report.joins.items()
        assert size == 3 and seconds >= 0.01 and not others


def full_report(rank: Rank) -> StepReport:
    report = rank.tier.end_step(output()).kv_tier_report
    assert report is not None
    return report


def test_every_copy_tells_its_time_once(rank: Rank) -> None:
    rank.run(1, store_blocks=[1, 2], store_slots=[0, 1])
    rank.run(2, load_slots=[0], load_blocks=[3], ahead_slots=[1], ahead_blocks=[4])
    times = full_report(rank).times
    # The step waits for its loads: that is its stall.
    assert {key: num for key, (num, _) in times.items()} == {
        ("store", 1): 2,
        ("load", 2): 1,
        ("stall", 2): 1,
        ("load_ahead", 2): 1,
    }
    assert all(seconds > 0 for _, seconds in times.values())
    assert times["stall", 2] == times["load", 2]
    rank.run(3)
    assert rank.tier.end_step(output()).kv_tier_report is None


def test_a_copy_that_failed_counts_no_blocks(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, rank, "stores")
    rank.run(1, store_blocks=[1, 2], store_slots=[0, 1])
    rank.run(2, load_slots=[1], load_blocks=[3])
    rank.run(3, ahead_slots=[1], ahead_blocks=[3])
    found = full_report(rank)
    assert found.failures == {"store": 1, "load": 2}
    blocks = [found.times[kind][0] for kind in (("store", 1), ("load", 2))]
    assert blocks == [0, 0] and found.times["load_ahead", 3][0] == 0
    # What failed before says nothing of what follows.
    rank.run(4, store_blocks=[1], store_slots=[1])
    assert full_report(rank).times["store", 4][0] == 1


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


def test_copies_end_before_the_engine_sleeps() -> None:
    """A pause promises an idle device; sleep then takes its memory away."""
    # Not all releases have a call that waits for the device: sleep itself does there.
    waits = hasattr(WorkerBase, "synchronize_device")
    name = "synchronize_device" if waits else "sleep"
    calls: list[str] = []
    config = {"vllm_config": SimpleNamespace(model_config=None)}
    known = signature(WorkerWrapperBase).parameters
    wrapper = WorkerWrapperBase(**{k: v for k, v in config.items() if k in known})
    wrapper.worker = SimpleNamespace(  # type: ignore[assignment]
        **{name: lambda *level: calls.append("device")}
    )
    getattr(wrapper, name)()
    wrapper.kv_tier = SimpleNamespace(  # type: ignore[assignment]
        finish=lambda: calls.append("copies")
    )
    getattr(wrapper, name)()
    assert calls == ["device", "copies", "device"]
