# SPDX-License-Identifier: Apache-2.0
"""`store_from_use: "auto"`: what would have had more hits of late."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from vllm.v1.kv_tier.config import KVTierConfig
from vllm.v1.kv_tier.eviction.hinted import Hinted, RetentionHints
from vllm.v1.kv_tier.layout import KVTierLayout
from vllm.v1.kv_tier.policy import LRU
from vllm.v1.kv_tier.scheduler.admission import (
    AdaptiveAdmission,
    Admission,
    GhostCache,
    GhostDevice,
    SecondUses,
    make_admission,
)
from vllm.v1.kv_tier.tuning import SchedulingTuning

from ..tier import Tier


def chosen(num_slots: int = 64, **tuning: float) -> AdaptiveAdmission:
    numbers = SchedulingTuning(**tuning)  # type: ignore[arg-type]
    return AdaptiveAdmission(16, num_slots, 0, "lru", 1000, bool, numbers)


def use(admission: Admission, keys: Iterable[int]) -> None:
    for key in keys:
        # Keys of these tests lie in device blocks in turn.
        admission.record_use(key, key % 16)


def once_and_again(first: int, rounds: int) -> list[int]:
    """A loop of 60 keys, between four times as many that never come back."""
    uses: list[int] = []
    for i in range(rounds):
        uses += [*range(first, first + 60)]
        uses += range(first + 1000 + 240 * i, first + 1240 + 240 * i)
    return uses


def test_second_uses_are_admitted() -> None:
    admission = SecondUses(num_keys=100)
    found = []
    for key in "aabb":
        admission.record_use(key)
        found.append((admission.num_uses(key), admission.admits(key)))
    assert found == [(1, False), (2, True)] * 2
    # What is hit was computed once, remembered or not.
    admission.record_hit("cd")
    assert admission.admits("c") and admission.num_uses("d") == 2
    assert not admission.admits("e") and admission.num_uses("e") == 0


def test_as_many_keys_are_remembered_at_least() -> None:
    admission = SecondUses(num_keys=10)
    use(admission, range(100))
    assert [admission.num_uses(key) for key in (89, 90, 99)] == [0, 1, 1]
    assert len(admission._young) + len(admission._old) <= 20
    # Each use makes a key young.
    for key in range(200, 300):
        use(admission, [90, key])
    assert admission.num_uses(90) == 2


def test_hits_of_many_blocks_are_bounded_too() -> None:
    admission = SecondUses(num_keys=10)
    for i in range(10):
        admission.record_hit(range(10 * i, 10 * i + 10))
        assert len(admission._young) + len(admission._old) <= 20
    assert admission.admits(99) and not admission.admits(0)


def test_what_is_over_is_in_nobodys_way() -> None:
    """Told that keys will not return, storing all has the hits of what does."""
    told, untold = chosen(), chosen()
    for admission in (told, untold):
        for i in range(20):
            use(admission, range(60))
            once = range(1000 + 240 * i, 1240 + 240 * i)
            for first in range(0, 240, 10):
                use(admission, once[first : first + 10])
                if admission is told:
                    admission.release(once[first : first + 10])
    assert told.admits_all and not untold.admits_all


def test_a_flood_beside_a_quota_does_not_choose() -> None:
    """A tenant's own share has more hits from the second use on, whatever others do
    with the rest."""

    def chosen_with(*tenants: str) -> bool:
        admission, said = chosen(256), RetentionHints(10_000, lambda: 0.0)
        admission.wrap_policies(
            lambda policy: Hinted(policy, said, dict.fromkeys(tenants, 0.25))
        )
        theirs = once_and_again(0, rounds=20)
        for i, key in enumerate(theirs):
            said.update(key, None, tenant="a")
            admission.record_use(key)
            # Twice, so that it does not stand back.
            for flood in 10**6 + 2 * i, 10**6 + 2 * i + 1:
                said.update(flood, 100, tenant="b")
                use(admission, (flood, flood))
        return admission.admits_all

    assert not chosen_with("a")
    assert chosen_with()


def test_a_new_tier_stores_all() -> None:
    admission = chosen()
    assert admission.admits_all and admission.admits("never used")


def test_what_comes_once_is_left_out_where_that_pays() -> None:
    admission = chosen()
    use(admission, once_and_again(0, rounds=20))
    assert not admission.admits_all
    # At once, since uses were counted all the time.
    use(admission, [5, 10**6])
    assert admission.admits(5, 5) and not admission.admits(10**6, 0)


def test_a_block_was_used_before_if_its_key_was() -> None:
    admission = chosen(4096)
    assert admission._one_in == 4
    admission.admits_all = False
    # In the sample or not.
    for key in (40, 41):
        admission.record_use(key, 3)
        # Its first use, as often as it is asked.
        assert not admission.admits(key, 3) and not admission.admits(key, 3)
        admission.record_use(key + 2, 3)
        admission.record_use(key, 5)
        assert admission.admits(key, 5) and not admission.admits(key + 2, 3)


def test_other_keys_of_a_block_do_not_count_for_it() -> None:
    admission = chosen()
    admission.admits_all = False
    for key, block_id in (("a", 3), ("b", -1), ("a", 4), ("b", -1)):
        admission.record_use(key, block_id)
    assert not admission.admits("a", 3) and admission.admits("a", 4)
    admission.record_use("c", 4)
    admission.record_use("b", -1)
    assert not admission.admits("c", 4)


def test_all_is_stored_again_when_work_shifts() -> None:
    admission = chosen()
    use(admission, once_and_again(0, rounds=20))
    # Each comes back once, soon enough: the second use is the last.
    pairs = [10**6 + 30 * i + k for i in range(60) for _ in range(2) for k in range(30)]
    use(admission, pairs)
    assert admission.admits_all


def test_a_large_tier_is_tried_on_a_sample() -> None:
    """A shadow has so many slots at least, and less than twice as many."""
    small, large = (
        chosen(255, shadow_slots=256),
        chosen(256 * 100 + 50, shadow_slots=256),
    )
    assert (small._one_in, small._all.num_slots) == (1, 255)
    assert (large._one_in, large._all.num_slots) == (100, 256)
    use(large, range(100_000))
    assert len(large._all.keys) == 256


def test_the_sample_tells_of_the_whole() -> None:
    """Whole and sample choose the same, and have the same part of hits."""
    uses = [8 * (i % 500) + i % 8 for i in range(40_000)]
    whole, sample = chosen(2000, shadow_slots=2000), chosen(2000, shadow_slots=250)
    for admission in (whole, sample):
        use(admission, uses)
    assert sample._one_in == 8
    assert whole.admits_all == sample.admits_all


def test_a_host_has_what_the_device_evicts() -> None:
    host = GhostCache(2, LRU(2))
    shadow = GhostDevice(2, [host])
    for key in "abcd":
        shadow.access(key)
    assert host.hits == 0 and host.keys == {"a", "b"}
    # On the device, which is no hit of the host.
    shadow.access("c")
    assert host.hits == 0
    # d leaves the device for a, and takes the place of b.
    shadow.access("a")
    assert host.hits == 1 and host.keys == {"a", "d"}
    shadow.access("b")
    assert host.hits == 1


def test_only_what_is_admitted_takes_the_place_of_others() -> None:
    host = GhostCache(2, LRU(2), "d".__eq__)
    for key in "abc":
        host.insert(key)
    assert host.keys == {"a", "b"}
    host.insert("d")
    assert host.keys == {"b", "d"}


@pytest.mark.parametrize("policy", ["write_back", "write_through"])
def test_a_tier_that_chooses_stores_from_the_first_use(policy: str) -> None:
    tier = Tier(2, store_policy=policy, store_from_use="auto")
    tier.computed("ab")
    tier.idle(2)
    tier.computed("cd")
    assert [tier.where(name) for name in "ab"] == ["host", "host"]
    assert tier.pool.host_writer.admits_all


def test_all_is_stored_above_a_tier_below() -> None:
    """It would never get what comes once, and may have room for it."""
    config = KVTierConfig(8)
    alone = KVTierLayout(config, 8, 1)
    below: Any = object()
    assert make_admission(replace(alone, secondary=below), 4, 16, bool) is None
    assert isinstance(make_admission(alone, 4, 16, bool), AdaptiveAdmission)


def told_to_wait(policy: str, num_slots: int) -> list[str]:
    """Where "xy" and "ab" are, if the tier chooses second uses between them."""
    tier = Tier(2, num_slots, store_policy=policy, store_from_use="auto")
    tier.demoted("xy")
    assert tier.pool.admission is not None
    tier.pool.admission.admits_all = False
    tier.computed("ab")
    tier.idle(2)
    tier.computed("cd")
    return [tier.where(name) for name in "xyab"]


@pytest.mark.parametrize("policy", ["write_back", "write_through"])
def test_a_tier_follows_its_choice(policy: str) -> None:
    assert told_to_wait(policy, 2) == 2 * ["host"] + 2 * ["nowhere"]


@pytest.mark.parametrize("policy", ["write_back", "write_through"])
def test_room_that_nobody_has_is_for_all(policy: str) -> None:
    """As it is in the shadow that tries second uses."""
    where = told_to_wait(policy, 3)
    assert where.count("host") == 3 and where[:2] == 2 * ["host"]


def test_what_was_chosen_does_not_outlive_a_reset() -> None:
    """Nor do keys in the shadows, which would be hits that the tier cannot have."""
    tier = Tier(2, 2, store_from_use="auto")
    tier.computed("xy")
    tier.computed("ab")
    admission: Any = tier.pool.admission
    admission.admits_all = False
    admission._again.hits = 5.0
    assert admission._all.keys
    assert tier.pool.reset_prefix_cache()
    assert admission.admits_all and not admission._again.hits
    assert not admission._all.keys and not admission._ghosts._device
    # The order of eviction has forgotten them, too.
    tier.computed("cd")
    tier.computed("ef")
    assert admission._all.keys == admission._again.keys != set()
