# SPDX-License-Identifier: Apache-2.0
"""Loads that always fail, and blocks that are gone for good.

A failed load costs time: every request that runs starts over. That must not go on for
ever, and a request that no longer fits must hear of it.
"""

from typing import Any

import pytest

from vllm.v1.engine import FinishReason
from vllm.v1.kv_tier.plan import StepPlan, StepReport

from . import upstream
from .served import Served

BLOCKS = 40
NUM_DOCUMENTS = 60


def failed(plan: StepPlan) -> StepReport | None:
    """All loads of a plan failed."""
    if not plan.load_blocks and not plan.ahead_blocks:
        return None
    report = StepReport(failed_load_seq=plan.seq)
    report.failures["load"] += 1
    return report


def step_with_failing_loads(served: Served) -> bool:
    """Returns whether loads failed."""
    output: Any = served.scheduler.schedule()
    report = failed(output.kv_tier_plan)
    served.finish(output, report)
    return report is not None


def on_host(**config: Any) -> Served:
    """The host has all documents, the device has the last of them."""
    served = Served(400, 4096, load_s=1e-6, max_model_len=8192, config=config)
    for document in range(NUM_DOCUMENTS):
        served.serve(10 + document, BLOCKS, max_tokens=2)
    return served


@pytest.mark.parametrize("max_load_stall_ms", [None, 0.0])
def test_running_requests_do_not_start_over_for_ever(
    max_load_stall_ms: float | None,
) -> None:
    """Every load fails, in its step or ahead of it, and a request that hits the host
    comes every other step."""
    served = on_host(max_load_stall_ms=max_load_stall_ms)
    running = served.add(900, 4, max_tokens=3000)
    others = []
    num_failed = 0
    for i in range(200):
        if i % 2 == 0:
            others.append(served.add(10 + i // 2 % 50, BLOCKS, max_tokens=2, end=500))
        num_failed += step_with_failing_loads(served)
    assert num_failed, "nothing was loaded"
    assert running.num_preemptions <= 10
    assert running.num_output_tokens >= 150
    assert sum(other.is_finished() for other in others) >= 80


def test_loads_are_tried_again_after_a_while() -> None:
    """Whatever it was, it may be over."""
    served = on_host(max_load_stall_ms=None)
    served.add(900, 4, max_tokens=3000)
    for i in range(40):
        if i % 2 == 0:
            served.add(10 + i // 2, BLOCKS, max_tokens=2, end=500)
        step_with_failing_loads(served)
    num_loaded = 0
    for i in range(4000):
        if i % 2 == 0:
            served.add(40 + i // 2 % 20, BLOCKS, max_tokens=2, end=500)
        plan = served.step().kv_tier_plan
        num_loaded += len(plan.load_blocks) + len(plan.ahead_blocks)
        # An hour at most, in steps of a second.
        served.now += 1.0
        if num_loaded:
            break
    assert num_loaded


def test_one_failure_is_not_the_end() -> None:
    """Nothing is given up for it."""
    served = on_host(max_load_stall_ms=None)
    served.add(900, 4, max_tokens=3000)
    served.step()
    served.add(10, BLOCKS, max_tokens=2, end=500)
    assert step_with_failing_loads(served)
    served.add(30, BLOCKS, max_tokens=2, end=500)
    plan = served.step().kv_tier_plan
    assert plan.load_blocks or plan.ahead_blocks


# -------------------------------------------------------------- blocks that are gone


def with_lost_blocks(num_lost: int) -> Served:
    """A device of 400 blocks, of which a copy that hangs has taken some."""
    served = Served(400, 4096, load_s=1e-6, max_model_len=300 * 16)
    served.serve(10, BLOCKS)
    output = served.scheduler.schedule()
    lost = StepReport(lost_blocks=[*range(1, num_lost + 1)])
    served.finish(output, lost)
    return served


def told(served: Served, num_steps: int) -> dict[str, FinishReason]:
    """How requests ended within `num_steps`, as their clients heard of it."""
    reasons: dict[str, FinishReason] = {}
    for _ in range(num_steps):
        # Those of the step before this call, too.
        for output in served.outputs:
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
        if not served.scheduler.has_unfinished_requests():
            break
        served.step()
    return reasons


def test_a_prompt_that_no_longer_fits_gets_an_error() -> None:
    served = with_lost_blocks(200)
    long = served.add(20, 250, max_tokens=4)
    assert told(served, 60) == {long.request_id: upstream.ERROR}
    assert not served.scheduler.has_unfinished_requests()


def test_one_that_waited_when_the_blocks_were_lost_gets_an_error_too() -> None:
    served = Served(400, 4096, load_s=1e-6, max_model_len=300 * 16)
    served.add(30, 200, max_tokens=40)
    for _ in range(2):
        served.step()
    # It waits for room.
    long = served.add(20, 250, max_tokens=4)
    output = served.scheduler.schedule()
    served.finish(output, StepReport(lost_blocks=[*range(200, 400)]))
    reasons = told(served, 300)
    assert reasons[long.request_id] == upstream.ERROR
    assert not served.scheduler.has_unfinished_requests()


def test_an_answer_that_no_longer_fits_ends() -> None:
    """Its prompt fits, but not all that it asks for: it is preempted when the last
    block is taken, and alone that would go on for ever."""
    served = with_lost_blocks(200)
    long = served.add(20, 180, max_tokens=1000)
    reasons = told(served, 2000)
    assert reasons.keys() == {long.request_id}
    assert reasons[long.request_id] in (upstream.ERROR, FinishReason.LENGTH)
    assert not served.scheduler.has_unfinished_requests()


def test_those_behind_one_that_no_longer_fits_go_on() -> None:
    served = with_lost_blocks(200)
    long = served.add(20, 250, max_tokens=4)
    short = served.add(21, 20, max_tokens=4)
    reasons = told(served, 60)
    assert reasons.get(short.request_id) == FinishReason.LENGTH
    assert reasons.get(long.request_id) == upstream.ERROR


def test_what_still_fits_is_served() -> None:
    served = with_lost_blocks(50)
    long = served.add(20, 295, max_tokens=4)
    assert told(served, 60) == {long.request_id: FinishReason.LENGTH}
