# SPDX-License-Identifier: Apache-2.0
"""A rank's host tier on CPU memory that tests drive step by step."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_tier.copying.engine import CopyEngine, Transfer
from vllm.v1.kv_tier.memory.regions import build_regions
from vllm.v1.kv_tier.plan import StepPlan, StepReport
from vllm.v1.kv_tier.tuning import DEFAULT_TUNING, RankTuning
from vllm.v1.kv_tier.worker.copies import CopyOrder
from vllm.v1.kv_tier.worker.host_tier import HostTier
from vllm.v1.kv_tier.worker.layers import LayerWaits
from vllm.v1.kv_tier.worker.slots import RankSlots
from vllm.v1.outputs import ModelRunnerOutput

from ..sim import upstream

NUM_BLOCKS, NUM_SLOTS = 6, 4


def step(
    seq: int, tokens: Sequence[int] = (), copies_on_write: Any = None, **plan: Any
) -> SchedulerOutput:
    """What the scheduler sends: `tokens` of each request, and a plan."""
    output = upstream.empty_step()
    output.num_scheduled_tokens = {f"r{i}": n for i, n in enumerate(tokens)}
    output.total_num_scheduled_tokens = sum(tokens)
    output.kv_cache_block_copies = copies_on_write
    output.kv_tier_plan = StepPlan(seq, **plan)
    return output


class Rank:
    """A host tier and the device memory it works on."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.caches = [torch.randn(2, NUM_BLOCKS, 3, 5), torch.randn(NUM_BLOCKS, 7)]
        self.regions = build_regions(self.caches, NUM_BLOCKS)
        cpu = torch.device("cpu")
        self.tier = HostTier.allocate(self.regions, NUM_SLOTS, cpu)

    def block(self, block_id: int) -> list[torch.Tensor]:
        return [self.caches[0][:, block_id].clone(), self.caches[1][block_id].clone()]

    def run(self, seq: int, **plan: Any) -> None:
        self.tier.begin_step(step(seq, **plan))

    def report(self) -> StepReport | None:
        """What failed, as the next output tells it."""
        return failed(self.tier.end_step(output()).kv_tier_report)


@pytest.fixture
def rank() -> Rank:
    return Rank()


def output() -> ModelRunnerOutput:
    return upstream.model_runner_output([])


def verifying(rank: Rank) -> Rank:
    """With a tier that checks slots before it loads them."""
    cpu = torch.device("cpu")
    rank.tier = HostTier.allocate(rank.regions, NUM_SLOTS, cpu, verify=True)
    return rank


def failed(report: StepReport | None) -> StepReport | None:
    """`report` without what was measured; None if nothing is left."""
    if report is None:
        return None
    only = StepReport(report.failed_load_seq, report.failed_store_slots)
    return only if only != StepReport() else None


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b))


def fail_once(monkeypatch: pytest.MonkeyPatch, rank: Rank, name: str) -> None:
    """Let the next copy of `step_loads`, `loads` (ahead) or `stores` stop half-way."""
    engine: CopyEngine = getattr(rank.tier.engines, name)
    real = engine.transfer

    class Failing(Transfer):
        def __init__(self, pairs: Any, to_device: bool) -> None:
            self.transfer = real(pairs, to_device)

        def copy(self, regions: range) -> None:
            monkeypatch.setattr(engine, "transfer", real)
            self.transfer.copy(regions[:1])
            raise RuntimeError("a copy fails for the test")

    monkeypatch.setattr(engine, "transfer", Failing)


def with_order(
    rank: Rank,
    order: CopyOrder,
    waits: LayerWaits | None = None,
    tuning: RankTuning = DEFAULT_TUNING,
) -> HostTier:
    """Another tier on the memory of `rank`, all slots of which hold something."""
    slots = RankSlots(NUM_SLOTS)
    slots.mark_stored(range(NUM_SLOTS))
    engines = rank.tier.engines
    return HostTier(rank.regions, engines, order, slots, waits, tuning=tuning)
