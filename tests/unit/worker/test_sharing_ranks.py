# SPDX-License-Identifier: Apache-2.0
"""Ranks that share host slots, each in a process of its own, with late copies, copies
that fail, and ranks that are killed."""

import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from vllm.v1.kv_tier.plan import StepReport

from ..sharing_ranks import NUM_BLOCKS, NUM_SLOTS, PATIENT_S, Remote, on_all, start

LATE_S = 1.0
"""How late copies are: more than a process ever is that has something to do."""

LIMIT_S = 1.0
"""How long ranks wait whose others were killed."""

Start = Callable[..., list[Remote]]


@pytest.fixture
def ranks() -> Iterator[Start]:
    """Starts ranks, which are gone after the test without anything left of them."""
    before = {*os.listdir("/dev/shm")}
    started: list[Remote] = []

    def begin(*args: Any, **kwargs: Any) -> list[Remote]:
        started.extend(found := start(*args, **kwargs))
        return found

    yield begin
    for rank in started:
        rank.kill()
    gc.collect()
    # Semaphores of other programs come and go.
    new = {*os.listdir("/dev/shm")} - before
    assert not {name for name in new if "kv" in name}


def stored(prefix: str, block: int, slot: int, after_loads: int = 0) -> dict[str, Any]:
    return {
        f"{prefix}_blocks": [block],
        f"{prefix}_slots": [slot],
        f"{prefix}_after_loads": after_loads,
    }


def loaded(prefix: str, slot: int, block: int, after_stores: int) -> dict[str, Any]:
    return {
        f"{prefix}_slots": [slot],
        f"{prefix}_blocks": [block],
        "load_after_stores": after_stores,
    }


STORES = pytest.mark.parametrize("store", ["store", "clean"])
LOADS = pytest.mark.parametrize("load", ["load", "ahead"])


def test_one_stores_and_all_load(ranks: Start) -> None:
    owner, *others = all_ = ranks(3)
    for other in others:
        # Not to be seen by anybody.
        other.ask("fill", 1, 99)
    on_all(all_, "run", 1, **stored("store", block=1, slot=0))
    assert on_all(all_, "slot", 0) == [{2}] * 3
    on_all(all_, "run", 2, **loaded("load", slot=0, block=5, after_stores=1))
    assert on_all(all_, "values", 5) == [{2}] * 3


@STORES
@LOADS
@pytest.mark.parametrize("has_fences", [True, False])
def test_a_load_waits_for_the_store_of_another_rank(
    ranks: Start, store: str, load: str, has_fences: bool
) -> None:
    """Without the fence it reads what was in the slot before."""
    owner, other = ranks()
    on_all([owner, other], "run", 1, **stored("store", block=3, slot=0))
    if not has_fences:
        other.ask("without_fences")
    owner.ask("delay", "stores", LATE_S)
    plans = [
        (2, stored(store, block=1, slot=0)),
        (3, loaded(load, slot=0, block=5, after_stores=2)),
    ]
    reports = []
    # Who waits for nothing is at its end before the owner begins.
    for together in ([owner, other],) if has_fences else ([other], [owner]):
        for rank in together:
            for seq, plan in plans:
                rank.begin("run", seq, **plan)
        reports += [rank.end()[0] for rank in together for _ in plans]
    assert reports == [None] * 4
    assert owner.ask("values", 5) == {2}
    assert other.ask("values", 5) == ({2} if has_fences else {4})


@STORES
@LOADS
@pytest.mark.parametrize("has_fences", [True, False])
def test_a_store_waits_for_the_loads_of_other_ranks(
    ranks: Start, store: str, load: str, has_fences: bool
) -> None:
    """Without the fence they read what comes into the slot next, or are refused when
    they come so late that its owner has begun to fill it."""
    owner, other = ranks()
    on_all([owner, other], "run", 1, **stored("store", block=1, slot=0))
    if not has_fences:
        owner.ask("without_fences")
    other.ask("delay", "loads", LATE_S)
    plans = [
        (2, loaded(load, slot=0, block=5, after_stores=1)),
        (3, stored(store, block=2, slot=0, after_loads=2)),
    ]
    for rank in (owner, other):
        for seq, plan in plans:
            rank.begin("run", seq, **plan)
    found = [[rank.end() for _ in plans] for rank in (owner, other)]
    failed = [report for of_rank in found for report, _ in of_rank if report]
    assert on_all([owner, other], "slot", 0) == [{3}] * 2
    if has_fences:
        assert not failed
        assert on_all([owner, other], "values", 5) == [{2}] * 2
    else:
        assert other.ask("values", 5) == ({6} if failed else {3})


def test_a_load_of_what_the_same_plan_stores(ranks: Start) -> None:
    owner, other = ranks()
    owner.ask("delay", "stores", LATE_S)
    plan = stored("store", 1, 0) | loaded("load", slot=0, block=5, after_stores=1)
    assert [r for r, _ in on_all([owner, other], "run", 1, **plan)] == [None] * 2
    assert on_all([owner, other], "values", 5) == [{2}] * 2


class Script:
    """Random plans, with the fences that the scheduler would give them, and what their
    loads must find."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        # By slot: what it holds and since which plan, and who read it last.
        self._held: dict[int, tuple[int, int]] = {}
        self._last_load = [0] * NUM_SLOTS
        self.expected: list[set[int]] = []

    def step(self, seq: int) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
        """What to ask of a rank for the next plan. The last is what its load found, if
        the plan has one."""
        asked: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        plan: dict[str, Any] = {}
        slot, value = self._rng.randrange(NUM_SLOTS), self._rng.randrange(1, 256)
        kind = self._rng.choice(["store", "clean", "nothing"])
        if kind != "nothing":
            asked.append(("fill", (0, value), {}))
            plan |= stored(kind, 0, slot, self._last_load[slot])
        if kind == "store":
            self._held[slot] = value, seq
        # A plan stores those of `clean` behind its loads, into other slots.
        readable = [each for each in self._held if kind != "clean" or each != slot]
        if readable and self._rng.random() < 0.8:
            source = self._rng.choice(readable)
            content, after_stores = self._held[source]
            self._last_load[source] = seq
            prefix = self._rng.choice(["load", "ahead"])
            plan |= loaded(prefix, source, NUM_BLOCKS - 1, after_stores)
            self.expected.append({content})
        asked.append(("run", (seq,), plan))
        if kind == "clean":
            self._held[slot] = value, seq
        if "load_after_stores" in plan:
            asked.append(("values", (NUM_BLOCKS - 1,), {}))
        return asked


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_random_plans_on_ranks_of_any_speed(
    ranks: Start, num_ranks: int, seed: int
) -> None:
    """No rank waits for another but in the fences."""
    rng, all_ = Random(seed), ranks(num_ranks)
    for rank in all_:
        for what in ("stores", "loads"):
            rank.ask("delay", what, rng.choice([0, 0, 0.002, 0.01]))
    script = Script(rng)
    asked = [each for seq in range(1, 80) for each in script.step(seq)]
    for rank in all_:
        for name, args, kwargs in asked:
            rank.begin(name, *args, **kwargs)
    for rank in all_:
        found = [(name, rank.end()) for name, _, _ in asked]
        assert [x for name, x in found if name == "values"] == script.expected
        assert not any(report for name, (report, _) in runs(found))


def runs(found: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [each for each in found if each[0] == "run"]


# ---------------------------------------------------------------- what goes wrong


def test_a_store_that_fails_is_told_and_nothing_of_it_counts(ranks: Start) -> None:
    """All ranks load the same slots in the same plan. The one that could not fill a
    slot refuses to, and so the plan has failed on all."""
    owner, other = all_ = ranks()
    owner.ask("fail", "stores")
    (told, _), (nothing, _) = on_all(all_, "run", 1, **stored("store", 1, 0))
    assert told == StepReport(failed_store_slots={0: 1}) and nothing is None
    plan = loaded("load", slot=0, block=5, after_stores=1)
    (told, _), _ = on_all(all_, "run", 2, **plan)
    assert told == StepReport(failed_load_seq=2)


@pytest.mark.parametrize("index", [0, 1])
def test_a_load_that_fails_on_one_rank_is_told_by_it(ranks: Start, index: int) -> None:
    all_ = ranks()
    on_all(all_, "run", 1, **stored("store", block=1, slot=0))
    all_[index].ask("fail", "loads")
    plan = loaded("ahead", slot=0, block=5, after_stores=1)
    found = [report for report, _ in on_all(all_, "run", 2, **plan)]
    assert found[index] == StepReport(failed_load_seq=2)
    assert found[1 - index] is None
    # It has ended all the same: the slot is free for the next.
    plan = stored("store", block=2, slot=0, after_loads=2)
    assert [report for report, _ in on_all(all_, "run", 3, **plan)] == [None] * 2


def test_every_rank_checks_what_it_loads(ranks: Start) -> None:
    """With `verify`: the checksum is that of the rank that has stored."""
    all_ = ranks(verify=True)
    on_all(all_, "run", 1, **stored("store", block=1, slot=0))
    plan = loaded("load", slot=0, block=5, after_stores=1)
    assert [report for report, _ in on_all(all_, "run", 2, **plan)] == [None] * 2
    assert on_all(all_, "values", 5) == [{2}] * 2
    all_[0].ask("spoil", 0)
    found = [report for report, _ in on_all(all_, "run", 3, **plan)]
    assert found == [StepReport(failed_load_seq=3)] * 2


def test_a_rank_whose_owner_was_killed_waits_no_longer_than_the_limit(
    ranks: Start,
) -> None:
    owner, other = ranks(limit_s=LIMIT_S)
    on_all([owner, other], "run", 1, **stored("store", block=1, slot=0))
    owner.kill()
    # What was stored is there.
    plan = loaded("load", slot=0, block=5, after_stores=1)
    assert other.ask("run", 2, **plan)[0] is None
    assert other.ask("values", 5) == {2}
    plan = loaded("load", slot=0, block=5, after_stores=3)
    report, seconds = other.ask("run", 3, **plan)
    assert report == StepReport(failed_load_seq=3)
    assert LIMIT_S <= seconds < PATIENT_S
    # From then on it copies nothing, and waits for nobody.
    report, seconds = other.ask("run", 4, **plan)
    assert report == StepReport(failed_load_seq=4) and seconds < PATIENT_S
    assert other.ask("is_off")


def test_an_owner_whose_reader_was_killed_waits_no_longer_than_the_limit(
    ranks: Start,
) -> None:
    owner, other = ranks(limit_s=LIMIT_S)
    on_all([owner, other], "run", 1, **stored("store", block=1, slot=0))
    other.kill()
    plan = stored("store", block=2, slot=0, after_loads=2)
    owner.ask("run", 2, **loaded("load", slot=0, block=5, after_stores=1))
    report, seconds = owner.ask("run", 3, **plan)
    assert report == StepReport(failed_store_slots={0: 3})
    assert LIMIT_S <= seconds < PATIENT_S
    # Nobody who may still read the slot sees other bytes.
    assert owner.ask("slot", 0) == {2}
    owner.ask("run", 4)
    assert owner.ask("is_off")


def test_nobody_waits_for_a_rank_that_has_switched_off(ranks: Start) -> None:
    owner, *others = ranks(3)
    on_all([owner, *others], "run", 1, **stored("store", block=1, slot=0))
    others[1].ask("leave")
    plan = stored("store", block=2, slot=0, after_loads=2)
    on_all([owner, others[0]], "run", 2)
    report, seconds = on_all([owner, others[0]], "run", 3, **plan)[0]
    # What it has under way may end late, and must not find other bytes then.
    assert report == StepReport(failed_store_slots={0: 3}) and seconds < PATIENT_S
    assert owner.ask("slot", 0) == {2}
    owner.ask("leave")
    plan = loaded("load", slot=0, block=5, after_stores=4)
    report, seconds = others[0].ask("run", 4, **plan)
    assert report == StepReport(failed_load_seq=4) and seconds < PATIENT_S
    assert not others[0].ask("is_off")


def test_memory_goes_with_the_last_process_whatever_ends_them(ranks: Start) -> None:
    """It has no name, and no process that was killed has kept an open file of it."""
    first, second = ranks()
    memory = memory_of(first.process.pid)
    assert memory and memory == memory_of(second.process.pid)
    first.kill()
    second.kill()
    time.sleep(0.1)
    for process in filter(str.isdecimal, os.listdir("/proc")):
        # Those of other tests, which run beside this one, map others.
        assert not memory & memory_of(int(process))


def memory_of(pid: int) -> set[str]:
    """Device and inode of all shared memory that a process maps."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {
        " ".join(line.split()[3:5])
        for line in lines
        if line.endswith("memfd:kv-tier (deleted)")
    }
