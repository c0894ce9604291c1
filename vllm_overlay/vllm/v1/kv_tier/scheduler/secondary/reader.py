# SPDX-License-Identifier: Apache-2.0
"""Asks secondary tiers for what requests lack, and fetches it.

A request that can compute meanwhile meets it (see `Meetings`). Another one waits in the
queue while slots are filled, from the beginning of its prefix on.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from weakref import WeakKeyDictionary

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.kv_tier.scheduler.secondary.fetches import Fetch, Fetches, SecondaryBlock
from vllm.v1.kv_tier.scheduler.secondary.jobs import SecondaryJobs, object_keys
from vllm.v1.kv_tier.scheduler.secondary.lookup import LoadFilter, PromptLookup
from vllm.v1.kv_tier.scheduler.secondary.meeting import Meetings
from vllm.v1.kv_tier.scheduler.secondary.tier import PoolView, Tier, Wanted
from vllm.v1.kv_tier.scheduler.slots import HostSlot
from vllm.v1.request import Request


class Inquiry:
    """What a tier is asked for a request. Steps take in the answer in parts."""

    def __init__(self, tier: Tier, wanted: Sequence[Wanted]) -> None:
        self.tier = tier
        self._wanted = wanted
        self._answer = tier.settings.lookup.ask(object_keys([key for key, _ in wanted]))
        self.left: deque[tuple[Wanted, bool]] | None = None
        """What was not taken in of the answer; None without an answer."""

    def take(self, most: int | None, until: float) -> list[tuple[Wanted, bool]]:
        """Take in the answer for up to `most` more blocks, None for all, if it is there
        by `until`, in seconds of `time.monotonic`."""
        if self.left is None:
            if (answer := self._answer(until)) is None:
                return []
            # A question may be answered in part, or not at all.
            self.left = deque(zip(self._wanted, answer))
        num = len(self.left) if most is None else min(most, len(self.left))
        return [self.left.popleft() for _ in range(num)]


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
    inquiries: list[Inquiry] = field(default_factory=list)
    """Those that are not answered, or whose answer is not taken in."""
    found: dict[BlockHashWithGroupId, SecondaryBlock] = field(default_factory=dict)
    """What its prefix lookup finds in secondary tiers."""
    fetches: list[Fetch] = field(default_factory=list)
    """What it waits for."""
    look_at: int = 0
    """Number of these that must end before its prefix is looked up again."""
    has_looked: bool = False
    """Whether its prefix was looked up with some of it on its way."""

    @property
    def num_ended(self) -> int:
        return sum(fetch.is_over for fetch in self.fetches)

    def end(self) -> None:
        """Let the request compute what it lacks."""
        self.is_asked = True
        self.wanted, self.inquiries, self.found, self.fetches = [], [], {}, []


class SecondaryReader:
    """Asks secondary tiers, in order, for blocks that requests lack, and fetches
    them."""

    def __init__(
        self,
        pool: PoolView,
        tiers: Sequence[Tier],
        jobs: SecondaryJobs,
        fetches: Fetches,
    ) -> None:
        self._tiers = tiers
        self._table = pool.table
        self._jobs = jobs
        self._costs = pool.costs
        self._tuning = tuning = pool.tuning
        self._fetches = fetches
        self._lookup = PromptLookup(
            pool.layout.block_sizes,
            pool.hash_size,
            pool.table,
            pool.is_cached,
            pool.reachable,
        )
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
        self.meetings = Meetings(pool, fetches)

    def skip(self, is_elsewhere: Callable[[BlockHashWithGroupId], object]) -> None:
        """Ask for no block that `is_elsewhere` finds."""
        self._lookup.skip(is_elsewhere)

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
        self._fetches.end_step()
        self.meetings.end_step()

    @property
    def num_awaited(self) -> int:
        """How many jobs must end before any waiting request can go on; 0 if none."""
        num_left = (
            max(1, wait.look_at - wait.num_ended)
            for wait in self._waits.values()
            if wait.fetches
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
            is_read = any(not tier.is_avoided(meets) for tier in self._tiers)
            if not is_read or not self._lookup.has_blocks(request):
                return False
            wait = self._waits[request] = _Wait(meets)
        if not wait.is_asked:
            # Otherwise its turn comes in a later step, since thousands may wait.
            if self._num_left > 0:
                self._look_up_more(request, wait, loadable)
            if not wait.is_asked:
                return True
        if is_idle and not self._until:
            # Only after it has asked, since looking up a long prompt takes a while.
            self._until = time.monotonic() + self._tuning.answer_wait_s
        if wait.inquiries and self._awaits_answers(request, wait):
            patience_s = self._tuning.answer_patience_s
            if not wait.meets or self._costs.clock() < wait.since + patience_s:
                return True
            self._unanswered[request] = wait
        if wait.meets:
            return False
        self._current = wait
        return bool(wait.fetches) and self._awaits_fetches(wait)

    def _look_up_more(
        self, request: Request, wait: _Wait, loadable: LoadFilter | None
    ) -> None:
        """Look up as many more blocks of `request` as the step may, and ask for all
        that are missing after the last."""
        wait.num_tokens, num, missing = self._lookup.find_missing(
            request, wait.num_tokens, self._num_left, loadable
        )
        self._num_left -= num
        wait.wanted += missing
        if wait.num_tokens < self._lookup.num_tokens(request):
            return
        wait.is_asked, wait.since = True, self._costs.clock()
        num = len(wait.wanted)
        if num:
            wait.inquiries = [
                Inquiry(tier, wait.wanted)
                for tier in self._tiers
                if tier.begin_ask(num, wait.meets)
            ]
        if wait.inquiries:
            self.num_asked += 1
            self._num_left -= num + self._tuning.looks_per_ask
        else:
            wait.end()

    def _awaits_answers(self, request: Request, wait: _Wait) -> bool:
        """Take in answers. Returns whether there are more to wait for."""
        for inquiry in wait.inquiries:
            # Upstream describes a prefix as a whole, which each part would repeat.
            most = None if self.on_found else max(0, (self._num_left + 1) // 2)
            answer = inquiry.take(most, self._until)
            self._num_left -= 2 * len(answer)
            self._take_answer(request, wait, inquiry.tier, answer)
        wait.inquiries = [
            each for each in wait.inquiries if each.left is None or each.left
        ]
        if wait.inquiries and len(wait.found) < len(wait.wanted):
            silent = [each.tier for each in wait.inquiries if each.left is None]
            # The other half of the time is for fetching.
            is_late = self._costs.clock() >= wait.since + self._timeout_s / 2
            if len(silent) < len(wait.inquiries) or not is_late:
                return True
            for tier in silent:
                tier.record_late(wait.since)
        if wait.meets:
            self.meetings.begin(request, wait.wanted, wait.found)
            wait.end()
        wait.wanted, wait.inquiries = [], []
        return False

    def _take_answer(
        self,
        request: Request,
        wait: _Wait,
        tier: Tier,
        answer: Sequence[tuple[Wanted, bool]],
    ) -> None:
        """`tier` answers whether it has these blocks of a request."""
        known, there = tier.presence, []
        for (key, num_tokens), is_there in answer:
            # A hot path: each new block of each prompt.
            if is_there:
                there.append(key)
                block = wait.found.get(key)
                if block is None or tier.index < block.tier.index:
                    wait.found[key] = SecondaryBlock(key, num_tokens, tier)
            elif key in known.keys:
                # A restarted server has lost everything.
                known.mark_absent(key)
        if there and self.on_found is not None:
            self.on_found(request, there, wait.found[there[-1]].num_tokens)
        for key in there:
            known.mark_present(key)

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
        wait, by_key = self._current, self._fetches.by_key
        blocks = [b for group in groups for b in group if type(b) is SecondaryBlock]
        if wait is None or not wait.found:
            return True
        # The beginning of a prefix is useful without its end.
        blocks.sort(key=lambda block: block.num_tokens)
        fetches = {by_key[b.key]: None for b in blocks if b.key in by_key}
        new = [b for b in blocks if b.key not in by_key and b.key in wait.found]
        if new and self._fetches.num_left > 0:
            # The host part of the hit must not be evicted for the rest.
            self._table.pin([b for g in groups for b in g if type(b) is HostSlot])
            fetches |= dict.fromkeys(self._begin(wait, new))
        if fetches.keys() == set(wait.fetches):
            # The scheduler has asked before in this step.
            return True
        wait.fetches, wait.look_at = list(fetches), len(fetches)
        if fetches and not wait.has_looked:
            wait.has_looked = True
            # It may have asked long before its turn, so half of the time is left.
            half_s = self._timeout_s / 2
            wait.since = max(wait.since, self._costs.clock() - half_s)
            if len(blocks) >= 2 * self._tuning.min_prefetch:
                # Half of a long prefix is loaded while the rest is read, which is
                # loaded layer by layer in the request's own step. Checking more often
                # takes the GIL from the reading threads.
                wait.look_at -= len(fetches) // 2
        return True

    def _begin(self, wait: _Wait, blocks: Sequence[SecondaryBlock]) -> list[Fetch]:
        """Begin to fetch the first of `blocks`, as far as it is worth it. What a step
        may not begin any more follows when these have come."""
        begun: list[Fetch] = []
        fetches, is_whole = self._fetches, True
        for tier, run in groupby(blocks, key=lambda block: block.tier):
            some = list(run)
            most = max(0, tier.most_to_wait_for(len(some)))
            is_whole, some = most >= len(some), some[:most]
            size = tier.job_size
            if tier.is_unknown:
                size = min(size, self._tuning.first_fetch)
            while some and fetches.num_left > 0:
                if (fetch := fetches.begin(some[:size])) is None:
                    is_whole = False
                    break
                begun.append(fetch)
                some, size = some[len(fetch.blocks) :], tier.job_size
            if not is_whole or some:
                break
        if not is_whole or fetches.num_left > 0:
            for block in blocks[sum(len(fetch.blocks) for fetch in begun) :]:
                del wait.found[block.key]
        return begun

    def _awaits_fetches(self, wait: _Wait) -> bool:
        """Whether a request goes on waiting: not for a tier that breaks the rule, and
        no longer than the one timeout."""
        tiers = {fetch.tier for fetch in wait.fetches if not fetch.is_over}
        num_ended = wait.num_ended
        if not tiers:
            wait.fetches = []
        if num_ended >= wait.look_at:
            return False
        if self._costs.clock() < wait.since + self._timeout_s and any(
            not tier.is_avoided(False) for tier in tiers
        ):
            return True
        for tier in tiers:
            tier.record_late(wait.since)
        # Blocks that arrived are in slots now. The rest is computed.
        wait.end()
        return False
