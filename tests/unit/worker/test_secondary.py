# SPDX-License-Identifier: Apache-2.0
"""A rank's part of the tier below: jobs, with real files, and what it tells of them."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from vllm.v1.kv_tier.plan import SecondaryJob, SecondaryResult, StepPlan, merge_reports
from vllm.v1.kv_tier.stores.base import BlockStore
from vllm.v1.kv_tier.tuning import RankTuning
from vllm.v1.kv_tier.worker.report import StepReportBuilder
from vllm.v1.kv_tier.worker.secondary import SecondaryIO
from vllm.v1.kv_tier.worker.slots import RankSlots
from vllm.v1.outputs import ModelRunnerOutput

from ...settings import store_config
from ...sim.upstream import model_runner_output

SLOT_BYTES = 4096


def put(
    number: int, slots: Sequence[int], after: tuple[int, int] = (0, 0)
) -> SecondaryJob:
    return SecondaryJob(number, True, keys(slots), list(slots), 0, *after)


def get(number: int, names: Sequence[int], slots: Sequence[int]) -> SecondaryJob:
    return SecondaryJob(number, False, keys(names), list(slots), 0, 0, 0)


def keys(names: Sequence[int]) -> list[bytes]:
    return [f"key {name}".encode() for name in names]


class Rank:
    """Slots with random bytes, a store and a report."""

    def __init__(self, store: BlockStore, **tuning: float) -> None:
        self.slots = torch.randint(0, 256, (8, SLOT_BYTES), dtype=torch.uint8)
        self.holds = RankSlots(len(self.slots))
        self.holds.mark_stored(range(len(self.slots)))
        self.report = StepReportBuilder()
        self.io = SecondaryIO(
            [store],
            self.slots,
            self.holds,
            self.report,
            RankTuning(**tuning),  # type: ignore[arg-type]
        )
        self._seq = 0

    def step(
        self,
        *jobs: SecondaryJob,
        have_ended: Callable[[int, int], bool] = lambda stores, loads: True,
        awaits: int = 0,
    ) -> None:
        self._seq += 1
        plan = StepPlan(self._seq, secondary=list(jobs), awaits_secondary=awaits)
        self.io.begin_step(plan, have_ended)

    def told(self, num_jobs: int = 1) -> list[SecondaryResult]:
        """What reports say, once they have told of so many jobs."""
        results: list[SecondaryResult] = []
        limit = time.monotonic() + 10
        while len(results) < num_jobs:
            assert time.monotonic() < limit, "nobody tells"
            output: ModelRunnerOutput = self.report.attach(
                model_runner_output([]), is_last_stage=True
            )
            if output.kv_tier_report is not None:
                results += output.kv_tier_report.secondary
            time.sleep(0.001)
        return results


@pytest.fixture
def store(tmp_path: Path) -> BlockStore:
    entry = {"type": "fs", "root_dir": str(tmp_path / "kv"), "max_gib": 0.01}
    config = store_config(entry)
    config.check()
    return config.open("ab", 0, SLOT_BYTES)


def test_what_was_put_comes_back_into_other_slots(store: BlockStore) -> None:
    rank = Rank(store)
    rank.step(put(1, [0, 1]))
    (result,) = rank.told()
    assert (result.number, result.done) == (1, [True, True])
    right = rank.slots[:2].clone()
    rank.step(get(2, [1, 5, 0], [6, 3, 7]))
    (result,) = rank.told()
    assert result.done == [True, False, True]
    assert torch.equal(rank.slots[[7, 6]], right)


def test_a_job_waits_for_its_fences_and_not_for_those_of_others(
    store: BlockStore,
) -> None:
    rank = Rank(store)
    ended = {"stores": 4, "loads": 2}

    def have_ended(stores: int, loads: int) -> bool:
        return stores <= ended["stores"] and loads <= ended["loads"]

    rank.step(put(1, [0], (5, 0)), put(2, [1], (4, 0)), have_ended=have_ended)
    assert [result.number for result in rank.told()] == [2]
    rank.step(put(3, [2], (0, 3)), have_ended=have_ended)
    time.sleep(0.05)
    assert rank.report.is_empty
    ended |= {"stores": 5}
    rank.step(have_ended=have_ended)
    assert [result.number for result in rank.told()] == [1]
    ended |= {"loads": 3}
    rank.step(have_ended=have_ended)
    assert [result.number for result in rank.told()] == [3]


def test_a_slot_that_was_never_filled_is_not_kept_for_others(
    store: BlockStore,
) -> None:
    rank = Rank(store)
    rank.holds.mark_bad([1])
    rank.step(put(1, [0, 1]))
    assert rank.told()[0].done == [True, False]
    assert store.exists(keys([0, 1])) == [True, False]
    # What is read into has nothing yet.
    rank.step(get(2, [0], [1]))
    assert rank.told()[0].done == [True]
    rank.step(put(3, [1]))
    assert rank.told()[0].done == [True]


class Stub(BlockStore):
    """A store that waits for the test, or fails."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.goes_on = threading.Event()
        self.leave_way: Callable[[], None]

    def give_way(self, wait: Callable[[], None]) -> None:
        self.leave_way = wait

    def put(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        self.goes_on.wait()
        if self.fails:
            raise RuntimeError("planned")
        return [True] * len(keys)

    get = put

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys)

    def delete(self, keys: Sequence[bytes]) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def stub() -> Iterator[Stub]:
    stub = Stub()
    yield stub
    stub.goes_on.set()


def test_a_store_that_fails_is_told_as_such(stub: Stub) -> None:
    stub.fails = True
    stub.goes_on.set()
    rank = Rank(stub)
    rank.step(put(1, [0, 1]), get(2, [3], [3]))
    assert {r.number: r.done for r in rank.told(2)} == {1: [False, False], 2: [False]}


def test_writing_leaves_the_way_to_what_requests_wait_for(
    stub: Stub, store: BlockStore
) -> None:
    stub.put = store.put  # type: ignore[method-assign]
    rank = Rank(stub, max_put_delay_s=60.0)
    rank.step(get(1, [3], [3]), get(2, [4], [4]))
    rank.step(put(3, [0]))
    time.sleep(0.05)
    assert rank.report.is_empty
    stub.goes_on.set()
    assert [result.number for result in rank.told(3)] == [1, 2, 3]


def test_writing_stops_between_objects_when_something_is_read(
    stub: Stub, store: BlockStore
) -> None:
    rank = Rank(stub, max_put_delay_s=60.0, after_read_s=0.2)
    begun = time.monotonic()
    stub.leave_way()
    assert time.monotonic() - begun < 0.2
    rank.step(get(1, [3], [3]))
    writer = threading.Thread(target=stub.leave_way)
    writer.start()
    writer.join(0.05)
    assert writer.is_alive()
    stub.goes_on.set()
    rank.told()
    told = time.monotonic()
    writer.join()
    # What was read is loaded, and a step is launched with it.
    assert 0.15 < time.monotonic() - told < 30


def test_writing_leaves_the_way_to_questions(stub: Stub) -> None:
    rank = Rank(stub, max_put_delay_s=60.0, after_read_s=0.2)
    asked = time.monotonic()
    rank.io.begin_step(StepPlan(1, asks_secondary=True), lambda *_: True)
    stub.leave_way()
    assert 0.2 <= time.monotonic() - asked < 30


def test_writing_leaves_the_way_to_launches_but_not_for_long(stub: Stub) -> None:
    rank = Rank(stub, put_gate_s=0.5)
    for is_launching in (True, False):
        rank.io.set_launching(is_launching)
        begun = time.monotonic()
        stub.leave_way()
        assert (time.monotonic() - begun >= 0.5) is is_launching


def test_reads_one_after_the_other_do_not_hold_up_writing_for_ever(stub: Stub) -> None:
    stub.goes_on.set()
    rank = Rank(stub, max_put_delay_s=0.3, after_read_s=5.0)
    begun = time.monotonic()
    for number in range(1, 9):
        rank.step(get(number, [3], [3]))
        rank.told()
        time.sleep(0.05)
    assert time.monotonic() - begun > 0.35
    begun = time.monotonic()
    stub.leave_way()
    assert time.monotonic() - begun < 2


def test_a_read_that_hangs_does_not_hold_up_writing_for_ever(
    stub: Stub, store: BlockStore
) -> None:
    stub.put = store.put  # type: ignore[method-assign]
    rank = Rank(stub, max_put_delay_s=0.01)
    rank.step(get(1, [3], [3]))
    rank.step(put(2, [0]))
    assert [result.number for result in rank.told()] == [2]


def test_what_a_request_waits_for_does_not_queue_behind_writing(
    stub: Stub, store: BlockStore
) -> None:
    stub.get = store.get  # type: ignore[method-assign]
    rank = Rank(stub)
    rank.step(put(1, [0]), get(2, [3], [3]))
    assert [result.number for result in rank.told()] == [2]


def test_only_a_step_that_runs_nothing_waits_and_not_for_long(stub: Stub) -> None:
    rank = Rank(stub, idle_wait_s=0.2)
    begun = time.monotonic()
    rank.step(put(1, [0]))
    assert time.monotonic() - begun < 0.1
    rank.step(awaits=1)
    assert 0.2 <= time.monotonic() - begun < 5
    begun = time.monotonic()
    threading.Timer(0.02, stub.goes_on.set).start()
    rank = Rank(stub, idle_wait_s=60)
    rank.step(put(1, [0]), awaits=1)
    assert time.monotonic() - begun < 10


def test_a_step_waits_longer_while_something_is_read(stub: Stub) -> None:
    rank = Rank(stub, idle_wait_s=0.0, idle_read_s=0.2)
    begun = time.monotonic()
    rank.step(put(1, [0]), awaits=1)
    assert time.monotonic() - begun < 0.1
    rank.step(get(2, [3], [3]), awaits=2)
    assert 0.2 <= time.monotonic() - begun < 5


@pytest.mark.parametrize("awaits", [1, 2, 3])
def test_a_step_waits_until_so_many_jobs_have_ended(stub: Stub, awaits: int) -> None:
    rank = Rank(stub, idle_wait_s=0.3 if awaits == 3 else 60)
    stub.goes_on.set()
    rank.step(put(1, [0]))
    rank.told()
    begun = time.monotonic()
    rank.step(put(2, [1]), awaits=awaits)
    assert (time.monotonic() - begun >= 0.3) == (awaits == 3)
    assert time.monotonic() - begun < 10
    if awaits > 1:
        # It is told of with the output of this step.
        assert [result.number for result in rank.report.take_secondary()] == [2]


def test_results_of_all_ranks_reach_the_scheduler() -> None:
    drafts = [StepReportBuilder(), StepReportBuilder()]
    for draft, done in zip(drafts, (True, False)):
        draft.record_job(SecondaryResult(7, [done], 0.1))
    reports = [
        draft.attach(model_runner_output([]), is_last_stage=True).kv_tier_report
        for draft in drafts
    ]
    merged = merge_reports(reports)
    assert merged is not None
    assert [result.done for result in merged.secondary] == [[True], [False]]


def test_what_a_store_evicted_is_told_once(store: BlockStore) -> None:
    rank, counts = Rank(store), iter([700, 0])
    store.take_evicted_bytes = lambda: next(counts)  # type: ignore[method-assign]
    rank.step(put(1, [0]))
    first = rank.told()
    rank.step(put(2, [0]))
    assert [r.evicted_bytes for r in first + rank.told()] == [700, 0]


@pytest.mark.parametrize("error", [ValueError, SystemExit, GeneratorExit])
@pytest.mark.parametrize("method", ["put", "take_evicted_bytes"])
def test_no_exception_of_a_store_ends_the_thread(
    store: BlockStore, method: str, error: type[BaseException]
) -> None:
    rank, right = Rank(store), getattr(store, method)

    def fail(*args: object) -> None:
        raise error

    setattr(store, method, fail)
    rank.step(put(1, [0]))
    told = rank.told()
    assert [(r.number, r.evicted_bytes) for r in told] == [(1, 0)]
    setattr(store, method, right)
    rank.step(put(2, [1]))
    assert [r.done for r in rank.told()] == [[True]]


@pytest.mark.parametrize("wrong", [[True], [True] * 3, None, iter([True])])
def test_an_answer_of_another_length_is_no_answer(
    store: BlockStore, wrong: object
) -> None:
    rank = Rank(store)
    store.put = lambda keys, rows: wrong  # type: ignore[method-assign,assignment,return-value]
    store.take_evicted_bytes = lambda: None  # type: ignore[method-assign,assignment,return-value]
    rank.step(put(1, [0, 1]))
    assert [(r.done, r.evicted_bytes) for r in rank.told()] == [([False, False], 0)]


def flush(
    rank: Rank, *jobs: SecondaryJob, seconds: float = 10, **more: Callable
) -> int:
    fences: dict[str, Callable] = {
        "have_ended": lambda stores, loads: True,
    }
    return rank.io.flush([(seconds, jobs)], **fences | more)


def test_a_rank_that_ends_writes_what_is_right(store: BlockStore) -> None:
    rank = Rank(store)
    rank.holds.mark_bad([1])
    jobs = put(1, [0, 1]), put(2, [2], after=(7, 0)), put(3, [3])
    written = flush(
        rank,
        *jobs,
        have_ended=lambda stores, loads: stores < 7,
    )
    assert written == 2
    assert store.exists(keys(range(4))) == [True, False, False, True]
    # What is there already counts as well, and no report tells of it.
    assert flush(rank, put(4, [0])) == 1
    assert rank.report.is_empty


def test_a_store_that_hangs_does_not_hold_up_the_end(stub: Stub) -> None:
    rank = Rank(stub)
    begun = time.monotonic()
    assert flush(rank, put(1, [0]), put(2, [1]), seconds=0.2) == 0
    assert 0.2 <= time.monotonic() - begun < 5
    # What it has not begun by then, it does not begin later.
    calls = []
    stub.put = lambda keys, rows: calls.append(keys) or [True] * len(keys)  # type: ignore[method-assign, func-returns-value]
    stub.goes_on.set()
    assert flush(rank, put(3, [2])) == 1
    assert calls == [keys([2])]
