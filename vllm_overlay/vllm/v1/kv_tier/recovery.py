# SPDX-License-Identifier: Apache-2.0
"""What the scheduler does when loads fail or hang.

Requests that used failed loads start over. Device blocks that a hanging load may still
overwrite are lost; requests that no longer fit end with an error.
"""

import time
from bisect import bisect_right
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.pool import ElasticBlockPool, SharedBlockPool, TieredBlockPool
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput

logger = init_logger(__name__)

_BETWEEN_INPUTS = releases.status_between_inputs()
_FAILED = releases.failed_status()


def start_over(scheduler: "Scheduler") -> None:
    """Let every request that holds blocks compute them again.

    Running requests are preempted, as on a reset of the prefix cache, and drop outputs
    in flight. Other requests hold blocks because a KV connector is loading, or has
    loaded, the next part of their prompt.
    """
    while scheduler.running:
        request = scheduler.running.pop()
        releases.count_prompt_as_computed(request)
        scheduler._preempt_request(request, time.monotonic())
    get_block_ids = scheduler.kv_cache_manager.get_block_ids
    for request in scheduler.requests.values():
        releases.drop_output_in_flight(request)
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
    releases.forget_last_step(scheduler)


def take_report(
    scheduler: "Scheduler",
    scheduler_output: "SchedulerOutput",
    model_runner_output: "ModelRunnerOutput",
    outputs: dict[int, list[EngineCoreOutput]],
) -> bool:
    """Act on the ranks' report of a step. Requests start over if a load failed, and end
    with an error if they no longer fit the device blocks.

    Args:
        scheduler: In `update_from_output`.
        scheduler_output: The step.
        model_runner_output: Its results, with the report if there is one.
        outputs: Outputs by client; errors are added.

    Returns:
        Whether tokens of the step are void: a load had failed before it ran. Since
        v0.28.0 upstream drops them by itself.

    """
    tier = scheduler.kv_cache_manager.kv_tier
    if not isinstance(tier, TieredBlockPool):
        return False
    report = model_runner_output.kv_tier_report
    if report is not None and (void_plan := tier.apply_report(report)):
        tier.void_plan = void_plan
        start_over(scheduler)
    if not scheduler.requests:
        _pause_between_steps(tier)
    plan = scheduler_output.kv_tier_plan
    if tier.adapter_files is not None and tier.adapter_files.check_files(
        _adapters_of(scheduler, scheduler_output)
    ):
        tier.void_since(_settled(tier) + 1)
    if plan is not None and releases.connector_has_failed(model_runner_output):
        # Upstream drops blocks of running requests only; one that was aborted during
        # the step had its own.
        tier.void_since(plan.seq)
    # Each output of a step comes here. From now on it may be settled.
    if isinstance(tier, SharedBlockPool):
        tier.record_output()
    if tier.secondary is not None:
        tier.secondary.record_output()
    if tier.num_lost_blocks:
        _end_what_cannot_fit(scheduler, tier, outputs)
    return plan is not None and plan.seq <= tier.void_plan


def _adapters_of(scheduler: "Scheduler", output: "SchedulerOutput") -> set[int]:
    """Ids of the LoRA adapters of requests that run, and of those that began in a step,
    which may have been aborted since."""
    loras = [request.lora_request for request in scheduler.running]
    loras += [request.lora_request for request in output.scheduled_new_reqs]
    return {lora.lora_int_id for lora in loras if lora is not None}


def _settled(tier: TieredBlockPool) -> int:
    """The last plan of which others may find what it has stored."""
    if isinstance(tier, SharedBlockPool):
        return tier.settled
    return 0 if tier.secondary is None else tier.secondary.settled


def has_work(scheduler: "Scheduler") -> bool:
    """Whether an engine without requests should keep stepping, because it has device
    memory to give back, or blocks to write to a secondary tier or to publish, now or
    soon. Not while it is paused: the caller of a pause waits until the engine does
    nothing."""
    tier = scheduler.kv_cache_manager.kv_tier
    return (
        isinstance(tier, TieredBlockPool)
        and _is_due(tier)
        and not releases.is_paused(scheduler)
    )


def _end_what_cannot_fit(
    scheduler: "Scheduler",
    tier: TieredBlockPool,
    outputs: dict[int, list[EngineCoreOutput]],
) -> None:
    """End requests that need more device blocks than are left, since they would wait
    for ever. `max_model_len` is lowered, so that longer answers end there."""
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
        outputs[request.client_index].append(
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
            )
        )


def _pause_between_steps(pool: TieredBlockPool) -> None:
    """Pause while the engine only waits for device memory, or for ranks that open or
    close host slots: else it would spin."""
    is_waiting = pool.host_size.is_moving
    if isinstance(pool, ElasticBlockPool):
        is_waiting = pool.elastic.is_waiting or is_waiting and not pool.elastic.is_busy
    if is_waiting and not _writes_on(pool):
        time.sleep(pool.host_size.pause_s)


def _is_due(pool: TieredBlockPool) -> bool:
    if isinstance(pool, ElasticBlockPool) and pool.elastic.is_busy:
        return True
    if isinstance(pool, SharedBlockPool) and pool.has_more:
        return True
    return pool.host_size.is_moving or _writes_on(pool)


def _writes_on(pool: TieredBlockPool) -> bool:
    return pool.secondary is not None and pool.secondary.writes_on


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
