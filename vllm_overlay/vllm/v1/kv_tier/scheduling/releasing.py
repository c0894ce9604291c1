# SPDX-License-Identifier: Apache-2.0
"""Follows requests with hints, and lets conversations that are over make room first.

A client says so with its last request (`Hints.release`), or afterwards (`hear`).
Nothing is dropped: blocks go to the front of the device's free queue, slots before all
that the eviction policy orders, and both serve whoever asks for them until then. What a
client wants to be kept is a matter of `Retaining`.
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
"""Blocks whose order is changed in one step because of hints. A block takes about 2 µs,
and a conversation may own all of both tiers."""
_TURNS_BYTES = 1 << 24
"""For the numbers of requests of conversations: some 50,000 of them."""


class Speaker(NamedTuple):
    """A request that speaks."""

    hints: Hints
    owner: bytes
    """Its conversation; of itself, if it names none."""
    tenant: Hashable
    """Its name, if there is a quota of that name; else a digest."""


_UNKNOWN = Speaker(Hints(), b"", None)
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
        self._last: dict[str, tuple[ref[Request], Speaker]] = {}
        # Requests so far, by conversation; those used last.
        self._turns = BoundedMap[bytes, int](_TURNS_BYTES)
        # What is left to do with keys, and how many of them in this step.
        self._work: deque[tuple[Portions, Callable[[list[Any]], None]]] = deque()
        self._room = KEYS_PER_STEP
        # What each request may load: up to which block, and these.
        self._loadable: WeakKeyDictionary[Request, tuple[int, frozenset[BlockHash]]]
        self._loadable = WeakKeyDictionary()
        # Blocks that were loaded ahead for requests with such a cap, until they run.
        self._loaded_ahead: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        # As they are when a request ends.
        self._some_were_freed = False
        self.is_listening = bool(self._quotas)
        """Whether this is to hear of what is computed: from the first request with
        hints on. Public, since every block of a decoding request comes by here."""

    def cached(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        first: int,
        last: int,
        block_size: int,
    ) -> None:
        """The step in the making computes those of the `blocks` of `request` from index
        `first` to `last`. To be called while `is_listening`."""
        if self.prewarms.pending:
            keys = [block.block_hash for block in blocks[first:last]]
            self.prewarms.computed(request, keys)
        if not self.untold.goes_on(request, blocks, first, last) and (
            self.speaks(request)
        ):
            self._computes(request, blocks[first:last], first, block_size)

    def cached_part(self, request: Request, block: KVCacheBlock) -> None:
        """The step computes a part of `block`, which may never be full."""
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
        self._room = KEYS_PER_STEP
        if self._some_were_freed and self._last:
            self._some_were_freed = False
            self._end_requests()
        if self._work:
            self._do_work()

    def _end_requests(self) -> None:
        # All that run may be among them, so none of those is called.
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
        """Do `work` with `keys`, as many as there is time for in each step."""
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
        """`conversation` is over. What its running requests use follows when they end.

        Returns:
            `released_blocks`, wherever they lay, and `running_requests`. Blocks that a
            later step puts first, since there are many, count as if they were there.

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
        """Whether there is something to know of `request`."""
        if are_in(kv_transfer_params(request)):
            return True
        if not self._quotas:
            return False
        salt = request.cache_salt
        return isinstance(salt, str) and salt in self._quotas

    def must_wait(self, request: Request) -> bool:
        """Whether a request that speaks is to leave free blocks to others."""
        speaker = self.follow(request)
        if speaker is None or not speaker.hints.prewarm:
            return False
        return self.prewarms.must_wait(request)

    def may_load(self, request: Request) -> Callable[[BlockHash], bool] | None:
        """Tells, of a request that speaks, for which of its blocks slots may be served.
        None: for all. To be asked when its prefix is about to be looked up."""
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
        # What was loaded for it counts as the device's.
        num_blocks += max(0, limit - self._loaded_ahead.get(request, 0))
        num_before, allowed = self._loadable.get(request, (-1, frozenset()))
        if num_before != num_blocks:
            allowed = frozenset(hashes[:num_blocks])
            self._loadable[request] = num_blocks, allowed
        # In some releases the hash of a block of several is made of all of theirs.
        size = len(hashes[0])
        return lambda block_hash: block_hash[-size:] in allowed

    def loads_ahead(self, request: Request, num_blocks: int) -> None:
        """So many blocks are loaded for `request`, which has a cap and waits."""
        loaded = self._loaded_ahead
        loaded[request] = loaded.get(request, 0) + num_blocks

    def end_loads_ahead(self, request: Request) -> None:
        """`request`, which has a cap, runs."""
        self._loaded_ahead.pop(request, None)

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
            self._last[request.request_id] = ref(request), speaker

    # ----------------------------------------------------------- what they say

    def follow(self, request: Request) -> Speaker | None:
        """Who `request` is, which speaks. None: what it says is not understood."""
        speaker = self._speakers.get(request, _UNKNOWN)
        if speaker is not _UNKNOWN:
            return speaker
        self.is_listening = True
        hints, params = None, kv_transfer_params(request)
        try:
            hints = Hints.from_params(params)
            if hints is None and not are_in(params):
                # Only its cache salt is of interest.
                hints = Hints()
        except Exception as e:
            # Whatever clients send, it must not end the scheduler.
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
        """A conversation is over. Returns how many of its blocks a later step puts
        first."""
        keys = self._owners.release(owner)
        self._do(keys, partial(self._put_first, owner))
        return len(keys)

    def _put_first(self, owner: bytes, keys: Sequence[Hashable]) -> None:
        """The blocks of `keys`, in the order of the conversation that has computed
        them, make room first."""
        if (admission := self._storer.admission) is not None:
            admission.release(keys)
        blocks = []
        cached = self._pool.cached_block_hash_to_block
        for key in keys:
            block = cached.get_one_block(key)  # type: ignore[arg-type]
            if block is not None:
                if self._is_in_use(block):
                    # By a request of the conversation, or somebody else's would have
                    # made it nobody's: it follows when that has ended.
                    self._owners.computed(key, owner)
                    continue
                blocks.append(block)
            slot = self._table.get(key)  # type: ignore[arg-type]
            if slot is not None:
                self._table.release(slot)
            self._stats.released_blocks += block is not None or slot is not None
        # A prefix is of use without its end, but not the other way round.
        blocks.reverse()
        self._free.put_first(blocks, need_no_store=True)
        self._storer.released.update(block.block_id for block in blocks)

    def _is_in_use(self, block: KVCacheBlock) -> bool:
        return block.ref_cnt > 0 or self._prefetches.is_unclaimed(block)


def owner_of(conversation: str, cache_salt: str | None) -> bytes:
    """What stands for a conversation. Names and salts are of any length, and known as
    long as blocks are."""
    return digest(conversation, cache_salt)
