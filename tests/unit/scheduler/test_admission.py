# SPDX-License-Identifier: Apache-2.0
"""Blocks are stored from their n-th use on."""

import pytest

from vllm.v1.kv_tier.scheduler.admission import Admission

from ..tier import Tier, ids, stores

POLICIES = pytest.mark.parametrize("policy", ["write_back", "write_through"])


def test_uses_are_counted_by_key() -> None:
    admission = Admission(from_use=3, num_keys=10)
    found = []
    for key in "aabaab":
        admission.record_use(key)
        found.append(admission.admits(key))
    assert found == [False, False, False, True, True, False]


def test_the_keys_used_last_are_remembered() -> None:
    admission = Admission(from_use=2, num_keys=2)
    for key in "abacb":
        admission.record_use(key)
    # `c` took the place of `b`, whose second use counts as its first.
    assert not admission.admits("b")
    admission.record_use("b")
    assert admission.admits("b")


def test_as_many_keys_are_remembered_as_may_be() -> None:
    admission = Admission(from_use=2, num_keys=2)
    for key in "aba":
        admission.record_use(key)
    assert admission.admits("a")


def test_what_was_never_used_has_no_use() -> None:
    admission = Admission(from_use=1, num_keys=2)
    assert not admission.admits("a")
    admission.record_use("a")
    assert admission.admits("a")


@POLICIES
def test_what_is_used_once_is_never_stored(policy: str) -> None:
    tier = Tier(2, store_policy=policy, store_from_use=2)
    for names in ("ab", "cd", "ef"):
        tier.computed(names)
        assert not any(stores(plan) for plan in tier.idle(2))
    assert len(tier.host) == 0
    stats = tier.pool.take_stats()
    assert (stats.passed_over_blocks, stats.dropped_blocks) == (4, 0)


@POLICIES
def test_what_is_computed_again_is_stored(policy: str) -> None:
    tier = Tier(2, store_policy=policy, store_from_use=2)
    tier.computed("ab")
    tier.computed("cd")
    assert tier.where("a") == "nowhere"
    blocks = tier.computed("ab")
    (plan,) = tier.idle()
    assert set(stores(plan).values()) <= ids(blocks) and stores(plan)
    tier.computed("ef")
    assert [tier.where(name) for name in "abcd"] == ["host"] * 2 + ["nowhere"] * 2


@POLICIES
def test_a_hit_on_the_device_is_a_use(policy: str) -> None:
    tier = Tier(2, store_policy=policy, store_from_use=2)
    tier.computed("ab")
    tier.begin()
    tier.promote(tier.find("a"))
    tier.end()
    tier.idle()
    tier.computed("cd")
    assert [tier.where(name) for name in "ab"] == ["host", "nowhere"]


def test_a_hit_on_the_host_is_a_use() -> None:
    """Or a block that came back from a slot that made room since would be lost."""
    tier = Tier(2, num_slots=1, store_from_use=2, store_policy="write_through")
    tier.computed("a")
    tier.computed("a")
    tier.idle()
    tier.computed("bc")
    assert tier.where("a") == "host"
    tier.begin()
    tier.promote(tier.find("a"))
    tier.end()
    assert tier.pool.admission is not None
    assert tier.pool.admission.admits(tier.slot("a").keys[0])
