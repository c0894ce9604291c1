# SPDX-License-Identifier: Apache-2.0
"""The wrappers of a timeline, around the real methods of vLLM and the tier."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.suite import hooks
from bench.suite.hooks import Hooks
from bench.suite.recorder import Event, Recorder, read_events
from tests.unit.prefetching import admit, defer, make_tier
from tests.unit.rank import Rank
from tests.unit.tier import Asking
from vllm.v1.kv_tier.plan import CopyTime, StepReport

WRAPPED = {
    "vllm.v1.core.sched.scheduler.Scheduler": ("schedule", "update_from_output"),
    "vllm.v1.executor.multiproc_executor.MultiprocExecutor": ("execute_model",),
    "vllm.v1.executor.uniproc_executor.UniProcExecutor": ("execute_model",),
    "vllm.v1.worker.worker_base.WorkerWrapperBase": ("execute_model",),
    "vllm.v1.kv_tier.worker.copies.Copier": ("store", "clean", "load", "load_ahead"),
    "vllm.v1.kv_tier.scheduler.block_pool.TieredBlockPool": (
        *("take_plan", "apply_report"),
    ),
    "vllm.v1.kv_tier.scheduler.load_admission.LoadAdmission": (
        *("decide", "begin_wait", "end_wait"),
    ),
    "vllm.v1.kv_tier.worker.host_tier.HostTier": ("begin_step",),
}


class Recorded:
    """What the wrappers have recorded so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.recorder = Recorder(folder, every_s=60)

    def __call__(self, *names: str) -> list[Event]:
        self.recorder.write()
        return [e for e in read_events(self._folder) if e.name in names]


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Wrappers that are gone after the test."""
    found = Recorded(tmp_path)
    for path, methods in WRAPPED.items():
        for name in methods:
            # To be put back.
            monkeypatch.setattr(f"{path}.{name}", _now(path, name))
    Hooks(found.recorder, device_times=False).install()
    return found


def _now(path: str, name: str) -> Any:
    module, _, owner = path.rpartition(".")
    return getattr(import_module(module), owner).__dict__[name]


def test_every_method_is_wrapped(recorded: Recorded) -> None:
    for path, methods in WRAPPED.items():
        for name in methods:
            assert _now(path, name).__qualname__.startswith("wrap."), (path, name)


def test_a_plan_a_report_and_a_wait_are_seen(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Asking, "request_id", "asking", raising=False)
    tier = make_tier(8)
    tier.demoted("abc")
    deferred = defer(tier, "abc")
    tier.now += 10
    times = {("load_ahead", deferred.seq): CopyTime(3, 3.0)}
    tier.pool.apply_report(StepReport(times=times))
    admit(tier, "abc")
    plans = {e.args["seq"]: e for e in recorded("plan")}
    assert plans[deferred.seq].args["ahead"] == 3
    assert sum(e.args["store"] + e.args["clean"] for e in plans.values()) >= 3
    (report,) = recorded("report")
    assert report.args["times"] == [["load_ahead", deferred.seq, 3, 3.0]]
    wait, admitted = recorded("wait", "admitted")
    assert (wait.name, admitted.name) == ("wait", "admitted")
    assert wait.args["plan"] == deferred.seq and wait.args["blocks"] == 3


def test_a_request_without_room_is_seen(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Asking, "request_id", "asking", raising=False)
    tier = make_tier(4)
    tier.demoted("abc")
    tier.pool.get_new_blocks(2)
    tier.begin()
    assert tier.try_promote(tier.find("abc"), among_others=True) is None
    (seen,) = recorded("no room")
    assert seen.args == {"request": "asking", "lacks": 3}


def test_copies_of_a_rank_are_seen_and_done(recorded: Recorded) -> None:
    rank = Rank()
    before = rank.block(1)
    rank.run(1, store_blocks=[1, 2], store_slots=[0, 1])
    rank.caches[0][:, 1] = 0
    rank.run(2, load_slots=[0], load_blocks=[1], load_after_stores=1)
    assert all((a == b).all() for a, b in zip(before, rank.block(1)))
    store, load = recorded("store", "clean", "load", "load_ahead")
    assert (store.name, store.args["seq"], store.args["blocks"]) == ("store", 1, 2)
    assert (load.name, load.args["seq"], load.args["blocks"]) == ("load", 2, 1)
    assert store.track == "rank 0 copies" and len(recorded("begin_step")) == 2


def test_a_forward_pass_is_of_its_rank(recorded: Recorded) -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    worker: Any = WorkerWrapperBase(rpc_rank=0, global_rank=3)
    worker.worker = SimpleNamespace(execute_model=lambda output: "result")
    worker.mm_receiver_cache = None
    made = SimpleNamespace(scheduled_new_reqs=[], **{hooks.STEP: [5, 6]})
    assert worker.execute_model(made) == "result"
    (forward,) = recorded("forward")
    assert forward.track == "rank 3" and forward.args["step"] == [5, 6]


class FakeEvent:
    """A CUDA event that comes when it is told to."""

    def __init__(self, at_ms: float, come: bool = True) -> None:
        self.at_ms = at_ms
        self.come = come

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return self.come

    def elapsed_time(self, other: "FakeEvent") -> float:
        return other.at_ms - self.at_ms


def test_times_of_the_device_are_told_once_they_have_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, every_s=60)
    device = hooks.DeviceTimes(recorder)
    monkeypatch.setattr(device, "mark", lambda: FakeEvent(100.0))
    monkeypatch.setattr(hooks, "now", lambda: 50.0)
    late = FakeEvent(108.0, come=False)
    device.add("rank 0", "forward", FakeEvent(104.0), late, step=[1, 2])
    device.add("rank 0", "fences", FakeEvent(101.0), FakeEvent(102.0), step=[1, 2])
    device.tell()
    recorder.write()
    (fences,) = read_events(tmp_path)
    assert (fences.name, fences.track) == ("fences", "rank 0, GPU")
    assert (fences.begin, fences.end) == (pytest.approx(50.001), pytest.approx(50.002))
    late.come = True
    device.tell()
    recorder.write()
    *_, forward = read_events(tmp_path)
    assert forward.name == "forward" and forward.seconds == pytest.approx(0.004)
    assert forward.args == {"step": [1, 2]}
