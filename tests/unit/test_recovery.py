# SPDX-License-Identifier: Apache-2.0
"""Which requests start over, and how. `tests/e2e/test_connectors.py` has the engine."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm.v1.kv_tier.recovery import start_over
from vllm.v1.request import RequestStatus


@pytest.fixture
def scheduler() -> Any:
    freed: list[str] = []
    preempted: list[str] = []

    def preempt(request: Any) -> None:
        preempted.append(request.request_id)
        blocks[request.request_id] = ([],)
        request.status = RequestStatus.PREEMPTED

    blocks: dict[str, tuple[list[int], ...]] = {}
    return SimpleNamespace(
        running=[],
        requests={},
        kv_cache_manager=SimpleNamespace(get_block_ids=blocks.__getitem__),
        blocks=blocks,
        failed_recving_kv_req_ids=set(),
        prev_step_scheduled_req_ids={"x"},
        freed=freed,
        preempted=preempted,
        _preempt_request=lambda r, time: preempt(r),
        _free_request_blocks=lambda r: freed.append(r.request_id),
    )


def add(
    scheduler: Any,
    name: str,
    status: RequestStatus,
    stale: int | None = 0,
    blocks: tuple[list[int], ...] = ([1, 2], []),
) -> Any:
    request: Any = SimpleNamespace(
        request_id=name,
        status=status,
        num_computed_tokens=64,
        drop_stale_output=False,
        is_finished=lambda: RequestStatus.is_finished(request.status),
    )
    if stale is not None:
        request.num_stale_output_tokens = stale
    scheduler.requests[name] = request
    scheduler.blocks[name] = blocks
    if status == RequestStatus.RUNNING:
        scheduler.running.append(request)
    return request


def test_running_requests_are_preempted_and_drop_what_is_in_flight(
    scheduler: Any,
) -> None:
    a = add(scheduler, "a", RequestStatus.RUNNING, stale=3)
    b = add(scheduler, "b", RequestStatus.RUNNING)
    start_over(scheduler)
    # The first is the first again.
    assert scheduler.preempted == ["b", "a"] and not scheduler.running
    assert a.drop_stale_output and not b.drop_stale_output
    assert not scheduler.prev_step_scheduled_req_ids
    # Preempted requests hold nothing.
    assert not scheduler.freed


def test_a_release_that_counts_no_stale_tokens(scheduler: Any) -> None:
    request = add(scheduler, "a", RequestStatus.RUNNING, stale=None)
    start_over(scheduler)
    assert scheduler.preempted == ["a"] and not request.drop_stale_output


@pytest.mark.parametrize(
    "status, blocks",
    [(RequestStatus.WAITING, ([], [])), (RequestStatus.FINISHED_STOPPED, ([1],))],
)
def test_others_are_left_alone(
    scheduler: Any, status: RequestStatus, blocks: tuple[list[int], ...]
) -> None:
    """Those without blocks, and those whose blocks a connector still sends."""
    request = add(scheduler, "a", status, blocks=blocks)
    start_over(scheduler)
    assert request.num_computed_tokens == 64
    assert not scheduler.freed and not scheduler.failed_recving_kv_req_ids


def test_blocks_that_a_connector_writes_to_are_freed_when_it_ends(
    scheduler: Any,
) -> None:
    request = add(scheduler, "a", RequestStatus.WAITING_FOR_REMOTE_KVS)
    start_over(scheduler)
    assert scheduler.failed_recving_kv_req_ids == {"a"}
    assert request.num_computed_tokens == 0 and not scheduler.freed


@pytest.mark.parametrize("status", [RequestStatus.WAITING, RequestStatus.PREEMPTED])
def test_a_request_that_its_connector_is_done_with_looks_again(
    scheduler: Any, status: RequestStatus
) -> None:
    request = add(scheduler, "a", status)
    start_over(scheduler)
    assert scheduler.freed == ["a"] and request.num_computed_tokens == 0
    assert not scheduler.failed_recving_kv_req_ids


def test_a_session_between_two_inputs_keeps_its_blocks(scheduler: Any) -> None:
    status = getattr(RequestStatus, "WAITING_FOR_STREAMING_REQ", None)
    if status is None:
        pytest.skip("prompts come in one part in this release")
    request = add(scheduler, "a", status)
    start_over(scheduler)
    assert request.num_computed_tokens == 64 and not scheduler.freed


class Prefill:
    """As upstream's `PrefillStats`."""

    num_prompt_tokens = 100

    def set(self, num_prompt: int, num_local: int, num_external: int) -> None:
        self.told = num_prompt, num_local, num_external


def test_a_prompt_that_starts_over_does_not_count_as_cached(scheduler: Any) -> None:
    """Releases count in one of two ways. What has answered has told its count."""
    new, told, old, begun = (
        add(scheduler, name, RequestStatus.RUNNING) for name in ("a", "b", "c", "d")
    )
    new.prefill_stats, told.prefill_stats = Prefill(), None
    for request, num_outputs in ((told, 3), (old, 0), (begun, 3)):
        request.num_cached_tokens, request.num_output_tokens = 96, num_outputs
    start_over(scheduler)
    assert new.prefill_stats.told == (100, 0, 0)
    assert (told.num_cached_tokens, begun.num_cached_tokens) == (96, 96)
    assert old.num_cached_tokens == -1
