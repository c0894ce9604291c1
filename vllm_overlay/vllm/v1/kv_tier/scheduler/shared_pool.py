# SPDX-License-Identifier: Apache-2.0
"""The block pool of an engine whose host slots are a part of a machine's pool.

The engine decides about its own slots as without a pool. It publishes what it has
stored (`shared_slots`), and its lookups find what neighbours have published
(`neighbours`). Both end when the weights may have changed. Secondary tiers are asked
for what neighbours lack, and move slots of the engine's own.
"""

from collections.abc import Iterable
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.kv_tier.eviction.base import EvictionPolicy
from vllm.v1.kv_tier.layout import KVTierLayout
from vllm.v1.kv_tier.plan import StepPlan, StepReport
from vllm.v1.kv_tier.scheduler.block_pool import TieredBlockPool
from vllm.v1.kv_tier.scheduler.events import PublishingBlockPool
from vllm.v1.kv_tier.scheduler.neighbours import Neighbours, SharedHostWriter
from vllm.v1.kv_tier.scheduler.secondary.lookup import PromptLookup
from vllm.v1.kv_tier.scheduler.shared_slots import PlanEnds, SharedSlotTable
from vllm.v1.request import Request

logger = init_logger(__name__)

# Plans after one that reads from neighbours in which second copies are looked for.
_COMPARES_FOR = 1000


class SharedBlockPool(TieredBlockPool):
    """A `TieredBlockPool` that finds blocks of neighbours, and is found by them."""

    host: SharedSlotTable
    host_writer: SharedHostWriter

    def __init__(self, layout: KVTierLayout, **kwargs: Any) -> None:
        super().__init__(layout, **kwargs)
        assert layout.pool is not None
        self._tuning = layout.tuning
        sizes = layout.pool.block_sizes
        lookup = PromptLookup(
            sizes,
            self.hash_block_size or min(sizes),
            self.host,
            self.cached_block_hash_to_block.get_one_block,
            layout.reachable,
        )
        max_looks = layout.tuning.max_looks
        self.neighbours = Neighbours(layout.pool.member, lookup, max_looks)
        self.neighbours.num_open = self.host_size.num_open
        self._find_elsewhere = self.neighbours.found.get
        if layout.secondary is not None:
            self._find_elsewhere = self._find
            assert self.secondary is not None
            self.secondary.reader.skip(self.neighbours.found.get)
            # One of the two watches the ranks.
            layout.secondary.rank_calls.may_change = self._weights_may_change
        self._ends = PlanEnds(layout.pool.num_ranks)
        self._is_off = False
        self._num_outputs = 0
        # The last plan that reads from neighbours.
        self._last_read = -_COMPARES_FOR
        layout.pool.rank_calls.may_change = self._weights_may_change

    def _make_table(
        self, layout: KVTierLayout, policy: EvictionPolicy, num_open: int
    ) -> SharedSlotTable:
        assert layout.pool is not None
        return SharedSlotTable(policy, layout.pool.member, layout.tuning, num_open)

    def _make_writer(self, *args: object) -> SharedHostWriter:
        return SharedHostWriter(*args)

    # ------------------------------------------------------------------ a step

    def is_loading(self, request: Request, has_scheduled_reqs: bool) -> bool:
        """As `TieredBlockPool.is_loading`; also looks what neighbours have, before
        secondary tiers are asked, if there are some."""
        if self.secondary is not None:
            return self._is_looking(request) or super().is_loading(
                request, has_scheduled_reqs
            )
        is_loading = super().is_loading(request, has_scheduled_reqs)
        return is_loading or self._is_looking(request)

    def _is_looking(self, request: Request) -> bool:
        if not self._serves_host:
            return False
        speaks = self.conversations.has_hints(request)
        loadable = self.conversations.make_load_filter if speaks else None
        return self.neighbours.look_up(request, loadable)

    def _find(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        assert self.secondary is not None
        return self.neighbours.found.get(key) or self.secondary.reader.find(key)

    def take_plan(self, is_idle: bool = False) -> StepPlan:
        """As `TieredBlockPool.take_plan`."""
        plan = super().take_plan(is_idle)
        is_due = self.host.record_stores(plan, is_idle)
        num_read = self.neighbours.record_plan(plan, self.host.num_own)
        if num_read:
            self._last_read = plan.seq
            self._stats.neighbour_blocks += num_read
            self.host_writer.record_loads(plan, self.neighbours)
        # What is read is unpinned, and what is stored is published, when it has ended.
        plan.report_end |= is_due or num_read > 0
        self.neighbours.end_step()
        self.host_writer.forget_overwritten()
        find_copies = self.neighbours.find_copies if self._compares else None
        if copies := self.host.share(self.settled, find_copies):
            self.host_writer.record_copies(copies)
        return plan

    @property
    def _compares(self) -> bool:
        """Whether to look for second copies of what is published.

        Not where neighbours lately had nothing that this engine could use: for 256
        blocks and seven neighbours that takes 0.2 ms. Nor where hints or quotas say
        what this engine keeps.
        """
        num_plans = self._builder.seq - self._last_read
        return num_plans < _COMPARES_FOR and self.retention.hinted is None

    @property
    def settled(self) -> int:
        """Nothing that plans up to this one have stored turns out to be void."""
        return self._tuning.last_settled(self._num_outputs, self._builder.seq - 1)

    def record_output(self) -> None:
        """Note that the scheduler has taken the output of a step, with its report."""
        self._num_outputs += 1

    def apply_report(self, report: StepReport) -> int | None:
        """As `TieredBlockPool.apply_report`."""
        void_plan = super().apply_report(report)
        if (failed := report.failed_load_seq) is not None:
            self.neighbours.mark_failed(failed)
            self.host_writer.forget_elsewhere()
        self.neighbours.num_open = self.host_size.num_open
        if ended := self._ends.take(report.ended):
            self.host.record_ended(ended)
            self.neighbours.record_ended(ended)
        return void_plan

    @property
    def has_more(self) -> bool:
        """Whether an engine without requests should step on, to publish or unpin."""
        return not self._is_off and (self.host.is_sharing or self.neighbours.is_reading)

    # ------------------------------------------------------------------ the end

    def leave(self, reason: str) -> None:
        """Share nothing from now on: what is computed has another identity."""
        if not self.host.has_left:
            logger.info(
                "KV tier: %s. The engine shares nothing with its pool until it starts "
                "again.",
                reason,
            )
        self.host.leave()
        self.neighbours.leave()
        self.host_writer.forget_elsewhere()

    def _weights_may_change(self, method: str) -> None:
        reason = f"{method} of the ranks was called, which may change weights"
        self.leave(reason)
        if self.secondary is not None:
            self.secondary.detach(reason)

    def _clear_host(self) -> None:
        self.leave("the prefix cache was cleared, maybe for other weights")
        super()._clear_host()

    def _switch_off(self, lost_blocks: Iterable[int]) -> None:
        self.leave("the host tier is off")
        # No plan ends any more.
        self._is_off = True
        super()._switch_off(lost_blocks)


class PublishingSharedBlockPool(PublishingBlockPool, SharedBlockPool):
    """A `SharedBlockPool` that publishes KV cache events of its own device and slots,
    and of what neighbours have once a request uses it."""

    def __init__(self, layout: KVTierLayout, **kwargs: Any) -> None:
        super().__init__(layout, **kwargs)
        self._promotion.listeners.append(self.events)
