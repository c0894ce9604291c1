# SPDX-License-Identifier: Apache-2.0
"""A tenant who floods is not counted, and takes what a quota leaves."""

import pytest

from sizing.flood import flooded
from sizing.replay import Outcome, Tier, replay
from sizing.shift import shifted

from .test_sizing import BLOCK_BYTES, chat, engine

CALLS = chat(200)


def beside_a_flood(times: float, quota: float, num_slots: int = 2400) -> Outcome:
    """The device has what runs at once, and hardly more."""
    tier = Tier(num_slots * BLOCK_BYTES, "lru", quota=quota)
    return replay(engine(150), tier, flooded(shifted([], CALLS), times).calls)


def test_a_flood_comes_beside_the_trace_and_is_not_counted() -> None:
    work = flooded(shifted(chat(20, seed=1), CALLS), 2.0)
    assert len(work.counted) == len(CALLS) and work.num_before == 20
    floods = [call for call in work.calls if call.floods]
    tokens = sum(call.input_tokens for call in work.counted)
    assert sum(call.input_tokens for call in floods) == pytest.approx(
        2 * tokens, rel=0.05
    )
    assert floods[0] == floods[1] != floods[2]
    times = [call.arrival_s for call in work.calls]
    assert times == sorted(times)
    theirs = {i for call in floods for i in call.hash_ids}
    assert not theirs & {i for call in work.counted for i in call.hash_ids}
    assert flooded(work, 0).counted == work.counted


def test_a_flood_takes_nothing_of_what_lies_within_a_share() -> None:
    alone = beside_a_flood(0, quota=0)
    assert beside_a_flood(20, quota=0).hit_rate < 0.8 * alone.hit_rate
    # All that the trace has takes less than half of the host.
    assert beside_a_flood(20, quota=0.5).hit_rate >= 0.95 * alone.hit_rate
