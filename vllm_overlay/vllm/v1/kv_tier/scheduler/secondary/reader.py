# SPDX-License-Identifier: Apache-2.0
"""Fills slots from the secondary tiers, for requests that wait in the queue."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    get_block_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.kv_tier.layout import SecondaryLayout
from vllm.v1.kv_tier.scheduler.costs import Costs
from vllm.v1.kv_tier.scheduler.kv_groups import hashes_of_blocks
from vllm.v1.kv_tier.scheduler.secondary.jobs import SecondaryJobs
from vllm.v1.kv_tier.scheduler.secondary.read_costs import (
    PresenceListener,
    ReadCostModel,
    Wanted,
)
from vllm.v1.kv_tier.scheduler.slots import HostSlot, SlotTable
from vllm.v1.kv_tier.tuning import SchedulingTuning
from vllm.v1.request import Request


class SecondaryBlock(KVCacheBlock):
    """A block that a secondary tier has, and the placeholder for it in a prefix scan.

    Like a `HostSlot` it is never referenced, and counts as one block to allocate. But
    it has no memory, so a hit with one cannot be admitted.

    Args:
        key: Key of the block.
        num_tokens: Prefix tokens up to its end.
        source: The first tier that has it.

    """

    # Weakly referenced; the request that found it keeps it alive.
    __slots__ = ("__weakref__", "is_found", "key", "num_tokens", "source")
    block_id = -1
    ref_cnt = 0
    prev_free_block = next_free_block = None
    is_null = False

    def __init__(
        self, key: BlockHashWithGroupId, num_tokens: int, source: ReadCostModel
    ) -> None:
        self.key = key
        self.num_tokens = num_tokens
        self.source = source
        self.is_found = True
        """Whether lookups find it, as long as it is referenced."""

    @property
    def block_hash(self) -> BlockHashWithGroupId:
        return self.key

    @property
    def block_hash_num_tokens(self) -> int:
        return self.num_tokens

    __eq__ = object.__eq__
    __hash__ = object.__hash__
    __repr__ = object.__repr__


class FoundBlocks:
    """The blocks of secondary tiers that lookups find, by weak references.

    Args:
        max_taken: Most forgotten blocks that are removed in a step. At least as many as
            a step finds, so that they do not pile up.

    """

    def __init__(self, max_taken: int) -> None:
        self._max_taken = max_taken
        self._blocks: WeakValueDictionary[BlockHashWithGroupId, SecondaryBlock]
        self._blocks = WeakValueDictionary()
        # Forgotten blocks that are still in `_blocks`.
        self._forgotten: deque[Sequence[SecondaryBlock]] = deque()

    def __len__(self) -> int:
        """Blocks, with those that are forgotten and not removed yet."""
        return len(self._blocks)

    def get(self, key: BlockHashWithGroupId) -> SecondaryBlock | None:
        """What stands for `key` in a prefix hit."""
        block = self._blocks.get(key)
        return block if block is not None and block.is_found else None

    def add(self, block: SecondaryBlock) -> SecondaryBlock:
        """Let `block` be the only one for its key."""
        self._blocks[block.key] = block
        return block

    def remove(self, block: SecondaryBlock) -> None:
        """Let no block stand for the key of `block`."""
        block.is_found = False
        self._blocks.pop(block.key, None)

    def forget(self, blocks: Sequence[SecondaryBlock]) -> None:
        """Let no lookup find `blocks`. The sequence must not change afterwards."""
        for block in blocks:
            block.is_found = False
        if blocks:
            self._forgotten.append(blocks)

    def begin_step(self) -> None:
        """Remove some of what is forgotten."""
        num_left = self._max_taken
        while self._forgotten and num_left > 0:
            blocks = self._forgotten.popleft()
            for block in blocks[:num_left]:
                if self._blocks.get(block.key) is block:
                    del self._blocks[block.key]
            if len(blocks) > num_left:
                self._forgotten.appendleft(blocks[num_left:])
            num_left -= len(blocks)

    def clear(self) -> None:
        """Let lookups find nothing."""
        self._blocks.clear()
        self._forgotten.clear()


def before_secondary(
    groups: Sequence[Sequence[KVCacheBlock]],
) -> tuple[Sequence[KVCacheBlock], ...]:
    """The part of a hit, by group, before the first block of a secondary tier."""
    cut = []
    for group in groups:
        # A hot path: every block of a long prefix.
        types = list(map(type, group))
        is_whole = SecondaryBlock not in types
        cut.append(group if is_whole else group[: types.index(SecondaryBlock)])
    return tuple(cut)


LoadFilter = Callable[[Request], Callable[[BlockHash], bool] | None]
"""As `ConversationTracker.make_load_filter`."""


@dataclass
class _Wait:
    """The state of a request that secondary tiers may have blocks for."""

    since: float
    wanted: list[Wanted] = field(default_factory=list)
    """Blocks that it lacks, until there is an answer."""
    is_asked: bool = True
    """False if it asks in a later step."""
    questions: dict[ReadCostModel, int] = field(default_factory=dict)
    """Open questions by source."""
    found: list[SecondaryBlock] = field(default_factory=list)
    """Blocks that were found. Only this, and jobs that fetch them, keep them alive."""
    jobs: dict[int, ReadCostModel] = field(default_factory=dict)
    """Jobs that it waits for."""
    rest: list[SecondaryBlock] = field(default_factory=list)
    """What the next steps begin to fetch for it, in the order of the prefix."""
    by_half: bool = False
    """Whether its prefix is looked at when half of the jobs have ended."""
    alone: tuple[ReadCostModel, int] | None = None
    """Source and number of its blocks, if nothing else is being fetched."""
    look_at: int = 0
    """Number of ended jobs at which its prefix is looked up again."""
    was_idle: bool = True
    """Whether the engine has run nothing else since."""
    is_over: bool = False


class SecondaryReader:
    """Asks secondary tiers for blocks that requests lack, and fetches them.

    Args:
        layout: The secondary tiers.
        hash_size: Tokens of a block hash of a request.
        sources: The tiers, in the order in which they are asked.
        table: The slot table.
        jobs: Runs the jobs.
        costs: Costs, and the clock.
        is_cached: Whether the device has a block.
        listener: Notified about what tiers have.
        tuning: Limits.

    """

    def __init__(
        self,
        layout: SecondaryLayout,
        hash_size: int,
        sources: Sequence[ReadCostModel],
        table: SlotTable,
        jobs: SecondaryJobs,
        costs: Costs,
        is_cached: Callable[[BlockHashWithGroupId], object],
        listener: PresenceListener,
        tuning: SchedulingTuning,
    ) -> None:
        self._layout = layout
        self._hash_size = hash_size
        self._sources = sources
        self._table = table
        self._jobs = jobs
        self._costs = costs
        self._is_cached = is_cached
        self._listener = listener
        self._tuning = tuning
        self.found = FoundBlocks(tuning.max_looks)
        """Stored blocks in prompts of waiting requests, for as long as these wait."""
        self._fetched_by: dict[BlockHashWithGroupId, int] = {}
        # Weak, since the tier is not notified of aborted requests.
        self._waits: WeakKeyDictionary[Request, _Wait] = WeakKeyDictionary()
        self.num_asked = 0
        """Requests for which this step has asked."""
        # Blocks of prompts that this step has looked up.
        self._num_looks = 0
        self._is_full = False
        # Until when this step waits for answers.
        self._until = 0.0
        self._num_filling = [0] * len(sources)
        # Of each job that has not ended.
        self._blocks_of: dict[int, Sequence[SecondaryBlock]] = {}
        # Requests for which there is more to fetch than a step may begin, in order, and
        # how many blocks this step may still begin to fetch.
        self._unbegun: deque[ref[_Wait]] = deque()
        self._num_left = tuning.max_fetches

    def forget(self) -> None:
        """Nothing that was found is there any more, and nothing else is fetched."""
        self.found.clear()
        for reference in self._unbegun:
            if (wait := reference()) is not None:
                wait.rest = []
        self._unbegun.clear()

    def is_fetching(self, key: BlockHashWithGroupId) -> bool:
        """Whether `key` is being read from a tier."""
        return key in self._fetched_by

    def end_step(self) -> None:
        """Reset the limits of the step."""
        self._num_left = self._tuning.max_fetches
        self.num_asked, self._num_looks, self._until = 0, 0, 0.0
        self._is_full = False

    @property
    def num_awaited(self) -> int:
        """How many jobs must end before any waiting request can go on; 0 if none."""
        num_left = (
            max(1, wait.look_at - self._num_ended(wait))
            for wait in self._waits.values()
            if wait.jobs
        )
        return min(num_left, default=0)

    def look_up(
        self,
        request: Request,
        is_idle: bool,
        loadable: LoadFilter | None = None,
    ) -> bool:
        """Whether `request` must wait. Asks for its blocks the first time.

        Args:
            request: A request in the queue.
            is_idle: The step runs nothing so far, so it may wait a moment for the
                answer. Another empty step would take longer.
            loadable: Says what may be loaded for the request; None for everything.

        """
        wait = self._waits.get(request)
        if not request.block_hashes:
            return False
        if self._is_full if wait is None else not wait.is_asked and self._asks_no_more:
            # Its turn comes in a later step, since thousands may wait.
            return True
        now = self._costs.clock()
        if wait is None:
            sources = self._open_sources(now)
            num_looks = self._num_blocks(request)
            if not sources or not num_looks:
                return False
            if self._num_looks and self._num_looks + num_looks > self._tuning.max_looks:
                self._is_full = True
                return True
            self._num_looks += num_looks
            wanted = self._missing(request, loadable)
            wait = self._waits[request] = _Wait(now, wanted, is_asked=not wanted)
            wait.is_over = not wanted
        if not wait.is_asked and not self._jobs.is_detached:
            if self._asks_no_more:
                return True
            self._ask(wait, now, is_idle)
        if is_idle and not self._until:
            # Only after it has asked, since looking up a long prompt takes a while.
            self._until = time.monotonic() + self._tuning.answer_wait_s
        wait.was_idle &= is_idle
        if wait.is_over:
            return False
        if self._jobs.is_detached:
            self._give_up(wait)
            return False
        if wait.questions and self._awaits_answers(request, wait, now):
            return True
        return self._awaits_jobs(wait, now)

    def _awaits_jobs(self, wait: _Wait, now: float) -> bool:
        # Sources that turn out slower than computing are not waited for.
        is_patient = now < wait.since + self._tuning.patience_s
        awaited = {
            source
            for job, source in wait.jobs.items()
            if (is_patient or source.is_worth_it) and self._jobs.is_under_way(job)
        }
        if wait.rest and (is_patient or wait.rest[0].source.is_worth_it):
            awaited.add(wait.rest[0].source)
        late = [
            source
            for source in awaited
            if now >= wait.since + source.deadline_s
            or (source.is_overdue and not is_patient)
        ]
        if len(late) < len(awaited):
            return bool(wait.rest) or self._num_ended(wait) < wait.look_at
        for source in late:
            source.record_late(wait.since, now)
        is_measured = wait.was_idle and self._num_ended(wait) == len(wait.jobs)
        if wait.alone is not None and is_measured:
            source, num_blocks = wait.alone
            source.record_wait(now - wait.since, num_blocks)
        if wait.jobs or not wait.found:
            # Blocks that arrived are in slots now. The rest is computed.
            self._give_up(wait)
        return False

    def _awaits_answers(self, request: Request, wait: _Wait, now: float) -> bool:
        self._take_answers(request, wait)
        wanted = wait.wanted
        # Mostly others begin alike, and the last block tells.
        if (
            wait.questions
            and self.found.get(wanted[-1][0]) is not None
            and None not in (blocks := [self.found.get(key) for key, _ in wanted])
        ):
            wait.questions.clear()
            # Other requests have asked for them, and may be aborted.
            wait.found = blocks  # type: ignore[assignment]
        for source in list(wait.questions):
            # The other half of the time is for fetching what other tiers have.
            if now >= wait.since + source.deadline_s / 2:
                del wait.questions[source]
                source.record_late(wait.since, now)
        if not wait.questions:
            wait.wanted = []
        return bool(wait.questions)

    @property
    def _asks_no_more(self) -> bool:
        """Whether this step has asked for as many requests as it may."""
        return self.num_asked >= self._tuning.max_asks and not self._jobs.is_detached

    def _open_sources(self, now: float) -> list[ReadCostModel]:
        if self._jobs.is_detached:
            return []
        return [
            each for each in self._sources if each.is_open(now) and each.is_worth_it
        ]

    def _ask(self, wait: _Wait, now: float, is_idle: bool) -> None:
        wait.since, wait.is_asked = now, True
        wait.questions = {
            source: source.ask(wait.wanted)
            for source in self._open_sources(now)
            if source.is_worth_asking(len(wait.wanted), is_idle)
        }
        if wait.questions:
            self.num_asked += 1
        else:
            self._give_up(wait)

    def _num_blocks(self, request: Request) -> int:
        """Number of full blocks of the prompt, over all groups."""
        num_tokens = len(request.block_hashes) * self._hash_size
        return sum(num_tokens // size for size in self._layout.block_sizes)

    def _missing(self, request: Request, loadable: LoadFilter | None) -> list[Wanted]:
        """Full blocks of a request that neither device nor host has."""
        missing = []
        on_host, on_device = self._table.get, self._is_cached
        for group_id, size in enumerate(self._layout.block_sizes):
            suffix = make_block_hash_with_group_id(BlockHash(b""), group_id)
            hashes = hashes_of_blocks(request, self._hash_size, size)
            # A hot path: every block of every prompt.
            missing += [
                (BlockHashWithGroupId(key), num_blocks * size)
                for num_blocks, block_hash in enumerate(hashes, 1)
                if on_host(key := block_hash + suffix) is None  # type: ignore[arg-type]
                and not on_device(key)  # type: ignore[arg-type]
            ]
        if loadable is not None and (may_be := loadable(request)) is not None:
            missing = [w for w in missing if may_be(get_block_hash(w[0]))]
        if len(self._layout.block_sizes) > 1:
            missing.sort(key=lambda wanted: wanted[1])
        return missing

    def _take_answers(self, request: Request, wait: _Wait) -> None:
        for source, question in list(wait.questions.items()):
            answer = source.take_answer(question, self._until)
            if answer is None:
                continue
            del wait.questions[source]
            there = [w for w, is_there in zip(wait.wanted, answer) if is_there]
            self._listener.record_missing(
                (w[0] for w, is_there in zip(wait.wanted, answer) if not is_there),
                source.index,
            )
            for key, num_tokens in there:
                block = self.found.get(key)
                if block is None or source.index < block.source.index:
                    block = self.found.add(SecondaryBlock(key, num_tokens, source))
                wait.found.append(block)
            if there:
                _, num_tokens = there[-1]
                keys = [key for key, _ in there]
                self._listener.record_found(request, keys, num_tokens, source.index)

    def _give_up(self, wait: _Wait) -> None:
        wait.is_over = wait.is_asked = True
        wait.questions.clear()
        wait.wanted = []
        # Including blocks that other requests found: a job that never ends must not
        # make a request wait twice.
        late = [block for job in wait.jobs for block in self._blocks_of.get(job, ())]
        self.found.forget(wait.found)
        self.found.forget(late)
        wait.found, wait.rest = [], []
        wait.jobs.clear()

    def end_wait(self, request: Request) -> None:
        """Stop waiting for `request`, which computes what it lacks."""
        if (wait := self._waits.get(request)) is not None:
            wait.is_over = wait.is_asked = True
            wait.questions, wait.jobs = {}, {}
            wait.wanted, wait.found, wait.rest = [], [], []

    # --------------------------------------------------------------- fetching

    def begin_fetch(
        self, request: Request | None, groups: Sequence[Sequence[KVCacheBlock]]
    ) -> bool:
        """Whether a hit contains stored blocks, so that it cannot be admitted now.

        Begins to fetch those that are worth it. The others are forgotten, so that the
        next lookup ends before them.

        Args:
            request: The request of the hit, if known.
            groups: Blocks of the hit, by group.

        """
        # A hot path: every block of every hit.
        if not any(SecondaryBlock in map(type, group) for group in groups):
            return False
        blocks = [b for group in groups for b in group if type(b) is SecondaryBlock]
        # The beginning of a prefix is useful without its end.
        if len(groups) > 1:
            blocks.sort(key=lambda block: block.num_tokens)
        fetched_by = self._fetched_by
        new = [b for b in blocks if b.key not in fetched_by]
        wait = None if request is None else self._waits.get(request)
        is_idle = wait is not None and wait.was_idle
        num_begun = num_wanted = 0
        if worth := self._worth_it(new, is_idle):
            # The host part of the hit must not be evicted for the rest.
            self._table.pin(b for g in groups for b in g if type(b) is HostSlot)
            num_wanted = min(len(worth), self._room)
            num_begun, is_all = self._begin(worth[:num_wanted])
            if not is_all:
                num_wanted = num_begun
        self.found.forget(new[num_wanted:])
        if request is not None:
            jobs = {
                job: block.source
                for block in blocks
                if (job := fetched_by.get(block.key)) is not None
            }
            num_fetched = len(blocks) - len(new) + num_begun
            self._wait_for(request, jobs, num_fetched, new[num_begun:num_wanted])
        return True

    def _begin(self, blocks: Sequence[SecondaryBlock]) -> tuple[int, bool]:
        """Begin to fetch the first of `blocks`.

        Returns:
            How many, and whether there are slots for more of them in the next steps.

        """
        num = min(len(blocks), self._num_left)
        indices = self._table.reserve(num)
        self._num_left -= len(indices)
        self._fetch(blocks[: len(indices)], indices)
        return len(indices), len(indices) == num

    # ----------------------------------------------------- more than a step begins

    @property
    def has_more(self) -> bool:
        """Whether the next step begins to fetch more."""
        return bool(self._unbegun)

    def go_on(self) -> None:
        """Begin to fetch more for requests that wait, as much as a step may."""
        self.found.begin_step()
        while self._unbegun and self._num_left > 0:
            wait = self._unbegun[0]()
            # The request may have been aborted, or have waited for long enough.
            if wait is not None and wait.rest:
                self._go_on(wait)
            if wait is None or not wait.rest:
                self._unbegun.popleft()

    def _go_on(self, wait: _Wait) -> None:
        """Begin to fetch the first of the rest that `wait` waits for."""
        some, wait.rest = wait.rest[: self._num_left], wait.rest[self._num_left :]
        new: list[SecondaryBlock] = []
        for block in some:
            if (job := self._fetched_by.get(block.key)) is not None:
                # Others have begun to fetch it meanwhile.
                wait.jobs[job] = block.source
            elif block.is_found:
                new.append(block)
            elif self._table.get(block.key) is None:
                # It was lost, so the rest of the prefix cannot be used.
                self.found.forget(wait.rest)
                wait.rest = []
                break
        worth = self._in_time(new)[: self._room]
        num_begun, _ = self._begin(worth)
        for block in worth[:num_begun]:
            wait.jobs[self._fetched_by[block.key]] = block.source
        self._num_left -= len(some) - num_begun
        if num_begun < len(new):
            self.found.forget(new[num_begun:])
            self.found.forget(wait.rest)
            wait.rest = []
        self._look_later(wait)

    def _worth_it(
        self, blocks: Sequence[SecondaryBlock], is_idle: bool
    ) -> Sequence[SecondaryBlock]:
        """The first of `blocks` that are faster to fetch than to compute, and in time,
        with what is being fetched already."""
        worth = self._in_time(blocks)
        # Mixed blocks are treated as those of the first block's tier.
        is_gain = worth and worth[0].source.gain_s(len(worth), is_idle) > 0
        return worth if is_gain else []

    def _in_time(self, blocks: Sequence[SecondaryBlock]) -> Sequence[SecondaryBlock]:
        """The first of `blocks` that come in time, behind what is on its way."""
        left = {
            source: source.num_in_time(num_queued)
            for source, num_queued in zip(self._sources, self._num_filling)
        }
        if len(left) == 1:
            return blocks[: left.popitem()[1]]
        worth = []
        for block in blocks:
            if not left[block.source]:
                break
            left[block.source] -= 1
            worth.append(block)
        return worth

    def _wait_for(
        self,
        request: Request,
        jobs: dict[int, ReadCostModel],
        num_fetched: int,
        rest: list[SecondaryBlock],
    ) -> None:
        """`request` waits for `jobs`, which fetch so many blocks of its prefix, and
        maybe others; the next steps begin to fetch `rest`."""
        wait = self._waits.get(request)
        if wait is None or wait.is_over:
            # Found by another request, after this one had asked.
            wait = self._waits[request] = _Wait(self._costs.clock())
        sources = {*jobs.values(), *(block.source for block in rest)}
        is_first = not wait.jobs
        if sources and is_first:
            # It may have asked long before its turn, so half of the time is left to
            # fetch.
            half_s = max(source.deadline_s for source in sources) / 2
            wait.since = max(wait.since, self._costs.clock() - half_s)
        is_alone = num_fetched == sum(self._num_filling)
        num_blocks = num_fetched + len(rest)
        if is_first and len(sources) == 1 and is_alone and not rest:
            wait.alone = sources.pop(), num_blocks
        wait.jobs |= jobs
        wait.by_half = is_first and num_blocks >= 2 * self._tuning.min_prefetch
        if rest:
            wait.rest = rest
            self._unbegun.append(ref(wait))
        self._look_later(wait)
        if not wait.jobs and not wait.rest:
            self._give_up(wait)

    def _look_later(self, wait: _Wait) -> None:
        """Decide when the prefix of a request is looked at again."""
        # Half of a long prefix is loaded while the rest is read, which is loaded layer
        # by layer in the request's own step. Checking more often takes the GIL from the
        # reading threads.
        wait.look_at = len(wait.jobs)
        if wait.by_half:
            wait.look_at -= (len(wait.jobs) - self._num_ended(wait)) // 2

    def _num_ended(self, wait: _Wait) -> int:
        return sum(not self._jobs.is_under_way(job) for job in wait.jobs)

    def _fetch(self, blocks: Sequence[SecondaryBlock], indices: list[int]) -> None:
        """Fetch as many of `blocks` as there are slots."""
        places, least = list(zip(blocks, indices)), self._layout.max_job
        for source in self._sources:
            some = [place for place in places if place[0].source is source]
            # A few blocks tell whether the others are worth the wait.
            num = size = min(source.job_size(least), self._tuning.max_ended)
            if some and not source.is_known:
                num = min(size, self._tuning.first_fetch)
            while some:
                self._fetch_from(source, some[:num])
                some, num = some[num:], size

    def _fetch_from(
        self, source: ReadCostModel, places: Sequence[tuple[SecondaryBlock, int]]
    ) -> None:
        def ended(done: Sequence[bool], seconds: float) -> None:
            del self._blocks_of[job]
            for (block, index), is_there in zip(places, done):
                self._end_fetch(block, index, is_there)
            source.record_fetch(done, seconds)

        source.begin_fetch(len(places))
        keys, indices = [b.key for b, _ in places], [index for _, index in places]
        job = self._jobs.add(False, source.index, keys, indices, ended)
        self._fetched_by.update(dict.fromkeys(keys, job))
        self._blocks_of[job] = [block for block, _ in places]
        self._num_filling[source.index] += len(keys)

    def _end_fetch(self, block: SecondaryBlock, index: int, is_there: bool) -> None:
        key, tier = block.key, block.source.index
        del self._fetched_by[key]
        self._num_filling[tier] -= 1
        self.found.remove(block)
        if is_there and not self._jobs.is_detached and self._table.get(key) is None:
            self._listener.mark_present(key, tier)
            self._listener.record_fetched(key, tier)
            self._table.fill(index, key, block.num_tokens)
            return
        if not is_there:
            self._listener.mark_absent(key, tier)
        self._table.unreserve(index)

    @property
    def _room(self) -> int:
        room = int(self._tuning.fetch_part * self._table.num_slots)
        return max(0, room - len(self._fetched_by))

    def num_filling(self) -> list[int]:
        """Number of slots that are being filled, by tier."""
        return list(self._num_filling)
