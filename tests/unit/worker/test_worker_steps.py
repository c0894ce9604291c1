# SPDX-License-Identifier: Apache-2.0
"""What a rank makes of a step: copies by layers or by blocks, and times."""

import time
from collections import Counter
from functools import partial

import pytest

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_tier.plan import PrefillTime, StepPlan, StepReport
from vllm.v1.kv_tier.tuning import RankTuning
from vllm.v1.kv_tier.worker.copies import Copies, InOrder
from vllm.v1.kv_tier.worker.layers import LayerWaits

from ..rank import Rank, fail_once, output, same, step, with_order
from ..rank import rank as rank


class Recorder(InOrder):
    """Keeps what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.layerwise: list[bool] = []
        self.num_tokens: list[int] = []
        self.num_breaks = [0, 0, 0]
        self.prefill = PrefillTime(0, 0.0)
        self.all_waited = True

    def begin_step(self, plan: StepPlan, copies: Copies, layerwise: bool) -> None:
        self.layerwise.append(layerwise)
        self.copies = copies
        for i, copy in enumerate((copies.store, copies.load, copies.load_ahead)):
            copy(partial(self._count, i))

    def _count(self, i: int) -> None:
        self.num_breaks[i] += 1

    def end_step(self) -> bool:
        return self.all_waited

    def take_prefill_time(self, num_tokens: int) -> PrefillTime:
        self.num_tokens.append(num_tokens)
        return self.prefill


LOAD = {"load_slots": [0], "load_blocks": [1]}


def test_copies_go_by_layers_where_a_step_waits_else_by_blocks(rank: Rank) -> None:
    # Keys, values, and the other layer: 60, 60 and 28 bytes of each block.
    order, waits = Recorder(), LayerWaits({}, max_decode_tokens=1)
    small = RankTuning(part_bytes=130, load_chunk_bytes=150, store_chunk_bytes=150)
    tier = with_order(rank, order, waits, small)
    one, two = rank.block(1), rank.block(2)
    tier.begin_step(step(1, store_slots=[0, 1], store_blocks=[1, 2]))
    tier.begin_step(step(2, ahead_slots=[0], ahead_blocks=[3]))
    # Two blocks of two regions are more than a part, one block of all is a chunk.
    tier.begin_step(step(3, [5], load_slots=[1, 0], load_blocks=[4, 5]))
    # There is no break after the last part: whoever waits for loads at breaks would
    # wait for others although all is copied.
    assert order.num_breaks == [1, 1, 0]
    assert order.copies.load_parts == [range(0, 2), range(2, 3)]
    assert same(rank.block(3), one)
    assert same(rank.block(4), two) and same(rank.block(5), one)
    tier = with_order(rank, order, waits, RankTuning(part_bytes=1))
    tier.begin_step(step(4, [5], **LOAD))
    assert order.copies.load_parts == [range(0, 1), range(1, 2), range(2, 3)]


@pytest.mark.parametrize("num_blocks, is_long", [(2, False), (3, True)])
def test_long_launches_are_left_to_a_thread(
    rank: Rank, num_blocks: int, is_long: bool
) -> None:
    # 5 us a piece, of three regions.
    tuning = RankTuning(long_launch_s=40e-6)
    order = Recorder()
    ids = list(range(num_blocks))
    with_order(rank, order, tuning=tuning).begin_step(
        step(1, load_slots=ids, load_blocks=ids)
    )
    assert order.copies.load_launches_long == is_long


@pytest.mark.parametrize(
    "output, is_layerwise",
    [
        (step(1, [5], **LOAD), True),
        (step(1, [1, 2], **LOAD), True),
        # One CUDA graph may hold such a step.
        (step(1, [1, 1], **LOAD), False),
        (step(1, **LOAD), False),
        # They come before the first layer.
        (step(1, [5], copies_on_write=["a copy"], **LOAD), False),
        (step(1, [5], ahead_slots=[0], ahead_blocks=[1]), False),
        (step(1, [5]), False),
    ],
)
def test_when_layers_wait_for_their_own_loads(
    rank: Rank, output: SchedulerOutput, is_layerwise: bool
) -> None:
    order = Recorder()
    with_order(rank, order, LayerWaits({}, max_decode_tokens=1)).begin_step(output)
    with_order(rank, order).begin_step(output)
    assert order.layerwise == [is_layerwise, False]


def test_a_layer_that_did_not_wait_fails_its_step(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    order = Recorder()
    tier = with_order(rank, order, LayerWaits({}, max_decode_tokens=1))
    tier.begin_step(step(1, [5], **LOAD))
    report = tier.end_step(output()).kv_tier_report
    assert report is not None and report.failed_load_seq is None
    tier.begin_step(step(2, [5], **LOAD))
    order.all_waited = False
    # No model output yet: `sample_tokens` brings it.
    assert tier.end_step(None) is None
    assert "layerwise_loads" in caplog.text
    found = tier.attach_report(output()).kv_tier_report
    assert found is not None and found.failed_load_seq == 2
    assert found.failures == Counter(layer_wait=1)
    # Once is enough.
    order.all_waited = True
    tier.begin_step(step(3, [5], **LOAD))
    assert tier.end_step(output()).kv_tier_report is None
    assert order.layerwise == [True, True, False]


@pytest.mark.parametrize(
    "output, num_tokens",
    [
        (step(1, [1024]), 1024),
        (step(1, [1023]), 0),
        (step(1, [1000, 80, 80]), 1160),
        # Most of its requests decode.
        (step(1, [1024, *[1] * 16]), 0),
        # It waits for loads.
        (step(1, [1024], **LOAD), 0),
        (step(1, [1024], compute_after_loads=1), 0),
        # Beside which others load.
        (step(1, [1024], ahead_slots=[0], ahead_blocks=[1]), 1024),
    ],
)
def test_which_steps_tell_what_prefill_costs(
    rank: Rank, output: SchedulerOutput, num_tokens: int
) -> None:
    order = Recorder()
    with_order(rank, order).begin_step(output)
    assert order.num_tokens == [num_tokens]


def test_what_prefill_costs_travels_with_the_next_output(rank: Rank) -> None:
    order = Recorder()
    tier = with_order(rank, order)
    order.prefill = PrefillTime(2048, 0.25)
    tier.begin_step(step(1))
    tier.end_step(None)
    # Of all steps since the last output.
    tier.begin_step(step(2))
    found = tier.end_step(output()).kv_tier_report
    assert found == StepReport(prefill=PrefillTime(4096, 0.5))
    order.prefill = PrefillTime(0, 0.0)
    tier.begin_step(step(3))
    assert tier.end_step(output()).kv_tier_report is None


@pytest.mark.parametrize(
    "tokens, counts",
    [([5], True), ([1, 1, 5], True), ([1, 1], False), ([1024], False)],
)
def test_what_it_takes_a_request_to_join(
    rank: Rank, tokens: list[int], counts: bool
) -> None:
    tier = with_order(rank, Recorder(), LayerWaits({}, max_decode_tokens=1))
    tier.begin_step(step(1, tokens))
    time.sleep(0.01)
    report = tier.end_step(output()).kv_tier_report
    assert (report is not None) == counts
    if report is not None:
        (size, seconds), *others = report.joins.items()
        assert size == 3 and 0.01 <= seconds < 60 and not others


def full_report(rank: Rank) -> StepReport:
    report = rank.tier.end_step(output()).kv_tier_report
    assert report is not None
    return report


def test_every_copy_tells_its_time_once(rank: Rank) -> None:
    rank.run(1, store_blocks=[1, 2], store_slots=[0, 1])
    rank.run(2, load_slots=[0], load_blocks=[3], ahead_slots=[1], ahead_blocks=[4])
    times = full_report(rank).times
    # The step waits for its loads: that is its stall.
    assert {key: time.num_blocks for key, time in times.items()} == {
        ("store", 1): 2,
        ("load", 2): 1,
        ("stall", 2): 1,
        ("load_ahead", 2): 1,
    }
    assert all(time.seconds > 0 for time in times.values())
    assert times["stall", 2] == times["load", 2]
    rank.run(3)
    assert rank.tier.end_step(output()).kv_tier_report is None


def test_a_copy_that_failed_counts_no_blocks(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, rank, "stores")
    rank.run(1, store_blocks=[1, 2], store_slots=[0, 1])
    rank.run(2, load_slots=[1], load_blocks=[3])
    rank.run(3, ahead_slots=[1], ahead_blocks=[3])
    found = full_report(rank)
    assert found.failures == {"store": 1, "load": 2}
    keys = ("store", 1), ("load", 2), ("load_ahead", 3)
    assert [found.times[key].num_blocks for key in keys] == [0, 0, 0]
    # What failed before says nothing of what follows.
    rank.run(4, store_blocks=[1], store_slots=[1])
    assert full_report(rank).times["store", 4].num_blocks == 1


def test_where_nothing_is_queued_a_step_has_taken_what_passed() -> None:
    order = InOrder()
    assert order.take_prefill_time(2048) == PrefillTime(0, 0.0)
    time.sleep(0.01)
    assert order.end_step()
    taken = order.take_prefill_time(0)
    assert taken.num_tokens == 2048 and taken.seconds >= 0.01
    # A step of no interest is not told.
    assert order.end_step()
    assert order.take_prefill_time(0) == PrefillTime(0, 0.0)
