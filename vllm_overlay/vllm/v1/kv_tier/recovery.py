# SPDX-License-Identifier: Apache-2.0
"""What the scheduler does when loads failed: what they were for starts over."""

import time
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

# Of a request whose prompt comes in parts, in releases that have such requests.
_BETWEEN_INPUTS = getattr(RequestStatus, "WAITING_FOR_STREAMING_REQ", None)


def start_over(scheduler: "Scheduler") -> None:
    """Let every request that holds blocks compute them again.

    Running requests are preempted, as for a reset of the prefix cache, and drop what
    they have in flight. The others hold blocks because a KV connector loads, or has
    loaded, what follows in their prompt.
    """
    while scheduler.running:
        scheduler._preempt_request(scheduler.running.pop(), time.monotonic())
    get_block_ids = scheduler.kv_cache_manager.get_block_ids
    for request in scheduler.requests.values():
        # Where upstream does not count them, the scheduler drops all that is void.
        request.drop_stale_output = getattr(request, "num_stale_output_tokens", 0) > 0
        if request.is_finished() or not any(get_block_ids(request.request_id)):
            continue
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            # The connector still writes to its blocks: they are freed when it ends.
            scheduler.failed_recving_kv_req_ids.add(request.request_id)
        elif request.status == _BETWEEN_INPUTS:
            # It has read its blocks, so its report came before it waited.
            continue
        else:
            scheduler._free_request_blocks(request)
        request.num_computed_tokens = 0
    # Not all releases ask who was in the step before.
    getattr(scheduler, "prev_step_scheduled_req_ids", set()).clear()
