# SPDX-License-Identifier: Apache-2.0
"""Conversations that are over make room first, on the device and on the host."""

import gc
import tracemalloc
import weakref
from collections.abc import Sequence
from time import process_time
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_tier.hints.tracker import KEYS_PER_STEP, PATIENCE_S, PAUSE_S
from vllm.v1.kv_tier.policy import POLICIES
from vllm.v1.request import RequestStatus

from ..tier import BLOCK, Asking, Tier, assert_nothing_leaks, hash_of, hashes, stores


class Turn(Asking):
    """A request with hints."""

    def __init__(self, name: str, tokens: str, **hints: Any) -> None:
        super().__init__(num_preemptions=0)
        self.request_id = name
        self.block_hashes = hashes(tokens)
        self.kv_transfer_params = {"kv_tier": hints} if hints else None
        self.cache_salt: str | None = None
        self.num_prompt_tokens = len(tokens) * BLOCK
        self.has_ended = self.is_preempted = False

    @property
    def status(self) -> RequestStatus:
        if self.has_ended:
            return RequestStatus.FINISHED_STOPPED
        if self.is_preempted:
            return RequestStatus.PREEMPTED
        return RequestStatus.RUNNING

    def is_finished(self) -> bool:
        return self.has_ended


def computes(
    tier: Tier, turn: Turn, tokens: str, num_hits: int = 0
) -> list[KVCacheBlock]:
    """A step that computes what `tokens` has beyond its hit; the turn goes on."""
    tier.begin()
    # Upstream's scheduler asks of every waiting request.
    assert not tier.pool.is_loading(turn, False)  # type: ignore[arg-type]
    blocks: list[KVCacheBlock] = []
    if num_hits:
        (group,) = tier.promote(tier.find(tokens[:num_hits]), request=turn)
        tier.pool.touch(group)
        blocks += group
    blocks += tier.pool.get_new_blocks(len(tokens) - num_hits)
    tier.pool.cache_full_blocks(turn, blocks, num_hits, len(blocks), BLOCK, 0)  # type: ignore[arg-type]
    tier.end()
    return blocks


def serve(tier: Tier, turn: Turn, tokens: str, num_hits: int = 0) -> None:
    """As `computes`; the turn ends with the step."""
    tier.free(reversed(computes(tier, turn, tokens, num_hits)))
    turn.has_ended = True


def victims(tier: Tier, num_blocks: int, names: str) -> str:
    """Which of `names` leave the device when a step takes so many blocks."""
    before = [name for name in names if tier.where(name) == "device"]
    tier.begin()
    blocks = tier.pool.get_new_blocks(num_blocks)
    tier.end()
    tier.free(blocks)
    return "".join(name for name in before if tier.where(name) != "device")


def test_a_released_conversation_leaves_the_device_first() -> None:
    tier = Tier(8)
    serve(tier, Turn("1", "ab"), "ab")
    serve(tier, Turn("2", "cdef", release=True), "cdef")
    tier.begin()
    blocks = []
    # From the end to the head, and before what is older.
    for left in ("abcde", "abcd", "abc", "ab"):
        blocks += tier.pool.get_new_blocks(1)
        assert [n for n in "abcdef" if tier.where(n) == "device"] == list(left)
    tier.end()
    tier.free(blocks)
    assert_nothing_leaks(tier)


def test_what_others_hit_while_it_runs_is_not_released() -> None:
    tier = Tier(8)
    running = Turn("1", "abcd", release=True)
    blocks = computes(tier, running, "abcd")
    serve(tier, Turn("2", "abxy", conversation="c"), "abxy", 2)
    tier.free(reversed(blocks))
    running.has_ended = True
    assert victims(tier, 4, "abcdxy") == "cd"


def test_a_preempted_request_releases_when_it_has_ended() -> None:
    tier = Tier(8)
    serve(tier, Turn("1", "ab"), "ab")
    turn = Turn("2", "cdef", release=True)
    blocks = computes(tier, turn, "cdef")
    turn.is_preempted = True
    tier.free(reversed(blocks))
    assert victims(tier, 3, "abcdef") == "b"
    turn.has_ended = True
    assert victims(tier, 3, "acdef") == "def"


def test_without_a_hint_the_oldest_leave_first() -> None:
    tier = Tier(8)
    serve(tier, Turn("1", "ab"), "ab")
    serve(tier, Turn("2", "cdef"), "cdef")
    assert victims(tier, 3, "abcdef") == "b"


def test_what_is_released_is_not_stored() -> None:
    tier = Tier(4)
    serve(tier, Turn("1", "abcd", release=True), "abcd")
    tier.begin()
    assert len(tier.pool.get_new_blocks(4)) == 4
    assert not stores(tier.end())
    assert [tier.where(n) for n in "abcd"] == 4 * ["nowhere"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_released_conversation_leaves_the_host_first(policy: str) -> None:
    tier = Tier(4, 6, eviction_policy=policy)
    tier.demoted("xy")
    turn = Turn("1", "abcd", conversation="c")
    serve(tier, turn, "abcd")
    victims(tier, 4, "")
    assert [tier.where(n) for n in "abcdxy"] == 6 * ["host"]
    serve(tier, Turn("2", "abcd", conversation="c", release=True), "abcd", 4)
    tier.computed("efgh")
    victims(tier, 4, "")
    assert [tier.where(n) for n in "abcd"] == 4 * ["nowhere"]
    assert [tier.where(n) for n in "efghxy"] == 6 * ["host"]


@pytest.mark.parametrize(
    "other", [{}, {"conversation": "d"}, {"conversation": "d", "release": True}]
)
def test_what_others_have_used_stays(other: dict[str, Any]) -> None:
    tier = Tier(12)
    serve(tier, Turn("1", "abcd", conversation="c"), "abcd")
    serve(tier, Turn("2", "abxy", **other), "abxy", 2)
    serve(tier, Turn("3", "abcdef", conversation="c", release=True), "abcdef", 4)
    gone = victims(tier, 8, "abcdefxy")
    assert set("cdef") <= set(gone)
    assert not set("ab") & set(gone)


def test_salts_keep_conversations_apart() -> None:
    tier = Tier(8)
    turn = Turn("1", "abcd", conversation="c")
    turn.cache_salt = "mine"
    serve(tier, turn, "abcd")
    serve(tier, Turn("2", "xy", conversation="c", release=True), "xy")
    assert victims(tier, 4, "abcdxy") == "xy"


def test_a_conversation_that_comes_back_is_like_any_other() -> None:
    tier = Tier(8)
    serve(tier, Turn("1", "ab"), "ab")
    serve(tier, Turn("2", "cdef", release=True), "cdef")
    tier.idle()
    serve(tier, Turn("3", "cdef"), "cdef", 4)
    assert victims(tier, 4, "abcdef") == "ab"
    # Worth a slot again, too.
    victims(tier, 8, "")
    assert [tier.where(n) for n in "cdef"] == 4 * ["host"]


def test_slots_that_are_used_again_stay() -> None:
    tier = Tier(4, 5)
    serve(tier, Turn("1", "abcd", conversation="c"), "abcd")
    victims(tier, 4, "")
    serve(tier, Turn("2", "abcd", conversation="c", release=True), "abcd", 4)
    victims(tier, 4, "")
    serve(tier, Turn("3", "abcd"), "abcd", 4)
    tier.computed("e")
    victims(tier, 4, "")
    tier.computed("f")
    victims(tier, 4, "")
    # One has to go, by the order of the policy: the one that was stored first.
    assert [tier.where(n) for n in "ef"] == 2 * ["host"]
    assert [tier.where(n) for n in "abcd"].count("host") == 3


def test_a_block_keeps_no_mark_of_what_it_held() -> None:
    tier = Tier(4)
    serve(tier, Turn("1", "abcd", release=True), "abcd")
    victims(tier, 4, "")
    tier.demoted("efgh")


def test_what_a_running_request_holds_is_left_alone() -> None:
    tier = Tier(8)
    turn = Turn("1", "abcd", conversation="c")
    tier.begin()
    running = tier.pool.get_new_blocks(4)
    tier.pool.cache_full_blocks(turn, running, 0, 4, BLOCK, 0)  # type: ignore[arg-type]
    tier.end()
    serve(tier, Turn("2", "x", conversation="c", release=True), "x")
    assert victims(tier, 1, "abcdx") == "x"
    tier.free(running)
    assert_nothing_leaks(tier)


def test_blocks_that_wait_for_a_request_are_left_alone() -> None:
    tier = Tier(8, load_s=1.0, max_load_stall_ms=0)
    serve(tier, Turn("1", "abcd", conversation="c"), "abcd")
    victims(tier, 8, "")
    tier.begin()
    assert tier.try_promote(tier.find("abcd"), among_others=True) is None
    tier.end()
    serve(tier, Turn("2", "xyz", conversation="c", release=True), "xyz")
    assert victims(tier, 4, "abcdxyz") == "xyz"


def test_a_bad_hint_is_counted_and_ignored() -> None:
    tier = Tier(8)
    serve(tier, Turn("1", "ab"), "ab")
    serve(tier, Turn("2", "cdef", release="yes"), "cdef")
    assert victims(tier, 3, "abcdef") == "b"
    stats = tier.pool.take_stats()
    assert (stats.refused_hints, stats.released_blocks) == (1, 0)


def test_blocks_are_counted_wherever_they_lay() -> None:
    tier = Tier(4)
    serve(tier, Turn("1", "abcd", conversation="c"), "abcd")
    victims(tier, 2, "")
    last = Turn("2", "ab", conversation="c", release=True)
    serve(tier, last, "ab", 2)
    tier.idle()
    assert tier.pool.take_stats().released_blocks == 4


def test_what_is_released_counts_as_clean() -> None:
    """While steps take released blocks, the cleaner stores nothing of the others."""
    tier = Tier(40, tuning={"clean_part": 1 / 4, "alloc_rate_decay": 0.0})
    others = "ABCDEFGHIJKLMNOPQRSTUVWX"
    serve(tier, Turn("1", others), others)
    serve(tier, Turn("2", "abcdefgh", conversation="c"), "abcdefgh")
    serve(tier, Turn("3", "ijklmnop", conversation="c", release=True), "ijklmnop")
    tier.idle()
    taken, num_stored = [], []
    for _ in range(8):
        tier.begin()
        taken += tier.pool.get_new_blocks(2)
        num_stored.append(len(stores(tier.end())))
    assert [tier.where(name) for name in "apA"] == ["nowhere", "nowhere", "device"]
    assert num_stored == [0] * 8
    assert len(tier.host) < len(others)
    tier.free(taken)


def _names(blocks: Sequence[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def test_the_next_victims_come_in_order() -> None:
    tier = Tier(6)
    queue = tier.pool.free_block_queue
    blocks = queue.get_all_free_blocks()
    chosen = [blocks[4], blocks[2], blocks[5]]
    tier.pool.free.put_first(chosen, need_no_store=False)
    rest = [blocks[0], blocks[1], blocks[3]]
    assert _names(queue.get_all_free_blocks()) == _names([*chosen, *rest])
    assert_nothing_leaks(tier)
    assert tier.pool.get_new_blocks(6) == [*chosen, *rest]


def test_nobody_hears_of_what_is_computed_until_the_first_hint() -> None:
    tier = Tier(8)
    serve(tier, Turn("1", "ab"), "ab")
    assert not tier.pool.conversations.is_listening
    serve(tier, Turn("2", "cd", conversation="c"), "cd")
    assert tier.pool.conversations.is_listening


def test_a_conversation_is_over_after_its_requests() -> None:
    tier = Tier(8)
    serve(tier, Turn("1", "ab", conversation="c"), "ab")
    serve(tier, Turn("2", "cdef", conversation="d"), "cdef")
    hear = tier.pool.conversations.end_conversation
    for name, salt in (("d", "salt"), ("e", None)):
        assert hear(name, salt) == {"released_blocks": 0, "running_requests": 0}
    assert hear("d", None) == {"released_blocks": 4, "running_requests": 0}
    assert tier.pool.take_stats().hints["release"] == 3
    assert victims(tier, 5, "abcdef") == "cdef"
    assert_nothing_leaks(tier)


def test_what_still_runs_is_released_when_it_ends() -> None:
    tier = Tier(8)
    serve(tier, Turn("1", "ab"), "ab")
    turn = Turn("2", "cdef", conversation="c")
    serve(tier, turn, "cdef")
    turn.has_ended = False
    assert tier.pool.conversations.end_conversation("c", None) == {
        "released_blocks": 4,
        "running_requests": 1,
    }
    turn.has_ended = True
    assert victims(tier, 5, "abcdef") == "cdef"


def prewarmed(tier: Tier) -> tuple[int, int, int]:
    """Blocks asked for, used, and late, since the last call."""
    stats = tier.pool.take_stats()
    return (
        stats.prewarmed_blocks,
        stats.prewarmed_used_blocks,
        stats.prewarmed_late_blocks,
    )


def test_what_was_prewarmed_is_of_use_once() -> None:
    tier = Tier(8)
    serve(tier, Turn("1", "abcd", prewarm=True), "abcd")
    assert prewarmed(tier) == (4, 0, 0)
    # Wherever it lies by now.
    victims(tier, 8, "")
    serve(tier, Turn("2", "abcx"), "abcx", 3)
    assert prewarmed(tier) == (0, 3, 0)
    serve(tier, Turn("3", "abcd"), "abcd", 4)
    assert prewarmed(tier) == (0, 1, 0)
    serve(tier, Turn("4", "abcd"), "abcd", 4)
    assert prewarmed(tier) == (0, 0, 0)


def test_a_prewarm_is_late_for_who_computes_meanwhile() -> None:
    tier = Tier(16)
    late = Turn("1", "abcd", prewarm=True)
    tier.begin()
    assert not tier.pool.is_loading(late, False)  # type: ignore[arg-type]
    tier.end()
    serve(tier, Turn("2", "ab"), "ab")
    assert prewarmed(tier) == (4, 0, 2)
    # It has no use of what another one has computed before, nor of its own.
    serve(tier, late, "abcd", 2)
    assert prewarmed(tier) == (0, 0, 0)


def test_a_prewarm_that_has_ended_is_not_late() -> None:
    tier = Tier(8)
    serve(tier, Turn("1", "abcd", prewarm=True, store=False), "abcd")
    victims(tier, 8, "")
    serve(tier, Turn("2", "abcd"), "abcd")
    assert prewarmed(tier) == (4, 0, 0)


def lack_blocks(tier: Tier) -> None:
    """A request finds too few free blocks in the step in the making."""
    tier.pool.load_ahead([], (), 0)


def test_a_prewarm_leaves_blocks_to_requests_that_lack_some() -> None:
    tier = Tier(8)
    now = 0.0
    tier.pool.costs.clock = lambda: now
    prewarm: Any = Turn("1", "abcd", prewarm=True)
    request: Any = Turn("2", "abcd", conversation="c")
    tier.begin()
    assert not tier.pool.is_loading(prewarm, True)
    lack_blocks(tier)
    assert tier.pool.is_loading(prewarm, True)
    assert not tier.pool.is_loading(request, True)
    # Who is alone takes what nobody else wants.
    assert not tier.pool.is_loading(prewarm, False)
    now += PAUSE_S
    assert not tier.pool.is_loading(prewarm, True)


def test_a_prewarm_does_not_wait_for_ever() -> None:
    tier = Tier(8)
    now = 0.0
    tier.pool.costs.clock = lambda: now
    prewarm: Any = Turn("1", "abcd", prewarm=True)
    tier.begin()
    for _ in range(int(PATIENCE_S / PAUSE_S)):
        lack_blocks(tier)
        assert tier.pool.is_loading(prewarm, True)
        now += PAUSE_S
    lack_blocks(tier)
    assert not tier.pool.is_loading(prewarm, True)


def test_as_many_blocks_as_owners_are_followed() -> None:
    tier = Tier(8)
    prewarms, limit = (
        tier.pool.conversations.prewarms,
        tier.pool.conversations._num_keys,
    )
    for i in range(limit):
        names = f"{chr(1000 + 2 * i)}{chr(1001 + 2 * i)}"
        turn: Any = Turn(str(i), names)
        prewarms.follow(weakref.ref(turn), prewarms.begin(turn).take(9))
    assert len(prewarms.pending) == limit


def test_a_prewarm_that_its_loads_put_off_lacks_no_blocks() -> None:
    tier = Tier(64, 64, load_s=1.0, max_load_stall_ms=0.0)
    tier.demoted("abcd")
    prewarm: Any = Turn("p", "abcd", prewarm=True)
    tier.begin()
    assert not tier.pool.is_loading(prewarm, True)
    hit = tier.find("abcd")
    assert tier.try_promote(hit, request=prewarm, among_others=True) is None
    # As upstream's scheduler does where allocate_slots has given nothing.
    manager = SimpleNamespace(block_size=BLOCK, get_num_skipped_tokens=lambda n: 0)
    tier.pool.load_ahead([manager], (hit,), 4 * BLOCK)
    assert not tier.pool.conversations.must_wait(prewarm)
    # The next one does.
    other: Any = Turn("q", "xy", conversation="c")
    assert not tier.pool.is_loading(other, True)
    tier.pool.load_ahead([], (), 0)
    assert tier.pool.conversations.must_wait(prewarm)


def test_what_earlier_turns_computed_and_a_running_one_uses_follows() -> None:
    tier = Tier(12)
    serve(tier, Turn("0", "xyz"), "xyz")
    serve(tier, Turn("1", "abcd", conversation="c"), "abcd")
    turn = Turn("2", "abcdef", conversation="c")
    blocks = computes(tier, turn, "abcdef", 4)
    assert tier.pool.conversations.end_conversation("c", None) == {
        "released_blocks": 0,
        "running_requests": 1,
    }
    tier.free(reversed(blocks))
    turn.has_ended = True
    assert victims(tier, 3 + 6, "abcdefxyz") == "abcdef"
    assert_nothing_leaks(tier)


def test_a_large_conversation_is_released_in_steps_with_the_end_first() -> None:
    num = 2 * KEYS_PER_STEP + 100
    names = "".join(chr(0x4E00 + i) for i in range(num))
    tier = Tier(num + 20, num)
    serve(tier, Turn("0", "xyz"), "xyz")
    serve(tier, Turn("1", names, conversation="c"), names)
    tier.begin()
    told = tier.pool.conversations.end_conversation("c", None)
    assert told == {"released_blocks": num, "running_requests": 0}
    assert tier.pool.take_stats().released_blocks == KEYS_PER_STEP
    tier.end()
    # What is used meanwhile is spared, as is what comes before it.
    serve(tier, Turn("2", names[-1:]), names[-1:], 1)
    tier.idle(2)
    assert tier.pool.take_stats().released_blocks == num - KEYS_PER_STEP - 1
    gone = victims(tier, 10, names + "xyz")
    assert gone == names[-11:-1]
    assert_nothing_leaks(tier)


def test_slots_of_a_large_conversation_make_room_from_the_end() -> None:
    num = KEYS_PER_STEP + 50
    names = "".join(chr(0x4E00 + i) for i in range(num))
    tier = Tier(num, num)
    serve(tier, Turn("1", names, conversation="c"), names)
    victims(tier, num, "")
    tier.pool.conversations.end_conversation("c", None)
    tier.idle(2)
    tier.demoted("abc")
    left = [name for name in names if tier.where(name) == "host"]
    assert left == list(names[:-3])


class Large(Turn):
    """What a request holds."""

    def __init__(self, *args: Any, **hints: Any) -> None:
        super().__init__(*args, **hints)
        self.cache_salt = "s" * (1 << 20) + self.request_id
        self.mm_features = bytearray(1 << 20)


@pytest.mark.parametrize(
    "hints",
    [
        *({"prewarm": True}, {"conversation": "c"}, {"release": True}),
        *({"retain": {"priority": 10}}, {"retain": {"priority": 90}}),
        *({"max_load_tokens": 1}, {"tenant": "t" * 256}, {"store": False}),
    ],
    ids=lambda hints: next(iter(hints)),
)
@pytest.mark.parametrize("is_served", [True, False], ids=["served", "aborted"])
def test_nothing_of_a_request_outlives_it(
    hints: dict[str, Any], is_served: bool
) -> None:
    """Neither the request, nor names and salts of any length."""
    tier = Tier(40)
    gone = []
    tracemalloc.start()
    try:
        for i in range(30):
            if i == 10:
                before = tracemalloc.get_traced_memory()[0]
            turn = Large(str(i), chr(0x4E00 + i), **hints)
            gone.append(weakref.ref(turn))
            if is_served:
                serve(tier, turn, chr(0x4E00 + i))
            else:
                tier.begin()
                assert not tier.pool.is_loading(turn, False)  # type: ignore[arg-type]
                tier.end()
            turn.has_ended = True
            tier.requests.clear()
            del turn
            tier.idle()
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert not any(turn() for turn in gone)
    assert kept < 1 << 20


def test_names_of_conversations_do_not_pile_up() -> None:
    tier = Tier(8)
    releasing: Any = tier.pool.conversations
    releasing._turns.max_bytes = 10_000
    for i in range(1000):
        releasing.follow(Turn(str(i), "", conversation=f"c{i}"))
    assert releasing._turns.num_bytes <= 10_000


@pytest.mark.parametrize(
    "params",
    [
        *(5, [{"a": 1}], "kv_tier", ["kv_tier"], {"kv_tier": 5}, {"kv_tier": [[[]]]}),
        {"kv_tier": {"retain": {"priority": 80, "ttl": 10**400}}},
        {"kv_tier": {"retain": {"priority": 80, "ttl": 10**6000}}},
        {"kv_tier": {"conversation": "\ud800"}},
        {"max_load_tokens": "x"},
    ],
    ids=lambda _: "",
)
def test_whatever_was_sent_does_not_end_the_scheduler(params: Any) -> None:
    tier = Tier(8, quotas={"t": 0.5})
    turn = Turn("1", "ab")
    turn.kv_transfer_params = params
    turn.cache_salt = ["no", "string"]  # type: ignore[assignment]
    serve(tier, turn, "ab")
    serve(tier, Turn("2", "ab"), "ab", 2)
    assert_nothing_leaks(tier)


def test_what_may_be_loaded_is_worked_out_once() -> None:
    tier = Tier(8)
    names = "".join(chr(0x4E00 + i) for i in range(5000))
    turn: Any = Turn("1", names, max_load_tokens=2500 * BLOCK)
    may_load = tier.pool.conversations.make_load_filter(turn)
    assert may_load is not None
    assert may_load(hash_of(names[2499])) and not may_load(hash_of(names[2500]))
    begin = process_time()
    for _ in range(1000):
        tier.pool.conversations.make_load_filter(turn)
    assert process_time() - begin < 0.1
    turn.kv_transfer_params = {"max_load_tokens": 10**12}
    tier.pool.conversations._hinted.clear()
    assert tier.pool.conversations.make_load_filter(turn) is None


def loaded(tier: Tier, turn: Turn, names: str, has_room: bool = True) -> int:
    """A step that looks at a waiting request. Returns how many blocks it loads."""
    tier.begin()
    if not tier.pool.is_loading(turn, True):  # type: ignore[arg-type]
        found = [tier.pool.get_cached_block(h, [0]) for h in hashes(names)]
        hit = [f[0] for f in found[: [*found, None].index(None)] if f]
        if has_room:
            if promoted := tier.try_promote(hit, request=turn, among_others=True):
                tier.pool.touch(promoted[0])
                turn.has_ended = True
        else:
            manager = SimpleNamespace(
                block_size=BLOCK, get_num_skipped_tokens=lambda n: 0
            )
            tier.pool.load_ahead([manager], (hit,), len(hit) * BLOCK)
    plan = tier.end()
    return len(plan.load_blocks) + len(plan.ahead_blocks)


@pytest.mark.parametrize("has_room", [True, False])
def test_no_more_is_loaded_while_a_request_waits_than_it_may(has_room: bool) -> None:
    """What was loaded for it is the device's when it is looked at again."""
    tuning = {"min_prefetch": 1}
    tier = Tier(64, 64, load_s=1.0, max_load_stall_ms=0.0, tuning=tuning)
    names = "abcdefghijklmnop"
    tier.demoted(names)
    turn = Turn("1", names, max_load_tokens=2 * BLOCK)
    tier.requests.append(turn)
    num_loaded = 0
    for _ in range(6):
        if not turn.has_ended:
            num_loaded += loaded(tier, turn, names, has_room)
            tier.now += 100
    assert num_loaded == 2
