# SPDX-License-Identifier: Apache-2.0
"""The tier below the host, as the block pool sees it. Nothing here waits for it.

The life of a block below the host:

    a slot is used again ────── spill ──▶ its bytes are put under its key; meanwhile it
                                          serves loads, and is given to nobody
    a request comes ─────────── ask ────▶ which of the blocks that it lacks are there
    they stand in its prefix hit ─ fetch ▶ slots are reserved and filled; the request
                                          waits in the queue, until a deadline
    all ranks have told ──────────────── ▶ the key enters the slot table: a host hit
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.kv_tier.plan import SecondaryResult, StepPlan
from vllm.v1.kv_tier.scheduling.below import SecondaryLayout
from vllm.v1.kv_tier.scheduling.costs import Costs
from vllm.v1.kv_tier.scheduling.fetching import Fetching
from vllm.v1.kv_tier.scheduling.jobs import Jobs
from vllm.v1.kv_tier.scheduling.slots import SlotTable
from vllm.v1.kv_tier.scheduling.spilling import Spiller
from vllm.v1.kv_tier.scheduling.tuning import SchedulingTuning
from vllm.v1.kv_tier.stats import KVTierStats

if TYPE_CHECKING:
    from vllm.v1.kv_tier.config import KVTierLayout

logger = init_logger(__name__)


def make_backing(
    layout: "KVTierLayout",
    pool: BlockPool,
    table: SlotTable,
    costs: Costs,
    stats: KVTierStats,
) -> "Backing | None":
    """The tier below of `pool`, if it has one.

    Raises:
        ValueError: Blocks are not what keys are made for.

    """
    if layout.secondary is None:
        return None
    # Not all releases can tell them apart.
    block_size = layout.secondary.block_size
    if (size := getattr(pool, "hash_block_size", block_size)) != block_size:
        raise ValueError(
            "--kv-offloading-config: secondary_tiers is not supported for this model, "
            f"whose KV blocks of {block_size} tokens have keys for each {size}. "
            "Remove it."
        )
    is_cached = pool.cached_block_hash_to_block.get_one_block
    return Backing(layout.secondary, table, costs, is_cached, stats, layout.tuning)


class Backing:
    """What writes below, what fetches from there, and the end of both.

    Args:
        layout: The tier below.
        table: The slots.
        costs: Of loads and of computing.
        is_cached: Whether the device has a block.
        stats: Counts.
        tuning: How much at a time.

    """

    def __init__(
        self,
        layout: SecondaryLayout,
        table: SlotTable,
        costs: Costs,
        is_cached: Callable[[BlockHashWithGroupId], object],
        stats: KVTierStats,
        tuning: SchedulingTuning,
    ) -> None:
        self._jobs = Jobs(table, layout.num_ranks)
        self.spiller = Spiller(layout, table, self._jobs, stats, tuning)
        self.fetching = Fetching(
            layout,
            table,
            self._jobs,
            costs,
            is_cached,
            self.spiller.is_below,
            stats,
            tuning,
        )

    def finish(self, plan: StepPlan, is_idle: bool) -> None:
        """The step is complete: put its jobs into its plan.

        Args:
            plan: Of the step.
            is_idle: The step runs nothing.

        """
        self.spiller.write(plan.seq)
        self._jobs.finish(plan)
        plan.awaits_secondary = is_idle and self.fetching.is_awaited
        self.fetching.end_step()

    def take(self, results: Sequence[SecondaryResult]) -> None:
        """Ranks have told of jobs."""
        self._jobs.take(results)

    def detach(self, reason: str) -> None:
        """What was computed until now is void: neither write nor serve any of it."""
        if not self._jobs.is_detached:
            logger.info(
                "KV tier: %s. The tier below is left alone until the engine starts "
                "again.",
                reason,
            )
        self._jobs.is_detached = True
        self.spiller.forget()
        self.fetching.forget()
