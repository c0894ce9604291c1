# SPDX-License-Identifier: Apache-2.0
"""What clients want to be kept longer than others, or less long, on both tiers.

On the host a layer around the eviction policy sees to it (`Hinted`), from the first
such hint on. On the device the order of eviction is that of the free queue: what is to
go before others comes first when its request has ended, and what is to stay is passed
over, so that it has another round of the queue.
"""

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_tier.eviction.base import About, EvictionPolicy
from vllm.v1.kv_tier.eviction.hinted import KEPT_PART, Hinted
from vllm.v1.kv_tier.eviction.said import Said
from vllm.v1.kv_tier.hints import NO_HINT, Hints, Retain
from vllm.v1.kv_tier.scheduling.admission import Admission
from vllm.v1.kv_tier.scheduling.costs import Costs
from vllm.v1.kv_tier.scheduling.free_blocks import FreeBlocks
from vllm.v1.kv_tier.scheduling.owners import Portions
from vllm.v1.kv_tier.scheduling.prefetches import Prefetches
from vllm.v1.kv_tier.scheduling.slots import SlotTable
from vllm.v1.kv_tier.stats import KVTierStats

_MAX_PASSED = 64
"""Retained blocks that an allocation passes over: decoding takes a block at a time."""


class Retaining:
    """Orders blocks by what was said of them, and by quotas.

    Args:
        pool: Whose blocks.
        free: Its free blocks.
        table: The slots.
        prefetches: Blocks that wait for a request are left alone.
        admission: Imitates the order of eviction; None: nobody does.
        costs: Knows the time.
        num_keys: Blocks of which is remembered what was said.
        quotas: Parts of the slots, by tenant.
        stats: Counts what is retained.

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
        self.said = Said(num_keys, lambda: costs.clock())
        self.hinted: Hinted | None = None
        """What carries this out on the host, if there has been something to do."""
        self.on_device: OrderedDict[int, Hashable] = OrderedDict()
        """Keys of blocks that are to stay, by their ids. Others may have the blocks
        meanwhile. Public, since asking whether there are some must cost nothing."""
        self._max_on_device = int(KEPT_PART * pool.num_gpu_blocks)
        self._is_vain = False
        # What requests want to go first, until they end.
        self._low: dict[str, dict[Hashable, int]] = {}
        if quotas:
            self._wrap()

    def _wrap(self) -> Hinted:
        if self.hinted is None:

            def wrap(policy: EvictionPolicy) -> Hinted:
                return Hinted(policy, self.said, self.quotas)

            self.hinted = self._table.wrap_policy(wrap)
            if self._admission is not None:
                self._admission.wrap_policies(wrap)
        return self.hinted

    @property
    def orders_itself(self) -> bool:
        """Whether the host's order of eviction is that of what is said, or of tenants:
        it is to be known of a block before it has a slot."""
        hinted = self.hinted
        return bool(self.quotas) or (hinted is not None and hinted.orders_itself)

    def begin_step(self) -> None:
        """A step begins: what was in vain may not be any more."""
        self._is_vain = False
        if self.hinted is not None:
            self.hinted.begin_step()

    # ------------------------------------------------------------ what is said

    def tell(
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
        """A request with hints computes or hits `blocks`.

        Args:
            request_id: Of the request.
            hints: What it says.
            tenant: Who it is from.
            turn: Of its conversation.
            num_prompt_tokens: Length of its prompt.
            blocks: Of the request, one after another.
            first: Index of the first of them in the request.
            block_size: Tokens of each of them.

        """
        ranges = hints.retain
        hinted = self._wrap() if ranges else self.hinted
        if hinted is None:
            return
        if not (ranges or tenant in hinted.shares or hinted.orders_itself):
            self.used_in_silence(blocks)
            return
        now, num_blocks = self.said.clock(), len(blocks)
        last = ranges[-1] if ranges else None
        # Mostly all of them are in the last range.
        if (
            last is not None
            and last.start == 0
            and last.end is None
            and (last.answer or (first + num_blocks) * block_size <= num_prompt_tokens)
        ):
            until = now + last.ttl if last.ttl else math.inf
            about = About(last.priority, until, tenant, turn)
            if self._retain_all(blocks, about, hinted):
                return
        abouts: list[About | None] = [
            About(retain.priority, now + (retain.ttl or math.inf), tenant, turn)
            for retain in ranges
        ]
        # At -1, for blocks in no range.
        abouts.append(None)
        where = first, num_blocks, block_size, num_prompt_tokens
        wanted = map(abouts.__getitem__, covering(ranges, *where))
        if lows := self._tell(blocks, wanted, hinted, tenant, turn):
            self._low.setdefault(request_id, {}).update(lows)

    def _retain_all(
        self, blocks: Iterable[KVCacheBlock], about: About, hinted: Hinted
    ) -> bool:
        """Does what `_tell` does, with few calls, if all of `blocks` are to stay and
        nobody else has said anything of them; else nothing, and returns False."""
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
        if not self.said.renew(keys, about):
            return False
        if not hinted.kept.keys().isdisjoint(keys):
            for kept in hinted.kept.keys() & keys:
                if self._table.is_ordered(kept):  # type: ignore[arg-type]
                    hinted.changed(kept)
        self._stay(stay)
        return True

    def _tell(
        self,
        blocks: Iterable[KVCacheBlock],
        wanted: Iterable[About | None],
        hinted: Hinted,
        tenant: Hashable,
        turn: int,
    ) -> dict[Hashable, int]:
        """What is said of each of `blocks`; None: that they are used.

        Returns:
            Priorities of those that are to go first.

        """
        said, kept, has_slot = self.said, hinted.kept, self._table.get
        is_told_all = hinted.orders_itself or tenant in hinted.shares
        stay: dict[int, Hashable] = {}
        lows: dict[Hashable, int] = {}
        for block, about in zip(blocks, wanted):
            if (key := block.block_hash) is None:
                continue
            old = said.get(key)
            if about is None:
                about = said.tell(key, None, math.inf, tenant, turn)
            else:
                about = said.tell(key, about.priority, about.until, tenant, turn)
            if about.priority > NO_HINT:
                stay[block.block_id] = key
            elif about.priority < NO_HINT:
                lows[key] = about.priority
            # Most keys are told by the policy alone, whatever is retained.
            if (
                (
                    key in kept
                    or is_told_all
                    or about.priority < NO_HINT
                    or (old is not None and old[0] < NO_HINT)
                )
                and has_slot(key) is not None
                and self._table.is_ordered(key)
            ):
                hinted.changed(key)
        if stay:
            self._stay(stay)
        return lows

    def used_in_silence(self, blocks: Iterable[KVCacheBlock]) -> None:
        """A request hits `blocks` of which it says nothing."""
        said, hinted = self.said, self.hinted
        if not said or hinted is None:
            return
        for block in blocks:
            key = block.block_hash
            if (
                key is not None
                and said.used_in_silence(key)
                and self._table.is_ordered(key)
            ):
                hinted.changed(key)

    def report(self, stats: KVTierStats) -> None:
        """Add what the host has, and what it has given up."""
        if (hinted := self.hinted) is None:
            return
        stats.yielded_slots, hinted.num_yielded = hinted.num_yielded, 0
        stats.tenant_slots = {
            str(tenant): len(share.resident) for tenant, share in hinted.shares.items()
        }

    # -------------------------------------------------------------- the device

    def _stay(self, blocks: Mapping[int, Hashable]) -> None:
        """Keys of blocks, by their ids."""
        self._stats.retained_blocks += len(blocks)
        on_device = self.on_device
        for block_id in on_device.keys() & blocks.keys():
            del on_device[block_id]
        on_device.update(blocks)
        for _ in range(len(on_device) - self._max_on_device):
            on_device.popitem(last=False)

    def has_low(self, request_id: str) -> bool:
        """Whether something is to go first when this request has ended."""
        return request_id in self._low

    def ended(self, request_id: str) -> Portions:
        """A request has ended. Returns what it wants to go first, for `put_first`."""
        lows = self._low.pop(request_id, {})
        # A prefix is of use without its end, but not the other way round: and what is
        # put first last goes first.
        keys = sorted(lows, key=lows.__getitem__, reverse=True)
        return Portions(keys, self.said.is_low)

    def put_first(self, keys: Sequence[Hashable]) -> None:
        """The blocks of `keys` make room first, the last of them before the others."""
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

    def make_way(self, num_blocks: int) -> None:
        """`num_blocks` are about to be taken: not those that are to stay, while there
        are others near the head of the queue."""
        if self._is_vain:
            return
        head = self._pool.free_block_queue.fake_free_list_head.next_free_block
        # Each block of a decoding request comes by here.
        if num_blocks == 1 and head.block_id not in self.on_device:  # type: ignore[union-attr]
            return
        max_looks = 2 * num_blocks + _MAX_PASSED
        # When all that is near is to stay, there is no second look in this step.
        self._is_vain = not self._free.pass_over(
            num_blocks, self.on_device.keys(), self._is_kept, max_looks
        )

    def _is_kept(self, block: KVCacheBlock) -> bool:
        key = self.on_device.get(block.block_id)
        return (
            key is not None and key == block.block_hash and self.said.is_retained(key)
        )


def covering(
    ranges: Iterable[Retain],
    first: int,
    num_blocks: int,
    block_size: int,
    num_prompt_tokens: int,
) -> list[int]:
    """For each of `num_blocks` blocks of a request, from index `first` on, which one of
    `ranges` is the last with a token of it; -1: none is."""
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
