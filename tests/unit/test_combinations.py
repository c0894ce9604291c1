# SPDX-License-Identifier: Apache-2.0
"""Combinations with which the tier would be without effect, or wrong."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.config import VllmConfig
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_tier import compatibility
from vllm.v1.kv_tier.compatibility import _HARMLESS_CONFIGS, side_objects, takes_plans
from vllm.v1.kv_tier.config import KVTierConfig

from .test_config import _v1 as _v1
from .test_config import engine_config, message, model, names_all, tier

__all__ = ["model"]


class Plain(Scheduler):
    """Takes its step from upstream, like one that only changes the order."""


class HandsOn(Scheduler):
    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        return output


class HandsOnToHandsOn(HandsOn):
    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        return self._in_turns(*args, **kwargs)

    def _in_turns(self, *args: Any, **kwargs: Any) -> Any:
        return super().schedule(*args, **kwargs)


class SendsPlans(Scheduler):
    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        return self._step()

    def _step(self) -> Any:
        tier: Any = self.kv_cache_manager.kv_tier
        return [tier.take_plan() for _ in range(1)]


class Wraps(SchedulerInterface):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._inner = Scheduler(*args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.schedule(*args, **kwargs)


def timed(function: Any) -> Any:
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


class Decorated(Scheduler):
    schedule = timed(Scheduler.schedule)


class WithoutPlans(Scheduler):
    """As written against upstream."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.kv_cache_manager.new_step_starts()
        return self._update_after_schedule(SchedulerOutput.make_empty())


class HandsOnInVain(WithoutPlans):
    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        return super().schedule(*args, **kwargs)


@pytest.mark.parametrize(
    "scheduler",
    [Plain, HandsOn, HandsOnToHandsOn, SendsPlans, Wraps, Decorated],
    ids=lambda cls: cls.__name__,
)
@pytest.mark.parametrize("by_name", [True, False])
def test_schedulers_of_ones_own(model: str, scheduler: type, by_name: bool) -> None:
    name = f"{__name__}.{scheduler.__name__}"
    assert tier(model, scheduler_cls=name if by_name else scheduler) is not None


@pytest.mark.compat(
    "refused at start", "--scheduler-cls with a class that sends no plans"
)
@pytest.mark.parametrize("scheduler", [WithoutPlans, HandsOnInVain])
@pytest.mark.parametrize("by_name", [True, False])
def test_a_scheduler_that_sends_no_plans(
    model: str, scheduler: type, by_name: bool
) -> None:
    name = f"{__name__}.{scheduler.__name__}"
    text = message(model, scheduler_cls=name if by_name else scheduler)
    names_all(text, "--kv-offloading-backend core", f"--scheduler-cls {name}")
    names_all(text, "take_plan()", "Call super().schedule(), send the plan, or remove")


class Repeats(WithoutPlans):
    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        return self._again(1)

    def _again(self, number: int) -> Any:
        return self._again(number - 1) if number else None


class Compiled(WithoutPlans):
    schedule = len  # Nobody can read it.


class Promises(ABC):
    @abstractmethod
    def schedule(self, *args: Any, **kwargs: Any) -> Any: ...


class Keeps(Promises, WithoutPlans):
    """Whatever stands behind the promise counts."""


@pytest.mark.parametrize(
    "scheduler, takes",
    [
        (WithoutPlans, False),
        (Repeats, False),
        (Keeps, False),
        (Compiled, True),
        (Promises, True),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_the_names_in_a_scheduler_tell(scheduler: type, takes: bool) -> None:
    assert takes_plans(scheduler) is takes


def test_a_scheduler_that_does_not_exist(model: str) -> None:
    """Upstream says so, in its own words."""
    assert tier(model, scheduler_cls="no.such.Scheduler") is not None


@pytest.mark.compat("refused at start", "--enable-fault-tolerance")
def test_fault_tolerance(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream gives steps up with it, and with them what ranks report."""
    config = engine_config(model)
    if not hasattr(config.parallel_config, "enable_fault_tolerance"):
        pytest.skip("this release has no fault tolerance")
    monkeypatch.setattr(config.parallel_config, "enable_fault_tolerance", True)
    with pytest.raises(ValueError) as error:
        KVTierConfig.from_vllm_config(config)
    names_all(str(error.value), "--enable-fault-tolerance", "Remove one of them")


def outputs_of(config: Any) -> Any:
    """Where a release has the setting."""
    found = getattr(config, "aux_output_config", config.model_config)
    if not hasattr(found, "enable_return_routed_experts"):
        pytest.skip("this release does not return routed experts")
    return found


def test_routed_experts(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream keeps them by block, for the blocks of the device only."""
    config = engine_config(model)
    monkeypatch.setattr(outputs_of(config), "enable_return_routed_experts", True)
    with pytest.raises(ValueError) as error:
        KVTierConfig.from_vllm_config(config)
    names_all(str(error.value), "return", "routed", "experts", "Remove one of them")


@pytest.mark.parametrize("enabled", [False, True])
def test_an_output_of_the_model_that_the_tier_does_not_know(
    model: str, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    @dataclass
    class Outputs:
        return_other_states: bool = enabled

    config = engine_config(model)
    monkeypatch.setattr(config, "model_config", Outputs())
    setting = side_objects(config)
    assert setting == ("--return-other-states" if enabled else None)


@pytest.mark.parametrize("value", [None, "on"])
def test_a_part_of_the_configuration_that_the_tier_does_not_know(
    value: str | None,
) -> None:
    @dataclass
    class Config:
        model_config: object = None
        other_config: str | None = None

    setting = side_objects(Config(other_config=value))  # type: ignore[arg-type]
    assert setting == (value and "other_config, which the tier does not know")


def test_the_tier_knows_all_parts_of_this_release() -> None:
    """One that is new is refused until somebody has seen what it keeps by block."""
    parts = {field.name for field in fields(VllmConfig) if field.init}
    assert parts - {"aux_output_config"} <= _HARMLESS_CONFIGS


@pytest.mark.compat("refused at start", "prefill context parallelism")
def test_prefill_context_parallelism(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config(model)
    if not hasattr(config.parallel_config, "prefill_context_parallel_size"):
        pytest.skip("this release has no prefill context parallelism")
    # Upstream itself refuses it on CPUs.
    monkeypatch.setattr(config.parallel_config, "prefill_context_parallel_size", 2)
    with pytest.raises(ValueError) as error:
        KVTierConfig.from_vllm_config(config)
    names_all(str(error.value), "--prefill-context-parallel-size 2", "Remove one")


STAGES = {
    "parallel_config": SimpleNamespace(pipeline_parallel_size=2),
    "speculative_config": SimpleNamespace(),
    "use_v2_model_runner": True,
    "cache_config": SimpleNamespace(mamba_cache_mode="align"),
}


def test_states_that_a_stage_writes_late_are_refused() -> None:
    """`sim/test_late_states.py` shows what would come of it."""
    with pytest.raises(ValueError) as error:
        compatibility.check_stages(SimpleNamespace(**STAGES))
    names_all(str(error.value), "--mamba-cache-mode align", "pipeline", "Remove")


@pytest.mark.parametrize(
    "other",
    [
        {"parallel_config": SimpleNamespace(pipeline_parallel_size=1)},
        {"speculative_config": None},
        {"use_v2_model_runner": False},
        {"cache_config": SimpleNamespace(mamba_cache_mode="all")},
        # As in releases that know neither.
        {"cache_config": SimpleNamespace()},
    ],
)
def test_without_one_of_them_all_is_well(other: dict[str, Any]) -> None:
    compatibility.check_stages(SimpleNamespace(**STAGES | other))
