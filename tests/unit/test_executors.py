# SPDX-License-Identifier: Apache-2.0
"""Which executors the tier runs with: those that merge the reports of all ranks."""

from concurrent.futures import ThreadPoolExecutor
from inspect import getsource
from queue import Queue
from threading import Event, Timer
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
from vllm.v1.kv_tier.config import KVTierConfig, is_one_machine

from .test_config import _v1 as _v1
from .test_config import engine_config, model, names_all

__all__ = ["model"]

V2 = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"


class Inherits(MultiprocExecutor):
    """As upstream's second Ray executor does."""

    uses_ray = True


class StepsItsOwnWay(MultiprocExecutor):
    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        return None


class CallsItsOwnWay(MultiprocExecutor):
    def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        return None


class Other(Executor):
    """As upstream's first Ray executor."""


OWN_WAYS = [StepsItsOwnWay, CallsItsOwnWay, Other]


def asked_for(
    model: str, monkeypatch: pytest.MonkeyPatch, backend: Any, executor: type
) -> VllmConfig:
    """Settings with which upstream takes `executor` for `backend`, on a platform that
    has Ray executors. Set afterwards: upstream wants Ray to be there."""
    config = engine_config(model)
    monkeypatch.setattr(config.parallel_config, "distributed_executor_backend", backend)
    monkeypatch.setattr(type(current_platform), "ray_device_key", "GPU")
    monkeypatch.setattr(Executor, "get_class", lambda vllm_config: executor)
    return config


def refusal(config: VllmConfig) -> str:
    with pytest.raises(ValueError) as error:
        KVTierConfig.from_vllm_config(config)
    return str(error.value)


@pytest.mark.parametrize("backend", ["ray", Inherits, f"{__name__}.Inherits"])
def test_an_executor_that_inherits_the_way_of_reports(
    model: str, monkeypatch: pytest.MonkeyPatch, backend: Any
) -> None:
    config = asked_for(model, monkeypatch, backend, Inherits)
    assert KVTierConfig.from_vllm_config(config) is not None


@pytest.mark.parametrize("executor", OWN_WAYS)
def test_an_executor_that_returns_one_ranks_output(
    model: str, monkeypatch: pytest.MonkeyPatch, executor: type
) -> None:
    monkeypatch.setattr(envs, V2, True, raising=False)
    text = refusal(asked_for(model, monkeypatch, executor, executor))
    names_all(text, "--distributed-executor-backend", executor.__name__, "Use mp")
    names_all(text, "--kv-offloading-backend core is not supported with")
    text = refusal(asked_for(model, monkeypatch, "ray", executor))
    names_all(text, "--distributed-executor-backend ray: ", "Use mp")
    assert V2 not in text


def test_the_first_ray_executor_where_there_is_a_second(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envs, V2, False, raising=False)
    text = refusal(asked_for(model, monkeypatch, "ray", Other))
    names_all(text, f"--distributed-executor-backend ray and {V2}=0", f"Set {V2}=1")


@pytest.mark.compat("refused at start", "--distributed-executor-backend ray, on CPUs")
def test_ray_where_upstream_has_none(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = asked_for(model, monkeypatch, "ray", Inherits)
    monkeypatch.setattr(type(current_platform), "ray_device_key", "")
    text = refusal(config)
    names_all(text, "--distributed-executor-backend ray: upstream has no Ray executor")
    names_all(text, "for cpu. Use mp.")


def test_memory_of_other_machines_is_not_that_of_this_one(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several machines, each is asked once the ranks are there."""
    config = asked_for(model, monkeypatch, "mp", MultiprocExecutor)
    config.cache_config.kv_offloading_size = 1e6
    assert is_one_machine(config)
    names_all(refusal(config), "larger than the memory of this machine")
    config = asked_for(model, monkeypatch, "ray", Inherits)
    config.cache_config.kv_offloading_size = 1e6
    assert not is_one_machine(config)
    assert KVTierConfig.from_vllm_config(config) is not None


@pytest.mark.skipif(
    "io_thread_pool" not in getsource(MultiprocExecutor),
    reason="later executors have no thread for answers",
)
def test_a_call_leaves_the_answer_of_a_step_under_way() -> None:
    """A step that only moves blocks may be under way when no request is left."""
    answers: Queue[Any] = Queue()
    mq = SimpleNamespace(
        dequeue=lambda **_: (WorkerProc.ResponseStatus.SUCCESS, answers.get())
    )
    may_take, thread = Event(), ThreadPoolExecutor(1)
    # It is late for the answer of the step.
    thread.submit(may_take.wait)
    executor: Any = MagicMock(is_failed=False, io_thread_pool=thread)
    executor.workers = [SimpleNamespace(worker_response_mq=mq)]
    (step,) = MultiprocExecutor.collective_rpc(
        executor, "execute_model", non_block=True
    )
    answers.put("of the step")
    answers.put("of the call")
    Timer(0.2, may_take.set).start()
    assert MultiprocExecutor.collective_rpc(executor, "add_lora") == ["of the call"]
    assert step.result() == "of the step"
    thread.shutdown()
