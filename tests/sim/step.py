# SPDX-License-Identifier: Apache-2.0
"""A step on its way through the worker."""

from dataclasses import dataclass, field

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.outputs import ModelRunnerOutput


@dataclass
class Step:
    """A step that was sent to the worker."""

    output: SchedulerOutput
    epoch: int
    rush: bool
    fail: str | None
    """What fails in this step: `store` or `load`, every copy of that kind, or
    `compute`, the forward pass of its first request."""
    plan: StepPlan
    stores: list[tuple[int, int]] = field(default_factory=list)
    """(device block, host slot); block -1 leaves garbage in the slot."""
    cleans: list[tuple[int, int]] = field(default_factory=list)
    """As `stores`."""
    loads: list[tuple[int, int]] = field(default_factory=list)
    """(host slot, device block); slot -1 leaves garbage in the block."""
    ahead: list[tuple[int, int]] = field(default_factory=list)
    """As `loads`."""
    is_void: bool = False
    """It works on what a failure left, which the scheduler cannot know yet."""
    spoiled: set[str] = field(default_factory=set)
    """Requests that read a wrong value."""
    drafts: dict[str, list[int]] = field(default_factory=dict)
    """What follows, as the model guesses; by request."""
    pooled: list[bool] = field(default_factory=list)
    """Whether each request has its pooled output, where the model pools."""
    is_done: bool = False
    result: ModelRunnerOutput = field(init=False)
