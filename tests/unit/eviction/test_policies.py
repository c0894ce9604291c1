# SPDX-License-Identifier: Apache-2.0
"""Eviction policies against plain models of them."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from vllm.v1.kv_tier.policy import ARC, LRU, S3FIFO, EvictionPolicy, make_policy

NUM_SLOTS = 5
KEYS = st.integers(0, 12)


class Own(LRU):
    """A policy of a user."""


class ModelLRU:
    def __init__(self) -> None:
        self.clock = 0
        self.used: dict[int, int] = {}

    def use(self, key: int) -> None:
        self.clock += 1
        self.used[key] = self.clock

    insert = hit = use

    def remove(self, key: int) -> None:
        del self.used[key]

    def evict(self, pinned: set[int]) -> int | None:
        free = [k for k in self.used if k not in pinned]
        if not free:
            return None
        victim = min(free, key=lambda k: self.used[k])
        del self.used[victim]
        return victim

    @property
    def resident(self) -> set[int]:
        return set(self.used)


class ModelARC:
    """The paper's lists T1, T2, B1, B2, oldest first, and its target p.

    The paper evicts with the new key at hand; here the key comes later.
    """

    def __init__(self) -> None:
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.p = 0.0

    @property
    def resident(self) -> set[int]:
        return {*self.t1, *self.t2}

    def insert(self, key: int) -> None:
        c = NUM_SLOTS
        if key in self.b1:
            self.p = min(c, self.p + max(1, len(self.b2) / len(self.b1)))
            self.b1.remove(key)
            self.t2.append(key)
        elif key in self.b2:
            self.p = max(0, self.p - max(1, len(self.b1) / len(self.b2)))
            self.b2.remove(key)
            self.t2.append(key)
        else:
            self.t1.append(key)

    def hit(self, key: int) -> None:
        (self.t1 if key in self.t1 else self.t2).remove(key)
        self.t2.append(key)

    def remove(self, key: int) -> None:
        (self.t1 if key in self.t1 else self.t2).remove(key)

    def evict(self, pinned: set[int]) -> int | None:
        pairs = [(self.t1, self.b1), (self.t2, self.b2)]
        if len(self.t1) <= self.p and self.t2:
            pairs.reverse()
        for resident, ghosts in pairs:
            for key in resident:
                if key not in pinned:
                    resident.remove(key)
                    ghosts.append(key)
                    self.trim()
                    return key
        return None

    def trim(self) -> None:
        while self.b1 and len(self.t1) + len(self.b1) > NUM_SLOTS:
            del self.b1[0]
        lists = self.t1, self.t2, self.b1, self.b2
        while sum(map(len, lists)) > 2 * NUM_SLOTS:
            del (self.b2 or self.b1)[0]


class ModelS3FIFO:
    """Two lists of [key, uses], oldest first, and what the first evicted last: a key
    is a ghost until it comes back, or until one of its evictions is forgotten."""

    def __init__(self) -> None:
        self.first: list[list[int]] = []
        self.main: list[list[int]] = []
        self.evicted: list[int] = []
        self.ghosts: set[int] = set()

    @property
    def resident(self) -> set[int]:
        return {key for key, _ in self.first + self.main}

    def insert(self, key: int) -> None:
        if key in self.ghosts:
            self.ghosts.remove(key)
            self.main.append([key, 0])
        else:
            self.first.append([key, 0])

    def hit(self, key: int) -> None:
        for entry in self.first + self.main:
            if entry[0] == key:
                entry[1] = min(entry[1] + 1, 3)

    def remove(self, key: int) -> None:
        self.first = [entry for entry in self.first if entry[0] != key]
        self.main = [entry for entry in self.main if entry[0] != key]

    def evict(self, pinned: set[int]) -> int | None:
        steps = [self.evict_first, self.evict_main]
        if 2 * len(self.first) < NUM_SLOTS:
            steps.insert(0, self.evict_main)
        for step in steps:
            if (victim := step(pinned)) is not None:
                return victim
        return None

    def evict_first(self, pinned: set[int]) -> int | None:
        kept: list[list[int]] = []
        while self.first:
            key, uses = self.first.pop(0)
            if uses:
                self.main.append([key, 0])
            elif key in pinned:
                kept.append([key, uses])
            else:
                self.first = kept + self.first
                self.evicted.append(key)
                self.ghosts.add(key)
                self.ghosts -= {*self.evicted[:-NUM_SLOTS]}
                self.evicted = self.evicted[-NUM_SLOTS:]
                return key
        self.first = kept
        return None

    def evict_main(self, pinned: set[int]) -> int | None:
        for _ in range(4 * len(self.main)):
            key, uses = self.main.pop(0)
            if not uses and key not in pinned:
                return key
            self.main.append([key, max(0, uses - 1)])
        return None


class PolicyMachine(RuleBasedStateMachine):
    """Whatever a host table may do to a policy."""

    policy: EvictionPolicy
    model: Any
    """The same in plain lines: `resident` keys, and the policy's methods, of which
    `evict` takes the pinned keys."""
    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.pinned: set[int] = set()

    @rule(target=keys, key=KEYS)
    def insert(self, key: int) -> int:
        if key not in self.model.resident:
            if len(self.model.resident) == NUM_SLOTS and self.evict() is None:
                return key
            self.policy.insert(key)
            self.model.insert(key)
        return key

    @rule(key=keys)
    def hit(self, key: int) -> None:
        if key in self.model.resident:
            self.policy.hit(key)
            self.model.hit(key)

    @rule(key=keys)
    def remove(self, key: int) -> None:
        if key in self.model.resident:
            self.policy.remove(key)
            self.model.remove(key)
            self.pinned.discard(key)

    @rule(key=keys)
    def pin(self, key: int) -> None:
        if key in self.model.resident:
            self.pinned.add(key)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin_all(self) -> None:
        self.pinned.clear()

    @rule()
    def evict_one(self) -> None:
        self.evict()

    @rule(num_keys=st.integers(1, 2 * NUM_SLOTS))
    def evict_several(self, num_keys: int) -> None:
        """As one by one."""
        number = min(num_keys, len(self.model.resident))
        victims = [self.model.evict(set()) for _ in range(number)]
        assert self.policy.evict_all(num_keys) == victims
        self.pinned -= {*victims}

    def evict(self) -> Any:
        before = self.model.resident
        victim = self.policy.evict(self.pinned.__contains__)
        assert victim == self.model.evict(self.pinned)
        if victim is None:
            assert before == self.pinned
        else:
            assert victim in before - self.pinned
        return victim


class LRUMachine(PolicyMachine):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.model = LRU(NUM_SLOTS), ModelLRU()


class ARCMachine(PolicyMachine):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.model = ARC(NUM_SLOTS), ModelARC()

    @invariant()
    def ghosts_are_bounded(self) -> None:
        policy = self.policy
        assert isinstance(policy, ARC)
        ghosts = [*policy._once_ghosts, *policy._again_ghosts]
        assert len(ghosts) == len(set(ghosts)) <= 2 * NUM_SLOTS
        assert not set(ghosts) & self.model.resident


class S3FIFOMachine(PolicyMachine):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.model = S3FIFO(NUM_SLOTS), ModelS3FIFO()

    @invariant()
    def ghosts_are_bounded(self) -> None:
        policy = self.policy
        assert isinstance(policy, S3FIFO)
        assert policy._ghosts <= {*policy._ghost_order}
        assert len(policy._ghost_order) <= NUM_SLOTS
        assert not policy._ghosts & self.model.resident


TestLRU = LRUMachine.TestCase
TestARC = ARCMachine.TestCase
TestS3FIFO = S3FIFOMachine.TestCase
TestLRU.settings = TestARC.settings = TestS3FIFO.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)


def fill(policy: EvictionPolicy, keys: range) -> None:
    for key in keys:
        policy.insert(key)


def never(key: object) -> bool:
    return False


def test_lru_evicts_in_order_of_use() -> None:
    policy = LRU(3)
    fill(policy, range(3))
    policy.hit(0)
    assert [policy.evict(never) for _ in range(4)] == [1, 2, 0, None]


def test_arc_keeps_what_was_used_again_through_a_scan() -> None:
    arc, lru = ARC(4), LRU(4)
    evicted: dict[EvictionPolicy, set] = {arc: set(), lru: set()}
    for policy, gone in evicted.items():
        fill(policy, range(4))
        policy.hit(0)
        policy.hit(1)
        for key in range(100, 120):
            gone.add(policy.evict(never))
            policy.insert(key)
    assert not {0, 1} & evicted[arc]
    assert {0, 1} <= evicted[lru]


def test_arc_learns_from_a_key_that_comes_back() -> None:
    policy = ARC(2)
    fill(policy, range(2))
    assert policy.evict(never) == 0
    policy.insert(0)
    # It was given up too early: keys used once get more room, at the cost of
    # those used again, which 0 now is.
    assert policy.evict(never) == 0


def test_arc_forgets_a_removed_key() -> None:
    policy = ARC(2)
    fill(policy, range(2))
    policy.remove(0)
    policy.insert(0)
    assert [policy.evict(never), policy.evict(never)] == [1, 0]


def test_s3fifo_keeps_what_was_used_again_through_a_scan() -> None:
    policy = S3FIFO(4)
    fill(policy, range(4))
    policy.hit(0)
    policy.hit(1)
    gone = set()
    for key in range(100, 120):
        gone.add(policy.evict(never))
        policy.insert(key)
    assert not {0, 1} & gone and {2, 3} <= gone


def test_s3fifo_lets_go_of_what_was_used_long_ago() -> None:
    policy = S3FIFO(4)
    fill(policy, range(4))
    for key in (0, 1, 2):
        policy.hit(key)
    assert policy.evict(never) == 3
    policy.insert(4)
    # Used once, and not since: each had one round in the second queue.
    assert [policy.evict(never) for _ in range(3)] == [0, 1, 2]


def test_s3fifo_knows_a_key_that_comes_back() -> None:
    policy = S3FIFO(2)
    fill(policy, range(2))
    assert policy.evict(never) == 0
    policy.insert(0)
    # It is in the second queue now, and 1 in the first.
    assert [policy.evict(never), policy.evict(never)] == [1, 0]


def test_s3fifo_forgets_a_removed_key() -> None:
    policy = S3FIFO(2)
    fill(policy, range(2))
    policy.remove(0)
    policy.insert(0)
    assert [policy.evict(never), policy.evict(never)] == [1, 0]


@pytest.mark.parametrize("name, cls", [("lru", LRU), ("arc", ARC), ("s3fifo", S3FIFO)])
def test_policies_have_names(name: str, cls: type) -> None:
    policy = make_policy(name, 7)
    assert type(policy) is cls and policy.num_slots == 7


def test_a_policy_can_be_imported() -> None:
    assert type(make_policy(f"{Own.__module__}.Own", 7)) is Own


@pytest.mark.parametrize(
    "name, message",
    [
        ("newest", "unknown eviction_policy 'newest'. Use one of s3fifo, lru, arc"),
        ("", "unknown eviction_policy ''"),
        (None, "unknown eviction_policy None"),
        (3, "unknown eviction_policy 3"),
        (["lru"], r"unknown eviction_policy \['lru'\]"),
        ("no.such.Policy", "'no.such.Policy' cannot be imported"),
        (".Policy", "'.Policy' cannot be imported"),
        ("collections.NoSuch", "'collections.NoSuch' cannot be imported"),
        ("collections.OrderedDict", "unknown eviction_policy"),
        ("vllm.v1.kv_tier.policy.EvictionPolicy", "unknown eviction_policy"),
    ],
)
def test_a_wrong_policy_is_named(name: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make_policy(name, 7)
    assert "--kv-offloading-config" in str(error.value)
