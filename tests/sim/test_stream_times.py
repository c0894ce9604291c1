# SPDX-License-Identifier: Apache-2.0
"""What is measured on the simulated device: each piece of work takes a millisecond."""

from functools import partial

import pytest
import torch

from vllm.v1.kv_tier.plan import PrefillTime
from vllm.v1.kv_tier.worker.streams import Done, LoadWait, PrefillTimer

from .fake_cuda import FakeCuda
from .stream_steps import LOAD, Rank
from .stream_steps import collect_fast as collect_fast
from .stream_steps import cuda as cuda


def test_prefill_is_timed_one_step_at_a_time(cuda: FakeCuda) -> None:
    timer = PrefillTimer()

    def forward(num_pieces: int) -> None:
        for _ in range(num_pieces):
            cuda.launch(lambda: None)
        timer.end_step()

    assert timer.next_step(2048) == PrefillTime(0, 0.0)
    forward(5)
    assert timer.next_step(4096) == PrefillTime(0, 0.0)
    forward(3)
    cuda.wait_for_all()
    num_tokens, seconds = timer.next_step(0)
    # A millisecond for each piece, and for the event behind them.
    assert num_tokens == 2048 and seconds == pytest.approx(6e-3, rel=1e-6)
    forward(3)
    assert timer.next_step(4096) == PrefillTime(0, 0.0)


def test_a_step_tells_what_its_prefill_took(cuda: FakeCuda) -> None:
    rank = Rank(cuda)
    rank.begin()
    rank.order.take_prefill_time(2048)
    rank.launch("forward", 1)
    rank.order.end_step()
    cuda.wait_for_all()
    rank.begin()
    num_tokens, seconds = rank.order.take_prefill_time(0)
    assert num_tokens == 2048 and seconds == pytest.approx(2e-3)


def test_loads_and_the_wait_for_them_are_told_once(cuda: FakeCuda) -> None:
    rank = Rank(cuda)
    rank.step(**LOAD)
    rank.step()
    assert rank.order.take_copy_times() == {}
    cuda.wait_for_all()
    rank.step()
    times = rank.order.take_copy_times()
    assert {key: each.num_blocks for key, each in times.items()} == {
        ("load", 1): 1,
        ("stall", 1): 1,
    }
    rank.step()
    assert rank.order.take_copy_times() == {}


def test_the_wait_for_loads_is_timed(cuda: FakeCuda) -> None:
    compute, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    done, ran = Done(), list[str]()
    wait = LoadWait(done)
    # Nobody has waited.
    assert wait.has_ended() and wait.seconds == 0.0
    with torch.cuda.stream(stream):
        for _ in range(3):
            cuda.launch(partial(ran.append, "load"))
    done.record(stream)
    wait.wait(compute)
    cuda.launch(partial(ran.append, "forward"))
    assert wait._begun is not None and wait.has_ended() is False
    wait._begun.synchronize()
    assert wait.has_ended() is False
    cuda.wait_for_all()
    assert ran == ["load", "load", "load", "forward"]
    assert wait.has_ended() and wait.seconds == pytest.approx(4e-3, rel=1e-6)


def test_a_wait_for_loads_that_had_come_takes_no_time(cuda: FakeCuda) -> None:
    done = Done()
    wait = LoadWait(done)
    done.record(torch.cuda.Stream())
    wait.wait(torch.cuda.current_stream())
    done.event.synchronize()
    assert wait.has_ended() is False
    cuda.wait_for_all()
    assert wait.has_ended() and wait.seconds == 0.0
