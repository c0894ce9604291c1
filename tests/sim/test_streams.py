# SPDX-License-Identifier: Apache-2.0
"""The real streams and threads under random scripts, on a device of no fixed order.

No thread of the host may wait for ever, no copy may come before what its fences ask
for, and every forward pass must read what it should.
"""

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch

from vllm.v1.kv_tier.memory.checksums import SlotChecksums
from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.rank import streams
from vllm.v1.kv_tier.rank.copy_order import Copies
from vllm.v1.kv_tier.rank.copy_thread import CopyThread, Job
from vllm.v1.kv_tier.rank.report import ReportDraft
from vllm.v1.kv_tier.rank.streams import CudaStreams

from . import upstream
from .content import Violation
from .fake_cuda import PACES, PATIENCE_S, Event, FakeCuda, Pace, Stream, Stuck
from .layouts import LAYOUTS
from .scheduler import Setup
from .scripts import Steps, random_script
from .step import Step
from .stream_worker import Luck, StreamEngine, StreamWorker

NUM_SCRIPTS = 10
NUM_PLAYS = 6
MAX_SCRIPTS = 1200

LUCKS = [
    Luck(layerwise, launches_long)
    for layerwise in (False, True)
    for launches_long in (False, True)
]
# Many loads ahead, and many fences.
BUSY = {"load_time": 1.0, "max_stall": 0.0, "is_async": True}


@pytest.fixture(autouse=True)
def _no_logs() -> Iterator[None]:
    """pytest keeps them, with tracebacks that hold the streams."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True, scope="module")
def _collect_fast() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def _play(
    cuda: FakeCuda, luck: Luck, seed: int, has_faults: bool = True, **setup: Any
) -> None:
    script = random_script(Random(seed))
    engine = StreamEngine(replace(script.setup, **setup), cuda, luck, seed)
    for action in script.actions:
        if isinstance(action, Steps) and not has_faults:
            action = replace(action, fail=None)
        action.run(engine)
    engine.drain()


def _end_threads(cuda: FakeCuda) -> None:
    """Nothing holds the streams any more: their threads end.

    Returns when they have ended. What is queued still, after an error, is dropped.
    """
    end = time.monotonic() + 5.0
    while True:
        gc.collect()
        if not _copy_threads():
            return
        assert time.monotonic() < end, "threads do not end"
        # These hold the streams too.
        cuda.wait_for_all()
        cuda.errors.clear()
        time.sleep(0.01)


_STUCK: set[threading.Thread] = set()


def _copy_threads() -> list[threading.Thread]:
    found = (each for each in threading.enumerate() if each.name.startswith("kv-tier"))
    return [each for each in found if each not in _STUCK]


@contextmanager
def _device(pace: Pace, seed: int, patch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A device on which nothing may go wrong, and no thread be left."""
    cuda = FakeCuda(pace, seed)
    with patch.context() as inner:
        cuda.install(inner)
        yield cuda
        cuda.check()
        _end_threads(cuda)


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("luck", LUCKS, ids=str)
def test_scripts(luck: Luck, pace: Pace, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(NUM_SCRIPTS):
        with _device(pace, seed, monkeypatch) as cuda:
            _play(cuda, luck, seed, **(BUSY if seed % 2 else {}))


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("luck", LUCKS, ids=str)
def test_random_plans(luck: Luck, pace: Pace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fences that a scheduler may ask for, far more of them than one does."""
    for seed in range(NUM_PLAYS):
        with _device(pace, seed, monkeypatch) as cuda:
            _run_plans(cuda, luck, seed)


def _run_plans(cuda: FakeCuda, luck: Luck, seed: int) -> None:
    rng = Random(seed)
    setup = Setup(LAYOUTS[0], spare_blocks=10, num_slots=20)
    worker = StreamWorker(setup, {}, cuda, luck, rng)
    steps: deque[Step] = deque()
    for seq in range(1, 50):
        output = upstream.empty_step()
        output.kv_tier_plan = _random_plan(rng, seq, setup)
        fail = rng.choice([None] * 8 + ["load", "store"])
        steps.append(worker.submit(output, 0, False, fail))
        if len(steps) == 2:
            worker.run_until(steps.popleft())
    worker.settled()


@pytest.mark.parametrize("luck", LUCKS, ids=str)
def test_nothing_is_left_to_copy_when_the_engine_sleeps(
    luck: Luck, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_left = 0
    for seed in range(NUM_PLAYS):
        with _device("late", seed, monkeypatch) as cuda:
            rng = Random(seed)
            setup = Setup(LAYOUTS[0], spare_blocks=10, num_slots=20)
            worker = StreamWorker(setup, {}, cuda, luck, rng)
            for seq in range(1, 10):
                output = upstream.empty_step()
                output.kv_tier_plan = _random_plan(rng, seq, setup)
                worker.submit(output, 0, False, None)
            num_left += worker.finish()
            assert not any(worker.pending.values())
            worker.settled()
            # Its threads go when it does.
            del worker
    assert num_left > 0


def _random_plan(rng: Random, seq: int, setup: Setup) -> StepPlan:
    blocks = rng.sample(range(1, setup.num_blocks), 12)
    slots = rng.sample(range(setup.num_slots), 12)
    store, load, ahead, clean = (
        slice(start, start + rng.choice([0, 1, 3])) for start in (0, 3, 6, 9)
    )

    def up_to(last: int) -> int:
        return rng.choice([0, 0, rng.randint(max(0, last - 3), last)])

    return StepPlan(
        seq,
        store_blocks=blocks[store],
        store_slots=slots[store],
        clean_blocks=blocks[clean],
        clean_slots=slots[clean],
        load_blocks=blocks[load],
        load_slots=slots[load],
        ahead_blocks=blocks[ahead],
        ahead_slots=slots[ahead],
        compute_after_stores=up_to(seq),
        compute_after_loads=up_to(seq),
        load_after_stores=up_to(seq),
        load_after_loads=up_to(seq - 1),
        load_after_compute=up_to(seq - 1),
        store_after_compute=up_to(seq - 1),
        store_after_loads=up_to(seq - 1),
        clean_after_compute=up_to(seq - 1),
        clean_after_loads=up_to(seq),
    )


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("layerwise", [False, True])
def test_no_good_slot_is_refused(
    layerwise: bool, pace: Pace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the checksums are taken that stores in flight leave."""
    refused, checked = _checks(monkeypatch)
    for seed in range(NUM_SCRIPTS):
        with _device(pace, seed, monkeypatch) as cuda:
            luck = Luck(layerwise, launches_long=True, verify=True)
            _play(cuda, luck, seed, has_faults=False, **(BUSY if seed % 2 else {}))
    assert checked and not refused


def test_a_checksum_taken_too_early_refuses_good_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test above could fail."""
    refused, _ = _checks(monkeypatch)
    monkeypatch.setattr(SlotChecksums, "_end_of_copies", lambda self: lambda: None)
    for seed in range(MAX_SCRIPTS):
        with _device("late", seed, monkeypatch) as cuda:
            _play(cuda, Luck(False, True, verify=True), seed, has_faults=False, **BUSY)
        if refused:
            return
    pytest.fail(f"{MAX_SCRIPTS} scripts found nothing")


def _checks(patch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """Plans whose loads will have been refused, and slots that were checked."""
    refused: list[int] = []
    checked: list[int] = []
    load_failed, check = ReportDraft.load_failed, SlotChecksums.check

    def note_refused(self: ReportDraft, kind: str, seq: int) -> None:
        refused.append(seq)
        load_failed(self, kind, seq)

    def note_checked(self: SlotChecksums, slots: list[int]) -> None:
        checked.extend(slots)
        check(self, slots)

    patch.setattr(ReportDraft, "load_failed", note_refused)
    patch.setattr(SlotChecksums, "check", note_checked)
    return refused, checked


def test_events_of_the_fake() -> None:
    cuda = FakeCuda("late")
    ran: list[str] = []
    a, b = Stream(cuda), Stream(cuda)
    event = Event(cuda)
    b.wait_event(event)  # Never recorded: waits for nothing.
    cuda.enqueue(a, partial(ran.append, "a1"))
    event.record(a)
    b.wait_event(event)
    cuda.enqueue(a, partial(ran.append, "a2"))
    event.record(a)  # Not what b waits for.
    cuda.enqueue(b, partial(ran.append, "b"))
    end = Event(cuda)
    end.record(b)
    assert not end.query() and not ran
    end.synchronize()
    assert ran == ["a1", "b"] and end.query() and not event.query()
    event.synchronize()
    assert ran == ["a1", "b", "a2"]


@pytest.mark.parametrize("writes", [False, True])
def test_a_connector_finds_its_blocks_left_alone(
    writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes when it likes, and waits for no stream."""
    with _device("late", 0, monkeypatch) as cuda:
        order = CudaStreams(torch.device("cpu"), None)
        stored: list[int] = []

        def store(between_parts: Callable[[], None]) -> None:
            cuda.launch(partial(stored.append, 1))
            between_parts()

        def nothing(between_parts: Callable[[], None]) -> None: ...

        plan = StepPlan(1, store_blocks=[1], store_slots=[1], compute_after_stores=1)
        plan.connector_writes = writes
        order.begin_step(
            plan, Copies(store, nothing, nothing, nothing), layerwise=False
        )
        assert bool(stored) == writes
        del order


def miss_fence(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """The streams do not see a fence."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        begin_step = CudaStreams.begin_step

        def begin(
            self: CudaStreams, plan: StepPlan, copies: Copies, layerwise: bool
        ) -> None:
            begin_step(self, replace(plan, **{name: 0}), copies, layerwise)

        patch.setattr(CudaStreams, "begin_step", begin)

    plant.__name__ = f"miss_{name}"
    return plant


def gate_on_any_load(patch: pytest.MonkeyPatch) -> None:
    """Loads ahead let loads of steps go first, even those that wait for them, and are
    never urgent: then it would be a matter of rare luck."""
    last_load: list[Job] = []

    def wait_for_load(_: Job) -> None:
        for load in last_load:
            load.wait_on_host()

    class GatedThread(CopyThread):
        def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
            self.name = name
            if name == "kv-tier-ahead":
                kwargs["gate"] = wait_for_load
            super().__init__(name, *args, **kwargs)

        def submit(self, job: Job) -> Job:
            if self.name == "kv-tier-load":
                last_load[:] = [job]
            return super().submit(job)

    patch.setattr(streams, "CopyThread", GatedThread)
    patch.setattr(Job, "hurry", lambda self: None)


FENCES = [name for name in StepPlan(1).__dict__ if "_after_" in name]


@pytest.mark.parametrize("pace", ["late", "random"])
@pytest.mark.parametrize("name", FENCES)
def test_missed_fence(name: str, pace: Pace, monkeypatch: pytest.MonkeyPatch) -> None:
    miss_fence(name)(monkeypatch)
    # Loads still read the slots of victims where there are few.
    few = {"num_slots": 6} if name == "store_after_loads" else {}
    _find(Violation, pace, Luck(True, True), monkeypatch, **few)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_on_any_load(monkeypatch)
    # Of the scripts before, none has such loads.
    _find(Stuck, "late", Luck(False, True, 5e-3), monkeypatch, first_seed=49)


def _find(
    kind: type[BaseException],
    pace: Pace,
    luck: Luck,
    patch: pytest.MonkeyPatch,
    first_seed: int = 0,
    **setup: int,
) -> None:
    for seed in range(first_seed, first_seed + MAX_SCRIPTS):
        cuda = FakeCuda(pace, seed)
        with patch.context() as inner:
            # Where a deadlock is wanted, nobody need wait for long to see one.
            cuda.install(inner, patience_s=1.0 if kind is Stuck else PATIENCE_S)
            found: BaseException | None = None
            try:
                _play(cuda, luck, seed, **{**BUSY, "spare_blocks": 0, **setup})
            except (Exception, Stuck) as error:
                # Tracebacks hold the streams.
                found = error.with_traceback(None)
                found.__context__ = found.__cause__ = None
            if isinstance(found, Stuck):
                # Whatever waits in their queues, nobody will end it.
                _STUCK.update(_copy_threads())
            _end_threads(cuda)
        if found is not None:
            assert isinstance(found, kind), found
            return
    pytest.fail(f"{MAX_SCRIPTS} scripts found nothing")
