# SPDX-License-Identifier: Apache-2.0
"""Asks secondary tiers for what requests lack, and fetches it.

A request that can compute meanwhile meets it (see `Meetings`). Another one waits in the
queue while slots are filled, from the beginning of its prefix on.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from weakref import WeakKeyDictionary

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.kv_tier.layout import SecondaryLayout
from vllm.v1.kv_tier.scheduler.costs import Costs
from vllm.v1.kv_tier.scheduler.secondary.fetches import Fetches, SecondaryBlock
from vllm.v1.kv_tier.scheduler.secondary.jobs import SecondaryJobs
from vllm.v1.kv_tier.scheduler.secondary.lookup import LoadFilter, PromptLookup
from vllm.v1.kv_tier.scheduler.secondary.meeting import Meetings
from vllm.v1.kv_tier.scheduler.secondary.tier import Arrivals, Question, Tier, Wanted
from vllm.v1.kv_tier.scheduler.slots import HostSlot, SlotTable
from vllm.v1.kv_tier.tuning import SchedulingTuning
from vllm.v1.request import Request


@dataclass
class _Wait:
    """A request that secondary tiers may have blocks for."""

    meets: bool
    """Whether it computes what has not arrived."""
    since: float = 0.0
    """When it asked, or began to fetch after it had answers."""
    num_tokens: int = 0
    """Tokens of its prompt whose blocks were looked up."""
    is_asked: bool = False
    wanted: list[Wanted] = field(default_factory=list)
    """Blocks that it lacks, until there are answers."""
    questions: list[tuple[Tier, Question]] = field(default_factory=list)
    """Those that are not answered, or whose answer is not taken in."""
    found: dict[BlockHashWithGroupId, SecondaryBlock] = field(default_factory=dict)
    """What its prefix lookup finds in secondary tiers."""
    jobs: dict[int, Tier] = field(default_factory=dict)
    """Jobs that it waits for."""
    look_at: int = 0
    """Number of these that must end before its prefix is looked up again."""
    has_looked: bool = False
    """Whether its prefix was looked up with some of it on its way."""

    def end(self) -> None:
        """Let the request compute what it lacks."""
        self.is_asked = True
        self.wanted, self.questions, self.found, self.jobs = [], [], {}, {}


class SecondaryReader:
    """Asks secondary tiers for blocks that requests lack, and fetches them.

    Args:
        layout: The secondary tiers.
        hash_size: Tokens of a block hash of a request.
        tiers: In the order in which they are asked.
        table: The slot table.
        jobs: Runs the jobs.
        costs: Costs, and the clock.
        is_cached: Whether the device has a block.
        arrivals: Notified of blocks that were read.
        tuning: Limits.

    """

    def __init__(
        self,
        layout: SecondaryLayout,
        hash_size: int,
        tiers: Sequence[Tier],
        table: SlotTable,
        jobs: SecondaryJobs,
        costs: Costs,
        is_cached: Callable[[BlockHashWithGroupId], object],
        arrivals: Arrivals,
        tuning: SchedulingTuning,
    ) -> None:
        self._tiers = tiers
        self._table = table
        self._jobs = jobs
        self._costs = costs
        self._tuning = tuning
        sizes = layout.block_sizes
        self._lookup = PromptLookup(sizes, hash_size, table, is_cached)
        self._timeout_s = max(tier.settings.deadline_s for tier in tiers)
        # Weak, since the tier is not notified of aborted requests.
        self._waits: WeakKeyDictionary[Request, _Wait] = WeakKeyDictionary()
        # Of the request whose prefix is being looked up, if it waits.
        self._current: _Wait | None = None
        # Requests that compute while their answers are awaited.
        self._unanswered: WeakKeyDictionary[Request, _Wait] = WeakKeyDictionary()
        self.num_asked = 0
        """Requests for which this step has asked."""
        # Blocks that this step may still look up, or take in answers for.
        self._num_left = tuning.max_looks
        # Until when this step waits for answers.
        self._until = 0.0
        self.on_found: (
            Callable[[Request, Sequence[BlockHashWithGroupId], int], None] | None
        ) = None
        """Called before keys of a request count as found: with the request, the keys,
        and the tokens up to the end of the last of them."""
        self.fetches = Fetches(layout, table, jobs, arrivals, tuning)
        self.can_meet = not any(tier.settings.fetches_always for tier in tiers)
        """Whether requests need not wait for all that is fetched for them."""
        self.meetings = Meetings(
            sizes[0],
            jobs,
            costs,
            lambda key: key and (table.has(key) or is_cached(key)),
            self.fetches,
            tuning,
        )

    def forget(self) -> None:
        """Nothing that was found is there any more, and nothing else is fetched."""
        self._waits.clear()
        self._unanswered.clear()
        self._current = None
        self.meetings.forget()

    def go_on(self) -> None:
        """Begin to fetch more for requests that compute meanwhile."""
        for request, wait in list(self._unanswered.items()):
            if request.is_finished() or not self._awaits_answers(request, wait):
                del self._unanswered[request]
        self.meetings.go_on()

    def end_step(self) -> None:
        """Reset the limits of the step."""
        self._current = None
        self.num_asked, self._until = 0, 0.0
        self._num_left = self._tuning.max_looks
        self.fetches.end_step()
        self.meetings.end_step()

    @property
    def num_awaited(self) -> int:
        """How many jobs must end before any waiting request can go on; 0 if none."""
        num_left = (
            max(1, wait.look_at - self._num_ended(wait))
            for wait in self._waits.values()
            if wait.jobs
        )
        return min(num_left, default=0)

    # ------------------------------------------------------------------- asking

    def look_up(
        self,
        request: Request,
        is_idle: bool,
        loadable: LoadFilter | None = None,
        meets: bool = False,
    ) -> bool:
        """Whether `request` must wait. Asks for its blocks the first time.

        Args:
            request: A request in the queue.
            is_idle: The step runs nothing so far, so it may wait a moment for the
                answer. Another empty step would take longer.
            loadable: Says what may be loaded for the request; None for everything.
            meets: The request can compute what has not arrived, so it waits for answers
                only, and not for long.

        """
        self._current = None
        if self._jobs.is_detached:
            return False
        wait = self._waits.get(request)
        if wait is None:
            is_read = any(not tier.reads.is_avoided(meets) for tier in self._tiers)
            if not is_read or not self._lookup.has_blocks(request):
                return False
            wait = self._waits[request] = _Wait(meets)
        if not wait.is_asked:
            if self._num_left <= 0:
                # Its turn comes in a later step, since thousands may wait.
                return True
            self._look_up_more(request, wait, loadable)
            if not wait.is_asked:
                return True
        if is_idle and not self._until:
            # Only after it has asked, since looking up a long prompt takes a while.
            self._until = time.monotonic() + self._tuning.answer_wait_s
        if wait.questions and self._awaits_answers(request, wait):
            patience_s = self._tuning.answer_patience_s
            if not wait.meets or self._costs.clock() < wait.since + patience_s:
                return True
            self._unanswered[request] = wait
        if wait.meets:
            return False
        self._current = wait
        return bool(wait.jobs) and self._awaits_jobs(wait)

    def _look_up_more(
        self, request: Request, wait: _Wait, loadable: LoadFilter | None
    ) -> None:
        """Look up as many more blocks of `request` as the step may, and ask for all
        that are missing after the last."""
        begin = wait.num_tokens
        wait.num_tokens, num, missing = self._lookup.find_missing(
            request, begin, self._num_left, loadable
        )
        self._num_left -= num
        wait.wanted += missing
        if wait.num_tokens < self._lookup.num_tokens(request):
            return
        wait.is_asked, wait.since = True, self._costs.clock()
        num = len(wait.wanted)
        if num:
            wait.questions = [
                (tier, tier.ask(wait.wanted))
                for tier in self._tiers
                if tier.reads.may_ask(num, wait.meets)
            ]
        if wait.questions:
            self.num_asked += 1
            self._num_left -= num + self._tuning.looks_per_ask
        else:
            wait.end()

    def _awaits_answers(self, request: Request, wait: _Wait) -> bool:
        """Take in answers. Returns whether there are more to wait for."""
        for tier, question in wait.questions:
            # Upstream describes a prefix as a whole, which each part would repeat.
            most = None if self.on_found else max(0, (self._num_left + 1) // 2)
            num, there = question.take(most, self._until)
            self._num_left -= 2 * num
            self._add_found(request, wait, tier, there)
        wait.questions = [each for each in wait.questions if each[1].num_left != 0]
        is_all = len(wait.found) == len(wait.wanted)
        # The other half of the time is for fetching.
        is_late = self._costs.clock() >= wait.since + self._timeout_s / 2
        if wait.questions and not is_all:
            open_ = [each for each in wait.questions if each[1].num_left is None]
            if len(open_) < len(wait.questions) or not is_late:
                return True
            for tier, _ in open_:
                tier.reads.record_late(wait.since)
        wait.questions = []
        if wait.meets:
            self.meetings.begin(request, wait.wanted, wait.found)
            wait.end()
        wait.wanted = []
        return False

    def _add_found(
        self, request: Request, wait: _Wait, tier: Tier, there: Sequence[Wanted]
    ) -> None:
        """`tier` answers that it has these blocks of a request."""
        for key, num_tokens in there:
            block = wait.found.get(key)
            if block is None or tier.index < block.tier.index:
                wait.found[key] = SecondaryBlock(key, num_tokens, tier)
        if there and self.on_found is not None:
            _, num_tokens = there[-1]
            self.on_found(request, [key for key, _ in there], num_tokens)
        for key, _ in there:
            tier.presence.mark_present(key)

    def find(self, key: BlockHashWithGroupId) -> SecondaryBlock | None:
        """What stands for `key` in the hit of the request that was looked up last."""
        if self._current is None or (block := self._current.found.get(key)) is None:
            return None
        # Meanwhile the tier may not have delivered it to another request. Nor do
        # followers of KV events have a description of it then.
        return block if key in block.tier.presence.keys else None

    def end_wait(self, request: Request) -> None:
        """Stop waiting for `request`, which computes what it lacks."""
        wait = self._waits.get(request)
        if wait is not None and not wait.meets:
            wait.end()

    # ------------------------------------------------------------------ waiting

    def begin_fetch(self, groups: Sequence[Sequence[KVCacheBlock]]) -> bool:
        """Whether a hit contains stored blocks, so that it cannot be admitted now.

        Begins to fetch those that are worth it. The others are forgotten, so that the
        next lookup ends before them.

        Args:
            groups: Blocks of the hit of the request that was looked up last, by group.

        """
        # A hot path: every block of every hit.
        if not any(SecondaryBlock in map(type, group) for group in groups):
            return False
        wait, fetched_by = self._current, self.fetches.fetched_by
        blocks = [b for group in groups for b in group if type(b) is SecondaryBlock]
        if wait is None or not wait.found:
            return True
        # The beginning of a prefix is useful without its end.
        blocks.sort(key=lambda block: block.num_tokens)
        jobs = {
            job: block.tier
            for block in blocks
            if (job := fetched_by.get(block.key)) is not None
        }
        new = [b for b in blocks if b.key not in fetched_by and b.key in wait.found]
        if new and self.fetches.num_left > 0:
            # The host part of the hit must not be evicted for the rest.
            self._table.pin([b for g in groups for b in g if type(b) is HostSlot])
            jobs |= self._begin(wait, new)
        if jobs.keys() == wait.jobs.keys():
            # The scheduler has asked before in this step.
            return True
        wait.jobs, wait.look_at = jobs, len(jobs)
        if jobs and not wait.has_looked:
            wait.has_looked = True
            # It may have asked long before its turn, so half of the time is left.
            half_s = self._timeout_s / 2
            wait.since = max(wait.since, self._costs.clock() - half_s)
            if len(blocks) >= 2 * self._tuning.min_prefetch:
                # Half of a long prefix is loaded while the rest is read, which is
                # loaded layer by layer in the request's own step. Checking more often
                # takes the GIL from the reading threads.
                wait.look_at -= len(jobs) // 2
        return True

    def _begin(self, wait: _Wait, blocks: Sequence[SecondaryBlock]) -> dict[int, Tier]:
        """Begin to fetch the first of `blocks`, as far as it is worth it. What a step
        may not begin any more follows when these have come.

        Returns:
            The jobs.

        """
        jobs: dict[int, Tier] = {}
        num, fetches = 0, self.fetches
        is_whole = True
        for tier, run in groupby(blocks, key=lambda block: block.tier):
            some = list(run)
            most = tier.reads.most_to_wait_for(len(some), tier.num_filling)
            is_whole, some = most >= len(some), some[: max(0, most)]
            size = fetches.job_size(tier)
            if tier.reads.is_unknown:
                size = min(size, self._tuning.first_fetch)
            while some and fetches.num_left > 0:
                job, begun = fetches.begin(some[:size])
                if not begun:
                    is_whole = False
                    break
                jobs[job] = tier
                num += len(begun)
                some, size = some[len(begun) :], fetches.job_size(tier)
            if not is_whole or some:
                break
        if not is_whole or fetches.num_left > 0:
            for block in blocks[num:]:
                del wait.found[block.key]
        return jobs

    def _awaits_jobs(self, wait: _Wait) -> bool:
        """Whether a request goes on waiting: not for a tier that breaks the rule, and
        no longer than the one timeout."""
        num_ended = self._num_ended(wait)
        tiers = {
            tier for job, tier in wait.jobs.items() if self._jobs.is_under_way(job)
        }
        if not tiers:
            wait.jobs = {}
        if num_ended >= wait.look_at:
            return False
        if self._costs.clock() < wait.since + self._timeout_s and any(
            not tier.reads.is_avoided(False) for tier in tiers
        ):
            return True
        for tier in tiers:
            tier.reads.record_late(wait.since)
        # Blocks that arrived are in slots now. The rest is computed.
        wait.end()
        return False

    def _num_ended(self, wait: _Wait) -> int:
        return sum(not self._jobs.is_under_way(job) for job in wait.jobs)
