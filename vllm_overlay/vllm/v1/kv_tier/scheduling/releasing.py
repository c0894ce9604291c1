# SPDX-License-Identifier: Apache-2.0
"""Follows requests with hints, and lets conversations that are over make room first.

A client says so with its last request (`Hints.release`), or afterwards (`hear`).
Nothing is dropped: blocks go to the front of the device's free queue, slots before all
that the eviction policy orders, and both serve whoever asks for them until then. What a
client wants to be kept is a matter of `Retaining`.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.kv_tier.hints import Hints, are_in
from vllm.v1.kv_tier.scheduling.free_blocks import FreeBlocks
from vllm.v1.kv_tier.scheduling.owners import Owners
from vllm.v1.kv_tier.scheduling.prefetches import Prefetches
from vllm.v1.kv_tier.scheduling.prewarms import Prewarms
from vllm.v1.kv_tier.scheduling.retaining import Retaining
from vllm.v1.kv_tier.scheduling.slots import SlotTable
from vllm.v1.kv_tier.scheduling.storing import BlockStorer
from vllm.v1.kv_tier.scheduling.untold import Tell, Untold
from vllm.v1.kv_tier.stats import KVTierStats
from vllm.v1.request import Request, RequestStatus

logger = init_logger(__name__)


class Speaker(NamedTuple):
    """A request that speaks."""

    hints: Hints
    owner: Hashable
    """Its conversation; of itself, if it names none."""
    tenant: Hashable


_UNKNOWN = Speaker(Hints(), None, None)
"""Stands for a request that was not heard before."""


class Releasing:
    """Follows requests with hints, and puts first what they release.

    Args:
        pool: Whose blocks.
        free: Its free blocks.
        table: The slots.
        storer: Stores nothing that is released, or that clients do not want to be.
        prefetches: Blocks that wait for a request are left alone.
        retaining: Orders what is retained.
        num_keys: Blocks whose owners are remembered.
        stats: Counts hints and what is released.

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
        """What requests have computed of which the rest here has not heard."""
        self.prewarms = Prewarms(num_keys, stats, retaining.said.clock)
        self._quotas = retaining.quotas
        self._stats = stats
        # None: what it says is not understood.
        self._speakers: WeakKeyDictionary[Request, Speaker | None]
        self._speakers = WeakKeyDictionary()
        # Requests after whose end there is something to do, by id.
        self._last: dict[str, Request] = {}
        # Requests so far, by conversation; those used last.
        self._turns: OrderedDict[Hashable, int] = OrderedDict()
        # As they are when a request ends.
        self._some_were_freed = False
        self.is_listening = False
        """Whether this hears of what is computed."""
        if self._quotas:
            self.listen()

    def listen(self) -> None:
        """Hear from now on for whom blocks are computed.

        Not before the first request with hints: every block of a decoding request comes
        by there, and upstream's own method is the cheapest.
        """
        self.is_listening = True
        cache_full_blocks, goes_on = self._pool.cache_full_blocks, self.untold.goes_on

        def listening(
            request: Request,
            blocks: list[KVCacheBlock],
            num_cached_blocks: int,
            num_full_blocks: int,
            block_size: int,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            numbers = num_cached_blocks, num_full_blocks
            cache_full_blocks(request, blocks, *numbers, block_size, *args, **kwargs)
            if self.prewarms.pending:
                keys = [block.block_hash for block in blocks[slice(*numbers)]]
                self.prewarms.computed(request, keys)
            if not goes_on(request, blocks, *numbers) and self.speaks(request):
                new = blocks[slice(*numbers)]
                self._computes(request, new, num_cached_blocks, block_size)

        self._pool.cache_full_blocks = listening  # type: ignore[method-assign]
        if (cache_partial := getattr(self._pool, "cache_partial_block", None)) is None:
            return

        def listening_to_parts(
            request: Request, block: KVCacheBlock, *args: Any, **kwargs: Any
        ) -> Any:
            # It may never be full.
            speaker = self.follow(request) if self.speaks(request) else None
            if speaker is not None and speaker.hints.offload_limit is not None:
                self._storer.forbidden.add(block.block_id)
            return cache_partial(request, block, *args, **kwargs)

        self._pool.cache_partial_block = listening_to_parts  # type: ignore[method-assign]

    def _computes(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        first: int,
        block_size: int,
    ) -> None:
        """As `computed`, now or when somebody needs to know."""
        if (speaker := self.follow(request)) is None:
            return
        tell: Tell = self.untold.begin
        if speaker.hints.offload_limit is not None or self.retaining.orders_itself:
            # What is stored at once must be known at once.
            tell = self.computed
        tell(request, blocks, first, block_size)

    def freed(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Requests let go of `blocks`."""
        self._some_were_freed = True
        if self.untold.runs:
            self.untold.needed(blocks)

    def begin_step(self) -> None:
        """Put first what requests have released that ended since the last step."""
        self.retaining.begin_step()
        if not (self._some_were_freed and self._last):
            return
        self._some_were_freed = False
        # All that run may be among them, so none of those is called.
        last, running = self._last, RequestStatus.RUNNING
        for request in [each for each in last.values() if each.status is not running]:
            if not request.is_finished():
                continue
            del last[request.request_id]
            self.retaining.ended(request.request_id)
            speaker = self._speakers[request]
            if speaker is not None and speaker.hints.release:
                self._release(self._owners.release(speaker.owner))

    def hear(self, conversation: str, cache_salt: str | None) -> dict[str, int]:
        """`conversation` is over. What its running requests use follows when they end.

        Returns:
            `released_blocks`, wherever they lay, and `running_requests`.

        """
        self._stats.hints["release"] = self._stats.hints.get("release", 0) + 1
        owner = conversation, cache_salt
        running = [
            (request, speaker)
            for request, speaker in self._speakers.items()
            if speaker is not None
            and speaker.owner == owner
            and not request.is_finished()
        ]
        for request, speaker in running:
            hints = replace(speaker.hints, release=True)
            self._speakers[request] = speaker._replace(hints=hints)
            self._last[request.request_id] = request
        before = self._stats.released_blocks
        self._release(self._owners.release(owner))
        return {
            "released_blocks": self._stats.released_blocks - before,
            "running_requests": len(running),
        }

    # -------------------------------------------------------- what requests do

    def speaks(self, request: Request) -> bool:
        """Whether there is something to know of `request`."""
        return are_in(_params(request)) or (
            bool(self._quotas) and getattr(request, "cache_salt", None) in self._quotas
        )

    def must_wait(self, request: Request) -> bool:
        """Whether a request that speaks is to leave free blocks to others."""
        speaker = self.follow(request)
        if speaker is None or not speaker.hints.prewarm:
            return False
        return self.prewarms.must_wait(request)

    def may_load(self, request: Request) -> Callable[[BlockHash], bool] | None:
        """Tells, of a request that speaks, for which of its blocks slots may be served.
        None: for all."""
        if not self.is_listening:
            self.listen()
        speaker = self.follow(request)
        if speaker is None or (limit := speaker.hints.max_load_tokens) is None:
            return None
        get = self._pool.cached_block_hash_to_block.get_one_block
        hashes, num_blocks = request.block_hashes, 0
        for block_hash in hashes:
            if get(make_block_hash_with_group_id(block_hash, 0)) is None:
                break
            num_blocks += 1
        assert self._pool.hash_block_size is not None
        num_blocks += limit // self._pool.hash_block_size
        allowed = frozenset(hashes[:num_blocks])
        # In some releases the hash of a block of several is made of all of theirs.
        size = len(hashes[0]) if hashes else 1
        return lambda block_hash: block_hash[-size:] in allowed

    def computed(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        first: int,
        block_size: int,
    ) -> None:
        """The step in the making computes `blocks`, from index `first` on, for
        `request`, which speaks."""
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
        """`request` is admitted with device blocks in `groups` that it hit."""
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
        # What one client does not want to be stored is so for others who cap, too.
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
        """`blocks` are about to hold something else."""
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
            self._last[request.request_id] = request

    # ----------------------------------------------------------- what they say

    def follow(self, request: Request) -> Speaker | None:
        """Who `request` is, which speaks. None: what it says is not understood."""
        speaker = self._speakers.get(request, _UNKNOWN)
        if speaker is not _UNKNOWN:
            return speaker
        hints, params = None, _params(request)
        try:
            hints = Hints.from_params(params)
            if hints is None and not are_in(params):
                # Only its cache salt is of interest.
                hints = Hints()
        except ValueError as e:
            self._stats.refused_hints += 1
            logger.warning_once("KV tier: hints of a request are ignored. %s", str(e))
        if hints is None:
            self._speakers[request] = None
            return None
        speaker = self._speakers[request] = _speaker(request, hints)
        for kind in hints.kinds():
            self._stats.hints[kind] = self._stats.hints.get(kind, 0) + 1
        if hints.release:
            self._last[request.request_id] = request
        if hints.prewarm:
            self.prewarms.ask(request)
        if hints.conversation is not None:
            owner = speaker.owner
            self._turns[owner] = self._turns.pop(owner, 0) + 1
            if len(self._turns) > self._num_keys:
                self._turns.popitem(last=False)
        return speaker

    def _release(self, keys: Sequence[Hashable]) -> None:
        """Nobody will ask for `keys` again."""
        if (admission := self._storer.admission) is not None:
            admission.release(keys)
        blocks = []
        cached = self._pool.cached_block_hash_to_block
        # A prefix is of use without its end, but not the other way round.
        for key in reversed(keys):
            block = cached.get_one_block(key)  # type: ignore[arg-type]
            if block is not None and not self._is_in_use(block):
                blocks.append(block)
            slot = self._table.get(key)  # type: ignore[arg-type]
            if slot is not None:
                self._table.release(slot)
            self._stats.released_blocks += block is not None or slot is not None
        self._free.put_first(blocks, need_no_store=True)
        self._storer.released.update(block.block_id for block in blocks)

    def _is_in_use(self, block: KVCacheBlock) -> bool:
        return block.ref_cnt > 0 or self._prefetches.is_unclaimed(block)


def _params(request: Request) -> dict[str, Any] | None:
    # Tests of upstream have stand-ins.
    return getattr(request, "kv_transfer_params", None)


def _speaker(request: Request, hints: Hints) -> Speaker:
    salt = getattr(request, "cache_salt", None)
    name, tenant = hints.conversation, hints.tenant
    owner = request.request_id if name is None else (name, salt)
    return Speaker(hints, owner, salt if tenant is None else tenant)
