# SPDX-License-Identifier: Apache-2.0
"""Fetches the end of a prompt while its request computes the beginning.

Pieces are fetched from the end of what is available towards the beginning. The front of
the request is what the planned steps will have computed. It jumps over what has arrived
(see `Jumps`); here is decided what to fetch, and where a step ends.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.kv_tier.scheduler.costs import Costs
from vllm.v1.kv_tier.scheduler.secondary.fetches import Fetches, SecondaryBlock
from vllm.v1.kv_tier.scheduler.secondary.jobs import SecondaryJobs
from vllm.v1.kv_tier.scheduler.secondary.tier import Tier, Wanted
from vllm.v1.kv_tier.tuning import SchedulingTuning
from vllm.v1.request import Request


@dataclass
class _Piece:
    """Consecutive blocks that one job fetches."""

    job: int
    tier: Tier
    begin: int
    """Prefix tokens before the first block."""
    end: int
    due: float
    """When it should have arrived."""
    num_steps: int = 0
    """Steps that have computed a part of it, since it was late."""


@dataclass
class _Meeting:
    """A request that computes towards what is being fetched for it."""

    todo: list[SecondaryBlock]
    """Blocks that are not begun, in the order of the prompt."""
    begin: int
    """Prefix tokens before the first of them."""
    end: int
    """Prefix tokens up to the last of them."""
    pieces: list[_Piece] = field(default_factory=list)
    """In flight, from the end of the prompt on."""
    waits: bool = False
    """Whether the step that is planned leaves it out."""
    has_met: bool = False
    """Whether it has jumped."""


class Meetings:
    """Requests whose front computes towards a back that is being fetched.

    Args:
        block_size: Tokens of a block.
        jobs: Knows which pieces have ended.
        costs: Costs of compute, and the clock.
        is_there: Whether the device or the host has a block.
        fetches: Begins to fetch blocks.
        tuning: Limits.

    """

    def __init__(
        self,
        block_size: int,
        jobs: SecondaryJobs,
        costs: Costs,
        is_there: Callable[[BlockHashWithGroupId | None], object],
        fetches: Fetches,
        tuning: SchedulingTuning,
    ) -> None:
        self._size = block_size
        self._jobs = jobs
        self._costs = costs
        self.is_there = is_there
        """Whether the device or the host has a block."""
        self._fetches = fetches
        self._tuning = tuning
        # Weak, since the tier is not notified of aborted requests.
        self._meetings: WeakKeyDictionary[Request, _Meeting] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._meetings)

    def forget(self) -> None:
        """Nothing more is fetched."""
        self._meetings.clear()

    def begin(
        self,
        request: Request,
        wanted: Sequence[Wanted],
        found: Mapping[BlockHashWithGroupId, SecondaryBlock],
    ) -> None:
        """Fetch the end of what was found, up to the first block that is nowhere.

        Args:
            request: The request.
            wanted: Blocks that it lacked, in its order.
            found: Those of them that a tier has.

        """
        blocks = []
        for key, num_tokens in wanted:
            # At least one token is left to compute.
            if num_tokens >= request.num_tokens:
                break
            if key in found:
                blocks.append(found[key])
            elif not self.is_there(key):
                break
        if blocks:
            begin, end = blocks[0].num_tokens - self._size, blocks[-1].num_tokens
            meeting = self._meetings[request] = _Meeting(blocks, begin, end)
            self._extend(meeting, begin)

    def end_step(self) -> None:
        """Requests that were left out may be in the next step."""
        for meeting in self._meetings.values():
            meeting.waits = False

    # ---------------------------------------------------------------- the back

    def go_on(self) -> None:
        """Begin to fetch what would arrive before its request computes it."""
        for request, meeting in list(self._meetings.items()):
            # It may be in the queue, and have found what is before the first block.
            front = max(request.num_computed_tokens, meeting.begin)
            if request.is_finished() or front >= meeting.end:
                del self._meetings[request]
            else:
                self._extend(meeting, front)

    def _extend(self, meeting: _Meeting, front: int) -> None:
        """Begin more pieces in front of those that were begun."""
        todo = meeting.todo
        while todo and todo[-1].num_tokens > front:
            block = todo[-1]
            if self.is_there(block.key):
                todo.pop()
            elif (job := self._fetches.fetched_by.get(block.key)) is not None:
                # Another request fetches it, or this one before it was preempted.
                todo.pop()
                self._add(meeting, job, [block])
            elif not self._begin_piece(meeting, front):
                return
        todo.clear()

    def _begin_piece(self, meeting: _Meeting, front: int) -> bool:
        """Begin the last piece of what is not begun, unless it would be late."""
        todo = meeting.todo
        tier = todo[-1].tier
        first = len(todo)
        most = tier.reads.most_to_meet(
            (todo[-1].num_tokens - front) / self._size, tier.num_filling
        )
        most = min(most, self._fetches.job_size(tier))
        while first and len(todo) - first < most:
            block, end = todo[first - 1], todo[first:]
            if block.tier is not tier or block.num_tokens <= front:
                break
            if end and block.num_tokens + self._size != end[0].num_tokens:
                break
            if end and self._needs_no_job(block):
                break
            first -= 1
        if first == len(todo):
            return False
        job, begun = self._fetches.begin(todo[first:], from_end=True)
        if not begun:
            return False
        del todo[len(todo) - len(begun) :]
        self._add(meeting, job, begun)
        return True

    def _needs_no_job(self, block: SecondaryBlock) -> bool:
        return bool(self.is_there(block.key) or block.key in self._fetches.fetched_by)

    def _add(
        self, meeting: _Meeting, job: int, blocks: Sequence[SecondaryBlock]
    ) -> None:
        """Record that `job` fetches `blocks`, which precede all others of it."""
        tier = blocks[0].tier
        begin = blocks[0].num_tokens - self._size
        last = meeting.pieces[-1] if meeting.pieces else None
        if last is not None and last.job == job and last.begin == blocks[-1].num_tokens:
            last.begin = begin
            return
        fetch_s = tier.reads.fetch_s or self._costs.compute_s
        due = self._costs.clock() + tier.num_filling * fetch_s
        meeting.pieces.append(_Piece(job, tier, begin, blocks[-1].num_tokens, due))

    # --------------------------------------------------------------- the front

    def cut(
        self,
        request: Request,
        keys: Callable[[int], BlockHashWithGroupId | None],
        start: int,
        num_new_tokens: int,
        may_wait: bool,
    ) -> int:
        """How many of `num_new_tokens` the step should compute from `start` on.

        It ends where the front can jump, then or soon.

        Args:
            request: The request.
            keys: Key of its block of an index.
            start: Its planned front.
            num_new_tokens: Tokens that the step could compute; at least one.
            may_wait: Whether it may be left out of the step.

        Returns:
            0 to leave it out; else at least one.

        """
        meeting = self._meetings.get(request)
        if meeting is None or start >= meeting.end:
            return num_new_tokens
        size, end = self._size, min(start + num_new_tokens, meeting.end)
        self._drop_overtaken(meeting, start)
        for piece in reversed(meeting.pieces):
            if piece.begin > start:
                end = min(end, piece.begin)
                break
            if may_wait and self._arrives_soon(piece):
                meeting.waits = True
                return 0
            # It may never come, so each step computes twice as much as the last.
            few = self._few_tokens << min(piece.num_steps, 16)
            end = min(end, piece.end, start - start % size + few)
            piece.num_steps += 1
        for index in range(start // size + 1, -(-end // size)):
            if self.is_there(keys(index)):
                end = index * size
                break
        if end == meeting.end:
            return num_new_tokens
        return end - start

    def is_first_jump(self, request: Request) -> bool:
        """Whether `request`, which jumps, has met its back now."""
        meeting = self._meetings.get(request)
        if meeting is None or meeting.has_met:
            return False
        meeting.has_met = meeting.begin <= request.num_computed_tokens < meeting.end
        return meeting.has_met

    def _drop_overtaken(self, meeting: _Meeting, start: int) -> None:
        """Drop pieces that have arrived, and those that the front has passed."""
        pieces = [p for p in meeting.pieces if self._jobs.is_under_way(p.job)]
        meeting.pieces = [piece for piece in pieces if piece.end > start]
        for piece in pieces:
            if piece.end <= start:
                num_blocks = (piece.end - piece.begin) // self._size
                piece.tier.stats.overtaken_blocks += num_blocks

    @property
    def _few_tokens(self) -> int:
        """Tokens of a step that computes what is late: whole blocks."""
        return -(-self._tuning.meet_tokens // self._size) * self._size

    def _arrives_soon(self, piece: _Piece) -> bool:
        """Whether waiting for a piece costs less than computing a part of it."""
        left_s = piece.due - self._costs.clock()
        num_blocks = min(self._few_tokens, piece.end - piece.begin) / self._size
        return 0 < left_s < num_blocks * self._costs.compute_s

    @property
    def is_waiting(self) -> bool:
        """Whether the step leaves out a request that waits for a piece."""
        return any(meeting.waits for meeting in self._meetings.values())
