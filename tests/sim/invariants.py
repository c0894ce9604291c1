# SPDX-License-Identifier: Apache-2.0
"""What must hold between any two actions."""

from collections import Counter
from collections.abc import Collection, Iterable
from copy import deepcopy
from typing import Any

from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    get_block_hash,
    get_group_id,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_tier.pool import ElasticBlockPool, TieredBlockPool
from vllm.v1.kv_tier.stats import KVTierStats
from vllm.v1.request import Request

from . import upstream
from .content import Violation
from .hints import WatchedHints
from .layouts import Layout
from .worker import Worker

Prefixes = dict[BlockHash, tuple[list[list[int]], int]]


class Invariants:
    """Checks of a block pool, and of the memory behind it.

    Args:
        layout: Groups of the model.
        coordinator: Owns the pool and the block tables.

    """

    def __init__(self, layout: Layout, coordinator: KVCacheCoordinator) -> None:
        assert isinstance(coordinator.block_pool, TieredBlockPool)
        self._pool: TieredBlockPool = coordinator.block_pool
        self._managers: Any = coordinator.single_type_managers
        self._layout = layout
        self._hints = WatchedHints(self._pool.conversations)
        # What a hash covers: (values by group, number of tokens).
        self._prefixes: Prefixes = {}
        # How a block with a key must begin.
        self._contents: dict[BlockHashWithGroupId, list[int]] = {}

    def know(self, prefixes: Prefixes) -> None:
        """Share what hashes cover with other engines."""
        self._prefixes = prefixes

    def learn(
        self, hashes: list[BlockHash], start: int, values: list[list[int]]
    ) -> None:
        """Learn what `hashes[start:]` of a request cover."""
        size = self._layout.hash_block_size
        for i in range(start, len(hashes)):
            end = (i + 1) * size
            known = self._prefixes.setdefault(hashes[i], (values, end))
            if known[1] != end or known[0][0][end - 1] != values[0][end - 1]:
                raise Violation("hash", f"two prefixes share the hash {hashes[i]!r}")

    def start_over(self) -> None:
        """What was computed until now must not be served any more."""
        # Other engines may know them still.
        self._prefixes, self._contents = {}, {}

    # ------------------------------------------------------------------ counts

    def check_counts(self, deferred: Iterable[int] = ()) -> None:
        """`deferred`: blocks that are free after a step that may write to them still,
        where there is a KV connector."""
        self._check_references(deferred)
        self._check_index()
        self._check_slots()

    def _check_references(self, deferred: Iterable[int]) -> None:
        pool = self._pool
        references = Counter(
            block.block_id
            for manager in self._managers
            for blocks in manager.req_to_blocks.values()
            for block in blocks
        )
        references.update(deferred)
        free = {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
        if len(free) != pool.get_num_free_blocks():
            raise Violation(
                "refs", f"{pool.get_num_free_blocks()} blocks count as free: {free}"
            )
        missing = self._missing_blocks()
        if pool.num_gpu_blocks != len(pool.blocks) - len(missing):
            raise Violation("refs", f"{pool.num_gpu_blocks} without {missing}")
        for block in pool.blocks:
            if block.is_null or block.block_id in pool.lost.withdrawn:
                continue
            if block.block_id in missing:
                if block.block_id in free or references[block.block_id]:
                    raise Violation("refs", f"{block} is there, its page is not")
                continue
            count = references[block.block_id]
            if block.ref_cnt != count or (block.block_id in free) != (count == 0):
                raise Violation("refs", f"{block} is in {count} block tables")

    def _missing_blocks(self) -> set[int]:
        """Device blocks that nobody may have now, since memory was given back."""
        pool = self._pool
        if not isinstance(pool, ElasticBlockPool):
            return pool.lost.withdrawn
        return {block.block_id for block in pool.elastic.missing_blocks()}

    def _check_index(self) -> None:
        pool = self._pool
        for key, blocks in upstream.cached_blocks(pool):
            for block in blocks:
                if key not in self._keys(block):
                    raise Violation("refs", f"{block} is cached under {key!r}")

    def _check_slots(self) -> None:
        host = self._pool.host
        filled = {slot.index for slot in host.filled_slots()}
        free = [*host._free, *host._free_after_plan]
        below = [*host._free_after_hold, *host._reserved]
        if sorted([*filled, *free, *below]) != list(range(host.num_slots)):
            raise Violation("slots", f"filled: {filled}, free: {free}, below: {below}")
        keys = [(key, slot.index) for slot in host.filled_slots() for key in slot.keys]
        table = list(host.places.items())
        if sorted(keys) != sorted(table):
            raise Violation("slots", f"slots have {keys}, the table {table}")

    def check_in_flight(
        self, requests: Iterable[Request], steps: Collection[SchedulerOutput]
    ) -> None:
        """The scheduler counts the tokens of a request in flight as they are, also
        behind steps that failed; not all releases count them."""
        for request in requests:
            counted = getattr(request, "num_in_flight_tokens", None)
            name = request.request_id
            found = sum(step.num_scheduled_tokens.get(name, 0) for step in steps)
            if counted not in (None, found):
                raise Violation(
                    "in flight", f"{counted} tokens of {name} count, {found} are"
                )

    def check_no_pins(self) -> None:
        """The plan was taken: no slot is kept for it any more."""
        host = self._pool.host
        if host._pinned or host._free_after_plan:
            raise Violation("slots", "slots are pinned after the plan was taken")

    def check_released(self) -> None:
        """What makes room first is there, and nobody uses it."""
        pool = self._pool
        for block_id in pool.host_writer.released:
            if pool.blocks[block_id].ref_cnt:
                raise Violation("released", f"{pool.blocks[block_id]} is in use")
        if gone := pool.host._released.keys() - dict(pool.host.places.items()).keys():
            raise Violation("released", f"{gone} are in no slot")

    def check_hints(self) -> None:
        """What hints and quotas keep is there, no more than may be, and not for
        longer."""
        if (hinted := self._pool.retention.hinted) is None:
            return
        self._hints.watch(hinted)
        host = self._pool.host
        ordered = {s.keys[0] for s in host.filled_slots()} - host._aside.keys()
        ordered -= host._passed.keys() | host._next.keys()
        shares = hinted.shares.values()
        known = {key for share in shares for key in (*share.resident, *share.kept)}
        known |= {*hinted._kept, *hinted._low}
        if gone := known - ordered:
            raise Violation("hints", f"{gone} are in no slot")
        stats = KVTierStats()
        self._pool.host_size.report(stats)
        if len(hinted._kept) > stats.reserved_slots // 2:
            raise Violation("hints", f"{len(hinted._kept)} slots are kept")

    def check_idle(self) -> None:
        """No request is left: every block is free, and the policy complete."""
        if self._pool.get_num_free_blocks() != self._pool.num_gpu_blocks - 1:
            raise Violation("refs", "blocks are in use without a request")
        policy = deepcopy(self._pool.host._policy)
        # Not the one of the object, which may be watched.
        evict = type(policy).evict
        # Those that the policy gave up while they were written below go first.
        resident = [*self._pool.host._passed, *self._pool.host._next]
        while (key := evict(policy, lambda key: False)) is not None:
            resident.append(key)
        primary = [slot.keys[0] for slot in self._pool.host.filled_slots()]
        if sorted(resident) != sorted(primary):  # type: ignore[type-var]
            raise Violation("slots", f"slots: {primary}, policy: {resident}")

    # ---------------------------------------------------------------- contents

    def check_contents(self, worker: Worker, unreported: Collection[int]) -> None:
        """Compare memory with the keys under which it can be found.

        Args:
            worker: Memory in which all copies and steps have been executed.
            unreported: Host slots whose store failed, which the pool cannot
                know yet.

        """
        for block in self._pool.blocks:
            if block.block_hash is not None:
                for key in self._keys(block):
                    self._compare("device", block, key, worker.device[block.block_id])
        host = self._pool.host
        for slot in host.filled_slots():
            if slot.index not in unreported:
                for key in slot.keys:
                    self._compare("host", slot, key, worker.host[slot.index])

    def _compare(
        self,
        kind: str,
        block: KVCacheBlock,
        key: BlockHashWithGroupId,
        memory: list[int],
    ) -> None:
        values = self._contents.get(key)
        if values is None:
            values = self._contents[key] = self._content_of(kind, block, key)
        if memory[: len(values)] != values:
            raise Violation(kind, f"{block} holds {memory}, its key asks for {values}")

    def _content_of(
        self, kind: str, block: KVCacheBlock, key: BlockHashWithGroupId
    ) -> list[int]:
        block_hash = upstream.last_hash(get_block_hash(key))
        prefix = self._prefixes.get(block_hash)
        if prefix is None:
            raise Violation(kind, f"{block} survived a reset")
        values, end = prefix
        group_id = get_group_id(key)
        group = self._layout.groups[group_id]
        if group.first_read is None:
            return [values[group_id][end - 1]]
        start = (end - 1) // group.block_size * group.block_size
        return values[group_id][start:end]

    def _keys(self, block: KVCacheBlock) -> list[BlockHashWithGroupId]:
        others = self._pool.cached_block_hashes_by_block.get(block.block_id, ())
        return [block.block_hash, *others] if block.block_hash is not None else []
