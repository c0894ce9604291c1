# SPDX-License-Identifier: Apache-2.0
"""Copy threads on the simulated device: what a GPU would show too seldom."""

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from vllm.v1.kv_tier.tuning import DEFAULT_TUNING
from vllm.v1.kv_tier.worker.streams import CopyThread, Done, Gate, Job

from .fake_cuda import FakeCuda, Pace
from .stream_play import collect_fast as collect_fast
from .stream_play import copy_threads, end_threads


def test_thousands_of_copies_behind_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that needs the last of them finds out that it does not end."""
    cuda = FakeCuda("late")
    released = threading.Event()

    def hangs(between_parts: Callable[[], None]) -> None:
        released.wait(60)

    def copies(between_parts: Callable[[], None]) -> None: ...

    with monkeypatch.context() as inner:
        cuda.install(inner)
        thread = CopyThread("kv-tier-store", torch.device("cpu"))
        thread.submit(Job(hangs, (), 1))
        for _ in range(10_000):
            last = thread.submit(Job(copies, (), 1))
        assert not last.wait_for_launch(0.1)
        thread.close()
        released.set()
        assert last.wait_for_launch(60.0)
        del thread
        end_threads(cuda)


@pytest.mark.parametrize("pace", ["late", "eager"])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_what_a_gate_waits_for_is_not_in_the_time_of_a_copy(
    num_parts: int, pace: Pace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece of work takes the simulated device a millisecond."""
    cuda = FakeCuda(pace)
    with monkeypatch.context() as inner:
        cuda.install(inner)
        other = torch.cuda.Stream()

        def gate(job: Job) -> None:
            with torch.cuda.stream(other):
                for _ in range(100):
                    cuda.launch(lambda: None)
                end = torch.cuda.Event()
                end.record()
            end.synchronize()

        def copy(between_parts: Callable[[], None]) -> None:
            for part in range(num_parts):
                if part:
                    between_parts()
                cuda.launch(partial(copied.append, part))

        copied: list[int] = []
        thread = CopyThread("kv-tier-ahead", torch.device("cpu"), gate=gate)
        job = thread.submit(Job(copy, (), num_parts))
        job.wait_on_host()
        assert copied == [*range(num_parts)]
        # Each part, and a millisecond for the event behind it.
        assert job.seconds == pytest.approx(2e-3 * num_parts)
        del thread
        end_threads(cuda)


def test_the_end_is_not_waited_for_beyond_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda("late")
    with monkeypatch.context() as inner:
        cuda.install(inner)
        done = Done()
        # Not launched, launched, and come.
        assert done.ends_within(0.01) is False
        done.record(torch.cuda.current_stream())
        assert done.ends_within(0.005) is False
        # It comes, as somebody asks for it again and again.
        assert done.ends_within(30.0) is True
        assert done.ends_within(0.0) is True


@pytest.mark.parametrize("what", ["opens", "is in a hurry", "comes late"])
def test_nobody_looks_again_and_again_behind_a_gate(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look would take Python's lock from a step that is being launched."""
    cuda = FakeCuda("late")
    looks: list[float] = []
    rest = Job.rest

    def counted(job: Job, timeout_s: float) -> None:
        looks.append(timeout_s)
        rest(job, timeout_s)

    with monkeypatch.context() as inner:
        cuda.install(inner)
        inner.setattr(Job, "rest", counted)
        gate = Gate()
        gate.close()
        thread = CopyThread(
            "kv-tier-store",
            torch.device("cpu"),
            gate=lambda job: gate.wait(job, 0.3 if what == "comes late" else 60.0),
        )
        job = thread.submit(Job(lambda _: None, (), 1))
        assert not Done.wait_for_launch(job, 0.2 if what != "comes late" else 0.01)
        assert len(looks) == 1
        if what == "opens":
            gate.open()
        elif what == "is in a hurry":
            job.hurry()
        assert Done.wait_for_launch(job, 10.0)
        # One more, since a lock may be had a little before its time.
        assert len(looks) <= 2
        del thread
        end_threads(cuda)


def test_a_hurry_ends_the_wait_for_a_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda("late")
    tuning = replace(DEFAULT_TUNING, fence_look_s=60.0)
    with monkeypatch.context() as inner:
        cuda.install(inner)
        computed = Done()
        computed.record(torch.cuda.current_stream())
        thread = CopyThread("kv-tier-store", torch.device("cpu"), tuning=tuning)
        job = thread.submit(Job(lambda _: None, (computed,), 1))
        assert not Done.wait_for_launch(job, 0.1)
        job.hurry()
        assert Done.wait_for_launch(job, 10.0)
        del thread
        end_threads(cuda)


def test_a_closed_thread_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda("late")
    ran: list[str] = []
    reached, opened = threading.Event(), threading.Event()

    def gate(job: Job) -> None:
        reached.set()
        opened.wait(5.0)

    with monkeypatch.context() as inner:
        cuda.install(inner)
        thread = CopyThread("kv-tier-ahead", torch.device("cpu"), gate=gate)
        held_up = thread.submit(Job(lambda _: ran.append("held up"), (), 1))
        assert reached.wait(5.0)
        thread.close()
        behind = thread.submit(Job(lambda _: ran.append("behind"), (), 1))
        opened.set()
        for job in (held_up, behind):
            job.wait_on_host()
        assert not ran
        del thread
        end_threads(cuda)


@pytest.mark.parametrize("limit", [1, 3])
def test_few_parts_are_queued_at_a_time(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda("late")
    ran: list[int] = []
    queued: list[int] = []
    with monkeypatch.context() as inner:
        cuda.install(inner)

        def copy(between_parts: Callable[[], None]) -> None:
            for part in range(12):
                cuda.launch(partial(ran.append, part))
                queued.append(part + 1 - len(ran))
                between_parts()

        gates: list[Job] = []
        thread = CopyThread("kv-tier-ahead", torch.device("cpu"), limit, gates.append)
        job = Job(copy, (), 12)
        thread.submit(job)
        # `wait_for_launch` would make it urgent.
        while not job.has_come():
            time.sleep(1e-3)
        # More urgent work may come before each of them.
        assert len(queued) == 12 and gates == 13 * [job]
        # One more is being launched.
        assert max(queued) == limit + 1
        del thread, gates
        end_threads(cuda)


def test_a_thread_ends_with_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever drops it waits for that: a thread that waits for the device when the
    process ends would abort it."""
    cuda = FakeCuda("late")
    ran: list[str] = []

    def copy(between_parts: Callable[[], None]) -> None:
        time.sleep(0.1)
        ran.append("copy")

    with monkeypatch.context() as inner:
        cuda.install(inner)
        thread = CopyThread("kv-tier-store", torch.device("cpu"))
        job = thread.submit(Job(copy, [Done()], 1))
        job.after[0].record(torch.cuda.current_stream())
        # It holds up nobody who ends the process.
        assert all(each.daemon for each in copy_threads())
        del thread
        gc.collect()
        assert ran == ["copy"]
        assert not copy_threads()
        # Nor does a job keep those before it.
        assert not job.after


@pytest.mark.parametrize("limit", [3, None])
def test_a_paced_thread_waits_on_the_host_too(
    limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits on the device fills the launch queue."""
    cuda = FakeCuda("late")
    ran: list[str] = []
    had_run: list[int] = []

    def before(between_parts: Callable[[], None]) -> None:
        cuda.launch(partial(ran.append, "before"))

    def behind(between_parts: Callable[[], None]) -> None:
        had_run.append(len(ran))
        cuda.launch(partial(ran.append, "behind"))

    with monkeypatch.context() as inner:
        cuda.install(inner)
        one = CopyThread("kv-tier-load", torch.device("cpu"), None)
        two = CopyThread("kv-tier-ahead", torch.device("cpu"), limit)
        job = two.submit(Job(behind, [one.launch(Job(before, (), 1))], 1))
        while not job.has_come():
            time.sleep(1e-3)
        assert had_run == [0 if limit is None else 1]
        assert ran == ["before", "behind"]
        del one, two
        end_threads(cuda)


def test_what_is_launched_here_comes_behind_what_the_thread_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda("late")
    launched: list[int] = []

    def slow(between_parts: Callable[[], None]) -> None:
        time.sleep(0.1)
        launched.append(1)

    with monkeypatch.context() as inner:
        cuda.install(inner)
        thread = CopyThread("kv-tier-load", torch.device("cpu"), None)
        thread.submit(Job(slow, (), 1))
        job = Job(lambda _: launched.append(2), (), 1)
        assert thread.launch(job) is job
        assert launched == [1, 2]
        del thread
        end_threads(cuda)
