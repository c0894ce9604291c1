# SPDX-License-Identifier: Apache-2.0
"""Follows requests with hints, and lets conversations that are over make room first.

A client ends a conversation with its last request (`Hints.release`), or afterwards
(`end_conversation`). Nothing is dropped: its blocks move to the front of the device's
free queue, and its slots before all others. Both serve hits until they are reused.
Hints to keep blocks longer are handled by `RetentionManager`.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary, ref

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.kv_tier.bounded import BoundedMap, digest
from vllm.v1.kv_tier.hints.retention import Portions, RetentionManager
from vllm.v1.kv_tier.hints.schema import Hints, are_in
from vllm.v1.kv_tier.releases import kv_transfer_params
from vllm.v1.kv_tier.scheduler.free_blocks import FreeBlocks
from vllm.v1.kv_tier.scheduler.host_writer import HostWriter
from vllm.v1.kv_tier.scheduler.kv_groups import UsedBlocks
from vllm.v1.kv_tier.scheduler.load_admission import Prefetches
from vllm.v1.kv_tier.scheduler.slots import SlotTable
from vllm.v1.kv_tier.stats import KVTierStats
from vllm.v1.request import Request, RequestStatus

logger = init_logger(__name__)

# Which blocks only one conversation has used.


class _Keys(dict[Hashable, None]):
    """Keys of one conversation, in the order in which it computed them."""

    __slots__ = ("is_over", "owner")

    def __init__(self, owner: Hashable) -> None:
        self.owner = owner
        self.is_over = False


class SoleUserIndex:
    """Remembers, for keys of blocks, the only conversation that has used them.

    The conversation that computes a block owns it until another one hits it. From then
    on it has no owner, like blocks without conversations. A key is remembered after its
    block is gone, since blocks that the device has evicted may still be on the host.

    Args:
        num_keys: Most keys that are remembered. Beyond that, the last keys of the least
            recently used conversation are dropped.

    """

    def __init__(self, num_keys: int) -> None:
        self._num_keys = num_keys
        # Keys of finished conversations stay until they are processed.
        self._keys_of: dict[Hashable, _Keys] = {}
        self._keys: OrderedDict[Hashable, _Keys] = OrderedDict()

    def __len__(self) -> int:
        """Number of keys with an owner."""
        return len(self._keys_of)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._keys_of

    def record_computed(self, key: Hashable, owner: Hashable) -> None:
        """Record that a request of conversation `owner` computes the block of `key`."""
        mine, old = self._keys.get(owner), self._keys_of.get(key)
        if old is not None and old is not mine and not old.is_over:
            self._forget(key, old)
            return
        if mine is None:
            mine = self._keys[owner] = _Keys(owner)
        else:
            self._keys.move_to_end(owner)
        mine[key] = None
        self._keys_of[key] = mine
        while len(self._keys_of) > self._num_keys:
            oldest = next(iter(self._keys.values()))
            del self._keys_of[oldest.popitem()[0]]
            if not oldest:
                del self._keys[oldest.owner]

    def record_hit(self, keys: Iterable[Hashable], user: Hashable | None) -> None:
        """Record that a request hits `keys`; `user` is its conversation, or None."""
        # A hot path: each block of a long prefix.
        if self._keys_of.keys().isdisjoint(keys):
            return
        get = self._keys_of.get
        for key in keys:
            if (its := get(key)) is not None and (its.is_over or its.owner != user):
                self._forget(key, its)

    def release(self, owner: Hashable) -> Portions:
        """End conversation `owner`.

        Returns:
            Its keys, in the order in which it computed them, without those that are
            used before they are taken.

        """
        its = self._keys.pop(owner, None)
        if its is None:
            return Portions(())
        its.is_over = True
        get, keys_of = self._keys_of.get, self._keys_of

        def is_left(key: Hashable) -> bool:
            if get(key) is not its:
                return False
            del keys_of[key]
            return True

        return Portions(tuple(its), is_left)

    def clear(self) -> None:
        """Forget all keys."""
        self._keys_of.clear()
        self._keys.clear()

    def _forget(self, key: Hashable, its: _Keys) -> None:
        del self._keys_of[key]
        if its.is_over:
            return
        del its[key]
        if not its:
            del self._keys[its.owner]


# Prompts that are computed or loaded ahead of a request.
#
# Decides when they must wait for others, and counts whether they were useful.

PAUSE_S = 0.25
"""Seconds for which prewarms wait after a request lacked device blocks."""
PATIENCE_S = 10.0
"""Longest wait of a prewarm, since a client may wait for its answer."""


class Prewarms:
    """Follows the blocks of prompts with the hint `prewarm`, until they are used.

    A prewarm takes no device blocks while requests lack some: it would delay requests
    that can run, and its blocks would be evicted before they are used.

    Blocks are counted when another request hits them, on the device or host, or when
    another request computes them before the prewarm has ended (late). Blocks of the
    first group of layers stand for all.

    Args:
        num_keys: Most blocks that are followed; the latest stay.
        stats: Counts them.
        clock: Time in seconds.

    """

    def __init__(
        self, num_keys: int, stats: KVTierStats, clock: Callable[[], float]
    ) -> None:
        self._num_keys = num_keys
        self._stats = stats
        self._clock = clock
        self._lacked = float("-inf")
        # Weak references, so that finished requests are not kept alive.
        self.pending: OrderedDict[Hashable, ref[Request]] = OrderedDict()
        """Blocks that were not used yet. Public, since testing whether there are any
        must be cheap."""

    def record_shortage(self) -> None:
        """Note that a request cannot run, since the device lacks free blocks."""
        self._lacked = self._clock()

    def must_wait(self, hinted: "HintedRequest") -> bool:
        """Whether a prewarm must leave free blocks to others."""
        now = self._clock()
        if now - self._lacked >= PAUSE_S:
            return False
        if hinted.held_since is None:
            hinted.held_since = now
        return now - hinted.held_since < PATIENCE_S

    def begin(self, request: Request) -> Portions:
        """Register `request`, which only prewarms its prompt.

        Returns:
            Its blocks, for `follow`.

        """
        self._stats.prewarmed_blocks += len(request.block_hashes)
        return Portions(tuple(request.block_hashes))

    def follow(self, prewarm: "ref[Request]", hashes: Iterable[Hashable]) -> None:
        """Follow blocks of `prewarm` until other requests need them."""
        pending = self.pending
        for block_hash in hashes:
            key = make_block_hash_with_group_id(block_hash, 0)  # type: ignore[arg-type]
            pending.pop(key, None)
            pending[key] = prewarm
        while len(pending) > self._num_keys:
            pending.popitem(last=False)

    def forget(self) -> None:
        """Nothing that was computed or loaded can be of use any more. Requests that
        still wait compute it anew."""
        for key, follows in list(self.pending.items()):
            if (prewarm := follows()) is None or prewarm.is_finished():
                del self.pending[key]

    def record_hit(self, request: Request, keys: Iterable[Hashable]) -> None:
        """Record that `request` is admitted with the blocks of `keys`."""
        for key in self.pending.keys() & keys:
            if self.pending[key]() is not request:
                del self.pending[key]
                self._stats.prewarmed_used_blocks += 1

    def record_computed(self, request: Request, keys: Iterable[Hashable]) -> None:
        """Record that `request` computes the blocks of `keys`."""
        for key in self.pending.keys() & keys:
            if (prewarm := self.pending[key]()) is not request:
                del self.pending[key]
                # Otherwise they were evicted meanwhile.
                is_late = prewarm is not None and not prewarm.is_finished()
                self._stats.prewarmed_late_blocks += is_late


# Computed blocks of requests with hints that are not processed yet.
#
# A decoding request fills a block every few steps, and processing one block takes about
# as long as processing all. They are needed only when one is freed or another request
# hits it, so a request's blocks are processed together then.

RecordComputed = Callable[[Request, Sequence[KVCacheBlock], int, int], None]
"""As `ConversationTracker.record_computed`."""

_ID = attrgetter("block_id")


@dataclass(eq=False, slots=True)
class _Run:
    """Consecutive blocks of one request."""

    request: Request
    blocks: list[KVCacheBlock]
    first: int
    block_size: int


class DeferredHintUpdates:
    """Computed blocks that wait for processing.

    Args:
        tell: Processes them.

    """

    def __init__(self, tell: RecordComputed) -> None:
        self._record = tell
        self.runs: dict[int, _Run] = {}
        """Runs by block id. Public, since testing whether there are any must be
        cheap."""

    def extend(
        self, request: Request, blocks: Sequence[KVCacheBlock], first: int, last: int
    ) -> bool:
        """Record that `request` computes `blocks[first:last]`.

        Returns:
            Whether they continue a run, and were added to it.

        """
        # A hot path: each block of a decoding request. The null block is shared by all
        # groups, and belongs to no run.
        runs = self.runs
        run = runs.get(blocks[first - 1].block_id) if first else None
        if run is None or run.request is not request:
            return False
        for block in blocks[first:last]:
            run.blocks.append(block)
            if not block.is_null:
                runs[block.block_id] = run
        return True

    def begin(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        first: int,
        block_size: int,
    ) -> None:
        """Begin a run with `blocks` of `request`, from index `first` on."""
        run = _Run(request, list(blocks), first, block_size)
        ids = [block.block_id for block in blocks if not block.is_null]
        self.runs.update(dict.fromkeys(ids, run))

    def flush(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Process the runs of `blocks`."""
        for run in set(map(self.runs.get, map(_ID, blocks))):
            if run is not None:
                self._end(run)

    def _end(self, run: _Run) -> None:
        for block in run.blocks:
            if self.runs.get(block.block_id) is run:
                del self.runs[block.block_id]
        self._record(run.request, run.blocks, run.first, run.block_size)


KEYS_PER_STEP = 1024
"""Most blocks that a step reorders because of hints. A block takes about 2 us, and a
conversation may own all blocks of both tiers."""
_TURNS_BYTES = 1 << 24
"""Bytes for the numbers of requests of conversations, some 50,000 of them."""


@dataclass(eq=False, slots=True)
class HintedRequest:
    """A request with hints, and what they have led to so far."""

    hints: Hints
    owner: bytes
    """Its conversation, or one of its own if it names none."""
    tenant: Hashable
    """Its name if that has a quota, else a digest."""
    held_since: float | None = None
    """Since when it waits as a prewarm."""
    loadable: tuple[int, frozenset[BlockHash]] = (-1, frozenset())
    """What it may load: number of blocks, and their hashes."""
    num_loaded_ahead: int = 0
    """Blocks that were loaded ahead for it, until it runs."""


_UNKNOWN = HintedRequest(Hints(), b"", None)
"""Stands for a request that was not seen before."""


class ConversationTracker:
    """Follows requests with hints, and moves what they release to the front.

    Args:
        pool: The block pool.
        free: Its free queue.
        table: The slot table.
        host_writer: Skips blocks that are released or not to be stored.
        prefetches: Blocks that wait for a request are left alone.
        retention: Handles retained blocks.
        num_keys: Most blocks whose owners are remembered.
        stats: Counts hints and released blocks.

    """

    def __init__(
        self,
        pool: BlockPool,
        free: FreeBlocks,
        table: SlotTable,
        host_writer: HostWriter,
        prefetches: Prefetches,
        retention: RetentionManager,
        num_keys: int,
        stats: KVTierStats,
    ) -> None:
        self._pool = pool
        self._free = free
        self._table = table
        self._host_writer = host_writer
        self._prefetches = prefetches
        self.retention = retention
        self._num_keys = num_keys
        self._sole_users = SoleUserIndex(num_keys)
        self.deferred = DeferredHintUpdates(lambda *run: self.record_computed(*run))
        """Computed blocks that are not processed here yet."""
        self.prewarms = Prewarms(num_keys, stats, retention.key_hints.clock)
        self._quotas = retention.quotas
        self._stats = stats
        # None for requests with invalid hints.
        self._hinted: WeakKeyDictionary[Request, HintedRequest | None]
        self._hinted = WeakKeyDictionary()
        # Requests with work to do at their end, by id.
        self._last: dict[str, tuple[ref[Request], HintedRequest]] = {}
        # Number of requests so far by conversation; those used last stay.
        self._turns = BoundedMap[bytes, int](_TURNS_BYTES)
        # Keys to process, and how many more of them in this step.
        self._work: deque[tuple[Portions, Callable[[list[Any]], None]]] = deque()
        self._room = KEYS_PER_STEP
        # Requests free their blocks when they end.
        self._some_were_freed = False
        self.is_listening = bool(self._quotas)
        """Whether `record_cached` must be called: from the first request with hints on.
        Public, since every block of a decoding request passes here."""

    def record_cached(
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
            self.prewarms.record_computed(request, keys)
        if not self.deferred.extend(request, blocks, first, last) and (
            self.has_hints(request)
        ):
            self._computes(request, blocks[first:last], first, block_size)

    def record_partial(self, request: Request, block: KVCacheBlock) -> None:
        """Record that the step computes a part of `block`, which may never be full."""
        hinted = self.follow(request) if self.has_hints(request) else None
        if hinted is not None and hinted.hints.offload_limit is not None:
            self._host_writer.forbidden.add(block.block_id)

    def _computes(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        first: int,
        block_size: int,
    ) -> None:
        """As `record_computed`, now or when the blocks are needed."""
        if (hinted := self.follow(request)) is None:
            return
        tell: RecordComputed = self.deferred.begin
        if hinted.hints.offload_limit is not None or self.retention.orders_itself:
            # Blocks that are stored at once must be processed at once.
            tell = self.record_computed
        tell(request, blocks, first, block_size)

    def record_freed(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Note that requests have freed `blocks`."""
        self._some_were_freed = True
        if self.deferred.runs:
            self.deferred.flush(blocks)

    def begin_step(self) -> None:
        """Process requests that ended since the last step, and remaining work."""
        self.retention.begin_step()
        self._room = KEYS_PER_STEP
        if self._some_were_freed and self._last:
            self._some_were_freed = False
            self._end_requests()
        if self._work:
            self._do_work()

    def _end_requests(self) -> None:
        # May include all running requests, so avoid method calls for those.
        last, running = self._last, RequestStatus.RUNNING
        for request_id, (follows, hinted) in list(last.items()):
            request = follows()
            if request is not None and (
                request.status is running or not request.is_finished()
            ):
                continue
            del last[request_id]
            self._do(self.retention.end_request(request_id), self.retention.put_first)
            if hinted.hints.release:
                self._release(hinted.owner)

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
        self._host_writer.released.clear()
        self._host_writer.forbidden.clear()
        self.retention.on_device.clear()
        self._sole_users.clear()
        self.retention.key_hints.clear()
        self.prewarms.forget()

    def end_conversation(
        self, conversation: str, cache_salt: str | None
    ) -> dict[str, int]:
        """End `conversation`. What its running requests use follows when they end.

        Returns:
            `released_blocks`, on device and host, and `running_requests`. Blocks that
            later steps will process are included as if they existed.

        """
        self._stats.hints["release"] = self._stats.hints.get("release", 0) + 1
        owner = owner_of(conversation, cache_salt)
        running = [
            (request, hinted)
            for request, hinted in self._hinted.items()
            if hinted is not None
            and hinted.owner == owner
            and not request.is_finished()
        ]
        for request, hinted in running:
            hinted.hints = replace(hinted.hints, release=True)
            self._last[request.request_id] = ref(request), hinted
        before = self._stats.released_blocks
        num_left = self._release(owner)
        return {
            "released_blocks": self._stats.released_blocks - before + num_left,
            "running_requests": len(running),
        }

    # -------------------------------------------------------- what requests do

    def has_hints(self, request: Request) -> bool:
        """Whether `request` has hints, or a salt with a quota."""
        if are_in(kv_transfer_params(request)):
            return True
        if not self._quotas:
            return False
        salt = request.cache_salt
        return isinstance(salt, str) and salt in self._quotas

    def must_wait(self, request: Request) -> bool:
        """Whether a request with hints must leave free blocks to others."""
        hinted = self.follow(request)
        if hinted is None or not hinted.hints.prewarm:
            return False
        return self.prewarms.must_wait(hinted)

    def make_load_filter(self, request: Request) -> Callable[[BlockHash], bool] | None:
        """Which blocks may be loaded for a request with hints; None for all.

        Call it before its prefix is looked up.
        """
        hinted = self.follow(request)
        if hinted is None or (limit := hinted.hints.max_load_tokens) is None:
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
        num_blocks += max(0, limit - hinted.num_loaded_ahead)
        num_before, allowed = hinted.loadable
        if num_before != num_blocks:
            allowed = frozenset(hashes[:num_blocks])
            hinted.loadable = num_blocks, allowed
        # In some releases the hash of a large block concatenates those of its parts.
        size = len(hashes[0])
        return lambda block_hash: block_hash[-size:] in allowed

    def count_loads_ahead(self, request: Request, num_blocks: int) -> None:
        """Count blocks that are loaded ahead for waiting `request`, which has a cap."""
        if (hinted := self.follow(request)) is not None:
            hinted.num_loaded_ahead += num_blocks

    def end_loads_ahead(self, request: Request) -> None:
        """Note that `request`, which has a cap, runs."""
        if (hinted := self.follow(request)) is not None:
            hinted.num_loaded_ahead = 0

    def record_computed(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        first: int,
        block_size: int,
    ) -> None:
        """Record that this step computes `blocks`, from index `first`, of `request`."""
        if (hinted := self.follow(request)) is None:
            return
        for block in blocks:
            if (key := block.block_hash) is not None:
                self._sole_users.record_computed(key, hinted.owner)
        self._record_use(request, hinted, blocks, first, block_size)
        if (limit := hinted.hints.offload_limit) is not None:
            num_stored = max(0, limit // block_size - first)
            self._host_writer.forbidden.update(
                block.block_id for block in blocks[num_stored:] if not block.is_null
            )

    def on_hit(self, request: Request, used: UsedBlocks) -> None:
        """A request is admitted with device blocks."""
        if self.deferred.runs:
            self.deferred.flush(used.blocks)
        hinted = self.follow(request) if self.has_hints(request) else None
        owner = None if hinted is None else hinted.owner
        host_writer, retention = self._host_writer, self.retention
        pending = self.prewarms.pending
        is_marked = (
            self._sole_users or host_writer.released or host_writer.forbidden or pending
        )
        if hinted is None and not (is_marked or retention.key_hints):
            return
        # Other requests that limit storing do not lift the limit.
        lifts = hinted is None or hinted.hints.offload_limit is None
        if host_writer.released or host_writer.forbidden:
            ids = [block.block_id for block in used.blocks]
            host_writer.released.difference_update(ids)
            if lifts:
                host_writer.forbidden.difference_update(ids)
        if self._sole_users or pending:
            self._sole_users.record_hit(used.keys, owner)
            self.prewarms.record_hit(request, used.keys)
        if hinted is None:
            retention.record_plain_use(used.blocks)
        else:
            self._record_use(request, hinted, used.blocks, 0, used.block_size)

    def record_taken(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Note that `blocks` are about to get new content."""
        ids = [block.block_id for block in blocks]
        self._host_writer.released.difference_update(ids)
        self._host_writer.forbidden.difference_update(ids)

    def _record_use(
        self,
        request: Request,
        hinted: HintedRequest,
        blocks: Sequence[KVCacheBlock],
        first: int,
        block_size: int,
    ) -> None:
        retention = self.retention
        retention.record_use(
            request.request_id,
            hinted.hints,
            hinted.tenant,
            self._turns.get(hinted.owner, 1),
            request.num_prompt_tokens,
            blocks,
            first,
            block_size,
        )
        if retention.has_low(request.request_id):
            self._last[request.request_id] = ref(request), hinted

    # ----------------------------------------------------------- what they say

    def follow(self, request: Request) -> HintedRequest | None:
        """Parse the hints of `request` once. None if they are invalid."""
        hinted = self._hinted.get(request, _UNKNOWN)
        if hinted is not _UNKNOWN:
            return hinted
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
            self._hinted[request] = None
            return None
        hinted = self._hinted[request] = self._hinted_request(request, hints)
        for kind in hints.kinds():
            self._stats.hints[kind] = self._stats.hints.get(kind, 0) + 1
        if hints.release:
            self._last[request.request_id] = ref(request), hinted
        if hints.prewarm:
            follow = partial(self.prewarms.follow, ref(request))
            self._do(self.prewarms.begin(request), follow)
        if hints.conversation is not None:
            owner = hinted.owner
            self._turns[owner] = self._turns.get(owner, 0) + 1
        return hinted

    def _hinted_request(self, request: Request, hints: Hints) -> HintedRequest:
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
        return HintedRequest(hints, owner, tenant)

    def _release(self, owner: bytes) -> int:
        """End a conversation.

        Returns how many of its blocks are left to later steps.
        """
        keys = self._sole_users.release(owner)
        self._do(keys, partial(self._put_first, owner))
        return len(keys)

    def _put_first(self, owner: bytes, keys: Sequence[Hashable]) -> None:
        """Move the blocks of `keys`, in order of computation, to the front."""
        if (admission := self._host_writer.admission) is not None:
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
                    self._sole_users.record_computed(key, owner)
                    continue
                blocks.append(block)
            slot = self._table.get(key)  # type: ignore[arg-type]
            if slot is not None:
                self._table.release(slot)
            self._stats.released_blocks += block is not None or slot is not None
        # The beginning of a prefix is useful without its end, but not vice versa.
        blocks.reverse()
        self._free.put_first(blocks, need_no_store=True)
        self._host_writer.released.update(block.block_id for block in blocks)

    def _is_in_use(self, block: KVCacheBlock) -> bool:
        return block.ref_cnt > 0 or self._prefetches.is_unclaimed(block)


def owner_of(conversation: str, cache_salt: str | None) -> bytes:
    """A digest that identifies a conversation.

    Names and salts may have any length, and are remembered as long as blocks.
    """
    return digest(conversation, cache_salt)
