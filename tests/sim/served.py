# SPDX-License-Identifier: Apache-2.0
"""A real scheduler with thousands of blocks, stepped by hand, without a worker.

Other than `Engine`, it has no content to check: its tests are about what the scheduler
decides, how often it looks, and what it tells. Time stands still between the steps.
"""

from dataclasses import dataclass, field
from itertools import count
from typing import Any

from bench.scheduler_setup import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    make_request,
    make_scheduler,
    sampled,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_tier.config import KVTierConfig
from vllm.v1.kv_tier.layout import KVTierLayout
from vllm.v1.kv_tier.plan import StepPlan, StepReport
from vllm.v1.kv_tier.pool import TieredBlockPool
from vllm.v1.request import Request

from ..settings import options

STEP_S = 0.02
"""How long a step takes."""


@dataclass
class Served:
    """A scheduler with a host tier, or without one.

    Blocks have 16 tokens. A prompt is a document, one token over and over, so that
    those of one document share their prefix.
    """

    num_blocks: int
    num_slots: int
    """0: no tier."""
    load_s: float = 40e-6
    max_num_seqs: int = 256
    max_model_len: int = 131072
    config: dict[str, Any] = field(default_factory=dict)
    """As `KVTierConfig` takes it."""

    def __post_init__(self) -> None:
        layout = None
        if self.num_slots:
            config = KVTierConfig(
                self.num_slots * BLOCK_BYTES, **options(**self.config)
            )
            layout = KVTierLayout(
                config,
                self.num_slots,
                BLOCK_BYTES,
                load_s=self.load_s,
                tokens_per_block=BLOCK_SIZE,
            )
        self.scheduler = make_scheduler(
            self.num_blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=8192,
            max_model_len=self.max_model_len,
            kv_tier=layout,
        )
        self.now = 0.0
        self.outputs: list[Any] = []
        """What clients were told by the last step."""
        self._numbers = count()
        if layout is not None:
            self.tier.costs.clock = lambda: self.now

    @property
    def tier(self) -> TieredBlockPool:
        tier = self.scheduler.kv_cache_manager.kv_tier
        assert isinstance(tier, TieredBlockPool)
        return tier

    def add(
        self, document: int, num_blocks: int, max_tokens: int, end: int | None = None
    ) -> Request:
        """A request arrives.

        Args:
            document: What its prompt begins with.
            num_blocks: How much of that.
            max_tokens: How many it asks for.
            end: What the two blocks after that have; None: nothing follows.

        """
        prompt = [document] * (num_blocks * BLOCK_SIZE)
        if end is not None:
            prompt += [end, document] * BLOCK_SIZE
        request = make_request(str(next(self._numbers)), prompt, max_tokens)
        self.scheduler.add_request(request)
        return request

    def step(self, throttle: bool = False, report: StepReport | None = None) -> Any:
        """Schedule a step, and give every request that has its prompt a token. Returns
        the `SchedulerOutput`.

        Args:
            throttle: As of `Scheduler.schedule`.
            report: What the workers tell with the output of the step.

        """
        output = self.scheduler.schedule(*([throttle] if throttle else []))
        self.finish(output, report)
        return output

    def finish(self, output: SchedulerOutput, report: StepReport | None = None) -> None:
        """The second half of `step`."""
        result = sampled(output)
        for i, req_id in enumerate(result.req_ids):
            request = self.scheduler.requests.get(req_id)
            if request is None or request.num_computed_tokens < request.num_tokens:
                result.sampled_token_ids[i] = []
        result.kv_tier_report = report
        told = self.scheduler.update_from_output(output, result)
        self.outputs = [each for some in told.values() for each in some.outputs]
        self.now += STEP_S

    def finish_all(self) -> None:
        while self.scheduler.has_unfinished_requests():
            self.step()

    def serve(self, document: int, num_blocks: int, max_tokens: int = 1) -> list:
        """Run a request alone until it ends. Returns the plans of its steps."""
        self.add(document, num_blocks, max_tokens)
        plans: list[StepPlan] = []
        while self.scheduler.has_unfinished_requests():
            plan = getattr(self.step(), "kv_tier_plan", None)
            if plan is not None:
                plans.append(plan)
        return plans
