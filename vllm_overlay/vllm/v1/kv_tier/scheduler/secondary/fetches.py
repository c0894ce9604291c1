# SPDX-License-Identifier: Apache-2.0
"""Blocks on their way from secondary tiers into slots.

A slot is reserved for each, and its key can be found only when all ranks have read it.
"""

from collections.abc import Sequence

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.kv_tier.layout import SecondaryLayout
from vllm.v1.kv_tier.scheduler.secondary.found import FoundBlocks, SecondaryBlock
from vllm.v1.kv_tier.scheduler.secondary.jobs import SecondaryJobs
from vllm.v1.kv_tier.scheduler.secondary.tier import Arrivals, Tier
from vllm.v1.kv_tier.scheduler.slots import SlotTable
from vllm.v1.kv_tier.tuning import SchedulingTuning


class Fetches:
    """Begins to fetch blocks, and takes in what has come.

    Args:
        layout: The secondary tiers.
        tiers: In the order in which they are asked.
        table: The slot table.
        jobs: Runs the jobs.
        found: Blocks that lookups find, until they have come.
        arrivals: Notified of blocks that were read.
        tuning: Limits.

    """

    def __init__(
        self,
        layout: SecondaryLayout,
        tiers: Sequence[Tier],
        table: SlotTable,
        jobs: SecondaryJobs,
        found: FoundBlocks,
        arrivals: Arrivals,
        tuning: SchedulingTuning,
    ) -> None:
        self._max_job = layout.max_job
        self._tiers = tiers
        self._table = table
        self._jobs = jobs
        self.found = found
        self._arrivals = arrivals
        self._tuning = tuning
        self.fetched_by: dict[BlockHashWithGroupId, int] = {}
        """The job that reads each block. Others only look at it."""
        self.blocks_of: dict[int, Sequence[SecondaryBlock]] = {}
        """Of each job that has not ended. Others only look at it."""
        self.num_left = tuning.max_fetches
        """Blocks that this step may still begin to fetch, or look at to do so."""

    def end_step(self) -> None:
        """Reset the limit of the step."""
        self.num_left = self._tuning.max_fetches

    def begin_first(self, blocks: Sequence[SecondaryBlock]) -> tuple[int, bool]:
        """Begin to fetch the first of `blocks`.

        Returns:
            How many, and whether there are slots for more of them in the next steps.

        """
        num = min(len(blocks), self.num_left)
        indices = self._table.reserve(num)
        self.num_left -= len(indices)
        self._fetch(blocks[: len(indices)], indices)
        return len(indices), len(indices) == num

    def _fetch(self, blocks: Sequence[SecondaryBlock], indices: list[int]) -> None:
        """Fetch as many of `blocks` as there are slots."""
        places, least = list(zip(blocks, indices)), self._max_job
        for tier in self._tiers:
            some = [place for place in places if place[0].tier is tier]
            # A few blocks tell whether the others are worth the wait.
            num = size = min(tier.reads.job_size(least), self._tuning.max_ended)
            if some and not tier.reads.is_known:
                num = min(size, self._tuning.first_fetch)
            while some:
                self._fetch_from(tier, some[:num])
                some, num = some[num:], size

    def begin_last(
        self, tier: Tier, blocks: Sequence[SecondaryBlock]
    ) -> tuple[int, Sequence[SecondaryBlock]]:
        """Begin to fetch the last of `blocks`, as many as there is room for.

        Returns:
            The job, and its blocks.

        """
        num = min(len(blocks), self.num_left, self.room)
        indices = self._table.reserve(num)
        self.num_left -= len(indices)
        blocks = blocks[len(blocks) - len(indices) :]
        if not blocks:
            return 0, blocks
        return self._fetch_from(tier, list(zip(blocks, indices))), blocks

    def _fetch_from(
        self, tier: Tier, places: Sequence[tuple[SecondaryBlock, int]]
    ) -> int:
        def ended(done: Sequence[bool], seconds: float) -> None:
            del self.blocks_of[job]
            for (block, index), is_there in zip(places, done):
                self._end_fetch(block, index, is_there)
            tier.reads.record_fetch(done, seconds)

        tier.reads.begin_fetch(len(places))
        keys, indices = [b.key for b, _ in places], [index for _, index in places]
        job = self._jobs.add(False, tier.index, keys, indices, ended)
        self.fetched_by.update(dict.fromkeys(keys, job))
        self.blocks_of[job] = [block for block, _ in places]
        tier.num_filling += len(keys)
        return job

    def _end_fetch(self, block: SecondaryBlock, index: int, is_there: bool) -> None:
        key, tier = block.key, block.tier
        del self.fetched_by[key]
        tier.num_filling -= 1
        self.found.remove(block)
        if is_there and not self._jobs.is_detached and self._table.get(key) is None:
            tier.presence.mark_present(key)
            self._arrivals.add(key, tier)
            self._table.fill(index, key, block.num_tokens)
            return
        if not is_there:
            tier.presence.mark_absent(key)
        self._table.unreserve(index)

    @property
    def room(self) -> int:
        room = int(self._tuning.fetch_part * self._table.num_slots)
        return max(0, room - len(self.fetched_by))
