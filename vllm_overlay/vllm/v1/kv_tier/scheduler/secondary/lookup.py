# SPDX-License-Identifier: Apache-2.0
"""Which blocks of prompts are missing on device and host, and which of these a store
has. A separate thread asks the store."""

import math
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    get_block_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.kv_tier.gil import fast_switching
from vllm.v1.kv_tier.layout import Answer, ReachableBlocks
from vllm.v1.kv_tier.scheduler.kv_groups import hashes_of_blocks
from vllm.v1.kv_tier.scheduler.secondary.tier import Wanted
from vllm.v1.kv_tier.scheduler.slots import SlotTable
from vllm.v1.request import Request

logger = init_logger(__name__)

LoadFilter = Callable[[Request], Callable[[BlockHash], bool] | None]
"""As `ConversationTracker.make_load_filter`."""


class PromptLookup:
    """Looks up which blocks of prompts neither device nor host has, in parts.

    Args:
        block_sizes: Tokens of a block, for each KV cache group.
        hash_size: Tokens of a block hash of a request.
        table: The slot table.
        is_cached: Whether the device has a block.
        reachable: By group, the blocks that a hit can use; empty for all.

    """

    def __init__(
        self,
        block_sizes: Sequence[int],
        hash_size: int,
        table: SlotTable,
        is_cached: Callable[[BlockHashWithGroupId], object],
        reachable: Sequence[ReachableBlocks] = (),
    ) -> None:
        self._block_sizes = block_sizes
        self._reachable = reachable or [ReachableBlocks()] * len(block_sizes)
        self._looks_per_token = sum(
            each.part / size for each, size in zip(self._reachable, block_sizes)
        )
        self._hash_size = hash_size
        self._table = table
        self._is_cached = is_cached

    def skip(self, is_elsewhere: Callable[[BlockHashWithGroupId], object]) -> None:
        """Blocks that `is_elsewhere` finds are not missing."""
        is_cached = self._is_cached
        self._is_cached = lambda key: is_cached(key) or is_elsewhere(key)

    def num_tokens(self, request: Request) -> int:
        """Tokens of a request that have hashes."""
        return len(request.block_hashes) * self._hash_size

    def has_blocks(self, request: Request) -> bool:
        """Whether a request has a full block."""
        return self.num_tokens(request) >= min(self._block_sizes)

    def find_missing(
        self, request: Request, begin: int, most: int, loadable: LoadFilter | None
    ) -> tuple[int, int, list[Wanted]]:
        """Look up about as many more blocks of a request as the step may.

        Blocks that no hit can use are left out.

        Args:
            request: The request.
            begin: Tokens whose blocks were looked up before.
            most: Blocks to look up.
            loadable: Says what may be loaded for it; None for everything.

        Returns:
            Tokens whose blocks are looked up now, how many blocks behind `begin` that
            were, and the missing ones, in the order of the prompt.

        """
        num_tokens = int(most / self._looks_per_token)
        end = begin + max(num_tokens, self._hash_size)
        end = min(end, self.num_tokens(request))
        missing, num_looks = [], 0
        on_host, on_device = self._table.has, self._is_cached
        groups = zip(self._block_sizes, self._reachable)
        for group_id, (size, reachable) in enumerate(groups):
            suffix = make_block_hash_with_group_id(BlockHash(b""), group_id)
            hashes = hashes_of_blocks(request, self._hash_size, size)
            first, last = begin // size, end // size
            indices = reachable.indices(first, last)
            num_looks += len(indices)
            if len(indices) == last - first:
                some = hashes[first:last]
            else:
                some = [hashes[index] for index in indices]
            # A hot path: every block of every prompt.
            missing += [
                (BlockHashWithGroupId(key), (index + 1) * size)
                for index, block_hash in zip(indices, some)
                if not on_host(key := block_hash + suffix)  # type: ignore[arg-type]
                and not on_device(key)  # type: ignore[arg-type]
            ]
        if loadable is not None and (may_be := loadable(request)) is not None:
            missing = [w for w in missing if may_be(get_block_hash(w[0]))]
        if len(self._block_sizes) > 1:
            missing.sort(key=lambda wanted: wanted[1])
        return end, num_looks, missing


Exists = Callable[[Sequence[bytes]], list[bool]]
"""Whether objects of these keys exist on all ranks. May block."""

_MISS_S = 1.0
_DEADLINE_S = 5.0
MAX_MISSES = 1 << 16
MAX_ASKED = 1 << 18
"""Most keys in open questions. A key takes at most 64 bytes, and Python another 70."""


class Question:
    """Keys that a store is asked for. It has its answer, which goes with it."""

    def __init__(self, keys: Sequence[bytes], until: float, is_news: bool) -> None:
        self.keys = keys
        self.until = until
        """Deadline in seconds of `time.monotonic`."""
        self.is_news = is_news
        """Nothing is asked: the store has these keys now."""
        self.answer: list[bool] = []
        self.is_over = threading.Event()

    def wait(self, until: float) -> list[bool] | None:
        """As `layout.Answer`."""
        if self.is_over.is_set():
            return self.answer
        left = until - time.monotonic()
        return self.answer if left > 0 and self.is_over.wait(left) else None


class AsyncLookup:
    """A thread that asks a store, one question after the other.

    Args:
        exists: Answers the questions.
        miss_s: Seconds for which a missing key is not asked for again, since requests
            that arrive together often share a prefix.
        clock: Monotonic clock in seconds.
        deadline_s: Longest wait for an answer. Later a question is not asked any more,
            and new ones are refused while an older one takes longer.

    """

    def __init__(
        self,
        exists: Exists,
        miss_s: float = _MISS_S,
        clock: Callable[[], float] = time.monotonic,
        deadline_s: float = _DEADLINE_S,
    ) -> None:
        self._deadline_s = deadline_s
        # Those that the thread has not finished, and the number of their keys.
        self._open: deque[Question] = deque()
        self._num_open = 0
        self._asker = asker = _Asker(exists, miss_s, clock)
        threading.Thread(target=asker.run, name="kv-tier-ask", daemon=True).start()
        # The thread holds no reference to this object.
        weakref.finalize(self, asker.questions.put, None)

    @property
    def ask_s(self) -> float:
        """Seconds that the last answer took."""
        return self._asker.ask_s

    def ask(self, keys: Sequence[bytes]) -> Answer:
        """Queue a question.

        If none can be asked now, its answer is empty, and there at once. With too many
        keys, only the first ones are asked for.
        """
        question = Question(
            keys[:MAX_ASKED], time.monotonic() + self._deadline_s, False
        )
        if not self._queue(question):
            question.is_over.set()
        return question.wait

    def mark_present(self, keys: Sequence[bytes]) -> None:
        """Note that the store has `keys` now, so that they are asked for again."""
        # Where there is no room for it, they are found a moment later.
        self._queue(Question(keys, math.inf, True))

    def _queue(self, question: Question) -> bool:
        """Queue `question`, unless the store hangs or has too many."""
        while self._open and self._open[0].is_over.is_set():
            self._num_open -= len(self._open.popleft().keys)
        is_late = bool(self._open) and time.monotonic() > self._open[0].until
        if is_late or self._num_open + len(question.keys) > MAX_ASKED:
            return False
        self._num_open += len(question.keys)
        self._open.append(question)
        self._asker.questions.put(question)
        return True


class _Asker:
    """What the thread needs. It asks for no key that was missing a moment ago."""

    def __init__(
        self, exists: Exists, miss_s: float, clock: Callable[[], float]
    ) -> None:
        self.ask_s = 0.0
        self.questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._exists = exists
        self._miss_s, self._clock = miss_s, clock
        # Times until which keys count as missing, oldest first.
        self._until: dict[bytes, float] = {}

    def run(self) -> None:
        while (question := self.questions.get()) is not None:
            if question.is_news:
                for key in question.keys:
                    self._until.pop(key, None)
            elif (begun := time.monotonic()) <= question.until:
                try:
                    with fast_switching():
                        question.answer = self._ask(question.keys)
                except BaseException:
                    # Stores answer False if they cannot tell. An exception is a defect,
                    # of any class, and must not end this thread.
                    logger.exception("KV tier: a secondary tier could not be asked.")
                    question.answer = [False] * len(question.keys)
                self.ask_s = time.monotonic() - begun
            question.is_over.set()
            # The next one may be long in coming.
            del question

    def _ask(self, keys: Sequence[bytes]) -> list[bool]:
        now, until = self._clock(), self._until
        while until and until[first := next(iter(until))] <= now:
            del until[first]
        asked = [key for key in keys if key not in until]
        there = {key for key, is_there in zip(asked, self._exists(asked)) if is_there}
        if self._miss_s:
            # Taken again, since the answer may have taken long.
            end = self._clock() + self._miss_s
            missing = [key for key in asked if key not in there]
            until.update(dict.fromkeys(missing[:MAX_MISSES], end))
            while len(until) > MAX_MISSES:
                del until[next(iter(until))]
        return [key in there for key in keys]
