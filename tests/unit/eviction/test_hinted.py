# SPDX-License-Identifier: Apache-2.0
"""Hints and quotas around any policy: what goes first, what stays, and for how long."""

import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm.v1.kv_tier.eviction.hinted import (
    ExpiryQueue,
    Hinted,
    ProtectedKeys,
    RetentionHints,
)
from vllm.v1.kv_tier.policy import LRU, POLICIES, EvictionPolicy, KeyHint, make_policy


class Host:
    """A policy with hints, and the clock behind it."""

    def __init__(
        self,
        num_slots: int,
        policy: EvictionPolicy | str = "lru",
        num_keys: int = 1000,
        **quotas: float,
    ) -> None:
        self.now = 0.0
        self.said = RetentionHints(num_keys, lambda: self.now)
        if isinstance(policy, str):
            policy = make_policy(policy, num_slots)
        self.hinted = Hinted(policy, self.said, quotas)
        self.resident: set[object] = set()

    def say(
        self,
        keys: Iterable[object],
        priority: int | None = None,
        ttl: float = math.inf,
        tenant: object = None,
    ) -> None:
        for key in keys:
            self.said.update(key, priority, self.now + ttl, tenant)
            if key in self.resident:
                self.hinted.update(key)

    def insert(self, keys: Iterable[object]) -> None:
        for key in keys:
            self.hinted.insert(key)
            self.resident.add(key)

    def evict(self, number: int = 1) -> str:
        gone = [self.hinted.evict(lambda key: False) for _ in range(number)]
        self.resident -= set(gone)
        return "".join("-" if key is None else str(key) for key in gone)


@pytest.mark.parametrize("policy", POLICIES)
def test_priorities_order_eviction(policy: str) -> None:
    host = Host(8, policy)
    host.say("a", 90)
    host.say("b", 60)
    host.say("c", 10)
    host.say("d", 0)
    host.insert("abcdxyzw")
    assert host.evict(8) == "dcxyzwba"
    assert host.hinted.num_yielded == 2
    assert host.evict() == "-"


@pytest.mark.parametrize("policy", POLICIES)
def test_without_hints_the_policy_decides(policy: str) -> None:
    host, alone = Host(8, policy), make_policy(policy, 8)
    for key in "abcdefgh":
        host.insert(key)
        alone.insert(key)
    for key in "bbd":
        host.hinted.hit(key)
        alone.hit(key)
    assert host.evict(8) == "".join(str(alone.evict(lambda k: False)) for _ in range(8))


def test_what_is_said_later_counts_for_what_is_there() -> None:
    host = Host(8)
    host.insert("abcd")
    host.say("a", 80)
    host.say("d", 20)
    assert host.evict(4) == "dbca"


def test_what_has_expired_is_as_if_nothing_had_been_said() -> None:
    host = Host(8)
    host.say("ab", 100, ttl=5)
    host.say("d", 0, ttl=5)
    host.insert("abcdef")
    assert host.evict() == "d"
    assert host.evict() == "c"
    host.say("f", 10, ttl=1)
    host.now = 5.0
    # Long given up by the policy, and kept for the hint alone.
    assert host.evict(4) == "abef"
    assert host.hinted.num_yielded == 0


@pytest.mark.parametrize("used", ["a", "da"])
def test_a_use_makes_it_the_policys_again(used: str) -> None:
    host = Host(8)
    host.say("ab", 100, ttl=5)
    host.insert("abcd")
    assert host.evict() == "c"
    host.hinted.hits(used)
    host.now = 5.0
    assert host.evict(3) == "bda"


def test_a_use_extends_its_time() -> None:
    host = Host(8)
    host.say("a", 100, ttl=5)
    host.insert("abcd")
    assert host.evict() == "b"
    host.now = 4.0
    host.say("a", 100, ttl=5)
    host.now = 6.0
    assert host.evict(3) == "cda"


def test_a_flood_has_half_of_the_slots() -> None:
    host = Host(8)
    host.say("abcdef", 100)
    host.insert("abcdefxy")
    # Four are kept; the oldest of the others go, before what nobody has hinted at.
    assert host.evict(2) == "ab"
    assert host.evict(6) == "xycdef"


def test_owners_of_what_is_retained_have_equal_shares() -> None:
    host = Host(8)
    host.say("a", 60, tenant="small")
    host.say("bcdefg", 100, tenant="flood")
    host.insert("abcdefgx")
    assert host.evict(3) == "bcd"
    assert host.evict() == "x"
    assert "a" in host.resident


def test_no_long_search_for_what_is_not_retained() -> None:
    host = Host(1000)
    host.say(range(400), 100)
    host.insert(range(1000))
    gone = host.evict()
    assert gone == "0", "the oldest of many"
    assert host.hinted.num_yielded == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_who_is_below_the_share_makes_no_room(policy: str) -> None:
    host = Host(8, policy, a=0.5, b=0.5)
    host.say("abc", tenant="a")
    host.say("pqrst", tenant="b")
    host.insert("abcpqrst")
    assert host.evict() == "p"
    # b has no more than its share; all are below it. Somebody must go.
    host.evict(7)
    assert not host.resident
    assert host.evict() == "-"


def test_a_flood_with_a_quota_evicts_its_own() -> None:
    host = Host(8, a=0.5, b=0.5)
    host.say("abc", tenant="a")
    host.insert("abc")
    for key in range(100):
        if len(host.resident) == 8:
            host.evict()
        host.say([key], 100, tenant="b")
        host.insert([key])
    assert set("abc") <= host.resident


def test_quotas_are_parts_of_the_slots_that_there_are_now() -> None:
    host = Host(8, a=0.5)
    host.say("abcd", tenant="a")
    host.insert("abcdwx")
    host.hinted.resize(4)
    # Only two of them are below the quota now.
    assert host.evict(2) == "ab"
    assert host.evict(2) == "wx"
    host.hinted.resize(8)
    host.insert("abwx")
    assert host.evict(2) == "wx"


def test_a_flood_of_words_takes_nothing_from_a_share() -> None:
    """What was said of `a`'s keys is forgotten over it, and whose they are is not."""
    host = Host(8, num_keys=16, a=0.5)
    host.say("abc", tenant="a")
    host.insert("abc")
    # Of what is not to be stored.
    host.say(range(100, 116), tenant="b")
    for key in range(100):
        if len(host.resident) == 8:
            host.evict()
        host.say([key], 100, tenant="b")
        host.insert([key])
    assert host.said.get("a") is None
    assert set("abc") <= host.resident


def test_what_a_tenant_does_not_fill_others_have() -> None:
    host = Host(8, a=0.5)
    host.insert("stuvwxyz")
    assert host.evict(8) == "stuvwxyz"


def test_a_tenant_takes_nothing_over_from_another() -> None:
    host = Host(8, a=0.5, b=0.5)
    host.say("x", 90, tenant="a")
    host.say("x", 0, tenant="b")
    host.say("x", 95, ttl=1, tenant="b")
    assert host.said.get("x") == KeyHint(95, math.inf, "a", 1)


def test_who_says_nothing_uses_what_was_to_go_first() -> None:
    host = Host(8)
    host.insert("ab")
    host.say("b", 0)
    assert not host.said.record_plain_use("a")
    assert host.said.record_plain_use("b")
    host.hinted.update("b")
    assert host.evict(2) == "ab"


class Told(LRU):
    """A policy that orders hints itself: it writes them down."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self.heard: list[tuple[object, KeyHint]] = []

    def set_hint(self, key: object, about: KeyHint) -> None:
        self.heard.append((key, about))


def test_a_policy_may_order_hints_itself() -> None:
    policy = Told(8)
    host = Host(8, policy)
    host.said.update("a", 90, 7.0, "t", 3)
    host.insert("ab")
    host.say("b", 0)
    assert policy.heard == [
        ("a", KeyHint(90, 7.0, "t", 3)),
        ("b", KeyHint(0, math.inf, None, 1)),
    ]
    assert host.evict(2) == "ab"


def test_owners_with_more_than_their_share_lose_first() -> None:
    kept = ProtectedKeys()
    for key, owner in zip("abcdefg", "1222223"):
        kept.add(key, 60, owner)
    assert [kept.pop() for _ in range(7)][:3] == ["b", "c", "d"]
    assert not kept


_KEYS = st.integers(0, 9)
_PRIORITIES = st.sampled_from([None, 0, 50, 60, 100])
_ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("use"), _KEYS),
        st.tuples(
            st.just("say"), _KEYS, _PRIORITIES, st.integers(1, 5), st.integers(0, 3)
        ),
        st.tuples(st.just("remove"), _KEYS),
        st.tuples(st.just("evict")),
        st.tuples(st.just("wait"), st.integers(1, 3)),
    ),
    max_size=80,
)


def _evict(host: Host) -> None:
    expired = {
        key
        for key in host.resident
        if key in host.hinted.kept and not host.said.is_retained(key)
    } - host.hinted._share_of.keys()
    lows = {key for key in host.resident if host.said.is_low(key)}
    victim = host.hinted.evict(lambda key: False)
    assert (victim is None) == (not host.resident)
    host.resident.discard(victim)
    if expired:
        assert victim in expired
    elif lows:
        assert victim in lows
    hinted = host.hinted
    kept = {*hinted._kept}.union(*(share.kept for share in hinted.shares.values()))
    assert hinted.kept.keys() == kept <= host.resident


@pytest.mark.parametrize("policy", POLICIES)
@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(_ACTIONS)
def test_whatever_is_said_somebody_makes_room(
    policy: str, actions: list[tuple]
) -> None:
    host = Host(8, policy, **{"1": 0.25, "2": 0.5})
    for action, *args in actions:
        if action == "use":
            if args[0] in host.resident:
                host.hinted.hits(args[:1])
            else:
                if len(host.resident) == 8:
                    _evict(host)
                host.insert(args)
        elif action == "say":
            host.say(args[:1], args[1], args[2], str(args[3]) if args[3] else None)
        elif action == "remove" and args[0] in host.resident:
            host.hinted.remove(args[0])
            host.resident.remove(args[0])
        elif action == "evict":
            _evict(host)
        elif action == "wait":
            host.now += args[0]
    while host.resident:
        _evict(host)
    assert host.evict() == "-"
    shares = host.hinted.shares.values()
    assert not any(share.resident or share.kept for share in shares)
    assert not host.hinted._kept and not host.hinted._low


def test_what_is_kept_while_ends_are_cleared_expires() -> None:
    host = Host(4)
    # Each use of a kept key leaves an end behind.
    for i in range(2 * 4):
        host.say("a", 90, ttl=1000)
        if not i:
            host.insert("a")
        host.insert("x")
        assert host.evict() == "x"
    host.say("b", 90, ttl=5)
    host.insert("bxy")
    host.hinted.hit("x")
    host.hinted.hit("y")
    assert host.evict() in "xy"
    host.now = 5.0
    assert host.evict() == "b"


def test_what_others_have_said_is_not_renewed() -> None:
    said = RetentionHints(10, lambda: 0.0)
    said.update("b", 90, tenant="another")
    said.update("c", 10, tenant="one")
    about = KeyHint(60, math.inf, "one", 1)
    for keys in ("ab", "ac"):
        before = [said.get(key) for key in keys]
        assert not said.renew(keys, about)
        assert [said.get(key) for key in keys] == before
    assert said.renew("ad", about)
    assert said.renew("da", later := about._replace(turn=2))
    assert [said.get(key) for key in "ad"] == [later, later]


def test_ends_are_told_in_order_however_often_they_change() -> None:
    rng, ends = random.Random(3), ExpiryQueue()
    until: dict[int, float] = {}
    for now in range(5000):
        for _ in range(rng.randrange(6)):
            key = rng.randrange(200)
            if rng.random() < 0.2:
                ends.discard(key)
                until.pop(key, None)
            else:
                until[key] = now + rng.choice([1, 7, 50, 1e9]) + rng.random()
                ends.set(key, until[key])
        due = sorted((end, key) for key, end in until.items() if end <= now)
        found = []
        while ends.is_due(now):
            if (popped := ends.pop()) is not None:
                found.append((until.pop(popped), popped))  # type: ignore[call-overload]
        assert found == due
        assert len(ends) == len(until) and ends.num_entries < 1000


def test_after_a_quiet_time_no_step_looks_at_all_that_has_expired() -> None:
    host = Host(8)
    host.say("ab", 90, ttl=5)
    host.say("cd", 10, ttl=5)
    host.insert("abcdwxyz")
    assert host.evict(3) == "cdw"
    host.now = 10.0
    for looks, gone in ((0, "x"), (9, "a")):
        host.hinted.begin_step()
        host.hinted._num_looks = looks
        assert host.evict() == gone
