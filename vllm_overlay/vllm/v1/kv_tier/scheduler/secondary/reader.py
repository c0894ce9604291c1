# SPDX-License-Identifier: Apache-2.0
"""Fills slots from the secondary tiers, for requests that wait in the queue."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from weakref import WeakKeyDictionary, ref

from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    KVCacheBlock,
)
from vllm.v1.kv_tier.layout import SecondaryLayout
from vllm.v1.kv_tier.scheduler.costs import Costs
from vllm.v1.kv_tier.scheduler.secondary.fetches import Fetches
from vllm.v1.kv_tier.scheduler.secondary.found import FoundBlocks, SecondaryBlock
from vllm.v1.kv_tier.scheduler.secondary.jobs import SecondaryJobs
from vllm.v1.kv_tier.scheduler.secondary.lookup import LoadFilter, PromptLookup
from vllm.v1.kv_tier.scheduler.secondary.meeting import Meetings
from vllm.v1.kv_tier.scheduler.secondary.tier import Answer, Arrivals, Tier, Wanted
from vllm.v1.kv_tier.scheduler.slots import HostSlot, SlotTable
from vllm.v1.kv_tier.tuning import SchedulingTuning
from vllm.v1.request import Request


class _State(Enum):
    """How far a request has come that secondary tiers may have blocks for."""

    TO_LOOK_UP = auto()
    """Steps look up which of its blocks are missing, each a part of a long prompt."""
    TO_ASK = auto()
    """Its blocks are not asked for yet: its turn comes in a later step."""
    ASKED = auto()
    """It waits for answers."""
    ANSWERED = auto()
    """What was found is in `found`. The lookup of its prefix finds it there."""
    FETCHING = auto()
    """It waits for jobs, or for those that later steps begin."""
    OVER = auto()
    """It computes what it lacks."""


@dataclass
class _Wait:
    """A request that secondary tiers may have blocks for."""

    blocks: FoundBlocks
    """Lets go of what was found."""
    since: float
    state: _State
    num_tokens: int = 0
    """Tokens of its prompt whose blocks were looked up."""
    wanted: list[Wanted] = field(default_factory=list)
    """Blocks that it lacks, until there is an answer."""
    questions: dict[Tier, int] = field(default_factory=dict)
    """Open questions by tier."""
    answers: dict[Tier, Answer] = field(default_factory=dict)
    """Answers of which the next steps take in the rest."""
    found: list[SecondaryBlock] = field(default_factory=list)
    """Blocks that were found. This and jobs that fetch them keep them alive, and then
    `blocks` for some steps."""
    jobs: dict[int, Tier] = field(default_factory=dict)
    """Jobs that it waits for."""
    rest: list[SecondaryBlock] = field(default_factory=list)
    """What the next steps begin to fetch for it, in the order of the prefix."""
    by_half: bool = False
    """Whether its prefix is looked at when half of the jobs have ended."""
    alone: tuple[Tier, int] | None = None
    """Tier and number of its blocks, if nothing else is being fetched."""
    look_at: int = 0
    """Number of ended jobs at which its prefix is looked up again."""
    was_idle: bool = True
    """Whether the engine has run nothing else since."""
    meets: bool = False
    """Whether its request computes what has not arrived."""

    def end(self) -> None:
        """Let the request compute what it lacks."""
        self.state = _State.OVER
        self.blocks.release(self.found)
        self.wanted, self.found, self.rest = [], [], []
        self.questions, self.answers, self.jobs = {}, {}, {}

    def __del__(self) -> None:
        # Its request was aborted.
        self.blocks.release(self.found)


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
        self._lookup = PromptLookup(sizes, hash_size, table, is_cached, tuning)
        self.found = FoundBlocks(tuning.max_looks)
        """Stored blocks in prompts of waiting requests, for as long as these wait."""
        # Weak, since the tier is not notified of aborted requests.
        self._waits: WeakKeyDictionary[Request, _Wait] = WeakKeyDictionary()
        self.num_asked = 0
        """Requests for which this step has asked."""
        # Blocks for which this step has asked, and whose answers it has taken in.
        self._num_wanted = self._num_heard = 0
        # Until when this step waits for answers.
        self._until = 0.0
        self.on_found: (
            Callable[[Request, Sequence[BlockHashWithGroupId], int], None] | None
        ) = None
        """Called before keys of a request count as found: with the request, the keys,
        and the tokens up to the end of the last of them."""
        # Requests for which there is more to fetch than a step may begin, in order.
        self._unbegun: deque[ref[_Wait]] = deque()
        self.fetches = Fetches(layout, tiers, table, jobs, self.found, arrivals, tuning)
        self.can_meet = not any(tier.settings.fetches_always for tier in tiers)
        """Whether requests need not wait for all that is fetched for them."""
        self.meetings = Meetings(
            sizes[0],
            jobs,
            costs,
            lambda key: key and (table.get(key) or is_cached(key)),
            self.fetches,
            min(layout.max_job, tuning.max_ended),
            tuning,
        )
        # Requests that compute while their answers are awaited.
        self._unanswered: WeakKeyDictionary[Request, _Wait] = WeakKeyDictionary()

    def forget(self) -> None:
        """Nothing that was found is there any more, and nothing else is fetched."""
        self.found.clear()
        for reference in self._unbegun:
            if (wait := reference()) is not None:
                wait.rest = []
        self._unbegun.clear()
        self.meetings.forget()
        self._unanswered.clear()

    def end_step(self) -> None:
        """Reset the limits of the step."""
        self.fetches.end_step()
        self.num_asked, self._until = 0, 0.0
        self._num_wanted = self._num_heard = 0
        self._lookup.end_step()
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
        wait = self._waits.get(request)
        if not request.block_hashes:
            return False
        if self._must_queue(wait):
            # Its turn comes in a later step, since thousands may wait.
            return True
        now = self._costs.clock()
        if wait is None:
            if not self._lookup.has_blocks(request) or not self._tiers_for(now, meets):
                return False
            wait = self._waits[request] = _Wait(
                self.found, now, _State.TO_LOOK_UP, meets=meets
            )
        if not self._jobs.is_detached:
            if wait.state is _State.TO_LOOK_UP:
                self._look_up_more(request, wait, loadable)
            if wait.state is _State.TO_LOOK_UP or self._must_queue(wait):
                return True
            if wait.state is _State.TO_ASK:
                self._ask(wait, now, is_idle)
        if is_idle and not self._until:
            # Only after it has asked, since looking up a long prompt takes a while.
            self._until = time.monotonic() + self._tuning.answer_wait_s
        wait.was_idle &= is_idle
        if wait.state is _State.OVER:
            return False
        if self._jobs.is_detached:
            self._give_up(wait)
            return False
        if wait.state is _State.ASKED and self._awaits_answers(request, wait, now):
            if not wait.meets or now < wait.since + self._tuning.answer_patience_s:
                return True
            self._unanswered[request] = wait
        if wait.meets:
            return False
        return self._awaits_jobs(wait, now)

    def _must_queue(self, wait: _Wait | None) -> bool:
        """Whether the step looks up or asks for no more blocks, as this one needs."""
        if self._jobs.is_detached:
            return False
        if wait is None or wait.state is _State.TO_LOOK_UP:
            return self._lookup.is_over
        return wait.state is _State.TO_ASK and (
            self.num_asked >= self._tuning.max_asks
            or self._num_wanted >= self._tuning.max_looks
        )

    def _awaits_jobs(self, wait: _Wait, now: float) -> bool:
        # Tiers that turn out slower than computing are not waited for.
        is_patient = now < wait.since + self._tuning.patience_s
        awaited = {
            tier
            for job, tier in wait.jobs.items()
            if (is_patient or tier.reads.is_worth_it) and self._jobs.is_under_way(job)
        }
        if wait.rest and (is_patient or wait.rest[0].tier.reads.is_worth_it):
            awaited.add(wait.rest[0].tier)
        late = [
            tier
            for tier in awaited
            if now >= wait.since + tier.settings.deadline_s
            or (tier.reads.is_overdue and not is_patient)
        ]
        if len(late) < len(awaited):
            return bool(wait.rest) or self._num_ended(wait) < wait.look_at
        for tier in late:
            tier.reads.record_late(wait.since, now)
        is_measured = wait.was_idle and self._num_ended(wait) == len(wait.jobs)
        if wait.alone is not None and is_measured:
            tier, num_blocks = wait.alone
            tier.reads.record_wait(now - wait.since, num_blocks)
        if wait.jobs or not wait.found:
            # Blocks that arrived are in slots now. The rest is computed.
            self._give_up(wait)
        return False

    def _awaits_answers(self, request: Request, wait: _Wait, now: float) -> bool:
        self._take_answers(request, wait)
        wanted = wait.wanted
        # Mostly others begin alike, and the last block tells. A prompt with too many
        # blocks for this step waits for its own answer.
        if (
            wait.questions
            and self._num_heard + len(wanted) <= self._tuning.max_heard
            and self.found.get(wanted[-1][0]) is not None
        ):
            self._num_heard += len(wanted)
            if None not in (blocks := [self.found.get(key) for key, _ in wanted]):
                wait.questions, wait.answers = {}, {}
                # Other requests have asked for them, and may be aborted.
                wait.found = blocks  # type: ignore[assignment]
        for tier in [each for each in wait.questions if each not in wait.answers]:
            # The other half of the time is for fetching what other tiers have.
            if now >= wait.since + tier.settings.deadline_s / 2:
                del wait.questions[tier]
                tier.reads.record_late(wait.since, now)
        if wait.questions:
            return True
        wait.state = _State.ANSWERED
        if wait.meets:
            self._meet(request, wait)
        wait.wanted = []
        return False

    def _meet(self, request: Request, wait: _Wait) -> None:
        """Begin to fetch the end of what was found, up to the first block that is
        nowhere."""
        blocks = []
        for key, num_tokens in wait.wanted:
            block = self.found.get(key)
            if num_tokens >= request.num_tokens:
                break
            if block is not None:
                blocks.append(block)
            elif not self.meetings.is_there(key):
                break
        self.meetings.begin(request, blocks)
        wait.end()

    def _tiers_for(self, now: float, meets: bool) -> list[Tier]:
        """Tiers that are asked for a request."""
        if self._jobs.is_detached:
            return []
        if meets:
            return [each for each in self._tiers if each.reads.is_open(now)]
        return [each for each in self._tiers if each.reads.is_used(now)]

    def _look_up_more(
        self, request: Request, wait: _Wait, loadable: LoadFilter | None
    ) -> None:
        """Look up as many more blocks of `request` as the step may."""
        begin = wait.num_tokens
        wait.num_tokens, missing = self._lookup.find_missing(request, begin, loadable)
        wait.wanted += missing
        if wait.num_tokens == self._lookup.num_tokens(request):
            wait.state = _State.TO_ASK if wait.wanted else _State.OVER

    def _ask(self, wait: _Wait, now: float, is_idle: bool) -> None:
        wait.since = now
        num = len(wait.wanted)
        wait.questions = {
            tier: tier.ask(wait.wanted)
            for tier in self._tiers_for(now, wait.meets)
            if (
                tier.reads.is_worth_meeting(num)
                if wait.meets
                else tier.reads.is_worth_asking(num, is_idle)
            )
        }
        if wait.questions:
            wait.state = _State.ASKED
            self.num_asked += 1
            self._num_wanted += len(wait.wanted)
        else:
            self._give_up(wait)

    def _take_answers(self, request: Request, wait: _Wait) -> None:
        for tier, question in list(wait.questions.items()):
            answer = wait.answers.get(tier)
            if answer is None:
                answer = tier.take_answer(question, wait.wanted, self._until)
                if answer is None:
                    continue
                wait.answers[tier] = answer
            num = max(0, self._tuning.max_heard - self._num_heard)
            if self.on_found is not None:
                # Upstream describes a prefix as a whole, which each part would repeat.
                num = answer.num_left
            num_heard, there = answer.take(num)
            self._num_heard += num_heard
            self._add_found(request, wait, tier, there)
            if not answer.num_left:
                del wait.questions[tier], wait.answers[tier]

    def _add_found(
        self, request: Request, wait: _Wait, tier: Tier, there: Sequence[Wanted]
    ) -> None:
        """`tier` answers that it has these blocks of a request."""
        for key, num_tokens in there:
            block = self.found.get(key)
            if block is None or tier.index < block.tier.index:
                block = self.found.add(SecondaryBlock(key, num_tokens, tier))
            wait.found.append(block)
        if there and self.on_found is not None:
            _, num_tokens = there[-1]
            self.on_found(request, [key for key, _ in there], num_tokens)
        for key, _ in there:
            tier.presence.mark_present(key)

    def _give_up(self, wait: _Wait) -> None:
        # Including blocks that other requests found: a job that never ends must not
        # make a request wait twice.
        late = [
            block for job in wait.jobs for block in self.fetches.blocks_of.get(job, ())
        ]
        self.found.forget(wait.found)
        self.found.forget(late)
        wait.found = []
        wait.end()

    def end_wait(self, request: Request) -> None:
        """Stop waiting for `request`, which computes what it lacks."""
        if (wait := self._waits.get(request)) is not None:
            wait.end()

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
        fetched_by = self.fetches.fetched_by
        new = [b for b in blocks if b.key not in fetched_by]
        wait = None if request is None else self._waits.get(request)
        is_idle = wait is not None and wait.was_idle
        num_begun = num_wanted = 0
        if worth := self._worth_it(new, is_idle):
            # The host part of the hit must not be evicted for the rest.
            self._table.pin(b for g in groups for b in g if type(b) is HostSlot)
            num_wanted = min(len(worth), self.fetches.room)
            num_begun, is_all = self.fetches.begin_first(worth[:num_wanted])
            if not is_all:
                num_wanted = num_begun
        self.found.forget(new[num_wanted:])
        if request is not None:
            jobs = {
                job: block.tier
                for block in blocks
                if (job := fetched_by.get(block.key)) is not None
            }
            num_fetched = len(blocks) - len(new) + num_begun
            self._wait_for(request, jobs, num_fetched, new[num_begun:num_wanted])
        return True

    # ----------------------------------------------------- more than a step begins

    @property
    def has_more(self) -> bool:
        """Whether the next step begins to fetch more."""
        return bool(self._unbegun)

    def go_on(self) -> None:
        """Begin to fetch more for requests that wait, as much as a step may."""
        self.found.begin_step()
        now = self._costs.clock()
        for request, wait in list(self._unanswered.items()):
            is_over = wait.state is not _State.ASKED or request.is_finished()
            if is_over or not self._awaits_answers(request, wait, now):
                del self._unanswered[request]
        self.meetings.go_on()
        self._go_on_waiting()

    def _go_on_waiting(self) -> None:
        """Begin to fetch more for requests that wait for all of it."""
        while self._unbegun and self.fetches.num_left > 0:
            wait = self._unbegun[0]()
            # The request may have been aborted, or have waited for long enough.
            if wait is not None and wait.rest:
                self._go_on(wait)
            if wait is None or not wait.rest:
                self._unbegun.popleft()

    def _go_on(self, wait: _Wait) -> None:
        """Begin to fetch the first of the rest that `wait` waits for."""
        some, wait.rest = (
            wait.rest[: self.fetches.num_left],
            wait.rest[self.fetches.num_left :],
        )
        new: list[SecondaryBlock] = []
        for block in some:
            if (job := self.fetches.fetched_by.get(block.key)) is not None:
                # Others have begun to fetch it meanwhile.
                wait.jobs[job] = block.tier
            elif block.is_found:
                new.append(block)
            elif self._table.get(block.key) is None:
                # It was lost, so the rest of the prefix cannot be used.
                self.found.forget(wait.rest)
                wait.rest = []
                break
        worth = self._in_time(new)[: self.fetches.room]
        num_begun, _ = self.fetches.begin_first(worth)
        for block in worth[:num_begun]:
            wait.jobs[self.fetches.fetched_by[block.key]] = block.tier
        self.fetches.num_left -= len(some) - num_begun
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
        is_gain = worth and worth[0].tier.reads.gain_s(len(worth), is_idle) > 0
        return worth if is_gain else []

    def _in_time(self, blocks: Sequence[SecondaryBlock]) -> Sequence[SecondaryBlock]:
        """The first of `blocks` that come in time, behind what is on its way."""
        left = {tier: tier.reads.num_in_time(tier.num_filling) for tier in self._tiers}
        if len(left) == 1:
            return blocks[: left.popitem()[1]]
        worth = []
        for block in blocks:
            if not left[block.tier]:
                break
            left[block.tier] -= 1
            worth.append(block)
        return worth

    def _wait_for(
        self,
        request: Request,
        jobs: dict[int, Tier],
        num_fetched: int,
        rest: list[SecondaryBlock],
    ) -> None:
        """`request` waits for `jobs`, which fetch so many blocks of its prefix, and
        maybe others; the next steps begin to fetch `rest`."""
        wait = self._waits.get(request)
        if wait is None or wait.state is _State.OVER:
            # Found by another request, after this one had asked.
            wait = _Wait(self.found, self._costs.clock(), _State.FETCHING)
            self._waits[request] = wait
        wait.state = _State.FETCHING
        tiers = {*jobs.values(), *(block.tier for block in rest)}
        is_first = not wait.jobs
        if tiers and is_first:
            # It may have asked long before its turn, so half of the time is left to
            # fetch.
            half_s = max(tier.settings.deadline_s for tier in tiers) / 2
            wait.since = max(wait.since, self._costs.clock() - half_s)
        is_alone = num_fetched == sum(tier.num_filling for tier in self._tiers)
        num_blocks = num_fetched + len(rest)
        if is_first and len(tiers) == 1 and is_alone and not rest:
            wait.alone = tiers.pop(), num_blocks
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
