# SPDX-License-Identifier: Apache-2.0
"""Windows and states that a later turn of the same conversation has replaced.

A hit needs the end of a window, or one state, and all blocks of full attention. So each
turn of a conversation leaves an end behind that the next turn uses, and that only a
branch at this turn can use from then on. Such ends are evicted from the host first, and
written to secondary tiers last.

An end is superseded when a request that hit it has cached one of its own, further on.
What is used although it was superseded is a place where conversations branch, like the
end of a system prompt. So a key is superseded once: if it is used or computed again,
the eviction policy alone decides. Where that happens often, it decides on all of them.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    KVCacheBlock,
    get_group_id,
)
from vllm.v1.kv_tier.eviction.base import drop_oldest
from vllm.v1.kv_tier.layout import KVTierLayout, PrefixEnd
from vllm.v1.kv_tier.scheduler.kv_groups import UsedBlocks
from vllm.v1.kv_tier.scheduler.slots import HostSlot, SlotTable
from vllm.v1.kv_tier.stats import KVTierStats
from vllm.v1.request import Request


class Branches:
    """Whether few superseded ends are used again.

    Those that were evicted first tell nothing, so some are samples, which are not.

    Args:
        num_keys: Superseded keys after which older ones count half.

    """

    _PART = 1 / 16
    _EACH = 8

    def __init__(self, num_keys: int) -> None:
        self._num_keys = num_keys
        self._num_requests = 0
        self._num_superseded = self._num_used = 0.0

    @property
    def are_rare(self) -> bool:
        return self._num_used <= self._PART * self._num_superseded

    def next_is_sample(self) -> bool:
        """Whether the ends that the next request hits are a sample."""
        self._num_requests += 1
        return self._num_requests % self._EACH == 0

    def record_superseded(self) -> None:
        """Record that a key is superseded."""
        self._num_superseded += 1
        if self._num_superseded > self._num_keys:
            self._num_superseded /= 2
            self._num_used /= 2

    def record_used(self) -> None:
        """Record that a superseded key is used again."""
        self._num_used += 1

    def record_evicted(self) -> None:
        """Record that a superseded key was evicted before others, which hides uses."""
        self._num_superseded = max(self._num_superseded - 1, 0.0)


class _Turn(NamedTuple):
    """Ends that a request hit, by group, until it has cached its own."""

    request: weakref.ref[Request]
    ends: dict[int, list[BlockHashWithGroupId]]
    is_sample: bool


_OVER, _RELEASED, _SAMPLE = range(3)
"""A key that was superseded: used again or gone; evicted first; a sample, which is
evicted in the policy's order."""


class SupersededEnds:
    """Finds superseded ends. A hit listener, and a listener of the slot table.

    Args:
        prefix_ends: By group; None for groups of which a hit needs all blocks.
        table: The slot table.
        num_keys: Most keys that are remembered.
        stats: Counts evicted slots.

    """

    def __init__(
        self,
        prefix_ends: Sequence[PrefixEnd | None],
        table: SlotTable,
        num_keys: int,
        stats: KVTierStats,
    ) -> None:
        self._ends = {i: end for i, end in enumerate(prefix_ends) if end is not None}
        self._table = table
        self._num_keys = num_keys
        self._stats = stats
        self._branches = Branches(max(table.num_slots, 64))
        self.on_superseded: list[Callable[[BlockHashWithGroupId], None]] = []
        """Called with each superseded key that the host has."""
        self._turns: dict[str, _Turn] = {}
        self._num_used = 0
        # By key that was superseded.
        self._states: dict[BlockHashWithGroupId, int] = {}
        # To be released once the plan does not pin them any more.
        self._due: list[BlockHashWithGroupId] = []
        table.listeners.append(self)

    @property
    def follows(self) -> bool:
        """Whether requests have hit ends, and not cached their own yet."""
        return bool(self._turns)

    def on_hit(self, request: Request, used: UsedBlocks) -> None:
        """`request` is admitted with `used`, of one group."""
        blocks = used.blocks
        if not blocks or (key := blocks[-1].block_hash) is None:
            return
        group = get_group_id(key)
        if group not in self._ends:
            return
        for key in (keys := used.keys):
            if state := self._states.get(key):
                self._use_again(key, state)
        turn = self._turns.get(request.request_id)
        if turn is None:
            turn = _Turn(weakref.ref(request), {}, self._branches.next_is_sample())
            self._turns[request.request_id] = turn
        self._num_used += len(keys) - len(turn.ends.get(group, ()))
        turn.ends[group] = keys
        while self._num_used > self._num_keys:
            self._forget(next(iter(self._turns)))

    def _use_again(self, key: BlockHashWithGroupId, state: int) -> None:
        self._states[key] = _OVER
        self._branches.record_used()
        if state == _RELEASED:
            self._table.keep(key)

    def _forget(self, request_id: str) -> None:
        self._num_used -= sum(map(len, self._turns.pop(request_id).ends.values()))

    def record_call(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        num_before: int,
        num_full: int,
        args: Sequence[Any],
        more: Mapping[str, Any],
    ) -> None:
        """As `record_cached`; the rest of the arguments of `cache_full_blocks`."""
        group = more["kv_cache_group_id"] if "kv_cache_group_id" in more else args[0]
        mask = more.get("block_mask", args[1] if len(args) > 1 else None)
        self.record_cached(request, blocks, num_before, num_full, group, mask)

    def record_cached(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        num_before: int,
        num_full: int,
        group: int,
        mask: Sequence[bool] | None = None,
    ) -> None:
        """Record that a request caches blocks.

        Args:
            request: The request.
            blocks: All of its blocks of one group.
            num_before: How many of them were cached before.
            num_full: How many are cached now.
            group: The group.
            mask: Which of the new ones are cached; None for all.

        """
        turn = self._turns.get(request.request_id)
        if turn is None or group not in turn.ends:
            return
        if mask is not None:
            last = next((i for i in range(len(mask) - 1, -1, -1) if mask[i]), -1)
            num_full = num_before + last + 1
        needed, most = self._ends[group]
        end = blocks[max(num_full - needed, 0) : num_full]
        if num_full <= num_before or any(block.block_hash is None for block in end):
            # A part of a prompt whose end is not cached, or not yet.
            return
        own = blocks[max(num_full - most, 0) : num_full]
        kept = {block.block_hash for block in own}
        keys = turn.ends.pop(group)
        self._num_used -= len(keys)
        self._supersede((key for key in keys if key not in kept), turn.is_sample)
        if not turn.ends:
            del self._turns[request.request_id]

    def _supersede(self, keys: Iterable[BlockHashWithGroupId], is_sample: bool) -> None:
        for key in keys:
            if key in self._states:
                continue
            self._branches.record_superseded()
            self._states[key] = _SAMPLE if is_sample else _RELEASED
            if not is_sample:
                self._due.append(key)
        drop_oldest(self._states, self._num_keys)  # type: ignore[arg-type]

    def end_plan(self) -> None:
        """Release slots in the table, which pins none now."""
        # Requests that ended before they had cached an end are soon the oldest.
        while self._turns:
            oldest, turn = next(iter(self._turns.items()))
            request = turn.request()
            if request is not None and not request.is_finished():
                break
            self._forget(oldest)
        if not self._due:
            return
        due, self._due = self._due, []
        if not self._branches.are_rare:
            return
        for key in due:
            slot = self._table.get(key)
            if slot is not None and self._states.get(key) == _RELEASED:
                self._table.release(slot)
                for listener in self.on_superseded:
                    listener(key)

    def forget(self) -> None:
        """The host was emptied."""
        self._turns.clear()
        self._num_used = 0
        self._states.clear()
        self._due.clear()

    # ------------------------------------------------------------ the slot table

    def on_filled(self, slot: HostSlot) -> None:
        """A slot is filled, maybe with an end that the device has had since."""
        if self._states.get(slot.keys[0]) == _RELEASED:
            self._due.append(slot.keys[0])

    def on_loaded(self, slots: Sequence[HostSlot]) -> None:
        """Loads are uses, see `on_hit`."""

    def on_forgotten(self, slot: HostSlot) -> None:
        """An end left the host. A branch may compute it again."""
        if self._states.get(slot.keys[0]) == _RELEASED:
            self._states[slot.keys[0]] = _OVER
            self._branches.record_evicted()
            self._stats.superseded_slots += 1


def make_superseded(
    layout: KVTierLayout, pool: Any, secondary: Any, stats: KVTierStats
) -> SupersededEnds | None:
    """None for models whose groups have no ends: a hot path."""
    if not layout.prefix_ends:
        return None
    ends, num_keys = layout.prefix_ends, pool.num_gpu_blocks
    superseded = SupersededEnds(ends, pool.host, num_keys, stats)
    if secondary is not None:
        superseded.on_superseded.append(secondary.put_last)
    return superseded
