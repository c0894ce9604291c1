# SPDX-License-Identifier: Apache-2.0
"""Steps on the streams of a GPU: which copies they wait for, which not, and times."""

import time

import pytest
import torch

from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.worker.copies import Copies
from vllm.v1.kv_tier.worker.layers import LayerWaits
from vllm.v1.kv_tier.worker.streams import CudaStreams

from ..stream_rank import NEW, OLD, Rank, needs_gpu, sleep, wait_for_threads
from ..stream_rank import compute_stream as compute_stream
from ..stream_rank import rank as rank

pytestmark = needs_gpu


# ---------------------------------------------------------------- loads of a step


@pytest.mark.parametrize("launches_long", [False, True])
def test_a_step_reads_what_it_loads(rank: Rank, launches_long: bool) -> None:
    rank.launches_long = launches_long
    rank.slots[:3] = torch.tensor([5.0, 6.0, 7.0])
    torch.cuda.synchronize()
    reads = [rank.reads(i) for i in (3, 4, 5)]
    rank.step(*reads, slow=["load"], load_slots=[0, 1, 2], load_blocks=[3, 4, 5])
    torch.cuda.synchronize()
    assert rank.read[3:6].tolist() == [5, 6, 7]


def test_a_step_does_not_wait_for_its_stores_and_loads_ahead(rank: Rank) -> None:
    ended = torch.cuda.Event()
    rank.step(
        rank.reads(0),
        ended.record,
        slow=["clean", "ahead"],
        store_blocks=[0],
        store_slots=[0],
        clean_blocks=[1],
        clean_slots=[1],
        ahead_slots=[2],
        ahead_blocks=[2],
        compute_after_stores=1,
    )
    ended.synchronize()
    assert rank.order._stored[1].has_come()
    jobs = [rank.order._cleaned[1], rank.order._loaded_ahead[1]]
    assert not any(job.has_come() for job in jobs)
    wait_for_threads(rank)


# ------------------------------------------------------------------------- layers


@pytest.fixture
def waits(rank: Rank) -> LayerWaits:
    """Two layers, with a region and a part of the loads each."""
    waits = LayerWaits({"a": 0, "b": 1}, max_decode_tokens=1)
    rank.order = CudaStreams(torch.device("cuda", 0), waits)
    rank.slots.fill_(NEW)
    torch.cuda.synchronize()
    return waits


@pytest.mark.parametrize("launches_long", [False, True])
def test_each_layer_waits_for_its_own_loads(
    rank: Rank, waits: LayerWaits, launches_long: bool
) -> None:
    rank.launches_long = launches_long
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    all_waited = rank.step(
        events[0].record,
        lambda: waits.wait("a"),
        rank.reads(0),
        events[1].record,
        lambda: waits.wait("b"),
        rank.reads(1),
        events[2].record,
        slow=["load"],
        layerwise=True,
        load_slots=[0, 1],
        load_blocks=[0, 1],
    )
    assert all_waited
    torch.cuda.synchronize()
    assert rank.read[:2].tolist() == [NEW, NEW]
    # Half of the loads each.
    first = events[0].elapsed_time(events[1])
    second = events[1].elapsed_time(events[2])
    assert first > 1 and second > 0.3 * first


def test_loads_may_have_come_before_the_step_is_launched(
    rank: Rank, waits: LayerWaits
) -> None:
    """Who asks what has ended, as tiers below do, makes them forgotten then."""

    def forget() -> None:
        torch.cuda.synchronize()
        assert rank.order.have_ended(1, 1)

    all_waited = rank.step(
        forget,
        lambda: waits.wait("a"),
        lambda: waits.wait("b"),
        rank.reads(0),
        layerwise=True,
        load_slots=[0, 1],
        load_blocks=[0, 1],
    )
    assert all_waited
    torch.cuda.synchronize()
    assert rank.read[0].item() == NEW


@pytest.mark.parametrize("launches_long", [False, True])
def test_a_layer_that_did_not_wait_is_told_and_nothing_overtakes_the_loads(
    rank: Rank, waits: LayerWaits, launches_long: bool
) -> None:
    rank.launches_long = launches_long
    plan = {"load_slots": [0, 1], "load_blocks": [0, 1]}
    assert not rank.step(
        lambda: waits.wait("a"), rank.reads(1), slow=["load"], layerwise=True, **plan
    )
    # The next step needs no fence for them.
    assert rank.step(rank.writes(1, OLD), rank.reads(0))
    torch.cuda.synchronize()
    assert rank.read[:2].tolist() == [NEW, OLD]
    assert rank.blocks[:2].tolist() == [NEW, OLD]


# -------------------------------------------------------------------------- times


def test_loads_ahead_are_timed(rank: Rank) -> None:
    started = time.perf_counter()
    rank.step(slow=["ahead"], ahead_slots=[0, 1, 2], ahead_blocks=[0, 1, 2])
    assert rank.order.take_copy_times() == {}
    wait_for_threads(rank)
    wall = time.perf_counter() - started
    rank.step()
    blocks, seconds = rank.order.take_copy_times()["load_ahead", 1]
    assert blocks == 3 and 0.3 * wall < seconds <= wall
    rank.step()
    assert rank.order.take_copy_times() == {}


def test_prefill_is_timed_on_the_device(rank: Rank) -> None:
    """`HostTier` asks for times between the copies of a step and its compute."""
    order = rank.order
    nothing = Copies(*[lambda between_parts: None] * 4)
    started = time.perf_counter()
    order.begin_step(StepPlan(1), nothing, False)
    assert order.take_prefill_time(2048) == (0, 0.0)
    sleep()
    order.end_step()
    order.begin_step(StepPlan(2), nothing, False)
    # It runs still, and one at a time is timed.
    assert order.take_prefill_time(4096) == (0, 0.0)
    order.end_step()
    torch.cuda.synchronize()
    wall = time.perf_counter() - started
    order.begin_step(StepPlan(3), nothing, False)
    tokens, seconds = order.take_prefill_time(0)
    assert tokens == 2048 and 0.5 * wall < seconds <= wall
    order.end_step()
    order.begin_step(StepPlan(4), nothing, False)
    assert order.take_prefill_time(0) == (0, 0.0)
    order.end_step()
