# SPDX-License-Identifier: Apache-2.0
"""Fills slots from the tier below, for requests that wait in the queue."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.kv_tier.scheduling.below import SecondaryLayout
from vllm.v1.kv_tier.scheduling.costs import Costs
from vllm.v1.kv_tier.scheduling.jobs import Jobs
from vllm.v1.kv_tier.scheduling.slots import HostSlot, SlotTable
from vllm.v1.kv_tier.scheduling.tuning import SchedulingTuning
from vllm.v1.kv_tier.stats import KVTierStats
from vllm.v1.request import Request

logger = init_logger(__name__)


class StoredBlock(KVCacheBlock):
    """A block that the tier below has, and the placeholder for it in a prefix scan.

    As a `HostSlot` it is never referenced, and counts as one block to allocate. But it
    stands for no memory: a hit with one of them is not admitted.

    Args:
        key: Of the block.
        num_tokens: Prefix tokens that it covers.

    """

    __slots__ = ("key", "num_tokens")
    block_id = -1
    ref_cnt = 0
    prev_free_block = next_free_block = None
    is_null = False

    def __init__(self, key: BlockHashWithGroupId, num_tokens: int) -> None:
        self.key = key
        self.num_tokens = num_tokens

    @property
    def block_hash(self) -> BlockHashWithGroupId:
        return self.key

    @property
    def block_hash_num_tokens(self) -> int:
        return self.num_tokens

    __eq__ = object.__eq__
    __hash__ = object.__hash__
    __repr__ = object.__repr__


class _Wanted(NamedTuple):
    key: BlockHashWithGroupId
    num_tokens: int


@dataclass
class _Wait:
    """A request that the tier below may have something for."""

    until: float
    """When it goes on without."""
    wanted: list[_Wanted] = field(default_factory=list)
    question: int = 0
    """Whether they are there, while there is no answer."""
    found: list[BlockHashWithGroupId] = field(default_factory=list)
    jobs: set[int] = field(default_factory=set)
    is_over: bool = False


class Fetching:
    """Asks the tier below for what requests lack, and fetches what it has.

    Args:
        layout: The tier below.
        table: The slots.
        jobs: Carries out.
        costs: Knows the time, and what computing costs.
        is_cached: Whether the device has a block.
        is_below: Is told of what the tier below turned out to have.
        stats: Counts.
        tuning: How much at a time.

    """

    def __init__(
        self,
        layout: SecondaryLayout,
        table: SlotTable,
        jobs: Jobs,
        costs: Costs,
        is_cached: Callable[[BlockHashWithGroupId], object],
        is_below: Callable[[BlockHashWithGroupId], None],
        stats: KVTierStats,
        tuning: SchedulingTuning,
    ) -> None:
        self._layout = layout
        self._table = table
        self._jobs = jobs
        self._costs = costs
        self._is_cached = is_cached
        self._is_below = is_below
        self._stats = stats
        self._tuning = tuning
        self._asker = layout.asker
        self.found: dict[BlockHashWithGroupId, StoredBlock] = {}
        """What is below of the prompts of requests that wait."""
        self._fetched_by: dict[BlockHashWithGroupId, int] = {}
        # Nobody tells of requests that are aborted.
        self._waits: WeakKeyDictionary[Request, _Wait] = WeakKeyDictionary()
        self._fetch_s = 0.0
        self._num_asked = 0
        self._num_late = 0
        self._closed_until = 0.0

    def forget(self) -> None:
        """Nothing that was found is there any more."""
        self.found.clear()

    def end_step(self) -> None:
        """The step is complete."""
        self._num_asked = 0

    @property
    def is_awaited(self) -> bool:
        """Whether a request waits for an answer or for a job."""
        return any(wait.question or wait.jobs for wait in self._waits.values())

    def holds_back(self, request: Request) -> bool:
        """Whether `request` waits. Asks for it the first time."""
        now = self._costs.clock()
        wait = self._waits.get(request)
        if wait is None:
            if self._num_asked >= self._tuning.max_asks:
                # Its turn comes in a later step: thousands may wait.
                return True
            self._num_asked += 1
            wait = self._waits[request] = self._ask(request, now)
        if wait.is_over:
            return False
        if wait.question:
            self._hear(wait)
        is_waiting = wait.question > 0 or self._jobs.are_under_way(wait.jobs)
        if is_waiting and now < wait.until and not self._jobs.is_detached:
            return True
        if is_waiting and not self._jobs.is_detached:
            self._is_late(now)
        if is_waiting or wait.jobs or not wait.found or now >= wait.until:
            # What has come lies in slots now. What has not is computed.
            self._give_up(wait)
        return False

    def _ask(self, request: Request, now: float) -> _Wait:
        wait = _Wait(until=now + self._layout.deadline_s)
        if not self._jobs.is_detached and now >= self._closed_until:
            wait.wanted = self._missing(request)
        if wait.wanted:
            wait.question = self._asker.ask([bytes(w.key) for w in wait.wanted])
        else:
            wait.is_over = True
        return wait

    def _missing(self, request: Request) -> list[_Wanted]:
        """Full blocks of a request that neither device nor host has."""
        missing = []
        for i, block_hash in enumerate(request.block_hashes):
            for group_id in range(self._layout.num_groups):
                key = make_block_hash_with_group_id(block_hash, group_id)
                if self._table.get(key) is None and not self._is_cached(key):
                    missing.append(_Wanted(key, (i + 1) * self._layout.block_size))
        return missing

    def _hear(self, wait: _Wait) -> None:
        answer = self._asker.take_answer(wait.question)
        if answer is None:
            return
        wait.question = 0
        if self._jobs.is_detached:
            return
        for wanted, is_there in zip(wait.wanted, answer, strict=True):
            if is_there:
                wait.found.append(wanted.key)
                self.found[wanted.key] = StoredBlock(*wanted)

    def _give_up(self, wait: _Wait) -> None:
        wait.is_over = True
        wait.question = 0
        # Also what another one has found: a job that never ends must not make anybody
        # wait twice.
        late = [key for key, job in self._fetched_by.items() if job in wait.jobs]
        for key in (*wait.found, *late):
            self.found.pop(key, None)
        wait.jobs.clear()

    def _is_late(self, now: float) -> None:
        self._stats.secondary_late_requests += 1
        self._num_late += 1
        if self._num_late < self._tuning.max_late_fetches:
            return
        self._num_late = 0
        self._closed_until = now + self._tuning.retry_store_s
        logger.error(
            "KV tier: the tier below (%s) is too slow: %d requests in a row went on "
            "without it after %g ms. It is not asked for %d seconds. Look after its "
            "disk, or raise deadline_ms in secondary_tiers.",
            self._layout.name,
            self._tuning.max_late_fetches,
            self._layout.deadline_s * 1e3,
            self._tuning.retry_store_s,
        )

    # --------------------------------------------------------------- fetching

    def fetches(
        self, request: Request | None, groups: Sequence[Sequence[KVCacheBlock]]
    ) -> bool:
        """Whether a hit needs the tier below, so that it cannot be admitted now.

        Begins to fetch what can be fetched of it. What cannot is forgotten, so that the
        next lookup ends before it.

        Args:
            request: That hit, if it is known.
            groups: Blocks of the hit by group.

        """
        stored = [
            (i, block)
            for group in groups
            for i, block in enumerate(group)
            if type(block) is StoredBlock
        ]
        if not stored:
            return False
        # The begin of a prefix is of use without its end.
        stored.sort(key=lambda place: place[0])
        fetched_by = self._fetched_by
        new = [b for _, b in stored if b.key not in fetched_by]
        jobs = {fetched_by[b.key] for _, b in stored if b.key in fetched_by}
        if new and self._is_worth_it:
            # A part of the hit must not make room for the rest.
            self._table.pin(b for g in groups for b in g if type(b) is HostSlot)
            indices = self._table.reserve(min(len(new), self._room))
            if indices:
                jobs.add(self._fetch(new[: len(indices)], indices))
            new = new[len(indices) :]
        for block in new:
            self.found.pop(block.key, None)
        if request is not None:
            self._wait_for(request, jobs)
        return True

    def _wait_for(self, request: Request, jobs: set[int]) -> None:
        wait = self._waits.get(request)
        if wait is None or wait.is_over:
            # Found by another request, after this one had asked.
            until = self._costs.clock() + self._layout.deadline_s
            wait = self._waits[request] = _Wait(until)
        wait.jobs |= jobs
        if not wait.jobs:
            self._give_up(wait)

    def _fetch(self, blocks: Sequence[StoredBlock], indices: list[int]) -> int:
        def ended(done: Sequence[bool], seconds: float) -> None:
            for index, block, is_there in zip(indices, blocks, done):
                self._came(block, index, is_there)
            self._stats.secondary_loaded_blocks += sum(done)
            self._stats.secondary_missed_blocks += len(done) - sum(done)
            weight = self._tuning.cost_weight if self._fetch_s else 1.0
            self._fetch_s += weight * (seconds / len(done) - self._fetch_s)

        job = self._jobs.add(False, [b.key for b in blocks], indices, ended)
        self._fetched_by.update((block.key, job) for block in blocks)
        return job

    def _came(self, block: StoredBlock, index: int, is_there: bool) -> None:
        key = block.key
        del self._fetched_by[key]
        self.found.pop(key, None)
        if is_there and not self._jobs.is_detached and self._table.get(key) is None:
            self._num_late = 0
            self._table.fill(index, key, block.num_tokens)
            self._is_below(key)
        else:
            self._table.unreserve(index)

    @property
    def _is_worth_it(self) -> bool:
        """Whether a block comes sooner than it is computed, as far as is known."""
        prefill_s = self._costs.prefill_s
        return not (prefill_s and self._fetch_s + self._costs.load_s > prefill_s)

    @property
    def _room(self) -> int:
        room = int(self._tuning.fetch_part * self._table.num_slots)
        return max(0, room - len(self._fetched_by))
