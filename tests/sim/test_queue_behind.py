# SPDX-License-Identifier: Apache-2.0
"""A request that waits for its loads holds up nobody, and is not taken for a queue.

Upstream tells requests that wait for something of their own (an adapter, a transfer)
from those that wait for room: the second make a step "capacity bound", which ends the
deferral of prefills between data parallel engines, and they are what a load balancer
counts.
"""

from collections import Counter
from inspect import signature
from typing import Any

import pytest

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import request_queue
from vllm.v1.core.sched.scheduler import Scheduler

from .served import Served

DOCUMENTS, BLOCKS = 30, 200
DEVICE, HOST = 4096, 16384


def burst(num_requests: int, has_tier: bool = True, **config: Any) -> Served:
    """Some requests decode, and `num_requests` arrive whose prefixes the host has (or
    nobody, without a tier)."""
    served = Served(
        DEVICE, HOST if has_tier else 0, config={"max_load_stall_ms": 2.0, **config}
    )
    for document in range(DOCUMENTS):
        served.serve(10 + document, BLOCKS, max_tokens=2)
    for i in range(8):
        served.add(900 + i, 4, max_tokens=3000)
    for _ in range(4):
        served.step()
    for i in range(num_requests):
        served.add(10 + i % DOCUMENTS, BLOCKS // 2, max_tokens=100, end=500 + i)
    return served


@pytest.mark.skipif(
    "throttle_prefills" not in signature(Scheduler.schedule).parameters,
    reason="no balance of prefills between data parallel engines",
)
def test_as_many_are_admitted_between_throttled_steps() -> None:
    interval = 8

    def admitted(has_tier: bool) -> int:
        served = burst(60, has_tier)
        return sum(
            len(served.step(k % interval != 0).scheduled_new_reqs) for k in range(80)
        )

    assert admitted(True) >= 0.95 * admitted(False) > 0


def test_as_many_are_admitted() -> None:
    def admitted(has_tier: bool) -> int:
        served = burst(60, has_tier)
        return sum(len(served.step().scheduled_new_reqs) for _ in range(60))

    assert admitted(True) >= 0.95 * admitted(False) > 0


def test_those_that_wait_for_room_are_counted_as_waiting() -> None:
    """Else the balancer sends its requests to the engine with the longest queue."""
    num_requests = 500
    served = burst(num_requests)
    for _ in range(3):
        output = served.step()
        stats = served.scheduler.make_stats()
        assert stats is not None
        # In releases that tell them apart.
        skipped = getattr(stats, "num_skipped_waiting_reqs", 0)
        num_left = len(served.scheduler.requests) - stats.num_running_reqs
        assert stats.num_waiting_reqs + skipped == num_left
        assert output.kv_tier_plan.ahead_blocks, "nobody waits for loads"
        # Each step began the loads of few.
        assert skipped <= 16
        assert stats.num_waiting_reqs >= num_left - 16


class Visits:
    """How often the scheduler looks at a waiting request, whatever for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count: Counter[str] = Counter()
        for name in ("FCFSRequestQueue", "PriorityRequestQueue"):
            queue = getattr(request_queue, name)
            for method in ("peek_request", "pop_request"):
                monkeypatch.setattr(
                    queue, method, self._counted(method, getattr(queue, method))
                )
        look_up = KVCacheManager.get_computed_blocks
        monkeypatch.setattr(
            KVCacheManager, "get_computed_blocks", self._counted("lookup", look_up)
        )

    def _counted(self, name: str, method: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count[name] += 1
            return method(*args, **kwargs)

        return counted


def test_work_does_not_grow_with_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    visits = Visits(monkeypatch)
    worst: dict[int, Counter[str]] = {}
    for num_requests in (100, 800):
        served = burst(num_requests)
        most: Counter[str] = Counter()
        num_ahead = 0
        for _ in range(10):
            visits.count.clear()
            num_ahead += len(served.step().kv_tier_plan.ahead_blocks)
            most |= visits.count
        assert num_ahead, "nobody waits for loads"
        worst[num_requests] = most
    for name, number in worst[800].items():
        assert number <= worst[100][name] + 4, name


def test_those_in_front_come_first() -> None:
    """Whoever arrived first is admitted first where all have the same to load."""
    served = burst(40)
    order: list[int] = []
    for _ in range(200):
        order += [int(r.req_id) for r in served.step().scheduled_new_reqs]
    assert len(order) >= 35
    overtaken = [
        sum(later < each for later in order[i:]) for i, each in enumerate(order)
    ]
    assert max(overtaken) <= DOCUMENTS
