# SPDX-License-Identifier: Apache-2.0
"""The tier as it was allocated: values that the scheduler gets, and nothing else."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from vllm.v1.kv_tier.keeper.client import Membership
from vllm.v1.kv_tier.tuning import SchedulingTuning
from vllm.v1.kv_tier.weight_changes import WeightChangeMonitor


def _nothing(pool: Any) -> None:
    pass


BACKEND = "core"


Answer = Callable[[float], list[bool] | None]
"""Waits until a time of `time.monotonic` for the answer to a question: whether each of
its keys exists, empty if it was not asked; None if there is no answer yet."""


class Lookup(Protocol):
    """Asks a store which blocks it has, without blocking the caller."""

    @property
    def ask_s(self) -> float:
        """Seconds that the last answer took."""

    def ask(self, keys: Sequence[bytes]) -> Answer:
        """Queue a question."""

    def mark_present(self, keys: Sequence[bytes]) -> None:
        """Note that the store has `keys` from now on, whatever it answered before."""


class AdapterFiles(Protocol):
    """Files of the LoRA adapters that keys of blocks name."""

    def watch(self, number: int) -> None:
        """Note that a request for the adapter with this id may run."""

    def check_files(self, numbers: Collection[int]) -> bool:
        """Whether files of these adapters, or of those watched lately, are no longer
        those that keys name."""


@dataclass(frozen=True)
class SecondaryTier:
    """One secondary tier, opened."""

    name: str
    """Name for messages."""
    label: str
    """Label of its metrics."""
    locality: str
    """`LOCAL` or `REMOTE`, as in upstream's events."""
    lookup: Lookup
    store_from_use: int
    """Write a slot from its n-th use on."""
    deadline_s: float
    """Longest time of a read, and of a request's wait for it."""
    fetches_always: bool = False
    """Whether requests wait for it even where computing is faster."""
    flush_s: float = 0.0
    """How long the engine writes to it before it ends."""


@dataclass(frozen=True)
class SecondaryLayout:
    """The secondary tiers, opened."""

    tiers: tuple[SecondaryTier, ...]
    """In the order in which they are asked."""
    num_ranks: int
    """Number of ranks with an object for each block."""
    block_sizes: tuple[int, ...]
    """Tokens of a block, for each KV cache group."""
    max_writing: int
    """Most slots that are being written to a tier."""
    max_job: int
    """Most slots in a job. Ranks report the end of each job."""
    max_known: int
    """Most keys per tier that are remembered as stored."""
    tokens_per_block: float
    """Tokens whose KV takes one block, over all groups together."""
    rank_calls: WeightChangeMonitor = field(
        default_factory=WeightChangeMonitor, compare=False
    )
    """Reports calls that may change weights."""
    begun: Callable[[Any], None] = field(default=_nothing, compare=False)
    """Takes the pool of the engine when it is made."""

    def tokens_of(self, num_blocks: int) -> int:
        """Tokens of `num_blocks` blocks, over all groups alike."""
        return round(num_blocks * self.tokens_per_block)


class PageMapper(Protocol):
    """Maps the pages of an engine.

    The caller ensures that no copy or forward pass uses a page that is not mapped.
    """

    @property
    def blocks_per_page(self) -> int:
        """Device blocks of a page."""

    @property
    def missing(self) -> list[int]:
        """Pages that are not mapped at first."""

    def num_wanted(self) -> int:
        """How many mapped pages others need more than this engine."""

    def map_pages(self, num_pages: int, wait: bool) -> list[int]:
        """Map up to `num_pages` unmapped pages, as far as there is memory.

        Args:
            num_pages: Number of pages.
            wait: The engine waits for them. Otherwise pages that take time are mapped
                meanwhile, for the next call.

        Returns:
            The mapped pages, without content.

        """

    def unmap_pages(self, pages: list[int]) -> None:
        """Release the memory of mapped `pages`, and their content."""

    def take_seconds(self) -> tuple[float, float]:
        """Seconds that this process spent mapping and unmapping since last called."""


UnmapBlocks = Callable[[int, int], None]
"""Lets all ranks release the memory of blocks (first, end) before the current plan."""

MakeMapper = Callable[[UnmapBlocks], PageMapper]


@dataclass(frozen=True)
class ElasticLayout:
    """Describes elastic device memory to the scheduler."""

    make_mapper: MakeMapper
    page_bytes: int
    """Bytes of a page on all ranks together."""
    num_ranks: int
    """Number of ranks with KV memory. Each reports when all use of a page has ended."""
    shrink_after_s: float
    """As in `KVTierConfig`."""
    block_sizes: tuple[int, ...]
    """Tokens of a block, for each group of layers."""
    headroom: int
    """Most blocks that the step of one request needs; kept mapped and free while
    requests run."""


class PrefixEnd(NamedTuple):
    """Blocks at the end of a prefix: all that a hit needs of a window, or a state."""

    needed: int
    """Blocks that every hit needs."""
    most: int
    """Blocks that a hit may need. A window may begin inside a block, and drafts of
    EAGLE look at one more."""


class ReachableBlocks(NamedTuple):
    """Which blocks of a KV cache group a hit can use.

    Hits end where all groups have whole blocks. Between two such places a hit uses none
    but the end of a window, or a state.
    """

    period: int = 1
    """Blocks from one end to the next."""
    before: int = 1
    """Blocks before each end; 0 for a group that is never cached."""
    behind: int = 0
    """Blocks behind each end: drafts of EAGLE look at one more."""

    @property
    def part(self) -> float:
        """Part of all blocks."""
        return min(1.0, (self.before + self.behind) / self.period)

    def indices(self, begin: int, end: int) -> Sequence[int]:
        """Those of the blocks `begin` to `end`, without `end`, by their index in a
        prompt."""
        period, before, behind = self
        if before + behind >= period:
            return range(begin, end)
        if not before:
            return ()
        first = (begin - behind) // period * period + period
        return [
            index
            for place in range(max(first, period), end + before, period)
            for index in range(max(place - before, begin), min(place + behind, end))
        ]


@dataclass(frozen=True)
class PoolLayout:
    """Describes the engine's part of a machine's pool to the scheduler."""

    member: Membership
    block_sizes: tuple[int, ...]
    """Tokens of a block, for each group of layers."""
    num_ranks: int
    """Number of ranks. Each reports the end of plans."""
    lease: object = None
    """The connection to the keeper, which lives as long as this."""
    rank_calls: WeightChangeMonitor = field(
        default_factory=WeightChangeMonitor, compare=False
    )
    """Reports calls that may change weights."""


class DebugSettings(Protocol):
    """What the scheduler reads of `config.DebugConfig`."""

    @property
    def store_policy(self) -> str: ...

    @property
    def store_from_use(self) -> int | Literal["auto"]: ...


class PoolSettings(Protocol):
    """What the scheduler reads of `config.KVTierConfig`."""

    @property
    def debug(self) -> DebugSettings: ...

    @property
    def eviction_policy(self) -> str: ...

    @property
    def quotas(self) -> Mapping[str, float] | None: ...

    @property
    def max_load_stall_s(self) -> float: ...


@dataclass(frozen=True)
class KVTierLayout:
    """The tier as it was allocated: what the scheduler must know of it."""

    config: PoolSettings
    num_slots: int
    """Host slots when all are open, without those of neighbours."""
    slot_bytes: int
    """Bytes of one slot on all ranks together."""
    open_slots: tuple[int, ...] = ()
    """For each rank, the slots that are open at first. Empty: all are, and stay so."""
    are_shared: bool = False
    """Whether several ranks map the memory of a slot."""
    load_s: float = 0.0
    """Seconds to load one slot, on the slowest rank, as measured at start."""
    tokens_per_block: float = 0.0
    """Tokens whose KV takes one block; less than the block size where several
    groups of layers have blocks of their own."""
    layerwise: bool = False
    """Whether layers wait for their own part of the loads of a step, on all ranks."""
    tuning: SchedulingTuning = SchedulingTuning()
    """No setting: what tests choose otherwise."""
    secondary: SecondaryLayout | None = None
    """The secondary tiers, if there are any."""
    elastic: ElasticLayout | None = None
    """Who maps device memory, if any of it is given back."""
    prefix_ends: tuple[PrefixEnd | None, ...] = ()
    """By KV cache group; None for groups of which a hit needs all blocks. Empty where
    no group has ends."""
    reachable: tuple[ReachableBlocks, ...] = ()
    """By KV cache group; empty where hits can use all blocks."""
    group_bytes: tuple[int, ...] = ()
    """By KV cache group, how many bytes of a slot its blocks need, on all ranks
    together. Empty if all need all of it."""
    pool: PoolLayout | None = None
    """The engine's part of a pool, if it has one. Its neighbours' slots follow."""
    adapter_files: AdapterFiles | None = None
    """None if keys name none."""
    can_jump: bool = False
    """Whether a prefill can skip blocks that others have computed or fetched since."""

    @property
    def all_slots(self) -> int:
        """Host slots that the ranks open, with those of neighbours."""
        return self.num_slots if self.pool is None else self.pool.member.end

    @property
    def copies_groups(self) -> bool:
        """Whether ranks copy and store of a block what its KV cache group needs."""
        return bool(self.group_bytes)
