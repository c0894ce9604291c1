# SPDX-License-Identifier: Apache-2.0
"""Blocks of secondary tiers: in prefix hits, and on their way into slots.

A slot is reserved for each block on its way, and its key can be found only when all
ranks have read it.
"""

from collections.abc import Sequence

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.kv_tier.layout import SecondaryLayout
from vllm.v1.kv_tier.scheduler.secondary.jobs import SecondaryJobs
from vllm.v1.kv_tier.scheduler.secondary.tier import Arrivals, Tier
from vllm.v1.kv_tier.scheduler.slots import SlotTable
from vllm.v1.kv_tier.tuning import SchedulingTuning


class SecondaryBlock(KVCacheBlock):
    """A block that a secondary tier has, and the placeholder for it in a prefix scan.

    Like a `HostSlot` it is never referenced, and counts as one block to allocate. But
    it has no memory, so a hit with one cannot be admitted.

    Args:
        key: Key of the block.
        num_tokens: Prefix tokens up to its end.
        tier: The first tier that has it.

    """

    __slots__ = ("key", "num_tokens", "tier")
    block_id = -1
    ref_cnt = 0
    prev_free_block = next_free_block = None
    is_null = False

    def __init__(self, key: BlockHashWithGroupId, num_tokens: int, tier: Tier) -> None:
        self.key = key
        self.num_tokens = num_tokens
        self.tier = tier

    @property
    def block_hash(self) -> BlockHashWithGroupId:
        return self.key

    @property
    def block_hash_num_tokens(self) -> int:
        return self.num_tokens

    __eq__ = object.__eq__
    __hash__ = object.__hash__
    __repr__ = object.__repr__


def before_secondary(
    groups: Sequence[Sequence[KVCacheBlock]],
) -> tuple[Sequence[KVCacheBlock], ...]:
    """The part of a hit, by group, before the first block of a secondary tier."""
    cut = []
    for group in groups:
        # A hot path: every block of a long prefix.
        types = list(map(type, group))
        is_whole = SecondaryBlock not in types
        cut.append(group if is_whole else group[: types.index(SecondaryBlock)])
    return tuple(cut)


class Fetches:
    """Begins to fetch blocks, and takes in what has come.

    Args:
        layout: The secondary tiers.
        table: The slot table.
        jobs: Runs the jobs.
        arrivals: Notified of blocks that were read.
        tuning: Limits.

    """

    def __init__(
        self,
        layout: SecondaryLayout,
        table: SlotTable,
        jobs: SecondaryJobs,
        arrivals: Arrivals,
        tuning: SchedulingTuning,
    ) -> None:
        self._max_job = layout.max_job
        self._table = table
        self._jobs = jobs
        self._arrivals = arrivals
        self._tuning = tuning
        self.fetched_by: dict[BlockHashWithGroupId, int] = {}
        """The job that reads each block. Others only look at it."""
        self.num_left = tuning.max_fetches
        """Blocks that this step may still begin to fetch."""

    def end_step(self) -> None:
        """Reset the limit of the step."""
        self.num_left = self._tuning.max_fetches

    def job_size(self, tier: Tier) -> int:
        """Blocks of a job for which all threads of a tier's store have work."""
        return min(tier.reads.job_size(self._max_job), self._tuning.max_ended)

    def begin(
        self, blocks: Sequence[SecondaryBlock], from_end: bool = False
    ) -> tuple[int, Sequence[SecondaryBlock]]:
        """Begin to fetch the first of `blocks`, all of one tier, in one job.

        Args:
            blocks: In the order of the prompt.
            from_end: Begin with the last of them instead.

        Returns:
            The job, and its blocks: as many as there are slots for, maybe none.

        """
        room = int(self._tuning.fetch_part * self._table.num_slots)
        room = min(self.num_left, room - len(self.fetched_by))
        indices = self._table.reserve(max(0, min(len(blocks), room)))
        num = len(indices)
        self.num_left -= num
        if not num:
            return 0, []
        blocks = blocks[len(blocks) - num :] if from_end else blocks[:num]
        tier = blocks[0].tier

        def ended(done: Sequence[bool], seconds: float) -> None:
            for block, index, is_there in zip(blocks, indices, done):
                self._end(block, index, is_there)
            tier.reads.record_fetch(done, seconds)

        tier.reads.begin_fetch(num)
        keys = [block.key for block in blocks]
        job = self._jobs.add(False, tier.index, keys, indices, ended)
        self.fetched_by.update(dict.fromkeys(keys, job))
        tier.num_filling += num
        return job, blocks

    def _end(self, block: SecondaryBlock, index: int, is_there: bool) -> None:
        key, tier = block.key, block.tier
        del self.fetched_by[key]
        tier.num_filling -= 1
        if is_there and not self._jobs.is_detached and not self._table.has(key):
            tier.presence.mark_present(key)
            self._arrivals.add(key, tier)
            self._table.fill(index, key, block.num_tokens)
            return
        if not is_there:
            tier.presence.mark_absent(key)
        self._table.unreserve(index)
