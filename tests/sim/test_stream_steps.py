# SPDX-License-Identifier: Apache-2.0
"""Gates and fences of single steps: who waits for whom, and who does not. Random steps
are in `test_streams`."""

import sys
import time
from importlib.util import find_spec, module_from_spec
from typing import Any

import pytest
import torch

from vllm.v1.kv_tier import gil
from vllm.v1.kv_tier.worker import streams
from vllm.v1.kv_tier.worker.layers import LayerWaits

from .fake_cuda import FakeCuda
from .stream_steps import AHEAD, CLEAN, FOR_EVER_S, LOAD, STORE, Rank, comes
from .stream_steps import collect_fast as collect_fast
from .stream_steps import cuda as cuda

# ------------------------------------------------------------------------- gates


def test_a_store_is_held_up_until_its_step_is_launched(cuda: FakeCuda) -> None:
    rank = Rank(cuda, gate_s=FOR_EVER_S)
    rank.begin(**STORE)
    assert not comes(rank.order._stored[1], 0.1)
    rank.order.end_step()
    assert comes(rank.order._stored[1])


def test_a_store_is_not_held_up_for_ever(cuda: FakeCuda) -> None:
    rank = Rank(cuda, gate_s=0.05)
    rank.begin(**STORE)
    assert comes(rank.order._stored[1])


def test_a_store_that_loads_ahead_wait_for_is_not_held_up(cuda: FakeCuda) -> None:
    rank = Rank(cuda, gate_s=FOR_EVER_S)
    rank.begin(**STORE)
    rank.begin(**AHEAD, load_after_stores=1)
    assert comes(rank.order._loaded_ahead[2])
    assert rank.ran == [("store", 1), ("ahead", 2)]


def test_nothing_is_held_up_when_all_must_end(cuda: FakeCuda) -> None:
    rank = Rank(cuda, gate_s=FOR_EVER_S)
    rank.begin(**STORE)
    rank.begin(**STORE)
    rank.order.finish()
    assert rank.ran == [("store", 1), ("store", 2)]


def test_loads_ahead_let_those_of_the_step_go_first(cuda: FakeCuda) -> None:
    rank = Rank(cuda)
    rank.step(**LOAD, **AHEAD)
    assert comes(rank.order._loaded_ahead[1])
    assert rank.ran == [("load", 1), ("ahead", 1)]


@pytest.mark.parametrize("usual_s, expected_s", [(5e-3, 5e-4), (1e-4, 1e-4)])
def test_threads_take_turns_while_one_has_a_copy_to_launch(
    usual_s: float, expected_s: float, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sys.getswitchinterval()
    # Threads that an earlier test has left in a deadlock still ask for short turns.
    assert (spec := find_spec(gil.__name__)) and spec.loader
    fresh = module_from_spec(spec)
    spec.loader.exec_module(fresh)
    monkeypatch.setattr(streams, "fast_switching", fresh.fast_switching)

    def turn_comes(turn_s: float) -> bool:
        until = time.monotonic() + 5
        while sys.getswitchinterval() != pytest.approx(turn_s, rel=0.05):
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    sys.setswitchinterval(usual_s)
    try:
        rank = Rank(cuda, gate_s=FOR_EVER_S, switch_interval_s=5e-4)
        rank.begin()
        assert turn_comes(usual_s)
        rank.begin(**STORE)
        rank.begin(**STORE)
        assert turn_comes(expected_s)
        rank.order.end_step()
        assert comes(rank.order._stored[3])
        assert turn_comes(usual_s)
    finally:
        sys.setswitchinterval(before)


def test_kernels_of_loads_go_first(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, priorities = torch.cuda.Stream, list[int]()

    def stream(device: torch.device, priority: int = 0) -> Any:
        priorities.append(priority)
        return make(device, priority)

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    Rank(cuda)
    assert priorities == [0, 0, -1]


# ------------------------------------------------------------------------ fences


def test_who_asks_hears_which_copies_have_ended(cuda: FakeCuda) -> None:
    rank = Rank(cuda)
    order = rank.order
    for seq, (kind, is_store) in enumerate(
        ((STORE, True), (CLEAN, True), (LOAD, False), (AHEAD, False)), 1
    ):
        rank.step(**kind)
        before, since = seq - 1, seq
        assert order.have_ended(before, before)
        assert not order.have_ended(*((since, 0) if is_store else (0, since)))
        # Nobody asks for the other kind.
        assert order.have_ended(*((0, since) if is_store else (since, 0)))
        order.finish()
        assert order.have_ended(since, since)


def test_a_step_does_not_wait_for_what_is_stored_for_later_ones(
    cuda: FakeCuda,
) -> None:
    rank = Rank(cuda)
    rank.step(**CLEAN, **STORE, compute_after_stores=1)
    rank.compute()
    assert rank.ran == [("store", 1), ("forward", 1)]


def test_a_fence_is_for_no_later_copy(cuda: FakeCuda) -> None:
    rank = Rank(cuda)
    rank.step(**AHEAD)
    rank.step(**AHEAD)
    rank.step(compute_after_loads=1)
    rank.compute()
    assert ("ahead", 1) in rank.ran and ("ahead", 2) not in rank.ran


def test_what_follows_a_layer_that_did_not_wait(cuda: FakeCuda) -> None:
    rank = Rank(cuda, LayerWaits({"a": 0}, max_decode_tokens=1))
    rank.begin(layerwise=True, **LOAD)
    assert rank.order.end_step() is False
    rank.launch("forward", 1)
    rank.compute()
    assert rank.ran == [("load", 1), ("forward", 1)]
    # Where the step waits, no layer does.
    rank.step(**LOAD)


@pytest.mark.parametrize("launches_long", [False, True])
def test_a_layer_waits_for_its_loads(launches_long: bool, cuda: FakeCuda) -> None:
    waits = LayerWaits({"a": 0}, max_decode_tokens=1)
    rank = Rank(cuda, waits)
    rank.begin(layerwise=True, launches_long=launches_long, **LOAD)
    waits.wait("a")
    rank.launch("forward", 1)
    assert rank.order.end_step() is True
    rank.compute()
    assert rank.ran == [("load", 1), ("forward", 1)]


def test_a_store_waits_for_the_forward_pass_of_its_fence(cuda: FakeCuda) -> None:
    rank = Rank(cuda)
    rank.step()
    rank.step(**STORE, store_after_compute=1)
    assert comes(rank.order._stored[2])
    assert rank.ran == [("forward", 1), ("store", 2)]


def test_a_forward_pass_waits_for_what_was_stored_for_it(cuda: FakeCuda) -> None:
    rank = Rank(cuda)
    rank.step(**CLEAN)
    rank.step(compute_after_stores=1)
    rank.compute()
    assert rank.ran[-2:] == [("clean", 1), ("forward", 2)]


def test_little_is_kept_of_steps_that_have_ended(cuda: FakeCuda) -> None:
    rank = Rank(cuda)
    for _ in range(6):
        rank.step(**LOAD)
        rank.compute()
    rank.step()
    # The end of the one before, which stands for all others, and its own begin.
    assert len(rank.order._begun) == 2
    assert not rank.order._filling
