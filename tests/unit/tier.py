# SPDX-License-Identifier: Apache-2.0
"""A tiered block pool that tests drive by hand."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_tier.config import KVTierConfig
from vllm.v1.kv_tier.layout import (
    ElasticLayout,
    KVTierLayout,
    PrefixEnd,
    SecondaryLayout,
)
from vllm.v1.kv_tier.plan import StepPlan, StepReport
from vllm.v1.kv_tier.pool import ElasticBlockPool, TieredBlockPool
from vllm.v1.kv_tier.scheduler.host_writer import Cleaner
from vllm.v1.kv_tier.scheduler.slots import HostSlot
from vllm.v1.kv_tier.tuning import SchedulingTuning

from ..names import block_hash
from ..settings import options

BLOCK = 32
SLOT_BYTES = 1 << 20


def hash_of(name: str) -> BlockHash:
    return block_hash(name.encode())


def hashes(names: str) -> list[BlockHash]:
    return [hash_of(name) for name in names]


class Asking:
    """What the tier must know of a request."""

    def __init__(self, num_preemptions: int) -> None:
        self.num_preemptions = num_preemptions


class Tier:
    """A pool of `num_blocks` usable device blocks, driven step by step.

    A block is named by a letter, which stands for its hash.
    """

    def __init__(
        self,
        num_blocks: int,
        num_slots: int = 100,
        hash_block_size: int = BLOCK,
        load_s: float = 0.0,
        layerwise: bool = False,
        tuning: dict[str, Any] | None = None,
        secondary: SecondaryLayout | None = None,
        elastic: ElasticLayout | None = None,
        open_slots: tuple[int, ...] = (),
        prefix_ends: tuple[PrefixEnd | None, ...] = (),
        group_bytes: tuple[int, ...] = (),
        **config: Any,
    ) -> None:
        # What they do is the easiest to foretell.
        config = {"eviction_policy": "lru", "store_from_use": 1} | config
        layout = KVTierLayout(
            KVTierConfig(num_slots * SLOT_BYTES, **options(**config)),
            num_slots,
            SLOT_BYTES,
            open_slots=open_slots,
            load_s=load_s,
            tokens_per_block=BLOCK,
            layerwise=layerwise,
            tuning=SchedulingTuning(**{"clean_batch": 0} | (tuning or {})),
            secondary=secondary,
            elastic=elastic,
            prefix_ends=prefix_ends,
            group_bytes=group_bytes,
        )
        pool = TieredBlockPool if elastic is None else ElasticBlockPool
        self.pool = pool(
            layout,
            num_gpu_blocks=num_blocks + 1,
            enable_caching=True,
            hash_block_size=hash_block_size,
        )
        self.host = self.pool.host
        self.now = 0.0
        # All that asked, so that none counts as aborted.
        self.requests: list[Asking] = []
        # Whether the last promotion waits for loads.
        self.deferred = False
        self.pool.costs.clock = lambda: self.now

    # Parts of a step.

    def compute(self, names: str, group_id: int = 0) -> list[KVCacheBlock]:
        """Schedule the computation of new blocks and hash them."""
        blocks = self.pool.get_new_blocks(len(names))
        self.cache(names, blocks, group_id)
        return blocks

    def cache(
        self, names: str, blocks: Sequence[KVCacheBlock], group_id: int = 0
    ) -> None:
        request = SimpleNamespace(
            request_id="", block_hashes=hashes(names), cache_salt=None
        )
        self.pool.cache_full_blocks(
            request, list(blocks), 0, len(blocks), BLOCK, group_id
        )

    def find(self, names: str, group_id: int = 0) -> list[KVCacheBlock]:
        found = [self.pool.get_cached_block(h, [group_id]) for h in hashes(names)]
        assert None not in found, "a miss"
        return [blocks[0] for blocks in found if blocks]

    def where(self, name: str, group_id: int = 0) -> str:
        """The tier that answers for a block."""
        found = self.pool.get_cached_block(hash_of(name), [group_id])
        if found is None:
            return "nowhere"
        return "host" if isinstance(found[0], HostSlot) else "device"

    def slot(self, name: str, group_id: int = 0) -> HostSlot:
        slot = self.host.get(make_block_hash_with_group_id(hash_of(name), group_id))
        assert slot is not None, f"{name} has no slot"
        return slot

    def try_promote(
        self,
        *groups: Sequence[KVCacheBlock],
        skipped_tokens: Sequence[int] = (),
        num_preemptions: int = 0,
        num_tokens: int | None = None,
        num_new_tokens: int = 2,
        among_others: bool = False,
        request: Any = None,
    ) -> tuple[Sequence[KVCacheBlock], ...] | None:
        """Admit a request that hit, `among_others` in the step or alone in it."""
        skips = list(skipped_tokens) or [0] * len(groups)
        managers = [
            SimpleNamespace(block_size=BLOCK, get_num_skipped_tokens=lambda n, s=s: s)
            for s in skips
        ]
        if num_tokens is None:
            num_tokens = max(map(len, groups)) * BLOCK
        request = request or Asking(num_preemptions)
        self.requests.append(request)
        promoted = self.pool.promote(
            request, managers, groups, num_tokens, 0, num_new_tokens, among_others
        )
        self.deferred = promoted is None and self.pool.load_admission.is_loading(
            request
        )
        return promoted

    def promote(
        self, *groups: Sequence[KVCacheBlock], **options: Any
    ) -> tuple[Sequence[KVCacheBlock], ...]:
        promoted = self.try_promote(*groups, **options)
        assert promoted is not None, "deferred"
        return promoted

    def free(self, blocks: Iterable[KVCacheBlock]) -> None:
        self.pool.free_blocks(blocks)

    # Whole steps.

    def begin(self) -> None:
        self.pool.begin_step()

    def end(self) -> StepPlan:
        return self.pool.take_plan()

    def computed(self, names: str, group_id: int = 0) -> list[KVCacheBlock]:
        """A step that computes blocks, which are free after it."""
        self.begin()
        blocks = self.compute(names, group_id)
        self.end()
        self.free(blocks)
        return blocks

    def demoted(self, names: str) -> StepPlan:
        """Steps after which blocks are only on the host, and the device is empty."""
        plan = self.demoted_or_dropped(names)
        assert all(self.where(n) == "host" for n in names)
        return plan

    def demoted_or_dropped(self, names: str) -> StepPlan:
        """As `demoted`, where the host may have no room for them."""
        self.computed(names)
        self.begin()
        blocks = self.pool.get_new_blocks(self.pool.get_num_free_blocks())
        plan = self.end()
        self.free(blocks)
        return plan

    def forget_rate(self) -> None:
        """What the cleaner has learned of the steps until now."""
        writer = self.pool.store_timing
        assert isinstance(writer, Cleaner)
        writer.alloc_rate = 0.0
        self.pool.free.cursor = None

    def drop(self, name: str) -> None:
        """The host loses a block, as when its store failed."""
        slot = self.slot(name)
        failed = {slot.index: slot.store_seq}
        self.pool.apply_report(StepReport(failed_store_slots=failed))

    def idle(self, num_steps: int = 1) -> list[StepPlan]:
        plans = []
        for _ in range(num_steps):
            self.begin()
            plans.append(self.end())
        return plans


def ids(blocks: Iterable[KVCacheBlock]) -> set[int]:
    return {block.block_id for block in blocks}


def stores(plan: StepPlan) -> dict[int, int]:
    """Device block by slot."""
    slots = plan.store_slots + plan.clean_slots
    assert len(slots) == len(set(slots))
    return dict(zip(slots, plan.store_blocks + plan.clean_blocks, strict=True))


def cleaned(plan: StepPlan) -> set[int]:
    """Device blocks."""
    return set(stores(plan).values())


def loads(plan: StepPlan) -> dict[int, int]:
    """Slot by device block."""
    assert len(plan.load_blocks) == len(set(plan.load_blocks))
    return dict(zip(plan.load_blocks, plan.load_slots, strict=True))


def loads_ahead(plan: StepPlan) -> dict[int, int]:
    """Slot by device block."""
    assert len(plan.ahead_blocks) == len(set(plan.ahead_blocks))
    return dict(zip(plan.ahead_blocks, plan.ahead_slots, strict=True))


def is_empty(plan: StepPlan) -> bool:
    """Whether a plan has neither copies nor fences."""
    return plan == StepPlan(plan.seq)


def assert_nothing_leaks(tier: Tier) -> None:
    pool = tier.pool
    free = pool.free_block_queue.get_all_free_blocks()
    assert len(free) == len({b.block_id for b in free}) == pool.get_num_free_blocks()
    assert all(b.ref_cnt == 0 for b in free)
    assert len(free) == pool.num_gpu_blocks - 1


class IdleScheduler(Scheduler):
    """Upstream's scheduler of an engine without requests."""

    connector = ec_connector = None

    def __init__(self, pool: TieredBlockPool) -> None:
        self.kv_cache_manager: Any = SimpleNamespace(kv_tier=pool)
        self._pause_state: Any = 0

    def has_unfinished_requests(self) -> bool:
        return False

    def has_finished_requests(self) -> bool:
        return False

    def pause(self) -> bool:
        """Pause all, as of `PauseState`; False in releases that cannot."""
        self._pause_state = 2
        return hasattr(Scheduler, "pause_state")

    def resume(self) -> None:
        self._pause_state = 0
