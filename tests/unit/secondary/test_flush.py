# SPDX-License-Identifier: Apache-2.0
"""What an engine writes below before it ends: what it chooses, and for how long."""

import json
from pathlib import Path
from types import SimpleNamespace as Bag
from typing import Any

import pytest

from vllm.v1.kv_tier.config import flush_time_s
from vllm.v1.kv_tier.eviction.policies import POLICIES, make_policy
from vllm.v1.kv_tier.plan import SecondaryJob, StepReport
from vllm.v1.kv_tier.releases import keys_are_bytes
from vllm.v1.kv_tier.scheduler.slots import SlotTable
from vllm.v1.kv_tier.start import flush_kv_tier

from ...settings import with_debug
from ..secondary_pool import SETTLED, Below, key
from ..test_config import LLAMA, engine_config

pytestmark = pytest.mark.skipif(
    not keys_are_bytes(), reason="refused: hashes are numbers of a process"
)


class Executor:
    """Takes note of what the ranks are asked for."""

    def __init__(self, *answers: int | None) -> None:
        self.jobs: list[SecondaryJob] = []
        self.timeout = 0.0
        self.report: StepReport | None = None
        self._answers = answers

    def collective_rpc(self, method: Any, timeout: float, args: Any = ()) -> Any:
        if method.__name__ == "_last_report":
            return [self.report]
        if not self._answers:
            raise TimeoutError("planned")
        self.timeout = timeout
        self.jobs = [job for _, jobs in args[0] for job in jobs]
        return list(self._answers)


def flush(
    below: Below, *answers: int | None, report: StepReport | None = None
) -> Executor:
    executor = Executor(*answers)
    executor.report = report
    flush_kv_tier(Bag(kv_cache_manager=Bag(kv_tier=below.pool)), executor)
    return executor


def flushed(below: Below) -> list[bytes]:
    return [each for job in flush(below, 0).jobs for each in job.keys]


def test_what_was_used_most_comes_first_and_what_is_below_not_at_all() -> None:
    below = Below(num_slots=16, store_from_use=3)
    below.tier.demoted("abcd")
    below.hit("c")
    below.plans()
    (job,) = below.jobs([below.hit("b"), below.hit("b"), *below.plans()])
    below.end(job)
    assert job.keys == [key("b")]
    keys = flushed(below)
    assert keys[0] == key("c") and set(keys) == {key(name) for name in "acd"}


def test_what_may_turn_out_to_be_void_is_not_written() -> None:
    below = Below(store_from_use=9)
    below.tier.demoted("ab")
    assert not flushed(below)
    below = Below(store_from_use=9)
    below.tier.demoted("ab")
    below.plans(SETTLED)
    assert set(flushed(below)) == {key("a"), key("b")}


def just_stored(names: str) -> Below:
    """Nothing is settled, but ranks have told of each step."""
    below = Below(store_from_use=9)
    below.tier.demoted(names)
    assert below.backing is not None
    while below.backing._num_outputs < below.backing._seq:
        below.backing.record_output()
    return below


def test_once_all_ranks_have_told_nothing_need_settle() -> None:
    assert set(flushed(just_stored("ab"))) == {key("a"), key("b")}


def test_what_fails_after_the_last_step_is_not_written() -> None:
    below = just_stored("ab")
    slot = below.pool.host.get(key("a"))
    assert slot is not None
    failed = StepReport(failed_store_slots={slot.index: slot.store_seq})
    jobs = flush(below, 0, report=failed).jobs
    assert [each for job in jobs for each in job.keys] == [key("b")]
    below = just_stored("ab")
    assert not flush(below, 0, report=StepReport(failed_load_seq=1)).jobs


def test_it_is_done_once() -> None:
    below = just_stored("ab")
    assert flush(below, 0).jobs
    assert not flush(below, 0).jobs


def test_of_several_tiers_each_gets_what_it_lacks() -> None:
    below = Below(num_tiers=2, store_from_use=9)
    below.tier.demoted("ab")
    below.plans()
    assert below.backing is not None
    below.backing.tiers[1].presence.mark_present(key("a"))
    written = [(job.tier, set(job.keys)) for job in flush(below, 0).jobs]
    assert written == [(0, {key("a"), key("b")}), (1, {key("b")})]


def test_much_goes_in_several_jobs() -> None:
    below = Below(store_from_use=9, max_job=1)
    below.tier.demoted("abc")
    below.plans()
    jobs = flush(below, 0).jobs
    assert [len(job.slots) for job in jobs] == [1, 1, 1]
    assert all(job.after_stores for job in jobs)


@pytest.mark.parametrize("policy", POLICIES)
def test_all_slots_are_there_once_and_those_released_come_last(policy: str) -> None:
    table = SlotTable(8, make_policy(policy, 8))
    for i in range(7):
        assert table.insert((i,), None, 1) is not None  # type: ignore[arg-type]
        table.unpin_all()
    table.pin([table.get(3)])  # type: ignore[arg-type, list-item]
    table.unpin_all()
    table.release(table.get(6))  # type: ignore[arg-type]
    keys = [slot.keys[0] for slot in table.by_value()]
    assert sorted(keys) == list(range(7)) and keys[-1] == 6  # type: ignore[type-var, comparison-overlap]


def test_what_was_used_last_makes_room_last() -> None:
    table = SlotTable(4, make_policy("lru", 4))
    for i in range(4):
        table.insert((i,), None, 1)  # type: ignore[arg-type]
        table.unpin_all()
    table.pin([table.get(0)])  # type: ignore[arg-type, list-item]
    table.unpin_all()
    assert [slot.keys[0] for slot in table.by_value()] == [0, 3, 2, 1]


def test_nothing_after_a_reset_without_time_or_without_a_tier_below() -> None:
    below = Below(store_from_use=9, flush_s=0)
    below.tier.demoted("ab")
    below.plans()
    assert not flush(below, 0).jobs
    below = Below(store_from_use=9)
    below.tier.demoted("ab")
    below.plans()
    assert below.pool.reset_prefix_cache()
    below.tier.demoted("cd")
    below.plans()
    assert not flush(below, 0).jobs
    for scheduler in (None, Bag(kv_cache_manager=Bag(kv_tier=None))):
        flush_kv_tier(scheduler, None)


def test_an_engine_that_failed_writes_nothing() -> None:
    below = just_stored("ab")
    try:
        raise RuntimeError("of a step")
    except RuntimeError:
        assert not flush(below, 0).jobs
    # Nor later, when the process ends.
    assert not flush(below, 0).jobs
    below = just_stored("ab")
    try:
        raise SystemExit
    except SystemExit:
        executor = flush(below, None, 2)
    assert executor.jobs and executor.timeout > 3


def test_ranks_that_do_not_answer_hold_up_nothing() -> None:
    assert not flush(just_stored("ab")).jobs
    # Nor one whose answer is of something else.
    assert flush(just_stored("ab"), "stale").jobs  # type: ignore[arg-type]
    below = just_stored("ab")
    flush(below, 0, report="stale")  # type: ignore[arg-type]


def test_an_engine_has_time_to_end_only_with_a_tier_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V1", "1")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))

    def time_s(*flush_s: float, **settings: object) -> float:
        directory = {"type": "fs", "root_dir": "/mnt/kv", "max_gib": 1}
        tiers = [with_debug(directory, flush_s=seconds) for seconds in flush_s]
        options = {"secondary_tiers": tiers} if tiers else {}
        return flush_time_s(
            engine_config(str(tmp_path), kv_offloading_config=options, **settings)
        )

    assert time_s() == time_s(0) == 0
    assert 14 < time_s(2, 7) < 22
