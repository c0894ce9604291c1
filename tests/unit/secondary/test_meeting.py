# SPDX-License-Identifier: Apache-2.0
"""What is fetched for a request that computes meanwhile, and where its steps end."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_tier.eviction.policies import LRU
from vllm.v1.kv_tier.layout import SecondaryLayout, SecondaryTier
from vllm.v1.kv_tier.scheduler.costs import Costs
from vllm.v1.kv_tier.scheduler.secondary.fetches import Fetch, SecondaryBlock
from vllm.v1.kv_tier.scheduler.secondary.meeting import Meetings
from vllm.v1.kv_tier.scheduler.secondary.tier import PoolView, Tier
from vllm.v1.kv_tier.scheduler.slots import SlotTable
from vllm.v1.kv_tier.tuning import SchedulingTuning

SIZE = 16
PREFILL_S = 1.0
"""Seconds to compute a block."""


class Lookup:
    ask_s = 0.0


class Request:
    num_computed_tokens = 0
    num_tokens = 10**6
    finished = False

    def is_finished(self) -> bool:
        return self.finished


class Engine:
    """A request of `num_blocks` full blocks, all of which a tier has."""

    def __init__(self, num_blocks: int, fetch_s: float, **options: Any) -> None:
        self.now = 0.0
        self.begun: list[Fetch] = []
        self.fetched: list[list[int]] = []
        """Indices of the blocks of each piece."""
        self.room = options.pop("room", 10**6)
        self.by_key: dict[bytes, Fetch] = {}
        self.costs = Costs(0.0, 0.0, tokens_per_block=SIZE)
        self.costs.prefill_s = PREFILL_S
        self.costs.clock = lambda: self.now
        self.there: set[bytes] = set()
        tier = SecondaryTier(*("/kv", "fs", "LOCAL"), Lookup(), 1, 5.0)
        max_job = options.pop("max_job", 4)
        pool = PoolView(
            SecondaryLayout((tier,), 1, (SIZE,), 4, max_job, 64, SIZE),
            SIZE,
            SlotTable(1, LRU(1)),
            self.costs,
            lambda key: key in self.there,
            SchedulingTuning(**{"meet_tokens": 2 * SIZE, "fetch_job_s": 0.0} | options),
            can_jump=True,
        )
        self.tier = Tier(0, tier, pool)
        self.tier.fetch_s = fetch_s
        self.meetings = Meetings(pool, self)  # type: ignore[arg-type]
        self.request: Any = Request()
        self.blocks = [
            SecondaryBlock(self.key(i), (i + 1) * SIZE, self.tier)  # type: ignore[arg-type]
            for i in range(num_blocks)
        ]

    @staticmethod
    def key(index: int) -> Any:
        return b"%d" % index

    def meet(self) -> None:
        self.begin_for(self.request)

    def begin_for(self, request: Any) -> None:
        wanted = [(block.key, block.num_tokens) for block in self.blocks]
        found = {block.key: block for block in self.blocks}
        self.meetings.begin(request, wanted, found)

    def begin(self, blocks: Sequence[SecondaryBlock], from_end: bool) -> Fetch | None:
        """As `Fetches.begin`."""
        assert from_end
        num = min(self.room, len(blocks))
        if not num:
            return None
        self.room -= num
        fetch = Fetch(blocks[len(blocks) - num :])
        self.begun.append(fetch)
        self.fetched.append([block.num_tokens // SIZE - 1 for block in fetch.blocks])
        self.by_key |= {block.key: fetch for block in fetch.blocks}
        self.tier.begin_fetch(num)
        return fetch

    def come(self, number: int, is_there: bool = True) -> None:
        fetch = self.begun[number - 1]
        fetch.is_over = True
        for block in fetch.blocks:
            del self.by_key[block.key]
            if is_there:
                self.there.add(block.key)
        self.tier._under_way.popleft()
        self.tier.num_under_way -= len(fetch.blocks)

    def cut(self, start: int, num_tokens: int, may_wait: bool = False) -> int:
        cut = self.meetings.cut
        return cut(self.request, self.key, start, num_tokens, may_wait)


def test_pieces_are_begun_from_the_end_as_far_as_they_arrive_in_time() -> None:
    engine = Engine(16, fetch_s=PREFILL_S)
    engine.meet()
    assert engine.fetched == [[12, 13, 14, 15], [8, 9, 10, 11]]


def test_a_faster_tier_gets_more() -> None:
    engine = Engine(16, fetch_s=PREFILL_S / 3)
    engine.meet()
    assert sum(engine.fetched, [])[-1:] == [7] and len(sum(engine.fetched, [])) == 12


def test_a_tier_of_unknown_speed_is_taken_for_as_fast_as_computing() -> None:
    engine = Engine(16, fetch_s=0.0)
    engine.meet()
    assert len(sum(engine.fetched, [])) == 8


def test_a_tier_that_never_wins_is_tried_now_and_then() -> None:
    engine = Engine(4, fetch_s=100 * PREFILL_S, first_fetch=2, remeasure_s=10.0)
    engine.now = 1000.0
    engine.meet()
    assert engine.fetched == [[2, 3]]
    engine.come(1, is_there=False)
    engine.meet()
    assert len(engine.fetched) == 1
    engine.now += 10
    engine.meet()
    assert len(engine.fetched) == 2


def test_what_others_fetch_is_not_fetched_again() -> None:
    engine = Engine(16, fetch_s=PREFILL_S)
    engine.meet()
    other: Any = Request()
    engine.begin_for(other)
    assert len(engine.fetched) == 2
    assert engine.meetings.cut(other, engine.key, 0, 1000, False) == 8 * SIZE


def test_a_step_ends_where_the_pieces_begin() -> None:
    engine = Engine(16, fetch_s=PREFILL_S)
    engine.meet()
    assert engine.cut(0, 5 * SIZE) == 5 * SIZE
    assert engine.cut(0, 1000) == 8 * SIZE


def test_a_step_ends_at_what_has_come() -> None:
    engine = Engine(16, fetch_s=PREFILL_S)
    engine.meet()
    engine.come(1)
    engine.come(2)
    assert engine.cut(0, 1000) == 8 * SIZE
    engine.there.add(engine.key(3))
    assert engine.cut(0, 1000) == 3 * SIZE
    assert engine.cut(5, 1000) == 3 * SIZE - 5


def test_behind_the_back_nothing_is_cut() -> None:
    engine = Engine(16, fetch_s=PREFILL_S)
    engine.meet()
    assert engine.cut(16 * SIZE, 1000) == 1000
    engine.meetings.forget()
    assert engine.cut(0, 1000) == 1000


def test_a_piece_that_arrives_soon_is_waited_for() -> None:
    engine = Engine(16, fetch_s=PREFILL_S)
    engine.meet()
    # It is due after the eight blocks that are fetched.
    engine.now = 7.0
    assert engine.cut(8 * SIZE, 1000, may_wait=True) == 0
    assert engine.meetings.is_waiting
    engine.meetings.end_step()
    assert not engine.meetings.is_waiting
    assert engine.cut(8 * SIZE, 1000, may_wait=False) == 2 * SIZE


def test_a_late_piece_is_computed_in_steps_that_grow() -> None:
    engine = Engine(64, fetch_s=PREFILL_S, max_job=32)
    engine.meet()
    assert engine.fetched == [[*range(32, 64)]]
    engine.now = 1000.0
    front, steps = 32 * SIZE, []
    while front < 64 * SIZE:
        steps.append(engine.cut(front, 10_000, may_wait=True) // SIZE)
        front += steps[-1] * SIZE
    assert steps[:4] == [2, 4, 8, 16] and len(steps) == 5
    engine.cut(63 * SIZE, 10_000)
    engine.request.num_computed_tokens = 64 * SIZE
    engine.meetings.go_on()
    assert not engine.meetings


def test_a_late_piece_is_computed_in_steps_that_are_worth_their_launch() -> None:
    engine = Engine(32, fetch_s=PREFILL_S, max_job=32)
    engine.costs.join_s = {6: 2.5 * PREFILL_S}
    engine.meet()
    assert engine.fetched == [[*range(16, 32)]]
    engine.now = 1000.0
    assert engine.cut(16 * SIZE, 16 * SIZE) == 5 * SIZE
    assert engine.cut(21 * SIZE, 11 * SIZE) == 10 * SIZE


def test_a_request_meets_its_back_once() -> None:
    engine = Engine(16, fetch_s=PREFILL_S)
    assert not engine.meetings.is_first_jump(engine.request)
    engine.meet()
    engine.request.num_computed_tokens = 8 * SIZE
    assert engine.meetings.is_first_jump(engine.request)
    assert not engine.meetings.is_first_jump(engine.request)
    # A jump behind the back is over what others have computed.
    other: Any = Request()
    engine.begin_for(other)
    other.num_computed_tokens = 16 * SIZE
    assert not engine.meetings.is_first_jump(other)


def test_what_is_overtaken_is_counted() -> None:
    engine = Engine(16, fetch_s=PREFILL_S)
    engine.meet()
    assert engine.cut(12 * SIZE, 1000, may_wait=False) > 0
    assert engine.tier.stats.overtaken_blocks == 4


def test_more_is_begun_when_there_is_room() -> None:
    engine = Engine(16, fetch_s=PREFILL_S / 100, room=3)
    engine.meet()
    assert engine.fetched == [[13, 14, 15]]
    engine.room = 100
    engine.come(1)
    engine.meetings.go_on()
    assert engine.fetched[1] == [9, 10, 11, 12]


def test_nothing_is_fetched_that_the_front_has_passed() -> None:
    engine = Engine(16, fetch_s=PREFILL_S, room=0)
    engine.meet()
    engine.room, engine.request.num_computed_tokens = 100, 14 * SIZE
    engine.meetings.go_on()
    assert engine.fetched == [[15]]


def test_a_request_that_ended_is_forgotten() -> None:
    engine = Engine(16, fetch_s=PREFILL_S)
    engine.meet()
    engine.request.finished = True
    engine.meetings.go_on()
    assert not engine.meetings
