# SPDX-License-Identifier: Apache-2.0
"""Conversations that are over: what only they have used makes room first.

A client says so with its last request (`Hints.release`). Nothing is dropped: blocks go
to the front of the device's free queue, slots before all that the eviction policy
orders, and both serve whoever asks for them until then.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_tier.hints import KEY, Hints
from vllm.v1.kv_tier.scheduling.free_blocks import FreeBlocks
from vllm.v1.kv_tier.scheduling.owners import Owners
from vllm.v1.kv_tier.scheduling.prefetches import Prefetches
from vllm.v1.kv_tier.scheduling.slots import SlotTable
from vllm.v1.kv_tier.scheduling.storing import BlockStorer
from vllm.v1.kv_tier.stats import KVTierStats
from vllm.v1.request import Request

logger = init_logger(__name__)


class Releasing:
    """Follows requests with hints, and puts first what they release.

    Args:
        pool: Whose blocks.
        free: Its free blocks.
        table: The slots.
        storer: Stores nothing that is released.
        prefetches: Blocks that wait for a request are left alone.
        num_keys: Blocks whose owners are remembered.
        stats: Counts what is released.

    """

    def __init__(
        self,
        pool: BlockPool,
        free: FreeBlocks,
        table: SlotTable,
        storer: BlockStorer,
        prefetches: Prefetches,
        num_keys: int,
        stats: KVTierStats,
    ) -> None:
        self._pool = pool
        self._free = free
        self._table = table
        self._storer = storer
        self._prefetches = prefetches
        self._owners = Owners(num_keys)
        self._stats = stats
        self._hints: WeakKeyDictionary[Request, Hints | None] = WeakKeyDictionary()
        # Requests that release their conversation when they end, by id.
        self._last: dict[str, Request] = {}
        self.is_listening = False
        """Whether this hears of what is computed."""

    def listen(self) -> None:
        """Hear from now on for whom blocks are computed.

        Not before the first request with hints: every block of a decoding request comes
        by there, and upstream's own method is the cheapest.
        """
        self.is_listening = True
        cache_full_blocks = self._pool.cache_full_blocks

        def listening(
            request: Request,
            blocks: list[KVCacheBlock],
            num_cached_blocks: int,
            num_full_blocks: int,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            numbers = num_cached_blocks, num_full_blocks
            cache_full_blocks(request, blocks, *numbers, *args, **kwargs)
            self.computed(request, blocks[slice(*numbers)])

        self._pool.cache_full_blocks = listening  # type: ignore[method-assign]

    def begin_step(self) -> None:
        """Put first what requests have released that ended since the last step."""
        if not self._last:
            return
        for request in [r for r in self._last.values() if r.is_finished()]:
            del self._last[request.request_id]
            self._release(self._owners.release(self._owner(request)))

    def computed(self, request: Request, blocks: Iterable[KVCacheBlock]) -> None:
        """The step in the making computes `blocks` for `request`."""
        if not has_hints(request) or self._follow(request) is None:
            return
        owner = self._owner(request)
        for block in blocks:
            if block.block_hash is not None:
                self._owners.computed(block.block_hash, owner)

    def hit(self, request: Request, groups: Iterable[Iterable[KVCacheBlock]]) -> None:
        """`request` is admitted with device blocks in `groups` that it hit."""
        owner: Hashable | None = None
        if has_hints(request) and self._follow(request) is not None:
            owner = self._owner(request)
        if not self._owners and not self._storer.released:
            return
        for group in groups:
            for block in group:
                self._storer.released.discard(block.block_id)
                self._owners.hit(block.block_hash, owner)

    def _follow(self, request: Request) -> Hints | None:
        if request in self._hints:
            return self._hints[request]
        hints = None
        try:
            hints = Hints.from_params(request.kv_transfer_params)
        except ValueError as e:
            self._stats.refused_hints += 1
            logger.warning_once("KV tier: hints of a request are ignored. %s", str(e))
        self._hints[request] = hints
        if hints is not None and hints.release:
            self._last[request.request_id] = request
        return hints

    def _owner(self, request: Request) -> Hashable:
        hints = self._hints[request]
        name = hints.conversation if hints is not None else None
        if name is None:
            return request.request_id
        return name, getattr(request, "cache_salt", None)

    def _release(self, keys: Sequence[Hashable]) -> None:
        """Nobody will ask for `keys` again."""
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
        self._free.put_first(blocks)
        self._storer.released.update(block.block_id for block in blocks)

    def _is_in_use(self, block: KVCacheBlock) -> bool:
        return block.ref_cnt > 0 or self._prefetches.is_unclaimed(block)


def has_hints(request: Request) -> bool:
    """Whether a client says something of the KV of `request`."""
    # Tests of upstream have stand-ins.
    params = getattr(request, "kv_transfer_params", None)
    return params is not None and KEY in params
