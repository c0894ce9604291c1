# SPDX-License-Identifier: Apache-2.0
"""The secondary tiers, as the block pool sees them. Nothing here waits for them.

The life of a block in a secondary tier:

    a slot is used again ─────── write ─▶ it is written under its key; meanwhile it is
                                          pinned and serves loads
    a request arrives ────────── ask ───▶ which of its missing blocks are stored
    they are part of its hit ─── fetch ─▶ slots are reserved and filled; the request
                                          waits in the queue, until a deadline
    all ranks have reported ────────────▶ the key enters the slot table: a host hit
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, get_group_id
from vllm.v1.kv_tier.layout import SecondaryLayout
from vllm.v1.kv_tier.plan import SecondaryJob, SecondaryResult, StepPlan
from vllm.v1.kv_tier.scheduler.costs import Costs
from vllm.v1.kv_tier.scheduler.secondary.jobs import SecondaryJobs
from vllm.v1.kv_tier.scheduler.secondary.read_costs import ReadCostModel
from vllm.v1.kv_tier.scheduler.secondary.reader import SecondaryReader
from vllm.v1.kv_tier.scheduler.secondary.writer import SecondaryWriter
from vllm.v1.kv_tier.scheduler.slots import SlotTable
from vllm.v1.kv_tier.stats import SecondaryStats
from vllm.v1.kv_tier.tuning import SchedulingTuning
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
    is_cached = pool.cached_block_hash_to_block.get_one_block
    return SecondaryTierManager(
        layout.secondary, hash_size, table, costs, is_cached, layout.tuning
    )


class SecondaryTierManager:
    """Writes to secondary tiers, reads from them, and tracks both.

    Args:
        layout: The secondary tiers.
        hash_size: Tokens of a block hash of a request.
        table: The slot table.
        costs: Costs of loads and of compute.
        is_cached: Whether the device has a block.
        tuning: Limits.

    """

    def __init__(
        self,
        layout: SecondaryLayout,
        hash_size: int,
        table: SlotTable,
        costs: Costs,
        is_cached: Callable[[BlockHashWithGroupId], object],
        tuning: SchedulingTuning,
    ) -> None:
        self._layout = layout
        self._tuning = tuning
        self._num_outputs = 0
        self.is_flushed = False
        """Whether the engine has written for the last time."""
        self._table = table
        self._seq = 0
        self._idle_since: float | None = None
        # Tier of blocks that arrived and that no request has hit yet.
        self._not_hit: dict[BlockHashWithGroupId, int] = {}
        self._num_hit = [0] * len(layout.tiers)
        self._jobs = SecondaryJobs(table, layout.num_ranks, tuning.max_ended)
        self._stats = {tier.label: SecondaryStats() for tier in layout.tiers}
        self.writers = [
            SecondaryWriter(i, tier, layout, table, self._jobs, stats)
            for i, (tier, stats) in enumerate(zip(layout.tiers, self._stats.values()))
        ]
        self._costs = costs
        self._sources = [
            ReadCostModel(i, tier, costs, stats, tuning)
            for i, (tier, stats) in enumerate(zip(layout.tiers, self._stats.values()))
        ]
        self.reader = SecondaryReader(
            layout,
            hash_size,
            self._sources,
            table,
            self._jobs,
            costs,
            is_cached,
            self,
            tuning,
        )
        layout.rank_calls.may_change = self._weights_may_change
        self.on_found: Callable[
            [Request, Sequence[BlockHashWithGroupId], int, int], None
        ]
        self.on_found = lambda request, keys, num_blocks, block_size: None
        """Called before keys of a request count as found: with the request, the keys,
        the number of its blocks up to the last of them, and the tokens of a block."""
        self.on_detached: Callable[[], None] = lambda: None
        """Called when the tiers are not used any more."""

    def record_output(self) -> None:
        """Note that the scheduler has taken the output of a step, with its report.

        Some releases skip outputs of steps whose loads failed.
        """
        self._num_outputs += 1
        for source in self._sources:
            source.record_output()

    @property
    def localities(self) -> list[str]:
        """Localities of the tiers, without duplicates."""
        return [*dict.fromkeys(tier.locality for tier in self._layout.tiers)]

    def subscribe(self, changed: Callable[[BlockHashWithGroupId], None]) -> None:
        """Call `changed` when a tier is found to have a key, or not to have it.

        Also when a write or read of a key has ended without success.
        """
        for writer in self.writers:
            writer.on_changed = changed

    def finder(self, locality: str) -> Callable[[BlockHashWithGroupId], object]:
        """A lookup that is not None for keys that a tier of `locality` has."""
        writers = [
            writer
            for tier, writer in zip(self._layout.tiers, self.writers)
            if tier.locality == locality
        ]

        def find(key: BlockHashWithGroupId) -> object:
            if self._jobs.is_detached:
                return None
            return next((s for s in writers if s.knows(key)), None)

        return find

    def is_moving(self, key: BlockHashWithGroupId) -> bool:
        """Whether `key` is being written or read. `subscribe` reports the end."""
        return self.reader.is_fetching(key) or any(
            writer.is_writing(key) for writer in self.writers
        )

    def record_found(
        self,
        request: Request,
        keys: Sequence[BlockHashWithGroupId],
        num_tokens: int,
        tier: int,
    ) -> None:
        """Note that a tier has `keys`, within a request's first `num_tokens` tokens."""
        sizes = self._layout.block_sizes
        for size in dict.fromkeys(sizes):
            of_size = keys
            if size != max(sizes) or size != min(sizes):
                of_size = [key for key in keys if sizes[get_group_id(key)] == size]
            self.on_found(request, of_size, num_tokens // size, size)
        for key in keys:
            self.mark_present(key, tier)

    def record_missing(self, keys: Iterable[BlockHashWithGroupId], tier: int) -> None:
        """Note that a tier does not have `keys`."""
        self.writers[tier].record_missing(keys)

    def mark_present(self, key: BlockHashWithGroupId, tier: int) -> None:
        """Note that a tier has `key`."""
        self.writers[tier].mark_present(key)

    def record_fetched(self, key: BlockHashWithGroupId, tier: int) -> None:
        """Note that `key` was read from a tier into a slot."""
        self._not_hit[key] = tier
        if len(self._not_hit) > self._table.num_slots:
            # The oldest has left the host by now.
            del self._not_hit[next(iter(self._not_hit))]

    def mark_absent(self, key: BlockHashWithGroupId, tier: int) -> None:
        """Note that a tier lacks `key`, or has it only in part."""
        self.writers[tier].mark_absent(key)

    def record_hit(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Record that a request is admitted with device blocks of `keys`."""
        self._table.keep_passed(keys)
        for writer in self.writers:
            writer.record_hit(keys)
        if not self._not_hit:
            return
        for key in keys:
            if (tier := self._not_hit.pop(key, None)) is not None:
                self._num_hit[tier] += 1

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
            self._idle_since = self._costs.clock()
        plan.asks_secondary = is_idle and self.reader.num_asked > 0
        has_more = self._jobs.has_ending or self.reader.has_more
        if is_idle and not has_more:
            num = self.reader.num_awaited or int(self.writes_on)
            plan.awaits_secondary = self._jobs.num_ended + num if num else 0
        self.reader.end_step()

    @property
    def writes_on(self) -> bool:
        """Whether an engine without requests should keep stepping to write.

        It does so for at most `flush_s` seconds.
        """
        now = self._costs.clock()
        idle_s = now - (now if self._idle_since is None else self._idle_since)
        return any(
            idle_s < tier.flush_s and (writer.num_due or writer.num_writing)
            for tier, writer in zip(self._layout.tiers, self.writers)
        )

    @property
    def settled(self) -> int:
        """Nothing that plans up to this one have stored turns out to be void."""
        # A load of an earlier step may fail, which voids what was computed since.
        return max(
            self._num_outputs - self._tuning.settled_outputs,
            self._seq - self._tuning.settled_steps,
        )

    def last_jobs(self) -> list[tuple[float, list[SecondaryJob]]]:
        """The last jobs before the engine ends, without further plans.

        Returns:
            For each tier, the seconds it may take, and its jobs, most valuable first.

        """
        if self._jobs.is_detached:
            return []
        slots, settled = self._table.by_value(), self.settled
        if self._num_outputs == self._seq:
            # Ranks have reported all of them, and were asked once more.
            settled = self._seq
        return [
            (tier.flush_s, writer.last_jobs(slots, settled))
            for tier, writer in zip(self._layout.tiers, self.writers)
            if tier.flush_s
        ]

    def take_results(self, results: Sequence[SecondaryResult]) -> None:
        """Take in results that ranks have reported."""
        self._jobs.take_results(results)

    def detach(self, reason: str) -> None:
        """Stop using the tiers: what was computed until now is void."""
        if not self._jobs.is_detached:
            logger.info(
                "KV tier: %s. Secondary tiers are not used until the engine starts "
                "again.",
                reason,
            )
        self._jobs.is_detached = True
        for writer in self.writers:
            writer.forget()
        self.reader.forget()
        self._not_hit.clear()
        self.on_detached()

    def _weights_may_change(self, method: str) -> None:
        self.detach(f"{method} of the ranks was called, which may change weights")

    def take_stats(self) -> dict[str, SecondaryStats]:
        """Stats of each tier since the last call."""
        now, filling = self._costs.clock(), self.reader.num_filling()
        evicted_bytes = self._jobs.evicted_bytes
        for i, (stats, writer, source, num_filling) in enumerate(
            zip(self._stats.values(), self.writers, self._sources, filling)
        ):
            stats.evicted_bytes = evicted_bytes.pop(i, 0)
            stats.due_blocks = writer.num_due
            stats.writing_blocks = writer.num_writing
            stats.filling_blocks = num_filling
            stats.is_closed = int(not (source.is_open(now) and source.is_worth_it))
            stats.loaded_tokens = self._layout.tokens_of(stats.loaded_blocks)
            stats.hit_tokens = self._layout.tokens_of(self._num_hit[i])
            self._num_hit[i] = 0
        return {label: stats.take() for label, stats in self._stats.items()}
