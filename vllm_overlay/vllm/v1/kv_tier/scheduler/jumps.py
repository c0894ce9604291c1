# SPDX-License-Identifier: Apache-2.0
"""Lets a prefill skip blocks that exist by now, as at its admission it skipped its hit.

They were fetched from a secondary tier meanwhile, or computed by another request. The
front of a request is what the planned steps will have computed.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.kv_tier.releases import scores_prompt
from vllm.v1.kv_tier.scheduler.costs import Costs
from vllm.v1.kv_tier.scheduler.kv_groups import (
    HitListener,
    UsedBlocks,
    hashes_of_blocks,
)
from vllm.v1.kv_tier.scheduler.load_admission import LoadAdmission, Prefetches
from vllm.v1.kv_tier.scheduler.plan_builder import StepPlanBuilder
from vllm.v1.kv_tier.scheduler.promotion import Loader, LoadTarget
from vllm.v1.kv_tier.scheduler.slots import HostSlot, SlotTable
from vllm.v1.kv_tier.stats import KVTierStats
from vllm.v1.request import Request


def needs_only_kv(request: Request) -> bool:
    """Whether no position of the prompt must be computed for more than its KV."""
    return not (
        request.skip_reading_prefix_cache
        # A client may ask for them, and let the cache be read all the same.
        or scores_prompt(request.sampling_params)
        or request.pooling_params is not None
        or request.has_encoder_inputs
    )


class Jumps:
    """Jumps of running requests, in models with one group of full attention.

    Args:
        pool: The block pool.
        table: The slot table.
        builder: The plan that is being built.
        loader: Loads blocks.
        waiting: Knows blocks that are kept for others.
        prefetches: Blocks that are being prefetched.
        costs: Costs of loads and of compute.
        listeners: Notified of the blocks.
        stats: Counts jumps.

    """

    def __init__(
        self,
        pool: BlockPool,
        table: SlotTable,
        builder: StepPlanBuilder,
        loader: Loader,
        waiting: LoadAdmission,
        prefetches: Prefetches,
        costs: Costs,
        listeners: Sequence[HitListener],
        stats: KVTierStats,
    ) -> None:
        self._pool = pool
        self._table = table
        self._builder = builder
        self._loader = loader
        self._load_admission = waiting
        self._prefetches = prefetches
        self._costs = costs
        self._listeners = listeners
        self._stats = stats
        # Blocks of jumps that no step has named to the workers yet, and how often their
        # request had been preempted. Weak, since it may be aborted.
        self._unnamed: WeakKeyDictionary[Request, tuple[int, list[KVCacheBlock]]]
        self._unnamed = WeakKeyDictionary()

    def keys(
        self, request: Request, block_size: int
    ) -> Callable[[int], BlockHashWithGroupId | None]:
        """Returns the key of a block of a request; None behind the last with a hash."""
        hashes = hashes_of_blocks(request, self._pool.hash_block_size, block_size)

        def key(index: int) -> BlockHashWithGroupId | None:
            if index >= len(hashes):
                return None
            return make_block_hash_with_group_id(hashes[index], 0)

        return key

    def find(self, key: BlockHashWithGroupId | None) -> KVCacheBlock | None:
        """A block that a step can use from now on, or its slot."""
        if key is None:
            return None
        block = self._pool.cached_block_hash_to_block.get_one_block(key)
        if block is None:
            return self._table.get(key)
        # A request that computes it in this step may still be preempted.
        builder = self._builder
        is_sure = builder.is_computed(block) or builder.is_loaded(block)
        return block if is_sure else None

    def jump(
        self, request: Request, manager: Any, num_tokens: int, among_others: bool
    ) -> list[KVCacheBlock]:
        """Find, and load, the blocks behind the front of `request`.

        Args:
            request: It runs, and computes its prompt.
            manager: The only `SingleTypeKVCacheManager`.
            num_tokens: Tokens that the step may still compute.
            among_others: Whether others wait for the loads.

        Returns:
            Blocks that the caller must give to the request, for whole blocks of tokens
            behind its front. They are free and hashed, or in use.

        """
        size, name = manager.block_size, request.request_id
        first, rest = divmod(request.num_computed_tokens, size)
        own = manager.req_to_blocks[name]
        if rest or len(own) != first or manager.num_cached_block.get(name) != first:
            return []
        hit = self._find_from(request, first, size, num_tokens, among_others)
        if not hit:
            return []
        targets: list[LoadTarget] = [
            (hit, i, block) for i, block in enumerate(hit) if type(block) is HostSlot
        ]
        devices = [block for block in hit if type(block) is not HostSlot]
        last_prefetch = self._load_admission.last_prefetch(devices)
        if targets:
            self._loader.load(targets, devices, prefetch=False)
        self._builder.wait_for_prefetches(last_prefetch)
        self._prefetches.claim(devices)
        for listener in self._listeners:
            listener.on_hit(request, UsedBlocks(hit, size))
        self._stats.jumped_tokens += len(hit) * size
        earlier = self.take_unnamed(request)
        self._unnamed[request] = request.num_preemptions, [*earlier, *hit]
        return hit

    def take_unnamed(self, request: Request) -> list[KVCacheBlock]:
        """Those of `request`, which are about to be named."""
        num_preemptions, blocks = self._unnamed.pop(request, (0, []))
        # A request that was preempted since has lost them.
        return blocks if num_preemptions == request.num_preemptions else []

    def _find_from(
        self,
        request: Request,
        first: int,
        size: int,
        num_tokens: int,
        among_others: bool,
    ) -> list[KVCacheBlock]:
        """Blocks from index `first` on that exist, as many as may be taken."""
        hit: list[KVCacheBlock] = []
        devices: list[KVCacheBlock] = []
        # At least one token is left to compute.
        last = (request.num_tokens - 1) // size
        num_loads, key = 0, self.keys(request, size)
        max_loads = self._max_loads(num_tokens / size, among_others)
        for index in range(first, last):
            block = self.find(key(index))
            if block is None:
                break
            if type(block) is not HostSlot:
                devices.append(block)
            elif num_loads < max_loads:
                num_loads += 1
            else:
                break
            hit.append(block)
        if not num_loads:
            return hit
        room = self._loader.num_free(devices) - self._prefetches.num_kept(devices)
        while hit and num_loads > room:
            num_loads -= type(hit.pop()) is HostSlot
        return hit

    def _max_loads(self, num_blocks: float, among_others: bool) -> float:
        """How many blocks a jump may load: others wait no longer for it than they would
        if `num_blocks` were computed."""
        costs = self._costs
        if not (among_others and costs.load_s and costs.prefill_s):
            return float("inf")
        return max(costs.max_stall_s, num_blocks * costs.prefill_s) / costs.load_s
