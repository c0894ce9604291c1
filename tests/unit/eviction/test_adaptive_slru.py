# SPDX-License-Identifier: Apache-2.0
"""Proven keys are protected while that pays: against a plain model, and by example."""

from collections.abc import Iterable
from itertools import islice
from random import Random
from typing import Any

from hypothesis import settings

from vllm.v1.kv_tier.eviction.recent import RecentKeys
from vllm.v1.kv_tier.policy import LRU, AdaptiveSLRU, EvictionPolicy, make_policy

from .test_policies import NUM_SLOTS, PolicyMachine


class Model:
    """Lists of [key, insertion of its last use], oldest first."""

    def __init__(self) -> None:
        self.new: list[list[int]] = []
        self.proven: list[list[int]] = []
        self.ghosts: list[tuple[int, int | None]] = []
        self.now = 0
        self.credit = 0.0

    @property
    def resident(self) -> set[int]:
        return {key for key, _ in self.new + self.proven}

    def earn(self, credit: int) -> None:
        most = NUM_SLOTS / 32
        self.credit = min(max(self.credit + credit, -most), most)

    def insert(self, key: int) -> None:
        self.now += 1
        if self.now % 128 == 0 and self.credit > 0:
            self.credit = max(0, self.credit - 1)
        known = dict(self.ghosts)
        self.ghosts = [ghost for ghost in self.ghosts if ghost[0] != key]
        if key not in known:
            self.new.append([key, self.now])
            return
        used = known[key]
        if used is None:
            self.earn(1)
        elif self.now - used < NUM_SLOTS:
            self.earn(-1)
        self.proven.append([key, self.now])

    def hit(self, key: int) -> None:
        uses = {known: used for known, used in self.proven}  # noqa: C416
        if key in uses and self.now - uses[key] >= NUM_SLOTS:
            self.earn(1)
        self.remove(key)
        self.proven.append([key, self.now])

    def remove(self, key: int) -> None:
        self.new = [entry for entry in self.new if entry[0] != key]
        self.proven = [entry for entry in self.proven if entry[0] != key]

    def evict(self, pinned: set[int]) -> int | None:
        protects = self.credit > 0
        new_first = not self.proven
        if self.new and self.proven:
            new_first = self.new[0][1] <= self.proven[0][1]
            if protects and len(self.proven) <= NUM_SLOTS / 2:
                new_first = True
        for is_new in (new_first, not new_first):
            for key, used in self.new if is_new else self.proven:
                if key not in pinned:
                    self.remove(key)
                    if is_new or not protects:
                        self.ghosts.append((key, used if is_new else None))
                    self.ghosts = self.ghosts[-NUM_SLOTS:]
                    return key
        return None


class ProvenMachine(PolicyMachine):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.model = make_policy("proven", NUM_SLOTS), Model()


TestProven = ProvenMachine.TestCase
TestProven.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def never(key: object) -> bool:
    return False


def hits(policy: EvictionPolicy, uses: Iterable[int]) -> int:
    """How many uses of a cache with this order find what they ask for."""
    resident: set[int] = set()
    found = 0
    for key in uses:
        if key in resident:
            found += 1
            policy.hit(key)
            continue
        if len(resident) == policy.num_slots:
            resident.remove(policy.evict(never))  # type: ignore[arg-type]
        policy.insert(key)
        resident.add(key)
    return found


def scans(first: int, rounds: int) -> list[int]:
    """30 keys that come back in each round, between twice as many that never do."""
    uses: list[int] = []
    for i in range(rounds):
        uses += range(first, first + 30)
        uses += range(first + 100 + 60 * i, first + 160 + 60 * i)
    return uses


def test_what_comes_back_is_kept_through_scans() -> None:
    """Where least recently used has no hit at all."""
    uses = scans(0, rounds=40)
    assert hits(LRU(64), uses) == 0
    assert hits(AdaptiveSLRU(64), uses) > 0.8 * 30 * 38


def test_without_evidence_it_is_lru() -> None:
    """A loop that fits: nothing tells that protection would pay."""
    old, loop = [*range(60)] * 5, [*range(100, 160)] * 5
    assert hits(AdaptiveSLRU(64), old + loop) == hits(LRU(64), old + loop) == 2 * 4 * 60


def test_a_workload_that_is_over_gives_way() -> None:
    """Credit of the scans is gone after some hits that LRU would have had."""
    old, new = scans(0, rounds=40), [*range(10**6, 10**6 + 50)] * 20
    before = hits(AdaptiveSLRU(64), old)
    assert before > 0
    # From the start again, since `hits` begins with an empty cache.
    after = hits(AdaptiveSLRU(64), old + new) - before
    assert after >= 0.85 * hits(LRU(64), new)


def test_what_outgrows_its_half_goes_by_age() -> None:
    """Scans have earned protection, and then a loop comes that fits: what was used
    once before it is older than all of it, and goes first, as with LRU."""
    ten = [10 * key + i for key in scans(0, rounds=40) for i in range(10)]
    loop, once = [*range(10**6, 10**6 + 480)], iter(range(10**7, 10**7 + 1000))
    later = [*range(10**8, 10**8 + 160), *loop]
    for _ in range(3):
        for j, key in enumerate(loop):
            later += [key] if j % 3 else [key, next(once)]
    policy = AdaptiveSLRU(640)
    hits(policy, ten)
    for key, _ in list(policy._places.items()):
        policy.remove(key)
    assert policy._credit > 0
    assert hits(policy, later) == hits(LRU(640), later) == 3 * 480


class ExactGhosts:
    """As `RecentKeys`, but exactly the last keys."""

    def __init__(self, num_keys: int) -> None:
        self.num_keys = num_keys
        self.keys: dict[Any, int] = {}

    def pop(self, keys: Iterable[Any]) -> list[int | None]:
        return [self.keys.pop(key, None) for key in keys]

    def add(self, keys: Iterable[Any], values: Iterable[int]) -> None:
        self.keys.update(zip(keys, values))
        for key in [*islice(self.keys, max(0, len(self.keys) - self.num_keys))]:
            del self.keys[key]


def conversations(draw: Random, num_slots: int) -> list[bytes]:
    """Conversations of 40 to 400 keys that come back after some time or never, some of
    them much more often than others, and scans in between."""
    uses: list[bytes] = []
    while len(uses) < 10 * num_slots:
        number = int(num_slots / 60 * draw.random() ** 3)
        keys = [f"{number} {i}" for i in range(40 + 360 * (number % 7) // 6)]
        if draw.random() < 0.3:
            keys = [f"scan {draw.random()}" for _ in range(200)]
        uses += map(str.encode, keys)
    return uses


def test_ghosts_in_rows_have_the_hits_of_exact_ones() -> None:
    """In the mean: some hits more here and less there, as with a few ghosts more."""
    num_slots, seeds = 4_000, range(100, 105)

    def with_ghosts(ghosts: type, num_keys: int) -> float:
        total = 0.0
        for uses in workloads:
            policy = AdaptiveSLRU(num_slots)
            policy._ghosts = ghosts(num_keys)
            total += hits(policy, uses) / len(uses)
        return total / len(workloads)

    workloads = [conversations(Random(seed), num_slots) for seed in seeds]
    exact = with_ghosts(ExactGhosts, num_slots)
    assert abs(with_ghosts(RecentKeys, num_slots) - exact) < 0.005
    # Without ghosts there are others.
    assert abs(with_ghosts(RecentKeys, 1) - exact) > 0.01
