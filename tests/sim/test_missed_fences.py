# SPDX-License-Identifier: Apache-2.0
"""What is planted in the streams is found: each fence missing, and a deadlock."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import pytest

from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.worker import streams
from vllm.v1.kv_tier.worker.copies import Copies
from vllm.v1.kv_tier.worker.streams import CopyThread, CudaStreams, Job

from .content import Violation
from .fake_cuda import PATIENCE_S, FakeCuda, Pace, Stuck
from .stream_play import BUSY, STUCK, copy_threads, end_threads, play, run_plans
from .stream_play import collect_fast as collect_fast
from .stream_play import no_logs as no_logs
from .stream_worker import Luck

MAX_SCRIPTS = 1200


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


RARE = {"load_after_loads", "clean_after_loads"}
"""One of some hundred scripts needs them: others nearly always order the same copies.
Random plans need them at once."""


@pytest.mark.parametrize("name", FENCES)
def test_missed_fence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    miss_fence(name)(monkeypatch)
    # Loads still read the slots of victims where there are few.
    few = {"num_slots": 6} if name == "store_after_loads" else {}
    run: Play = run_plans if name in RARE else _busy(**few)
    _find(Violation, "random", lambda seed: (_luck(seed), run), monkeypatch)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_on_any_load(monkeypatch)
    luck = Luck(False, True, 5e-3)
    _find(Stuck, "late", lambda _: (luck, run_plans), monkeypatch)


class Play(Protocol):
    """A run of the real streams."""

    def __call__(self, cuda: FakeCuda, luck: Luck, seed: int) -> object: ...


def _luck(seed: int) -> Luck:
    """All four ways in turns."""
    return Luck(layerwise=bool(seed & 1), launches_long=bool(seed & 2))


def _busy(**setup: int) -> Play:
    return partial(play, **{**BUSY, "spare_blocks": 0, **setup})


def _find(
    kind: type[BaseException],
    pace: Pace,
    how: Callable[[int], tuple[Luck, Play]],
    patch: pytest.MonkeyPatch,
    first_seed: int = 0,
) -> None:
    for seed in range(first_seed, first_seed + MAX_SCRIPTS):
        luck, run = how(seed)
        cuda = FakeCuda(pace, seed)
        with patch.context() as inner:
            # Where a deadlock is wanted, nobody need wait for long to see one.
            cuda.install(inner, patience_s=1.0 if kind is Stuck else PATIENCE_S)
            found: BaseException | None = None
            try:
                run(cuda, luck, seed)
            except (Exception, Stuck) as error:
                # Tracebacks hold the streams.
                found = error.with_traceback(None)
                found.__context__ = found.__cause__ = None
            if isinstance(found, Stuck):
                # Each gives up in its turn, while their exceptions are still ignored.
                end = time.monotonic() + 2.0
                for thread in copy_threads():
                    thread.join(max(0.0, end - time.monotonic()))
                # Whatever waits in their queues, nobody will end it.
                STUCK.update(copy_threads())
            end_threads(cuda)
        if found is not None:
            assert isinstance(found, kind), found
            return
    pytest.fail(f"{MAX_SCRIPTS} scripts found nothing")
