# SPDX-License-Identifier: Apache-2.0
"""What the scheduler does when loads fail or hang.

Requests that used failed loads start over. Device blocks that a hanging load may still
overwrite are lost; requests that no longer fit end with an error.
"""

import time
from bisect import bisect_right
from typing import TYPE_CHECKING, Any
from weakref import ref

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_tier.pool import ElasticBlockPool, TieredBlockPool
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

logger = init_logger(__name__)

# Requests whose prompt arrives in parts, in releases that support them.
_BETWEEN_INPUTS = getattr(RequestStatus, "WAITING_FOR_STREAMING_REQ", None)

# Older releases have no status for an error of the server.
_FAILED = getattr(RequestStatus, "FINISHED_ERROR", RequestStatus.FINISHED_ABORTED)


def start_over(scheduler: "Scheduler") -> None:
    """Let every request that holds blocks compute them again.

    Running requests are preempted, as on a reset of the prefix cache, and drop outputs
    in flight. Other requests hold blocks because a KV connector is loading, or has
    loaded, the next part of their prompt.
    """
    while scheduler.running:
        request = scheduler.running.pop()
        _count_as_computed(request)
        scheduler._preempt_request(request, time.monotonic())
    get_block_ids = scheduler.kv_cache_manager.get_block_ids
    for request in scheduler.requests.values():
        # Where upstream does not count stale outputs, the scheduler drops them itself.
        request.drop_stale_output = getattr(request, "num_stale_output_tokens", 0) > 0
        if request.is_finished() or not any(get_block_ids(request.request_id)):
            continue
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            # The connector still writes to these blocks; they are freed when it has
            # ended.
            scheduler.failed_recving_kv_req_ids.add(request.request_id)
        elif request.status == _BETWEEN_INPUTS:
            # It had read its blocks before it waited, so their report came before.
            continue
        else:
            scheduler._free_request_blocks(request)
        request.num_computed_tokens = 0
    # Not all releases record the requests of the previous step.
    getattr(scheduler, "prev_step_scheduled_req_ids", set()).clear()


def _count_as_computed(request: Any) -> None:
    """Count a prompt that starts over before its first token as computed, not cached.

    Upstream counts cached tokens only when a request is first scheduled.
    """
    stats = getattr(request, "prefill_stats", None)
    if stats is not None and stats.num_prompt_tokens:
        stats.set(stats.num_prompt_tokens, 0, 0)
    elif getattr(request, "num_cached_tokens", 0) > 0 and not request.num_output_tokens:
        # Older releases count again if the number is negative.
        request.num_cached_tokens = -1


def end_what_cannot_fit(
    scheduler: "Scheduler", outputs: dict[int, list[EngineCoreOutput]]
) -> None:
    """End requests that need more device blocks than are left, and would wait forever.

    Answers that grow too long end as at `max_model_len`, which is lowered. Also notes
    that the scheduler has received an output, and keeps an engine without requests
    stepping while it has device memory to give back or blocks to write to secondary
    tiers.

    Args:
        scheduler: Called from its `update_from_output`.
        outputs: By client, the outputs to send; errors are added.

    """
    tier = scheduler.kv_cache_manager.kv_tier
    if not isinstance(tier, TieredBlockPool):
        return
    if tier.backing is not None or isinstance(tier, ElasticBlockPool):
        _step_on(scheduler, tier)
    if tier.backing is not None:
        # Called for each output of a step, after its report.
        tier.backing.heard()
    if not tier.num_lost_blocks:
        return
    num_tokens = _most_tokens(scheduler)
    if num_tokens < scheduler.max_model_len:
        scheduler.max_model_len = num_tokens
        logger.error(
            "KV tier: %d device blocks are lost to copies that do not end. Requests "
            "of more than %d tokens no longer fit and get an error. Restart the "
            "engine.",
            tier.num_lost_blocks,
            num_tokens,
        )
    running = {request.request_id for request in scheduler.running}
    for request in list(scheduler.requests.values()):
        if (
            request.num_tokens < scheduler.max_model_len
            or request.request_id in running
            or request.is_finished()
        ):
            continue
        scheduler.finish_requests(request.request_id, _FAILED)
        outputs[getattr(request, "client_index", 0)].append(
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
            )
        )


def _step_on(scheduler: "Scheduler", pool: TieredBlockPool) -> None:
    """Keep the engine stepping while it has no requests but other work."""
    if "has_requests" not in vars(scheduler):
        # A strong reference to itself would keep the scheduler alive after its engine.
        owner, has_requests = ref(scheduler), type(scheduler).has_requests

        def has_work() -> bool:
            if (me := owner()) is None:
                return False
            # A pause waits until the scheduler has no work. Not all releases can pause.
            is_paused = bool(getattr(me, "pause_state", 0))
            return has_requests(me) or (not is_paused and _is_due(pool))

        scheduler.has_requests = has_work  # type: ignore[method-assign]
    if not isinstance(pool, ElasticBlockPool) or scheduler.requests:
        return
    if pool.elastic.is_waiting and not _writes_on(pool):
        # Without this the engine would spin.
        time.sleep(pool.elastic.pause_s)


def _is_due(pool: TieredBlockPool) -> bool:
    if isinstance(pool, ElasticBlockPool) and pool.elastic.is_busy:
        return True
    return _writes_on(pool)


def _writes_on(pool: TieredBlockPool) -> bool:
    return pool.backing is not None and pool.backing.writes_on


def _most_tokens(scheduler: "Scheduler") -> int:
    """Tokens of the longest request that fits the remaining device blocks."""
    manager = scheduler.kv_cache_manager
    tier = manager.kv_tier
    assert tier is not None
    num_blocks = tier.num_gpu_blocks - 1 - len(tier.lost.in_use)
    step_tokens = scheduler.max_num_scheduled_tokens

    def blocks_for(num_tokens: int) -> int:
        # Windows hold the tokens of the current step, and those that it reads of
        # earlier steps.
        return sum(
            -(-num_tokens // each.block_size)
            - each.get_num_skipped_tokens(max(0, num_tokens - step_tokens))
            // each.block_size
            for each in manager.coordinator.single_type_managers
        )

    lengths = range(scheduler.max_model_len + 1)
    return bisect_right(lengths, num_blocks, key=blocks_for) - 1
