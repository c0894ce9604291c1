# SPDX-License-Identifier: Apache-2.0
"""Copy threads on a GPU: order, pace, and who waits for whom."""

import gc
import threading
import time
from collections.abc import Callable

import pytest
import torch

from vllm.v1.kv_tier.worker.copies import Copy
from vllm.v1.kv_tier.worker.streams import CopyThread, Job

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SLEEP = 50_000_000
"""GPU cycles: some tens of milliseconds."""


@pytest.fixture(scope="module")
def device() -> torch.device:
    device = torch.device("cuda", 0)
    # What is loaded at first use may wait for the device.
    torch.cuda._sleep(1)
    cell = torch.zeros(2, device=device)
    cell[0].fill_(1)
    cell[1].copy_(cell[0])
    torch.cuda.synchronize()
    return device


def slow(*actions: Callable[[], object]) -> Copy:
    """A copy of one part, which takes its time before it acts."""

    def copy(between_parts: Callable[[], None]) -> None:
        torch.cuda._sleep(SLEEP)
        for action in actions:
            action()

    return copy


def quick(*actions: Callable[[], object]) -> Copy:
    def copy(between_parts: Callable[[], None]) -> None:
        for action in actions:
            action()

    return copy


@pytest.mark.parametrize("in_flight", [3, None])
def test_jobs_run_in_order(device: torch.device, in_flight: int | None) -> None:
    thread = CopyThread("test-order", device, parts_in_flight=in_flight)
    cell = torch.zeros(3, device=device)
    torch.cuda.synchronize()
    thread.submit(Job(slow(lambda: cell[0].fill_(1)), [], 1))
    thread.submit(Job(quick(lambda: cell[1].copy_(cell[0])), [], 1))
    # Launched here, but after what the thread was given.
    last = thread.launch(Job(quick(lambda: cell[2].copy_(cell[1])), [], 1))
    last.wait_on_host()
    assert cell.tolist() == [1, 1, 1]


@pytest.mark.parametrize("in_flight", [3, None])
def test_a_job_waits_for_what_it_comes_after(
    device: torch.device, in_flight: int | None
) -> None:
    first, second = (
        CopyThread("test-1", device),
        CopyThread("test-2", device, parts_in_flight=in_flight),
    )
    cell = torch.zeros(2, device=device)
    torch.cuda.synchronize()
    before = first.submit(Job(slow(lambda: cell[0].fill_(1)), [], 1))
    job = Job(quick(lambda: cell[1].copy_(cell[0])), [before], 1)
    second.submit(job).wait_on_host()
    assert cell[1].item() == 1


def test_threads_do_not_wait_for_one_another(device: torch.device) -> None:
    first, second = CopyThread("test-1", device), CopyThread("test-2", device)
    slow_job = first.submit(Job(slow(), [], 1))
    second.submit(Job(quick(), [], 1)).wait_on_host()
    assert not slow_job.has_come()
    slow_job.wait_on_host()
    assert slow_job.has_come()


def test_a_thread_without_pace_waits_on_the_device_only(device: torch.device) -> None:
    first, second = (
        CopyThread("test-1", device),
        CopyThread("test-2", device, parts_in_flight=None),
    )
    before = first.launch(Job(slow(), [], 1))
    job = second.launch(Job(quick(), [before], 1))
    # Launched already, while what it waits for runs.
    assert not before.has_come() and not job.has_come()
    job.wait_on_host()
    assert before.has_come()


def test_a_stream_waits_for_a_job_that_is_not_launched_yet(
    device: torch.device,
) -> None:
    first, second = CopyThread("test-1", device), CopyThread("test-2", device)
    cell = torch.zeros(2, device=device)
    torch.cuda.synchronize()
    before = first.submit(Job(slow(), [], 1))
    job = second.submit(Job(quick(lambda: cell[0].fill_(1)), [before], 1))
    stream = torch.cuda.Stream(device)
    job.wait(stream)
    with torch.cuda.stream(stream):
        cell[1].copy_(cell[0])
    stream.synchronize()
    assert cell[1].item() == 1


def test_few_parts_of_a_paced_copy_are_queued_at_a_time(device: torch.device) -> None:
    ahead: list[int] = []

    def copy(between_parts: Callable[[], None]) -> None:
        events = []
        for _ in range(12):
            torch.cuda._sleep(SLEEP // 10)
            events.append(torch.cuda.current_stream().record_event())
            between_parts()
            ahead.append(sum(not event.query() for event in events))

    paced, other = (
        CopyThread("test-1", device),
        CopyThread("test-2", device, parts_in_flight=None),
    )
    paced.submit(Job(copy, [], 1)).wait_on_host()
    assert 1 < max(ahead) <= 4
    ahead.clear()
    other.launch(Job(copy, [], 1)).wait_on_host()
    assert max(ahead) > 4


def test_a_closed_gate_holds_parts_up_but_not_for_ever(device: torch.device) -> None:
    gate = threading.Event()
    thread = CopyThread("test-gate", device, gate=lambda job: gate.wait(0.002))

    def copy(between_parts: Callable[[], None]) -> None:
        for _ in range(20):
            between_parts()

    def seconds() -> float:
        started = time.perf_counter()
        thread.submit(Job(copy, [], 1)).wait_on_host()
        return time.perf_counter() - started

    closed = seconds()
    gate.set()
    # 2 ms at most for each part.
    assert seconds() < 0.02 < closed < 1.0


def test_a_job_tells_how_long_it_took(device: torch.device) -> None:
    thread = CopyThread("test-time", device)
    started = time.perf_counter()
    before = thread.submit(Job(slow(), [], 1))
    job = thread.submit(Job(slow(), [], 3))
    job.wait_on_host()
    wall = time.perf_counter() - started
    # Each its own time only.
    assert 0.4 * wall < job.seconds + before.seconds <= 1.05 * wall
    assert before.seconds == pytest.approx(job.seconds, rel=0.5)
    assert job.num_blocks == 3


def test_a_thread_that_is_dropped_ends_its_thread_after_its_jobs(
    device: torch.device,
) -> None:
    thread = CopyThread("test-drop", device)
    cell = torch.zeros(1, device=device)
    torch.cuda.synchronize()
    thread.submit(Job(slow(), [], 1))
    job = thread.submit(Job(quick(lambda: cell.fill_(1)), [], 1))
    assert any(thread.name == "test-drop" for thread in threading.enumerate())
    del thread
    gc.collect()
    job.wait_on_host()
    assert cell.item() == 1
    assert not any(thread.name == "test-drop" for thread in threading.enumerate())
