# SPDX-License-Identifier: Apache-2.0
"""Follows requests with hints, and evicts finished conversations first.

A client ends a conversation with its last request (`Hints.release`), or afterwards
(`hear`). Nothing is dropped: its blocks move to the front of the device's free queue,
and its slots before all others. Both serve hits until they are reused. Hints to keep
blocks longer are handled by `Retaining`.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.kv_tier.bounded import BoundedMap, digest
from vllm.v1.kv_tier.hints import Hints, are_in
from vllm.v1.kv_tier.releases import kv_transfer_params
from vllm.v1.kv_tier.scheduling.free_blocks import FreeBlocks
from vllm.v1.kv_tier.scheduling.owners import Owners, Portions
from vllm.v1.kv_tier.scheduling.prefetches import Prefetches
from vllm.v1.kv_tier.scheduling.prewarms import Prewarms
from vllm.v1.kv_tier.scheduling.retaining import Retaining
from vllm.v1.kv_tier.scheduling.slots import SlotTable
from vllm.v1.kv_tier.scheduling.storing import BlockStorer
from vllm.v1.kv_tier.scheduling.untold import Tell, Untold
from vllm.v1.kv_tier.stats import KVTierStats
from vllm.v1.request import Request, RequestStatus

logger = init_logger(__name__)

KEYS_PER_STEP = 1024
"""Most blocks that a step reorders because of hints. A block takes about 2 us, and a
conversation may own all blocks of both tiers."""
_TURNS_BYTES = 1 << 24
"""Bytes for the numbers of requests of conversations, some 50,000 of them."""


class Speaker(NamedTuple):
    """A request with hints."""

    hints: Hints
    owner: bytes
    """Its conversation, or one of its own if it names none."""
    tenant: Hashable
    """Its name if that has a quota, else a digest."""


_UNKNOWN = Speaker(Hints(), b"", None)
"""Stands for a request that was not seen before."""


class Releasing:
    """Follows requests with hints, and moves what they release to the front.

    Args:
        pool: The block pool.
        free: Its free queue.
        table: The slot table.
        storer: Skips blocks that are released or not to be stored.
        prefetches: Blocks that wait for a request are left alone.
        retaining: Handles retained blocks.
        num_keys: Most blocks whose owners are remembered.
        stats: Counts hints and released blocks.

    """

    def __init__(
        self,
        pool: BlockPool,
        free: FreeBlocks,
        table: SlotTable,
        storer: BlockStorer,
        prefetches: Prefetches,
        retaining: Retaining,
        num_keys: int,
        stats: KVTierStats,
    ) -> None:
        self._pool = pool
        self._free = free
        self._table = table
        self._storer = storer
        self._prefetches = prefetches
        self.retaining = retaining
        self._num_keys = num_keys
        self._owners = Owners(num_keys)
        self.untold = Untold(lambda *run: self.computed(*run))
        """Computed blocks that are not processed here yet."""
        self.prewarms = Prewarms(num_keys, stats, retaining.said.clock)
        self._quotas = retaining.quotas
        self._stats = stats
        # None for requests with invalid hints.
        self._speakers: WeakKeyDictionary[Request, Speaker | None]
        self._speakers = WeakKeyDictionary()
        # Requests with work to do at their end, by id.
        self._last: dict[str, tuple[ref[Request], Speaker]] = {}
        # Number of requests so far by conversation; those used last stay.
        self._turns = BoundedMap[bytes, int](_TURNS_BYTES)
        # Keys to process, and how many more of them in this step.
        self._work: deque[tuple[Portions, Callable[[list[Any]], None]]] = deque()
        self._room = KEYS_PER_STEP
        # What each request may load: number of blocks, and their hashes.
        self._loadable: WeakKeyDictionary[Request, tuple[int, frozenset[BlockHash]]]
        self._loadable = WeakKeyDictionary()
        # Number of blocks loaded ahead for requests with a cap, until they run.
        self._loaded_ahead: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        # Requests free their blocks when they end.
        self._some_were_freed = False
        self.is_listening = bool(self._quotas)
        """Whether `cached` must be called: from the first request with hints on.
        Public, since every block of a decoding request passes here."""

    def cached(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        first: int,
        last: int,
        block_size: int,
    ) -> None:
        """Record that this step computes `blocks[first:last]` of `request`.

        Call it while `is_listening`.
        """
        if self.prewarms.pending:
            keys = [block.block_hash for block in blocks[first:last]]
            self.prewarms.computed(request, keys)
        if not self.untold.goes_on(request, blocks, first, last) and (
            self.speaks(request)
        ):
            self._computes(request, blocks[first:last], first, block_size)

    def cached_part(self, request: Request, block: KVCacheBlock) -> None:
        """Record that the step computes a part of `block`, which may never be full."""
        speaker = self.follow(request) if self.speaks(request) else None
        if speaker is not None and speaker.hints.offload_limit is not None:
            self._storer.forbidden.add(block.block_id)

    def _computes(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        first: int,
        block_size: int,
    ) -> None:
        """As `computed`, now or when the blocks are needed."""
        if (speaker := self.follow(request)) is None:
            return
        tell: Tell = self.untold.begin
        if speaker.hints.offload_limit is not None or self.retaining.orders_itself:
            # Blocks that are stored at once must be processed at once.
            tell = self.computed
        tell(request, blocks, first, block_size)

    def freed(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Note that requests have freed `blocks`."""
        self._some_were_freed = True
        if self.untold.runs:
            self.untold.needed(blocks)

    def begin_step(self) -> None:
        """Process requests that ended since the last step, and remaining work."""
        self.retaining.begin_step()
        self._room = KEYS_PER_STEP
        if self._some_were_freed and self._last:
            self._some_were_freed = False
            self._end_requests()
        if self._work:
            self._do_work()

    def _end_requests(self) -> None:
        # May include all running requests, so avoid method calls for those.
        last, running = self._last, RequestStatus.RUNNING
        for request_id, (follows, speaker) in list(last.items()):
            request = follows()
            if request is not None and (
                request.status is running or not request.is_finished()
            ):
                continue
            del last[request_id]
            self._do(self.retaining.ended(request_id), self.retaining.put_first)
            if speaker.hints.release:
                self._release(speaker.owner)

    def _do(self, keys: Portions, work: Callable[[list[Any]], None]) -> None:
        """Process `keys` with `work`, as many per step as allowed."""
        if keys:
            self._work.append((keys, work))
            self._do_work()

    def _do_work(self) -> None:
        while self._work and self._room:
            keys, work = self._work[0]
            before = len(keys)
            part = keys.take(self._room)
            self._room -= before - len(keys)
            if not keys:
                self._work.popleft()
            work(part)

    def forget(self) -> None:
        """Nothing is left of what was computed, on either tier.

        How many requests each conversation had stays, which says nothing of blocks.
        """
        self._storer.released.clear()
        self._storer.forbidden.clear()
        self.retaining.on_device.clear()
        self._owners.clear()
        self.retaining.said.clear()
        self.prewarms.forget()

    def hear(self, conversation: str, cache_salt: str | None) -> dict[str, int]:
        """End `conversation`. What its running requests use follows when they end.

        Returns:
            `released_blocks`, on device and host, and `running_requests`. Blocks that
            later steps will process are included as if they existed.

        """
        self._stats.hints["release"] = self._stats.hints.get("release", 0) + 1
        owner = owner_of(conversation, cache_salt)
        running = [
            (request, speaker)
            for request, speaker in self._speakers.items()
            if speaker is not None
            and speaker.owner == owner
            and not request.is_finished()
        ]
        for request, speaker in running:
            hints = replace(speaker.hints, release=True)
            self._speakers[request] = speaker = speaker._replace(hints=hints)
            self._last[request.request_id] = ref(request), speaker
        before = self._stats.released_blocks
        num_left = self._release(owner)
        return {
            "released_blocks": self._stats.released_blocks - before + num_left,
            "running_requests": len(running),
        }

    # -------------------------------------------------------- what requests do

    def speaks(self, request: Request) -> bool:
        """Whether `request` has hints, or a salt with a quota."""
        if are_in(kv_transfer_params(request)):
            return True
        if not self._quotas:
            return False
        salt = request.cache_salt
        return isinstance(salt, str) and salt in self._quotas

    def must_wait(self, request: Request) -> bool:
        """Whether a request with hints must leave free blocks to others."""
        speaker = self.follow(request)
        if speaker is None or not speaker.hints.prewarm:
            return False
        return self.prewarms.must_wait(request)

    def may_load(self, request: Request) -> Callable[[BlockHash], bool] | None:
        """Which blocks may be loaded for a request with hints; None for all.

        Call it before its prefix is looked up.
        """
        speaker = self.follow(request)
        if speaker is None or (limit := speaker.hints.max_load_tokens) is None:
            return None
        get = self._pool.cached_block_hash_to_block.get_one_block
        hashes, num_blocks = request.block_hashes, 0
        assert self._pool.hash_block_size is not None
        if (limit := limit // self._pool.hash_block_size) >= len(hashes):
            return None
        for block_hash in hashes:
            if get(make_block_hash_with_group_id(block_hash, 0)) is None:
                break
            num_blocks += 1
        # Blocks that were loaded ahead for it count as device blocks.
        num_blocks += max(0, limit - self._loaded_ahead.get(request, 0))
        num_before, allowed = self._loadable.get(request, (-1, frozenset()))
        if num_before != num_blocks:
            allowed = frozenset(hashes[:num_blocks])
            self._loadable[request] = num_blocks, allowed
        # In some releases the hash of a large block concatenates those of its parts.
        size = len(hashes[0])
        return lambda block_hash: block_hash[-size:] in allowed

    def loads_ahead(self, request: Request, num_blocks: int) -> None:
        """Count blocks that are loaded ahead for waiting `request`, which has a cap."""
        loaded = self._loaded_ahead
        loaded[request] = loaded.get(request, 0) + num_blocks

    def end_loads_ahead(self, request: Request) -> None:
        """Note that `request`, which has a cap, runs."""
        self._loaded_ahead.pop(request, None)

    def computed(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        first: int,
        block_size: int,
    ) -> None:
        """Record that this step computes `blocks`, from index `first`, of `request`."""
        if (speaker := self.follow(request)) is None:
            return
        for block in blocks:
            if (key := block.block_hash) is not None:
                self._owners.computed(key, speaker.owner)
        self._tell(request, speaker, blocks, first, block_size)
        if (limit := speaker.hints.offload_limit) is not None:
            num_stored = max(0, limit // block_size - first)
            self._storer.forbidden.update(
                block.block_id for block in blocks[num_stored:] if not block.is_null
            )

    def hit(
        self,
        request: Request,
        groups: Sequence[Sequence[KVCacheBlock]],
        managers: Iterable[Any],
    ) -> None:
        """Record that `request` is admitted and hit device blocks in `groups`."""
        if self.untold.runs:
            for group in groups:
                self.untold.needed(group)
        speaker = self.follow(request) if self.speaks(request) else None
        owner = None if speaker is None else speaker.owner
        storer, retaining = self._storer, self.retaining
        pending = self.prewarms.pending
        is_marked = self._owners or storer.released or storer.forbidden or pending
        if speaker is None and not (is_marked or retaining.said):
            return
        # Other requests that limit storing do not lift the limit.
        lifts = speaker is None or speaker.hints.offload_limit is None
        for group, manager in zip(groups, managers, strict=True):
            if storer.released or storer.forbidden:
                ids = [block.block_id for block in group]
                storer.released.difference_update(ids)
                if lifts:
                    storer.forbidden.difference_update(ids)
            if self._owners or pending:
                keys = [block.block_hash for block in group]
                self._owners.hit(keys, owner)
                self.prewarms.hit(request, keys)
            if speaker is None:
                retaining.used_in_silence(group)
            else:
                self._tell(request, speaker, group, 0, manager.block_size)

    def taken(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Note that `blocks` are about to get new content."""
        ids = [block.block_id for block in blocks]
        self._storer.released.difference_update(ids)
        self._storer.forbidden.difference_update(ids)

    def _tell(
        self,
        request: Request,
        speaker: Speaker,
        blocks: Sequence[KVCacheBlock],
        first: int,
        block_size: int,
    ) -> None:
        retaining = self.retaining
        retaining.tell(
            request.request_id,
            speaker.hints,
            speaker.tenant,
            self._turns.get(speaker.owner, 1),
            request.num_prompt_tokens,
            blocks,
            first,
            block_size,
        )
        if retaining.has_low(request.request_id):
            self._last[request.request_id] = ref(request), speaker

    # ----------------------------------------------------------- what they say

    def follow(self, request: Request) -> Speaker | None:
        """Parse the hints of `request` once. None if they are invalid."""
        speaker = self._speakers.get(request, _UNKNOWN)
        if speaker is not _UNKNOWN:
            return speaker
        self.is_listening = True
        hints, params = None, kv_transfer_params(request)
        try:
            hints = Hints.from_params(params)
            if hints is None and not are_in(params):
                # Only its cache salt matters.
                hints = Hints()
        except Exception as e:
            # No client input may crash the scheduler.
            self._stats.refused_hints += 1
            logger.warning_once("KV tier: hints of a request are ignored. %s", str(e))
        if hints is None:
            self._speakers[request] = None
            return None
        speaker = self._speakers[request] = self._speaker(request, hints)
        for kind in hints.kinds():
            self._stats.hints[kind] = self._stats.hints.get(kind, 0) + 1
        if hints.release:
            self._last[request.request_id] = ref(request), speaker
        if hints.prewarm:
            follow = partial(self.prewarms.follow, ref(request))
            self._do(self.prewarms.ask(request), follow)
        if hints.conversation is not None:
            owner = speaker.owner
            self._turns[owner] = self._turns.get(owner, 0) + 1
        return speaker

    def _speaker(self, request: Request, hints: Hints) -> Speaker:
        salt = request.cache_salt
        if hints.conversation is None:
            owner = digest(request.request_id)
        else:
            owner = owner_of(hints.conversation, salt)
        tenant: str | bytes | None = salt if hints.tenant is None else hints.tenant
        if tenant is not None and not (
            isinstance(tenant, str) and tenant in self._quotas
        ):
            tenant = digest(tenant)
        return Speaker(hints, owner, tenant)

    def _release(self, owner: bytes) -> int:
        """End a conversation.

        Returns how many of its blocks are left to later steps.
        """
        keys = self._owners.release(owner)
        self._do(keys, partial(self._put_first, owner))
        return len(keys)

    def _put_first(self, owner: bytes, keys: Sequence[Hashable]) -> None:
        """Move the blocks of `keys`, in order of computation, to the front."""
        if (admission := self._storer.admission) is not None:
            admission.release(keys)
        blocks = []
        cached = self._pool.cached_block_hash_to_block
        for key in keys:
            block = cached.get_one_block(key)  # type: ignore[arg-type]
            if block is not None:
                if self._is_in_use(block):
                    # In use by a request of the conversation, since a hit by another
                    # one would have removed the owner. It follows when that request
                    # ends.
                    self._owners.computed(key, owner)
                    continue
                blocks.append(block)
            slot = self._table.get(key)  # type: ignore[arg-type]
            if slot is not None:
                self._table.release(slot)
            self._stats.released_blocks += block is not None or slot is not None
        # The beginning of a prefix is useful without its end, but not vice versa.
        blocks.reverse()
        self._free.put_first(blocks, need_no_store=True)
        self._storer.released.update(block.block_id for block in blocks)

    def _is_in_use(self, block: KVCacheBlock) -> bool:
        return block.ref_cnt > 0 or self._prefetches.is_unclaimed(block)


def owner_of(conversation: str, cache_salt: str | None) -> bytes:
    """A digest that identifies a conversation.

    Names and salts may have any length, and are remembered as long as blocks.
    """
    return digest(conversation, cache_salt)
