# SPDX-License-Identifier: Apache-2.0
"""Copies of single steps that hang, and what is given up then. Random ones are in
`test_hangs`."""

import threading
import time
from typing import Any

import pytest

from vllm.v1.kv_tier.tuning import RankTuning
from vllm.v1.kv_tier.worker.copies import CopyHangs
from vllm.v1.kv_tier.worker.layers import LayerWaits

from .fake_cuda import FakeCuda
from .stream_steps import AHEAD, FOR_EVER_S, LOAD, STORE, Rank, comes
from .stream_steps import collect_fast as collect_fast
from .stream_steps import cuda as cuda


@pytest.mark.parametrize("writes", [False, True])
def test_a_connector_does_not_write_while_a_copy_hangs(
    writes: bool, cuda: FakeCuda
) -> None:
    """Launched it is, and the device takes longer than anybody waits."""
    rank = Rank(cuda)
    rank.step(**STORE)
    rank.order._stored[1].wait_for_launch()
    rank.order._tuning = RankTuning(limit_s=0.01)
    plan = {"compute_after_stores": 1, "connector_writes": writes}
    if writes:
        with pytest.raises(CopyHangs):
            rank.begin(**plan)
    else:
        rank.begin(**plan)
    assert not rank.ran


@pytest.mark.parametrize(
    "plan", [{"compute_after_stores": 1}, {"load_after_stores": 1, **LOAD}]
)
def test_a_step_does_not_wait_for_a_launch_that_hangs(
    plan: dict[str, Any], cuda: FakeCuda
) -> None:
    rank = Rank(cuda, limit_s=0.05)
    rank.step(hang=["store"], **STORE)
    with pytest.raises(CopyHangs):
        rank.begin(**plan)
    rank.released.set()


@pytest.mark.parametrize("old_s", [0.01, FOR_EVER_S])
def test_no_stream_is_told_to_wait_for_what_is_old_and_hangs(
    old_s: float, cuda: FakeCuda
) -> None:
    rank = Rank(cuda, limit_s=0.2, old_s=old_s)
    rank.step(hang=["store"], **STORE)
    time.sleep(0.02)
    if old_s < 1:
        with pytest.raises(CopyHangs):
            rank.begin(**AHEAD, load_after_stores=1)
    else:
        rank.begin(**AHEAD, load_after_stores=1)
    rank.released.set()


def test_what_is_old_and_ends_is_waited_for_on_the_host(cuda: FakeCuda) -> None:
    rank = Rank(cuda, old_s=0.0)
    rank.step(**STORE)
    rank.begin(compute_after_stores=1)
    assert rank.ran == [("store", 1)]


@pytest.mark.parametrize("ends", [False, True])
def test_the_next_to_end_has_its_time(ends: bool, cuda: FakeCuda) -> None:
    rank = Rank(cuda, limit_s=0.3, grace_s=5.0 if ends else 0.02)
    rank.step(hang=["store"], **STORE)
    # Since then it is the next.
    rank.step()
    rank.step()
    time.sleep(0.4)
    if ends:
        threading.Timer(0.1, rank.released.set).start()
        rank.step()
        # It begins anew for what is the next then.
        rank.step()
    else:
        with pytest.raises(CopyHangs):
            rank.begin()
        rank.released.set()


def test_blocks_that_loads_may_still_write_to(cuda: FakeCuda) -> None:
    waits = LayerWaits({"a": 0}, max_decode_tokens=1)
    rank = Rank(cuda, waits)
    rank.step(**AHEAD)
    rank.order._loaded_ahead[1].wait_on_host()
    rank.step(ahead_slots=[5], ahead_blocks=[4])
    rank.begin(layerwise=True, **LOAD)
    assert waits.is_armed
    assert rank.order.give_up() == {2: [4], 3: [2]}
    assert not waits.is_armed


def test_nothing_is_copied_after_that(cuda: FakeCuda) -> None:
    rank = Rank(cuda, gate_s=FOR_EVER_S)
    rank.begin(**STORE, **AHEAD)
    rank.order._loaded_ahead[1].wait_on_host()
    # What has come is not lost, and no layer waits.
    assert rank.order.give_up() == {}
    rank.order.end_step()
    assert comes(rank.order._stored[1])
    assert rank.ran == [("ahead", 1)]


def test_loads_may_have_come_before_their_step_is_launched(cuda: FakeCuda) -> None:
    """Tiers below ask what has ended, and it is forgotten then."""
    waits = LayerWaits({"a": 0}, max_decode_tokens=1)
    rank = Rank(cuda, waits)
    rank.begin(layerwise=True, **LOAD)
    rank.order._loaded[1].wait_on_host()
    assert rank.order.have_ended(1, 1) and not rank.order._loaded
    waits.wait("a")
    assert rank.order.end_step()
    assert rank.ran == [("load", 1)]


def test_each_has_its_own_time_to_be_the_next(cuda: FakeCuda) -> None:
    """Together they take longer than one may."""
    rank = Rank(cuda, limit_s=0.1, grace_s=0.01)
    for seq in range(1, 7):
        rank.step(**STORE)
        if seq > 1:
            rank.order._stored[seq - 1].wait_on_host()
        time.sleep(0.04)
