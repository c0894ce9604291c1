# SPDX-License-Identifier: Apache-2.0
"""The secondary tiers, as the block pool sees them. Nothing here waits for them.

The life of a block in a secondary tier:

    a slot is used again ─────── write ─▶ it is written under its key; meanwhile it is
                                          pinned and serves loads
    a request arrives ────────── ask ───▶ which of its missing blocks are stored
    they are worth it ────────── fetch ─▶ slots are reserved and filled; the request
                                          computes what is before them, or waits
    all ranks have reported ────────────▶ the key enters the slot table: a host hit
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.kv_tier.plan import SecondaryJob, SecondaryResult, StepPlan
from vllm.v1.kv_tier.scheduler.costs import Costs
from vllm.v1.kv_tier.scheduler.kv_groups import UsedBlocks
from vllm.v1.kv_tier.scheduler.secondary.fetches import Fetches
from vllm.v1.kv_tier.scheduler.secondary.jobs import SecondaryJobs
from vllm.v1.kv_tier.scheduler.secondary.reader import SecondaryReader
from vllm.v1.kv_tier.scheduler.secondary.tier import PoolView, Tier
from vllm.v1.kv_tier.scheduler.secondary.writer import SecondaryWriter
from vllm.v1.kv_tier.scheduler.slots import SlotTable
from vllm.v1.kv_tier.stats import SecondaryStats
from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm.v1.kv_tier.layout import KVTierLayout

logger = init_logger(__name__)


def make_secondary_manager(
    layout: "KVTierLayout",
    pool: BlockPool,
    table: SlotTable,
    costs: Costs,
) -> "SecondaryTierManager | None":
    """The secondary tiers of `pool`, if any.

    Raises:
        ValueError: The model's block sizes do not match its block hashes.

    """
    if layout.secondary is None:
        return None
    sizes = layout.secondary.block_sizes
    # v0.9.2 and v0.11.0 give it only where blocks have one hash each.
    hash_size = pool.hash_block_size or min(sizes)
    for size in sizes:
        if size % hash_size:
            raise ValueError(
                "--kv-offloading-config: secondary_tiers is not supported for this "
                f"model, whose KV blocks of {size} tokens have keys for each "
                f"{hash_size}. Remove secondary_tiers."
            )
    view = PoolView(
        layout.secondary,
        hash_size,
        table,
        costs,
        pool.cached_block_hash_to_block.get_one_block,
        layout.tuning,
        layout.can_jump,
        layout.reachable,
        layout.slot_bytes,
        layout.group_bytes,
    )
    return SecondaryTierManager(view)


class SecondaryTierManager:
    """Writes to secondary tiers, reads from them, and tracks both."""

    def __init__(self, pool: PoolView) -> None:
        self._layout = layout = pool.layout
        self._pool = pool
        self._num_outputs = 0
        self.is_flushed = False
        """Whether the engine has written for the last time."""
        self._seq = 0
        self._idle_since: float | None = None
        self._jobs = jobs = SecondaryJobs(
            pool.table,
            layout.num_ranks,
            pool.tuning.max_ended,
            bool(pool.group_bytes),
        )
        self.tiers = [Tier(i, each, pool) for i, each in enumerate(layout.tiers)]
        self.writers = [SecondaryWriter(tier, pool, jobs) for tier in self.tiers]
        self.fetches = Fetches(pool, jobs)
        self.reader = SecondaryReader(pool, self.tiers, jobs, self.fetches)
        self.block_sizes = layout.block_sizes
        """Tokens of a block, for each KV cache group."""
        layout.rank_calls.may_change = lambda method: self.detach(
            f"{method} of the ranks was called, which may change weights"
        )
        self.on_detached: Callable[[], None] = lambda: None
        """Called when the tiers are not used any more."""

    # ------------------------------------------------------------------ a step

    def record_output(self) -> None:
        """Note that the scheduler has taken the output of a step, with its report.

        Some releases skip outputs of steps whose loads failed.
        """
        self._num_outputs += 1
        for tier in self.tiers:
            tier.record_output()

    def take_results(self, results: Sequence[SecondaryResult]) -> None:
        """Take in results that ranks have reported."""
        self._jobs.take_results(results)

    def put_last(self, key: BlockHashWithGroupId) -> None:
        """Write `key` after all others, if it is to be written."""
        for writer in self.writers:
            writer.put_last(key)

    def on_hit(self, request: Request, used: UsedBlocks) -> None:
        """A request is admitted with blocks whose slots, if any, may be due now."""
        keys = used.keys
        self._pool.table.keep_passed(keys)
        for writer in self.writers:
            writer.record_hit(keys)
        self.fetches.record_hit(keys)

    def finish(self, plan: StepPlan, is_idle: bool) -> None:
        """Put the jobs of a step into its plan.

        Args:
            plan: Plan of the step, complete otherwise.
            is_idle: The step runs nothing.

        """
        self._seq = plan.seq
        self._jobs.begin_step()
        self.reader.go_on()
        settled = self.settled
        for writer in self.writers:
            writer.write(settled)
        self._jobs.finish(plan)
        if not is_idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self._pool.costs.clock()
        plan.asks_secondary = is_idle and self.reader.num_asked > 0
        if is_idle and not self._jobs.has_ending:
            num = self.reader.num_awaited or int(self.writes_on)
            num = 1 if self.reader.meetings.is_waiting else num
            plan.awaits_secondary = self._jobs.num_ended + num if num else 0
        self.reader.end_step()

    @property
    def settled(self) -> int:
        """Nothing that plans up to this one have stored turns out to be void."""
        return self._pool.tuning.last_settled(self._num_outputs, self._seq)

    # --------------------------------------------------------- what others ask

    def finder(self, locality: str) -> Callable[[BlockHashWithGroupId], object]:
        """A lookup that is not None for keys that a tier of `locality` has."""
        known = [
            tier.presence.keys
            for tier in self.tiers
            if tier.settings.locality == locality
        ]
        return lambda key: next((keys for keys in known if key in keys), None)

    def is_moving(self, key: BlockHashWithGroupId) -> bool:
        """Whether `key` is being written or read.

        At the end the listeners of a tier's presence are called.
        """
        return key in self.fetches.by_key or any(
            key in writer.writing for writer in self.writers
        )

    def take_stats(self) -> dict[str, SecondaryStats]:
        """Stats of each tier since the last call."""
        for writer in self.writers:
            tier, stats = writer.tier, writer.tier.stats
            stats.evicted_bytes = self._jobs.evicted_bytes.pop(tier.index, 0)
            stats.due_blocks = len(writer.due)
            stats.writing_blocks = len(writer.writing)
            stats.filling_blocks = tier.num_under_way
            stats.is_closed = int(tier.is_avoided(self._pool.can_jump))
            stats.loaded_tokens = self._layout.tokens_of(stats.loaded_blocks)
            stats.hit_tokens = self._layout.tokens_of(tier.num_hit)
            tier.num_hit = 0
        return {tier.settings.label: tier.stats.take() for tier in self.tiers}

    # ----------------------------------------------------------------- the end

    @property
    def writes_on(self) -> bool:
        """Whether an engine without requests should keep stepping to write.

        It does so for at most `flush_s` seconds.
        """
        now = self._pool.costs.clock()
        idle_s = now - (now if self._idle_since is None else self._idle_since)
        return any(
            idle_s < writer.tier.settings.flush_s and (writer.due or writer.writing)
            for writer in self.writers
        )

    def last_jobs(self) -> list[tuple[float, list[SecondaryJob]]]:
        """The last jobs before the engine ends, without further plans.

        Returns:
            For each tier, the seconds it may take, and its jobs, most valuable first.

        """
        if self._jobs.is_detached:
            return []
        slots, settled = self._pool.table.by_value(), self.settled
        if self._num_outputs == self._seq:
            # Ranks have reported all of them, and were asked once more.
            settled = self._seq
        return [
            (flush_s, writer.last_jobs(slots, settled))
            for writer in self.writers
            if (flush_s := writer.tier.settings.flush_s)
        ]

    def detach(self, reason: str) -> None:
        """Stop using the tiers: what was computed until now is void."""
        if not self._jobs.is_detached:
            logger.info(
                "KV tier: %s. Secondary tiers are not used until the engine starts "
                "again.",
                reason,
            )
        self._jobs.is_detached = True
        for tier in self.tiers:
            tier.presence.close()
        for writer in self.writers:
            writer.due.clear()
        self.fetches.forget()
        self.reader.forget()
        self.on_detached()
