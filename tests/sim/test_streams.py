# SPDX-License-Identifier: Apache-2.0
"""The real streams and threads under random scripts, on a device of no fixed order.

No thread of the host may wait for ever, no copy may come before what its fences ask
for, and every forward pass must read what it should.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch

from vllm.v1.kv_tier.memory.checksums import SlotChecksums
from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.releases import keys_are_bytes
from vllm.v1.kv_tier.worker.copies import Copies
from vllm.v1.kv_tier.worker.report import StepReportBuilder
from vllm.v1.kv_tier.worker.slots import RankSlots
from vllm.v1.kv_tier.worker.streams import CudaStreams

from . import upstream
from .fake_cuda import PACES, Event, FakeCuda, Pace, Stream
from .layouts import LAYOUTS
from .scheduler import Setup
from .scripts import random_script
from .stream_play import BUSY, device, play, random_plan, run_plans
from .stream_play import collect_fast as collect_fast
from .stream_play import no_logs as no_logs
from .stream_worker import Luck, StreamWorker

NUM_SCRIPTS = 10
NUM_PLAYS = 6
MAX_SCRIPTS = 1200

NEEDS_KEYS = pytest.mark.skipif(
    not keys_are_bytes(), reason="refused: hashes are numbers of a process"
)


LUCKS = [
    Luck(layerwise, launches_long)
    for layerwise in (False, True)
    for launches_long in (False, True)
]


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("luck", LUCKS, ids=str)
def test_scripts(luck: Luck, pace: Pace, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(NUM_SCRIPTS):
        with device(pace, seed, monkeypatch) as cuda:
            play(cuda, luck, seed, **(BUSY if seed % 2 else {}))


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("luck", LUCKS, ids=str)
def test_random_plans(luck: Luck, pace: Pace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fences that a scheduler may ask for, far more of them than one does."""
    for seed in range(NUM_PLAYS):
        with device(pace, seed, monkeypatch) as cuda:
            run_plans(cuda, luck, seed)


@pytest.mark.parametrize("luck", LUCKS, ids=str)
def test_nothing_is_left_to_copy_when_the_engine_sleeps(
    luck: Luck, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_left = 0
    for seed in range(NUM_PLAYS):
        with device("late", seed, monkeypatch) as cuda:
            rng = Random(seed)
            setup = Setup(LAYOUTS[0], spare_blocks=10, num_slots=20)
            worker = StreamWorker(setup, {}, cuda, luck, rng)
            for seq in range(1, 10):
                output = upstream.empty_step()
                output.kv_tier_plan = random_plan(rng, seq, setup)
                worker.submit(output, 0, False, None)
            num_left += worker.finish()
            assert not any(worker.pending.values())
            worker.settled()
            # Its threads go when it does.
            del worker
    assert num_left > 0


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("layerwise", [False, True])
def test_no_good_slot_is_refused(
    layerwise: bool, pace: Pace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the checksums are taken that stores in flight leave."""
    refused, checked = _checks(monkeypatch)
    for seed in range(NUM_SCRIPTS):
        with device(pace, seed, monkeypatch) as cuda:
            luck = Luck(layerwise, launches_long=True, verify=True)
            play(cuda, luck, seed, has_faults=False, **(BUSY if seed % 2 else {}))
    assert checked and not refused


def test_a_checksum_taken_too_early_refuses_good_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test above could fail."""
    refused, _ = _checks(monkeypatch)
    monkeypatch.setattr(SlotChecksums, "_end_of_copies", lambda self: lambda: None)
    for seed in range(MAX_SCRIPTS):
        with device("late", seed, monkeypatch) as cuda:
            play(cuda, Luck(False, True, verify=True), seed, has_faults=False, **BUSY)
        if refused:
            return
    pytest.fail(f"{MAX_SCRIPTS} scripts found nothing")


def with_below(seed: int) -> dict[str, Any]:
    """Settings with which much comes back from a tier below."""
    tuning = random_script(Random(seed)).setup.tuning
    tuning = replace(tuning, fetch_part=1.0, assumed_prefill_s=1e3)
    slots = {"num_slots": 8, "store_from_use": 1}
    return {"below": (seed, 2), "tuning": tuning, "is_async": True} | slots


@NEEDS_KEYS
@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("verify", [False, True])
def test_no_good_slot_is_refused_wherever_it_was_filled_from(
    verify: bool, pace: Pace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be read from below leaves slots that are filled again."""
    refused, checked = _checks(monkeypatch)
    num_got = 0
    for seed in range(NUM_SCRIPTS):
        with device(pace, seed, monkeypatch) as cuda:
            luck = Luck(layerwise=bool(seed % 2), launches_long=True, verify=verify)
            num_got += play(cuda, luck, seed, has_faults=False, **with_below(seed))
    assert checked and num_got and not refused


@NEEDS_KEYS
def test_a_fetched_slot_without_a_checksum_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test above could fail: only stores take checksums here."""
    refused, _ = _checks(monkeypatch)
    monkeypatch.setattr(
        SlotChecksums, "compute", lambda self, slots: self.forget(slots)
    )
    for seed in range(MAX_SCRIPTS):
        with device("late", seed, monkeypatch) as cuda:
            luck = Luck(layerwise=False, launches_long=True, verify=True)
            play(cuda, luck, seed, has_faults=False, **with_below(seed))
        if refused:
            return
    pytest.fail(f"{MAX_SCRIPTS} scripts found nothing")


def _checks(patch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """Plans whose loads will have been refused, and slots that were checked."""
    refused: list[int] = []
    checked: list[int] = []
    load_failed, check = StepReportBuilder.record_load_failure, RankSlots.check

    def note_refused(self: StepReportBuilder, kind: str, seq: int) -> None:
        refused.append(seq)
        load_failed(self, kind, seq)

    def note_checked(self: RankSlots, slots: list[int]) -> None:
        checked.extend(slots)
        check(self, slots)

    patch.setattr(StepReportBuilder, "record_load_failure", note_refused)
    patch.setattr(RankSlots, "check", note_checked)
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
    with device("late", 0, monkeypatch) as cuda:
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
