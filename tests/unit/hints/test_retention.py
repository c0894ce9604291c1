# SPDX-License-Identifier: Apache-2.0
"""What is retained stays longer on both tiers; caps limit what is stored and loaded."""

from typing import Any

import pytest

from vllm.v1.kv_tier.hints.retention import covering
from vllm.v1.kv_tier.hints.schema import Retain
from vllm.v1.kv_tier.policy import POLICIES

from ..tier import BLOCK, Tier, assert_nothing_leaks
from .test_conversations import Turn, serve, victims

HIGH = {"priority": 90}
LOW = {"priority": 10}


def on_device(tier: Tier, names: str) -> str:
    return "".join(name for name in names if tier.where(name) == "device")


def on_host(tier: Tier, names: str) -> str:
    return "".join(name for name in names if tier.where(name) == "host")


# ------------------------------------------------------------------ the device


def test_what_is_retained_leaves_the_device_last() -> None:
    tier = Tier(8)
    serve(tier, Turn("1", "abc", retain=HIGH), "abc")
    serve(tier, Turn("2", "wxyz"), "wxyz")
    # One is free from the start.
    assert victims(tier, 5, "abcwxyz") == "wxyz"
    assert_nothing_leaks(tier)


def test_without_the_hint_it_leaves_first() -> None:
    tier = Tier(8)
    serve(tier, Turn("1", "abc", retain={"priority": 50}), "abc")
    serve(tier, Turn("2", "wxyz"), "wxyz")
    assert victims(tier, 4, "abcwxyz") == "abc"


def test_what_is_low_leaves_the_device_first() -> None:
    tier = Tier(8)
    serve(tier, Turn("1", "ab"), "ab")
    ranges = [{"priority": 10}, {"priority": 0, "start": 2 * BLOCK, "end": 3 * BLOCK}]
    serve(tier, Turn("2", "cdef", retain=ranges), "cdef")
    tier.begin()
    blocks = []
    # The lowest priority first, then from the end to the head.
    for left in ("abcdf", "abcd", "abc", "ab"):
        blocks += tier.pool.get_new_blocks(1)
        assert on_device(tier, "abcdef") == left
    tier.end()
    tier.free(blocks)
    assert_nothing_leaks(tier)


def test_a_low_block_that_others_use_is_like_any_other() -> None:
    tier = Tier(8)
    serve(tier, Turn("1", "ab"), "ab")
    serve(tier, Turn("2", "cdef", retain=LOW), "cdef")
    serve(tier, Turn("3", "cd"), "cd", 2)
    tier.idle()
    gone = victims(tier, 4, "abcdef")
    assert set("ef") <= set(gone) and not set("cd") & set(gone)


def test_on_the_device_it_expires() -> None:
    tier = Tier(8)
    serve(tier, Turn("1", "abc", retain=HIGH | {"ttl": 5}), "abc")
    serve(tier, Turn("2", "wxyz"), "wxyz")
    tier.now = 5.0
    assert victims(tier, 4, "abcwxyz") == "abc"


def test_a_device_full_of_what_is_retained_makes_room() -> None:
    tier = Tier(8)
    serve(tier, Turn("1", "abcdefgh", retain={"priority": 100}), "abcdefgh")
    assert len(victims(tier, 8, "abcdefgh")) == 8
    assert on_host(tier, "abcdefgh") == "abcdefgh"
    assert_nothing_leaks(tier)


# -------------------------------------------------------------------- the host


@pytest.mark.parametrize("policy", POLICIES)
def test_priorities_order_the_host(policy: str) -> None:
    tier = Tier(4, 8, eviction_policy=policy)
    serve(tier, Turn("1", "abcd", retain=HIGH), "abcd")
    victims(tier, 4, "")
    tier.demoted("efgh")
    tier.demoted("wxyz")
    assert on_host(tier, "abcdefghwxyz") == "abcdwxyz"
    assert tier.pool.take_stats().yielded_slots == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_without_the_hint_the_oldest_make_room(policy: str) -> None:
    tier = Tier(4, 8, eviction_policy=policy)
    serve(tier, Turn("1", "abcd", conversation="c"), "abcd")
    victims(tier, 4, "")
    tier.demoted("efgh")
    tier.demoted("wxyz")
    assert on_host(tier, "abcdefghwxyz") == "efghwxyz"


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_low_leaves_the_host_first(policy: str) -> None:
    tier = Tier(4, 8, eviction_policy=policy)
    tier.demoted("efgh")
    serve(tier, Turn("1", "abcd", retain=LOW), "abcd")
    victims(tier, 4, "")
    tier.demoted("wxyz")
    assert on_host(tier, "abcdefghwxyz") == "efghwxyz"


def test_a_hint_with_a_hit_counts_for_slots_that_are_there() -> None:
    tier = Tier(4, 8)
    serve(tier, Turn("1", "abcd"), "abcd")
    victims(tier, 4, "")
    serve(tier, Turn("2", "abcd", retain=HIGH), "abcd", 4)
    victims(tier, 4, "")
    tier.demoted("efgh")
    tier.demoted("wxyz")
    assert on_host(tier, "abcdefghwxyz") == "abcdwxyz"


def test_quotas_by_tenant_and_by_salt() -> None:
    for turn in (Turn("1", "abcd", tenant="t"), Turn("1", "abcd")):
        turn.cache_salt = "t"
        tier = Tier(4, 8, quotas={"t": 0.75})
        serve(tier, turn, "abcd")
        victims(tier, 4, "")
        assert tier.pool.take_stats().tenant_slots == {"t": 4}
        tier.demoted("efgh")
        tier.demoted("wxyz")
        assert on_host(tier, "abcdefghwxyz") == "abcdwxyz"


# ------------------------------------------------------------------------ caps


@pytest.mark.parametrize("store_policy", ["write_back", "write_through"])
@pytest.mark.parametrize(
    ("hints", "stored"),
    [
        ({"store": False}, ""),
        ({"max_offload_tokens": 0}, ""),
        ({"max_offload_tokens": 2 * BLOCK + 1}, "ab"),
        ({"store": False, "max_offload_tokens": 2 * BLOCK}, ""),
        ({"store": True}, "abcd"),
    ],
)
def test_what_is_not_to_be_stored(
    hints: dict[str, Any], stored: str, store_policy: str
) -> None:
    tier = Tier(4, store_policy=store_policy)
    serve(tier, Turn("1", "abcd", **hints), "abcd")
    tier.idle(3)
    victims(tier, 4, "")
    assert on_host(tier, "abcd") == stored
    # The blocks keep no mark of it.
    tier.demoted("efgh")


def test_a_request_that_says_nothing_makes_it_worth_storing() -> None:
    tier = Tier(4)
    serve(tier, Turn("1", "abcd", store=False), "abcd")
    serve(tier, Turn("2", "abcd", store=False), "abcd", 4)
    serve(tier, Turn("3", "ab"), "ab", 2)
    victims(tier, 4, "")
    assert on_host(tier, "abcd") == "ab"


def hits(tier: Tier, turn: Turn, names: str) -> int:
    """How long a prefix the tier answers for when it is asked by a request."""
    tier.pool.is_loading(turn, False)  # type: ignore[arg-type]
    return next(
        (n for n, name in enumerate(names) if tier.where(name) == "nowhere"), len(names)
    )


@pytest.mark.parametrize("beside", [False, True])
def test_what_is_not_to_be_loaded(beside: bool) -> None:
    tier = Tier(6)
    tier.demoted("abcdef")
    serve(tier, Turn("1", "ab"), "ab", 2)
    for cap, expected in ((0, 2), (BLOCK - 1, 2), (BLOCK, 3), (3 * BLOCK, 5), (999, 6)):
        turn = Turn("2", "abcdef", max_load_tokens=cap)
        if beside:
            turn.kv_transfer_params = {"max_load_tokens": cap}  # type: ignore[dict-item]
        assert hits(tier, turn, "abcdef") == expected, cap
    assert hits(tier, Turn("3", "abcdef"), "abcdef") == 6


# ---------------------------------------------------------------------- ranges


@pytest.mark.parametrize(
    ("retain", "blocks"),
    [
        (Retain(90), [0, 1, 2]),
        (Retain(90, start=5, end=8), [1]),
        (Retain(90, start=5, end=9), [1, 2]),
        (Retain(90, start=4, end=400), [1, 2]),
        (Retain(90, start=40), []),
        (Retain(90, end=1, answer=True), [0, 2, 3, 4]),
    ],
)
def test_blocks_of_a_range(retain: Retain, blocks: list[int]) -> None:
    """Blocks of four tokens; the prompt ends in the middle of the third."""
    found = covering([retain], 0, 5, 4, 10)
    assert [i for i in range(5) if found[i] == 0] == blocks
    # Wherever it is looked at from.
    for first in range(7):
        part = covering([retain], first, 2, 4, 10)
        here = range(first, first + 2)
        expected = [i in blocks or (i > 4 and retain.answer) for i in here]
        assert [found == 0 for found in part] == expected


def test_of_ranges_that_overlap_the_last_counts() -> None:
    first, last = Retain(90), Retain(10, end=4)
    assert covering([first, last], 0, 4, 4, 10) == [1, 0, 0, -1]


def test_hints_are_counted_by_kind() -> None:
    tier = Tier(8)
    hints: dict[str, Any] = {
        "conversation": "c",
        "retain": HIGH,
        "store": False,
        "max_load_tokens": 0,
    }
    serve(tier, Turn("1", "ab", **hints), "ab")
    serve(tier, Turn("2", "cd", retain=LOW, tenant="t", release=False), "cd")
    counted = tier.pool.take_stats()
    assert counted.hints == {
        "conversation": 1,
        "retain": 2,
        "tenant": 1,
        "store": 1,
        "max_load_tokens": 1,
    }
    assert counted.retained_blocks == 2
