# SPDX-License-Identifier: Apache-2.0
"""Blocks of secondary tiers: in prefix hits, and on their way into slots.

A slot is reserved for each block on its way, and its key can be found only when all
ranks have read it.
"""

from collections.abc import Iterable, Sequence

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.kv_tier.scheduler.secondary.jobs import SecondaryJobs
from vllm.v1.kv_tier.scheduler.secondary.tier import PoolView, Tier
from vllm.v1.kv_tier.scheduler.slots import Placeholder


class SecondaryBlock(Placeholder):
    """A block that a secondary tier has. A hit with one cannot be admitted.

    Args:
        key: Key of the block.
        num_tokens: Prefix tokens up to its end.
        tier: The first tier that has it.

    """

    __slots__ = ("key", "tier")
    num_tokens: int

    def __init__(self, key: BlockHashWithGroupId, num_tokens: int, tier: Tier) -> None:
        self.key = key
        self.num_tokens = num_tokens
        self.tier = tier

    @property
    def block_hash(self) -> BlockHashWithGroupId:
        return self.key


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


class Fetch:
    """Blocks of one tier on their way into slots, in one job.

    Args:
        blocks: At least one, in the order of the prompt.

    """

    def __init__(self, blocks: Sequence[SecondaryBlock]) -> None:
        self.blocks = blocks
        self.tier = blocks[0].tier
        self.is_over = False


class Fetches:
    """Begins to fetch blocks, and takes in what has come."""

    def __init__(self, pool: PoolView, jobs: SecondaryJobs) -> None:
        self._table = pool.table
        self._num_bytes = pool.num_bytes
        self._jobs = jobs
        self._tuning = pool.tuning
        self.by_key: dict[BlockHashWithGroupId, Fetch] = {}
        """What fetches each block. Others only look at it."""
        self.num_left = pool.tuning.max_fetches
        """Blocks that this step may still begin to fetch."""
        # The tier of each block that came, until it is hit or was evicted long ago.
        self._came_from: dict[BlockHashWithGroupId, Tier] = {}

    def end_step(self) -> None:
        """Reset the limit of the step."""
        self.num_left = self._tuning.max_fetches

    def begin(
        self, blocks: Sequence[SecondaryBlock], from_end: bool = False
    ) -> Fetch | None:
        """Begin to fetch the first of `blocks`, all of one tier, in one job.

        Args:
            blocks: In the order of the prompt.
            from_end: Begin with the last of them instead.

        Returns:
            The fetch of as many as there are slots for; None if there is no slot.

        """
        room = int(self._tuning.fetch_part * self._table.num_slots)
        room = min(self.num_left, room - len(self.by_key))
        indices = self._table.reserve(max(0, min(len(blocks), room)))
        if not (num := len(indices)):
            return None
        self.num_left -= num
        fetch = Fetch(blocks[len(blocks) - num :] if from_end else blocks[:num])

        def ended(done: Sequence[bool], seconds: float) -> None:
            fetch.is_over = True
            for block, index, is_there in zip(fetch.blocks, indices, done):
                self._end(block, index, is_there)
            came = [key for key, is_there in zip(keys, done) if is_there]
            fetch.tier.stats.loaded_bytes += self._num_bytes(came)
            fetch.tier.record_fetch(done, seconds)

        fetch.tier.begin_fetch(num)
        keys = [block.key for block in fetch.blocks]
        self.by_key.update(dict.fromkeys(keys, fetch))
        self._jobs.add(self._jobs.make(False, fetch.tier.index, keys, indices), ended)
        return fetch

    def _end(self, block: SecondaryBlock, index: int, is_there: bool) -> None:
        key, tier = block.key, block.tier
        del self.by_key[key]
        if is_there and not self._jobs.is_detached and not self._table.has(key):
            tier.presence.mark_present(key)
            self._came_from[key] = tier
            if len(self._came_from) > self._table.num_slots:
                del self._came_from[next(iter(self._came_from))]
            self._table.fill(index, key, block.num_tokens)
            return
        if not is_there:
            tier.presence.mark_absent(key)
        self._table.unreserve(index)

    def record_hit(self, keys: Iterable[BlockHashWithGroupId]) -> None:
        """Count those of `keys` that came, and that a request hits for the first
        time."""
        if self._came_from:
            for key in keys:
                if (tier := self._came_from.pop(key, None)) is not None:
                    tier.num_hit += 1

    def forget(self) -> None:
        """No hit of what came counts any more."""
        self._came_from.clear()
