# SPDX-License-Identifier: Apache-2.0
"""Applies hints to keep blocks longer or less long, on both tiers.

On the host, a layer around the eviction policy does so (`Hinted`), from the first such
hint on. On the device, the free queue is the order of eviction: blocks of low priority
move to its front when their request ends, and retained blocks are skipped, which gives
them another round in the queue.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_tier.eviction.base import EvictionPolicy, KeyHint
from vllm.v1.kv_tier.eviction.hinted import KEPT_PART, Hinted, RetentionHints
from vllm.v1.kv_tier.hints.schema import NO_HINT, Hints, Retain
from vllm.v1.kv_tier.scheduler.admission import Admission
from vllm.v1.kv_tier.scheduler.costs import Costs
from vllm.v1.kv_tier.scheduler.free_blocks import FreeBlocks
from vllm.v1.kv_tier.scheduler.load_admission import Prefetches
from vllm.v1.kv_tier.scheduler.slots import SlotTable
from vllm.v1.kv_tier.stats import KVTierStats


class Portions:
    """Keys that are processed in portions, to bound the work of each step.

    Args:
        keys: All keys, in order.
        is_left: Whether a key still needs processing when its turn comes. Called once
            for each key, and may change state.

    """

    def __init__(
        self,
        keys: Sequence[Hashable],
        is_left: Callable[[Hashable], bool] = lambda key: True,
    ) -> None:
        self._keys = keys
        self._is_left = is_left
        self._num_taken = 0

    def __len__(self) -> int:
        """Number of keys that have not been taken."""
        return len(self._keys) - self._num_taken

    def take(self, num_keys: int) -> list[Hashable]:
        """Take the next `num_keys` keys; return those that still need processing."""
        begin = self._num_taken
        self._num_taken = min(begin + num_keys, len(self._keys))
        return list(filter(self._is_left, self._keys[begin : self._num_taken]))


_MAX_PASSED = 64
"""Most retained blocks that an allocation skips. Decoding allocates one block at a
time."""


class RetentionManager:
    """Orders blocks by hints and quotas.

    Args:
        pool: The block pool.
        free: Its free queue.
        table: The slot table.
        prefetches: Blocks that wait for a request are left alone.
        admission: Simulates the order of eviction; may be None.
        costs: Has the clock.
        num_keys: Most blocks whose hints are remembered.
        quotas: Parts of the slots, by tenant.
        stats: Counts retained blocks.

    """

    def __init__(
        self,
        pool: BlockPool,
        free: FreeBlocks,
        table: SlotTable,
        prefetches: Prefetches,
        admission: Admission | None,
        costs: Costs,
        num_keys: int,
        quotas: Mapping[str, float],
        stats: KVTierStats,
    ) -> None:
        self._pool = pool
        self._free = free
        self._table = table
        self._prefetches = prefetches
        self._admission = admission
        self._stats = stats
        self.quotas = quotas
        """Parts of the slots, by tenant."""
        self.key_hints = RetentionHints(num_keys, lambda: costs.clock())
        self.hinted: Hinted | None = None
        """The layer around the host's policy, once it is needed."""
        self.on_device: OrderedDict[int, Hashable] = OrderedDict()
        """Keys of retained blocks by block id. The blocks may have other content by
        now. Public, since testing whether there are any must be cheap."""
        self._max_on_device = int(KEPT_PART * pool.num_gpu_blocks)
        self._is_vain = False
        # Blocks with low priority, by request, until it ends.
        self._low: dict[str, dict[Hashable, int]] = {}
        if quotas:
            self._wrap()

    def _wrap(self) -> Hinted:
        if self.hinted is None:

            def wrap(policy: EvictionPolicy) -> Hinted:
                return Hinted(policy, self.key_hints, self.quotas)

            self.hinted = self._table.wrap_policy(wrap)
            if self._admission is not None:
                self._admission.wrap_policies(wrap)
        return self.hinted

    @property
    def orders_itself(self) -> bool:
        """Whether the host's order depends on the hints or tenants of all blocks.

        They must then be known before a block gets a slot.
        """
        hinted = self.hinted
        return bool(self.quotas) or (hinted is not None and hinted.orders_itself)

    def begin_step(self) -> None:
        """Start a step, and look for blocks to skip again."""
        self._is_vain = False
        if self.hinted is not None:
            self.hinted.begin_step()

    # ------------------------------------------------------------ what is said

    def record_use(
        self,
        request_id: str,
        hints: Hints,
        tenant: Hashable,
        turn: int,
        num_prompt_tokens: int,
        blocks: Sequence[KVCacheBlock],
        first: int,
        block_size: int,
    ) -> None:
        """Record that a request with hints computes or hits `blocks`.

        Args:
            request_id: Id of the request.
            hints: Its hints.
            tenant: Its tenant.
            turn: Turn of its conversation.
            num_prompt_tokens: Length of its prompt.
            blocks: Consecutive blocks of the request.
            first: Index of the first of them in the request.
            block_size: Tokens of a block.

        """
        ranges = hints.retain
        hinted = self._wrap() if ranges else self.hinted
        if hinted is None:
            return
        if not (ranges or tenant in hinted.shares or hinted.orders_itself):
            self.record_plain_use(blocks)
            return
        now, num_blocks = self.key_hints.clock(), len(blocks)
        last = ranges[-1] if ranges else None
        # Usually all of them are in the last range.
        if (
            last is not None
            and last.start == 0
            and last.end is None
            and (last.answer or (first + num_blocks) * block_size <= num_prompt_tokens)
        ):
            until = now + last.ttl if last.ttl else math.inf
            about = KeyHint(last.priority, until, tenant, turn)
            if self._retain_all(blocks, about, hinted):
                return
        abouts: list[KeyHint | None] = [
            KeyHint(retain.priority, now + (retain.ttl or math.inf), tenant, turn)
            for retain in ranges
        ]
        # At -1, for blocks in no range.
        abouts.append(None)
        where = first, num_blocks, block_size, num_prompt_tokens
        wanted = map(abouts.__getitem__, covering(ranges, *where))
        if lows := self._record_uses(blocks, wanted, hinted, tenant, turn):
            self._low.setdefault(request_id, {}).update(lows)

    def _retain_all(
        self, blocks: Iterable[KVCacheBlock], about: KeyHint, hinted: Hinted
    ) -> bool:
        """A faster `_record_uses` for blocks that are all retained, without other
        hints.

        Returns:
            False if that does not apply, and nothing was done.

        """
        if (
            about.priority <= NO_HINT
            or hinted.orders_itself
            or about.tenant in hinted.shares
        ):
            return False
        stay: dict[int, Any] = {
            b.block_id: key for b in blocks if (key := b.block_hash) is not None
        }
        keys = stay.values()
        if not self.key_hints.renew(keys, about):
            return False
        if not hinted.kept.keys().isdisjoint(keys):
            for kept in hinted.kept.keys() & keys:
                if self._table.is_ordered(kept):  # type: ignore[arg-type]
                    hinted.update(kept)
        self._stay(stay)
        return True

    def _record_uses(
        self,
        blocks: Iterable[KVCacheBlock],
        wanted: Iterable[KeyHint | None],
        hinted: Hinted,
        tenant: Hashable,
        turn: int,
    ) -> dict[Hashable, int]:
        """Record the hint of each of `blocks`; None for a use without one.

        Returns:
            Priorities of the keys that are to be evicted first.

        """
        said, kept, has_slot = self.key_hints, hinted.kept, self._table.has
        is_told_all = hinted.orders_itself or tenant in hinted.shares
        stay: dict[int, Hashable] = {}
        lows: dict[Hashable, int] = {}
        for block, about in zip(blocks, wanted):
            if (key := block.block_hash) is None:
                continue
            old = said.get(key)
            if about is None:
                about = said.update(key, None, math.inf, tenant, turn)
            else:
                about = said.update(key, about.priority, about.until, tenant, turn)
            if about.priority > NO_HINT:
                stay[block.block_id] = key
            elif about.priority < NO_HINT:
                lows[key] = about.priority
            # Most keys are ordered by the policy alone, even if retained.
            if (
                (
                    key in kept
                    or is_told_all
                    or about.priority < NO_HINT
                    or (old is not None and old[0] < NO_HINT)
                )
                and has_slot(key)
                and self._table.is_ordered(key)
            ):
                hinted.update(key)
        if stay:
            self._stay(stay)
        return lows

    def record_plain_use(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Record that a request hits `blocks` without hints for them."""
        said, hinted = self.key_hints, self.hinted
        if not said or hinted is None:
            return
        for block in blocks:
            key = block.block_hash
            if (
                key is not None
                and said.record_plain_use(key)
                and self._table.is_ordered(key)
            ):
                hinted.update(key)

    def report(self, stats: KVTierStats) -> None:
        """Put the counts of slots into `stats`."""
        if (hinted := self.hinted) is None:
            return
        stats.yielded_slots, hinted.num_yielded = hinted.num_yielded, 0
        stats.tenant_slots = {
            str(tenant): len(share.resident) for tenant, share in hinted.shares.items()
        }

    # -------------------------------------------------------------- the device

    def _stay(self, blocks: Mapping[int, Hashable]) -> None:
        """Retain blocks, given their keys by block id."""
        self._stats.retained_blocks += len(blocks)
        on_device = self.on_device
        for block_id in on_device.keys() & blocks.keys():
            del on_device[block_id]
        on_device.update(blocks)
        for _ in range(len(on_device) - self._max_on_device):
            on_device.popitem(last=False)

    def has_low(self, request_id: str) -> bool:
        """Whether blocks have low priority once this request has ended."""
        return request_id in self._low

    def end_request(self, request_id: str) -> Portions:
        """End a request. Returns its keys of low priority, for `put_first`."""
        # Not `sorted`, which takes 35 ms for a prompt of a million tokens.
        by_priority: list[list[Hashable]] = [[] for _ in range(NO_HINT)]
        for key, priority in self._low.pop(request_id, {}).items():
            by_priority[priority].append(key)
        # The beginning of a prefix is useful without its end, but not vice versa; what
        # is moved to the front last is evicted first.
        keys = [*chain.from_iterable(reversed(by_priority))]
        return Portions(keys, self.key_hints.is_low)

    def put_first(self, keys: Sequence[Hashable]) -> None:
        """Move the blocks of `keys` to the front, the last one foremost."""
        get = self._pool.cached_block_hash_to_block.get_one_block
        found = map(get, reversed(keys))  # type: ignore[arg-type]
        self._free.put_first(
            [
                block
                for block in found
                if block is not None
                and block.ref_cnt == 0
                and not self._prefetches.is_unclaimed(block)
            ],
            need_no_store=False,
        )

    def pass_over_retained(self, num_blocks: int) -> None:
        """Before an allocation, move retained blocks away from the head of the queue.

        Only as long as there are other blocks near the head.
        """
        if self._is_vain:
            return
        head = self._pool.free_block_queue.fake_free_list_head.next_free_block
        # A hot path: each block of a decoding request.
        if num_blocks == 1 and head.block_id not in self.on_device:  # type: ignore[union-attr]
            return
        max_looks = 2 * num_blocks + _MAX_PASSED
        # If all blocks near the head are retained, this step does not look again.
        self._is_vain = not self._free.pass_over(
            num_blocks, self.on_device.keys(), self._is_kept, max_looks
        )

    def _is_kept(self, block: KVCacheBlock) -> bool:
        key = self.on_device.get(block.block_id)
        return (
            key is not None
            and key == block.block_hash
            and self.key_hints.is_retained(key)
        )


def covering(
    ranges: Iterable[Retain],
    first: int,
    num_blocks: int,
    block_size: int,
    num_prompt_tokens: int,
) -> list[int]:
    """For each of `num_blocks` blocks, the index of the last range that covers it.

    The blocks start at index `first` of the request. A range covers a block if it has
    any of its tokens. -1 for blocks in no range.
    """
    found = [-1] * num_blocks
    last = first + num_blocks
    for index, retain in enumerate(ranges):
        limit = num_prompt_tokens if retain.end is None else retain.end
        begin, end = retain.start // block_size, -(-limit // block_size)
        if limit >= num_prompt_tokens:
            end = last if retain.answer else -(-num_prompt_tokens // block_size)
        elif retain.answer:
            answer = max(num_prompt_tokens // block_size, first)
            if answer < last:
                found[answer - first :] = [index] * (last - answer)
        if begin <= first and last <= end:
            found = [index] * num_blocks
        elif (begin := max(begin, first)) < (end := min(end, last)):
            found[begin - first : end - first] = [index] * (end - begin)
    return found
