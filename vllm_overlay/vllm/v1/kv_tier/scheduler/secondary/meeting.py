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
from vllm.v1.kv_tier.scheduler.secondary.fetches import Fetch, Fetches, SecondaryBlock
from vllm.v1.kv_tier.scheduler.secondary.tier import PoolView, Wanted
from vllm.v1.request import Request


@dataclass
class _Piece:
    """Consecutive blocks of one fetch."""

    fetch: Fetch
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
    has_met: bool = False
    """Whether it has jumped."""


class Meetings:
    """Requests whose front computes towards a back that is being fetched."""

    def __init__(self, pool: PoolView, fetches: Fetches) -> None:
        self._pool = pool
        self._size = pool.layout.block_sizes[0]
        self._costs = pool.costs
        self._tuning = pool.tuning
        self._fetches = fetches
        # Weak, since the tier is not notified of aborted requests.
        self._meetings: WeakKeyDictionary[Request, _Meeting] = WeakKeyDictionary()
        self.is_waiting = False
        """Whether the step leaves out a request that waits for a piece."""

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
            elif not self._pool.is_there(key):
                break
        if blocks:
            begin, end = blocks[0].num_tokens - self._size, blocks[-1].num_tokens
            meeting = self._meetings[request] = _Meeting(blocks, begin, end)
            self._extend(meeting, begin)

    def end_step(self) -> None:
        """Requests that were left out may be in the next step."""
        self.is_waiting = False

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
        todo, by_key = meeting.todo, self._fetches.by_key
        while todo and todo[-1].num_tokens > front:
            block = todo[-1]
            if self._pool.is_there(block.key):
                todo.pop()
            elif (fetch := by_key.get(block.key)) is not None:
                # Another request fetches it, or this one before it was preempted.
                todo.pop()
                self._add(meeting, fetch, [block])
            elif (fetch := self._begin_piece(meeting, front)) is not None:
                del todo[len(todo) - len(fetch.blocks) :]
                self._add(meeting, fetch, fetch.blocks)
            else:
                return
        todo.clear()

    def _begin_piece(self, meeting: _Meeting, front: int) -> Fetch | None:
        """Begin to fetch the last of what is not begun, unless it would be late."""
        todo = meeting.todo
        last = todo[-1]
        most = last.tier.most_to_meet(
            (last.num_tokens - front) / self._size,
            is_first=last.num_tokens == meeting.end,
        )
        most = min(most, last.tier.job_size)
        piece: list[SecondaryBlock] = []
        for block in reversed(todo):
            if len(piece) >= most or block.tier is not last.tier:
                break
            # It ends before a hole, and before what is there or on its way by now.
            is_next = block.num_tokens == last.num_tokens - len(piece) * self._size
            if not is_next or block.num_tokens <= front or self._is_begun(block):
                break
            piece.append(block)
        return self._fetches.begin(piece[::-1], from_end=True) if piece else None

    def _is_begun(self, block: SecondaryBlock) -> bool:
        return block.key in self._fetches.by_key or self._pool.is_there(block.key)

    def _add(
        self, meeting: _Meeting, fetch: Fetch, blocks: Sequence[SecondaryBlock]
    ) -> None:
        """Record that `fetch` has `blocks`, which precede all others of the meeting."""
        begin, end = blocks[0].num_tokens - self._size, blocks[-1].num_tokens
        last = meeting.pieces[-1] if meeting.pieces else None
        if last is not None and last.fetch is fetch and last.begin == end:
            last.begin = begin
            return
        fetch_s = fetch.tier.fetch_s or self._costs.compute_s
        due = self._costs.clock() + fetch.tier.num_under_way * fetch_s
        meeting.pieces.append(_Piece(fetch, begin, end, due))

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
                self.is_waiting = True
                return 0
            # It may never come, so each step computes twice as much as the last.
            few = self._few_tokens << min(piece.num_steps, 16)
            end = min(end, piece.end, start - start % size + few)
            piece.num_steps += 1
        for index in range(start // size + 1, -(-end // size)):
            if self._pool.is_there(keys(index)):
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
        pieces = [piece for piece in meeting.pieces if not piece.fetch.is_over]
        meeting.pieces = [piece for piece in pieces if piece.end > start]
        for piece in pieces:
            if piece.end <= start:
                num_blocks = (piece.end - piece.begin) // self._size
                piece.fetch.tier.stats.overtaken_blocks += num_blocks

    @property
    def _few_tokens(self) -> int:
        """Tokens of a step that computes what is late: whole blocks, and so many that
        computing them takes longer than a step that computes little."""
        costs = self._costs
        num_blocks = int(2 * costs.least_join_s / costs.compute_s)
        return max(-(-self._tuning.meet_tokens // self._size), num_blocks) * self._size

    def _arrives_soon(self, piece: _Piece) -> bool:
        """Whether waiting for a piece costs less than computing a part of it."""
        left_s = piece.due - self._costs.clock()
        num_blocks = min(self._few_tokens, piece.end - piece.begin) / self._size
        return 0 < left_s < num_blocks * self._costs.compute_s
