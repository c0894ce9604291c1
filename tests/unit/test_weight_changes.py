# SPDX-License-Identifier: Apache-2.0
"""Calls to the ranks that may change weights, and what they do to the tier below."""

import logging
import weakref
from typing import Any

import pytest

from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.kv_tier.releases import keys_are_bytes
from vllm.v1.kv_tier.start import _flush_rank
from vllm.v1.kv_tier.weight_changes import KEEP_WEIGHTS, WeightChangeMonitor
from vllm.v1.kv_tier.worker.report import note_rank_call

try:
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
except ImportError:
    from vllm.v1.executor.abstract import (  # type: ignore[attr-defined, no-redef]
        UniProcExecutor,
    )

from .secondary_pool import Below, Request, key


class Ranks:
    """An executor that remembers what it was asked, and when."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: tuple = ()
    ) -> str:
        # As upstream's executors with the seam.
        note_rank_call(self, method)
        self.order.append("ranks")
        return f"{method} {timeout} {args}"

    def step(self) -> str:
        return self.collective_rpc("execute_model", args=(1,))


def merge(model: object) -> None:
    """A function of a user, as `apply_model` takes it."""


@pytest.mark.parametrize(
    "method", ["reload_weights", "update_weights", "apply_model", "my_update", merge]
)
def test_what_may_change_weights_is_told_before_the_ranks_hear_of_it(
    method: Any,
) -> None:
    ranks, calls = Ranks(), WeightChangeMonitor()
    calls.listen(ranks)
    told: list[str] = []

    def may_change(name: str) -> None:
        told.append(name)
        ranks.order.append("told")

    calls.may_change = may_change
    assert ranks.collective_rpc(method, 3.0, args=(7,)) == f"{method} 3.0 (7,)"
    assert told == [getattr(method, "__name__", method)]
    assert ranks.order == ["told", "ranks"]


def test_steps_and_what_is_known_are_not_told() -> None:
    ranks, calls = Ranks(), WeightChangeMonitor()
    calls.listen(ranks)
    calls.may_change = lambda name: pytest.fail(name)
    assert ranks.step() == "execute_model None (1,)"
    for method in (*KEEP_WEIGHTS, _flush_rank):
        ranks.collective_rpc(method)


@pytest.mark.skipif(not keys_are_bytes(), reason="has no tiers below the host")
@pytest.mark.parametrize("kind", [UniProcExecutor, MultiprocExecutor])
def test_upstreams_executors_say_what_they_call(kind: type[Executor]) -> None:
    """The ranks of this one have gone, so the call fails, but after it was told."""
    executor, calls, told = object.__new__(kind), WeightChangeMonitor(), list[str]()
    calls.listen(executor)
    calls.may_change = told.append
    vars(executor).update(is_failed=True, rpc_broadcast_mq=(), driver_worker=None)
    with pytest.raises(Exception):  # noqa: B017, PT011
        executor.collective_rpc("reload_weights")
    assert told == ["reload_weights"]


def test_an_executor_does_not_hold_itself() -> None:
    ranks, calls = Ranks(), WeightChangeMonitor()
    calls.listen(ranks)
    gone = weakref.ref(ranks)
    del ranks
    assert gone() is None


def test_no_way_to_new_weights_counts_as_known() -> None:
    """Methods of upstream's workers whose names speak of it."""
    from vllm.v1.worker.gpu_worker import Worker

    ways = {name for name in dir(Worker) if "weight" in name or "load" in name}
    ways -= {"compute_weight_checksums", "supports_draft_weight_updates"}
    assert "load_model" in ways and not ways & KEEP_WEIGHTS
    # Where it is the executor that steps, it is by this method.
    assert callable(Executor.collective_rpc)


@pytest.mark.skipif(
    not keys_are_bytes(), reason="refused: hashes are numbers of a process"
)
def test_nothing_is_written_or_served_between_new_weights_and_their_reset(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks, calls = Ranks(), WeightChangeMonitor()
    below = Below(num_blocks=4, rank_calls=calls)
    calls.listen(ranks)
    below.store.keys = {key("x")}
    fetching = below.begins_to_fetch(Request("x"), "x")
    below.tier.demoted("ab")
    with caplog.at_level(logging.INFO, logger="vllm.v1.kv_tier"):
        ranks.collective_rpc("reload_weights")
        ranks.collective_rpc("reload_weights")
    (line,) = [r.getMessage() for r in caplog.records]
    assert "reload_weights of the ranks was called, which may change weights" in line
    # What was on its way is not served, and nobody waits for it.
    assert not below.pool.is_loading(Request("x"), False)  # type: ignore[arg-type]
    below.end(fetching)
    assert below.where("x") == "nowhere"
    # Computed by the new weights, and pushed off the device by what comes after.
    below.tier.demoted("cd")
    assert not below.jobs(below.plans(30))
    assert below.backing is not None and not below.backing.last_jobs()
    # What upstream's own prefix cache would serve until the reset, the host does too.
    assert below.where("a") == "host"
