# SPDX-License-Identifier: Apache-2.0
"""Tells model runner V2 how far its requests have jumped.

It counts the computed tokens of each request on the device, where each step adds what
it has computed. Of what the scheduler sends it only keeps a copy on the host.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.states import RequestState


def stage_jumps(states: "RequestState", step: "SchedulerOutput") -> None:
    """Stage the scheduler's count for the requests that jump in `step`.

    A prefill rejects no token, so at the end of the steps before, the device has what
    the scheduler had. The caller applies the staged writes once, with those of the
    requests that `step` adds: for each time that they are applied, upstream has one
    buffer for each step in flight.

    Args:
        states: Of the requests of a rank, without those that `step` adds.
        step: A step with or without a plan.

    """
    plan = step.kv_tier_plan
    if plan is None or not plan.jumped:
        return
    cached = step.scheduled_cached_reqs
    for req_id, num_tokens in zip(cached.req_ids, cached.num_computed_tokens):
        if req_id in plan.jumped:
            index = states.req_id_to_index[req_id]
            states.num_computed_tokens.stage_write_elem(index, num_tokens)
