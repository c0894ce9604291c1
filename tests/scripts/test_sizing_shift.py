# SPDX-License-Identifier: Apache-2.0
"""What ran before a trace fills the tiers, shares nothing, and is not counted."""

from sizing.replay import Tier, replay
from sizing.shift import agents, shifted
from sizing.trace import ID_TOKENS

from .test_sizing import BLOCK_BYTES, chat, engine


def test_ids_and_arrivals_go_on_behind() -> None:
    before, calls = chat(20), chat(30, seed=1)
    work = shifted(before, calls)
    assert work.calls[:20] == tuple(before) and len(work.counted) == 30
    old = {i for call in before for i in call.hash_ids}
    assert not old & {i for call in work.counted for i in call.hash_ids}
    times = [call.arrival_s for call in work.calls]
    assert times == sorted(times)
    lengths = [(call.input_tokens, call.output_tokens) for call in work.counted]
    assert lengths == [(call.input_tokens, call.output_tokens) for call in calls]


def test_nothing_before_is_the_trace_itself() -> None:
    calls = chat(20)
    assert shifted([], calls).counted == tuple(calls)


def test_only_what_follows_is_counted() -> None:
    calls = chat(60, seed=1)
    work = shifted(chat(60), calls)
    tier = Tier(10_000 * BLOCK_BYTES, "lru")
    alone = replay(engine(300), tier, calls)
    behind = replay(engine(300), tier, work.calls, work.num_before)
    assert behind.prompt_blocks == alone.prompt_blocks
    # All fits, and nothing of what ran before is of use.
    assert behind.hit_rate == alone.hit_rate


def test_agents_go_on_where_they_were() -> None:
    calls = agents(5, seconds=600)
    assert calls == agents(5, seconds=600) != agents(5, seconds=600, seed=1)
    assert all(call.input_tokens == ID_TOKENS * len(call.hash_ids) for call in calls)
    times = [call.arrival_s for call in calls]
    assert times == sorted(times) and times[-1] <= 600
    seen: set[int] = set()
    goes_on = 0
    for call in calls:
        goes_on += call.hash_ids[8] in seen
        seen.update(call.hash_ids)
    assert goes_on > 0.8 * len(calls)
