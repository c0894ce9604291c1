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
    return SimpleNamespace(
        running=[],
        requests={},
        kv_holding_waiting=[],
        failed_recving_kv_req_ids=set(),
        prev_step_scheduled_req_ids={"x"},
        freed=freed,
        preempted=preempted,
        _preempt_request=lambda r, time: preempted.append(r.request_id),
        _free_request_blocks=lambda r: freed.append(r.request_id),
    )


def add(scheduler: Any, name: str, status: RequestStatus, stale: int = 0) -> Any:
    request = SimpleNamespace(
        request_id=name,
        status=status,
        num_computed_tokens=64,
        num_stale_output_tokens=stale,
        drop_stale_output=False,
    )
    scheduler.requests[name] = request
    is_running = status == RequestStatus.RUNNING
    (scheduler.running if is_running else scheduler.kv_holding_waiting).append(request)
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
    request = add(scheduler, "a", RequestStatus.WAITING_FOR_STREAMING_REQ)
    start_over(scheduler)
    assert request.num_computed_tokens == 64 and not scheduler.freed
