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
from vllm.v1.kv_tier.plan import SecondaryJob, SecondaryResult, StepPlan
from vllm.v1.kv_tier.scheduling.below import SecondaryLayout
from vllm.v1.kv_tier.scheduling.costs import Costs
from vllm.v1.kv_tier.scheduling.fetching import Fetching
from vllm.v1.kv_tier.scheduling.jobs import Jobs
from vllm.v1.kv_tier.scheduling.slots import SlotTable
from vllm.v1.kv_tier.scheduling.sources import Source
from vllm.v1.kv_tier.scheduling.spilling import Spiller
from vllm.v1.kv_tier.scheduling.tuning import SchedulingTuning
from vllm.v1.kv_tier.stats import SecondaryStats
from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm.v1.kv_tier.config import KVTierLayout

logger = init_logger(__name__)


def make_backing(
    layout: "KVTierLayout",
    pool: BlockPool,
    table: SlotTable,
    costs: Costs,
) -> "Backing | None":
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
    return Backing(layout.secondary, hash_size, table, costs, is_cached, layout.tuning)


class Backing:
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
        self._jobs = Jobs(table, layout.num_ranks, tuning.max_ended)
        self._stats = {tier.label: SecondaryStats() for tier in layout.tiers}
        self.spillers = [
            Spiller(i, tier, layout, table, self._jobs, stats)
            for i, (tier, stats) in enumerate(zip(layout.tiers, self._stats.values()))
        ]
        self._costs = costs
        self._sources = [
            Source(i, tier, costs, stats, tuning)
            for i, (tier, stats) in enumerate(zip(layout.tiers, self._stats.values()))
        ]
        self.fetching = Fetching(
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
        self.found: Callable[[Request, Sequence[BlockHashWithGroupId], int, int], None]
        self.found = lambda request, keys, num_blocks, block_size: None
        """Called before keys of a request count as found: with the request, the keys,
        the number of its blocks up to the last of them, and the tokens of a block."""

    def heard(self) -> None:
        """Note that the scheduler has taken the output of a step, with its report.

        Some releases skip outputs of steps whose loads failed.
        """
        self._num_outputs += 1
        for source in self._sources:
            source.heard()

    @property
    def localities(self) -> list[str]:
        """Localities of the tiers, without duplicates."""
        return [*dict.fromkeys(tier.locality for tier in self._layout.tiers)]

    def tell_changes(self, changed: Callable[[BlockHashWithGroupId], None]) -> None:
        """Call `changed` when a tier is found to have a key, or not to have it.

        Also when a write or read of a key has ended without success.
        """
        for spiller in self.spillers:
            spiller.changed = changed

    def finder(self, locality: str) -> Callable[[BlockHashWithGroupId], object]:
        """A lookup that is not None for keys that a tier of `locality` has."""
        spillers = [
            spiller
            for tier, spiller in zip(self._layout.tiers, self.spillers)
            if tier.locality == locality
        ]

        def find(key: BlockHashWithGroupId) -> object:
            if self._jobs.is_detached:
                return None
            return next((s for s in spillers if s.knows(key)), None)

        return find

    def is_moving(self, key: BlockHashWithGroupId) -> bool:
        """Whether `key` is being written or read. `tell_changes` reports the end."""
        return self.fetching.is_fetching(key) or any(
            spiller.is_writing(key) for spiller in self.spillers
        )

    def was_found(
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
            self.found(request, of_size, num_tokens // size, size)
        for key in keys:
            self.is_below(key, tier)

    def were_missing(self, keys: Iterable[BlockHashWithGroupId], tier: int) -> None:
        """Note that a tier does not have `keys`."""
        self.spillers[tier].are_missing(keys)

    def is_below(self, key: BlockHashWithGroupId, tier: int) -> None:
        """Note that a tier has `key`."""
        self.spillers[tier].is_below(key)

    def came(self, key: BlockHashWithGroupId, tier: int) -> None:
        """Note that `key` was read from a tier into a slot."""
        self._not_hit[key] = tier
        if len(self._not_hit) > self._table.num_slots:
            # The oldest has left the host by now.
            del self._not_hit[next(iter(self._not_hit))]

    def is_gone(self, key: BlockHashWithGroupId, tier: int) -> None:
        """Note that a tier lacks `key`, or has it only in part."""
        self.spillers[tier].is_gone(key)

    def hit(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Record that a request is admitted with device blocks of `keys`."""
        self._table.order_passed(keys)
        for spiller in self.spillers:
            spiller.hit(keys)
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
        self.fetching.go_on()
        settled = self.settled
        for spiller in self.spillers:
            spiller.write(settled)
        self._jobs.finish(plan)
        if not is_idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self._costs.clock()
        plan.asks_secondary = is_idle and self.fetching.num_asked > 0
        has_more = self._jobs.has_ending or self.fetching.has_more
        if is_idle and not has_more:
            num = self.fetching.num_awaited or int(self.writes_on)
            plan.awaits_secondary = self._jobs.num_ended + num if num else 0
        self.fetching.end_step()

    @property
    def writes_on(self) -> bool:
        """Whether an engine without requests should keep stepping to write.

        It does so for at most `flush_s` seconds.
        """
        now = self._costs.clock()
        idle_s = now - (now if self._idle_since is None else self._idle_since)
        return any(
            idle_s < tier.flush_s and (spiller.num_due or spiller.num_writing)
            for tier, spiller in zip(self._layout.tiers, self.spillers)
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
            # Ranks have told of all of them, and were asked once more.
            settled = self._seq
        return [
            (tier.flush_s, spiller.last_jobs(slots, settled))
            for tier, spiller in zip(self._layout.tiers, self.spillers)
            if tier.flush_s
        ]

    def take(self, results: Sequence[SecondaryResult]) -> None:
        """Take in results that ranks have reported."""
        self._jobs.take(results)

    def detach(self, reason: str) -> None:
        """Stop using the tiers: what was computed until now is void."""
        if not self._jobs.is_detached:
            logger.info(
                "KV tier: %s. Secondary tiers are not used until the engine starts "
                "again.",
                reason,
            )
        self._jobs.is_detached = True
        for spiller in self.spillers:
            spiller.forget()
        self.fetching.forget()
        self._not_hit.clear()

    def _weights_may_change(self, method: str) -> None:
        self.detach(f"{method} of the ranks was called, which may change weights")

    def take_stats(self) -> dict[str, SecondaryStats]:
        """Stats of each tier since the last call."""
        now, filling = self._costs.clock(), self.fetching.num_filling()
        evicted_bytes = self._jobs.evicted_bytes
        for i, (stats, spiller, source, num_filling) in enumerate(
            zip(self._stats.values(), self.spillers, self._sources, filling)
        ):
            stats.evicted_bytes = evicted_bytes.pop(i, 0)
            stats.due_blocks = spiller.num_due
            stats.writing_blocks = spiller.num_writing
            stats.filling_blocks = num_filling
            stats.is_closed = int(not (source.is_open(now) and source.is_worth_it))
            stats.loaded_tokens = self._layout.tokens_of(stats.loaded_blocks)
            stats.hit_tokens = self._layout.tokens_of(self._num_hit[i])
            self._num_hit[i] = 0
        return {label: stats.take() for label, stats in self._stats.items()}
