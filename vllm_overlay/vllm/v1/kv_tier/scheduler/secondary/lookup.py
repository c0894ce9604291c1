# SPDX-License-Identifier: Apache-2.0
"""Which blocks of prompts are missing on device and host, and which of these a store
has. A separate thread asks the store."""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    get_block_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.kv_tier.gil import fast_switching
from vllm.v1.kv_tier.scheduler.kv_groups import hashes_of_blocks
from vllm.v1.kv_tier.scheduler.secondary.tier import Wanted
from vllm.v1.kv_tier.scheduler.slots import SlotTable
from vllm.v1.kv_tier.stores.settings import StoreConfig
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

    """

    def __init__(
        self,
        block_sizes: Sequence[int],
        hash_size: int,
        table: SlotTable,
        is_cached: Callable[[BlockHashWithGroupId], object],
    ) -> None:
        self._block_sizes = block_sizes
        self._hash_size = hash_size
        self._table = table
        self._is_cached = is_cached

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

        Args:
            request: The request.
            begin: Tokens whose blocks were looked up before.
            most: Blocks to look up.
            loadable: Says what may be loaded for it; None for everything.

        Returns:
            Tokens whose blocks are looked up now, how many blocks behind `begin` that
            were, and the missing ones, in the order of the prompt.

        """
        num_tokens = int(most / sum(1 / size for size in self._block_sizes))
        end = begin + max(num_tokens, self._hash_size)
        end = min(end, self.num_tokens(request))
        missing, num_looks = [], 0
        on_host, on_device = self._table.has, self._is_cached
        for group_id, size in enumerate(self._block_sizes):
            suffix = make_block_hash_with_group_id(BlockHash(b""), group_id)
            hashes = hashes_of_blocks(request, self._hash_size, size)
            first, last = begin // size, end // size
            num_looks += last - first
            # A hot path: every block of every prompt.
            missing += [
                (BlockHashWithGroupId(key), num_blocks * size)
                for num_blocks, block_hash in enumerate(hashes[first:last], first + 1)
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

Question = tuple[int, Sequence[bytes], float]
"""Number, keys, and deadline in seconds of `time.monotonic`. Number 0 is no question:
these keys exist now."""
Answer = tuple[int, list[bool], float]
"""Number of the question, whether each key exists, and the seconds it took; negative
seconds if nothing was asked."""

_MISS_S = 1.0
_DEADLINE_S = 5.0
MAX_MISSES = 1 << 16
MAX_ASKED = 1 << 18
"""Most keys in open questions. A key takes at most 64 bytes, and Python another 70."""
MAX_ANSWERS = 1 << 20
"""Most keys in answers that are not taken, because requests were aborted or did not
wait. A key takes eight bytes."""
_REFUSED = -1


def exists_on_all(
    entry: StoreConfig, writers: Sequence[tuple[str, int]], replicas: int
) -> Exists:
    """A function that tells which objects all ranks have.

    Args:
        entry: The store.
        writers: Namespace and bytes of an object for each rank that writes.
        replicas: Number of ranks for which each of them writes.

    """
    stores = [
        entry.open(rank_space, i * replicas, num_bytes)
        for i, (rank_space, num_bytes) in enumerate(writers)
        if num_bytes
    ]

    def exists(keys: Sequence[bytes]) -> list[bool]:
        return [all(each) for each in zip(*(store.exists(keys) for store in stores))]

    return exists


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
        self.ask_s = 0.0
        """Seconds that the last answer took."""
        self._deadline_s = deadline_s
        self._num_asked = self._num_dropped = 0
        # For each open question, in order, its number of keys and deadline. Then the
        # numbers of keys that are asked, that arrived meanwhile, and in answers.
        self._open: dict[int, tuple[int, float]] = {}
        self._num_open = self._num_come = self._num_kept = 0
        self._questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._answers: dict[int, list[bool]] = {}
        threading.Thread(
            target=_run,
            args=(_Misses(exists, miss_s, clock), self._questions, self._told),
            name="kv-tier-ask",
            daemon=True,
        ).start()
        # The thread holds no reference to this object.
        weakref.finalize(self, self._questions.put, None)

    def ask(self, keys: Sequence[bytes]) -> int:
        """Queue a question, and return its number.

        If no question can be asked now, the number has an empty answer at once. With
        too many keys, only the first ones are asked for.
        """
        self._take_answers()
        now, keys = time.monotonic(), keys[:MAX_ASKED]
        _, oldest_until = next(iter(self._open.values()), (0, now))
        if now > oldest_until or self._num_open + len(keys) > MAX_ASKED:
            return _REFUSED
        self._num_asked += 1
        until = now + self._deadline_s
        self._open[self._num_asked] = len(keys), until
        self._num_open += len(keys)
        self._questions.put((self._num_asked, keys, until))
        return self._num_asked

    def mark_present(self, keys: Sequence[bytes]) -> None:
        """Note that the store has `keys` now, so that they are asked for again."""
        self._take_answers()
        # Beyond the limit they are found a moment later.
        if self._num_come + len(keys) <= MAX_ASKED:
            self._num_come += len(keys)
            self._questions.put((0, keys, 0.0))

    def take_answer(self, number: int, until: float = 0.0) -> list[bool] | None:
        """Take the answer to a question: for each key whether it exists.

        Returns:
            None if there is no answer yet; empty if the answer was dropped.

        Args:
            number: Number of the question.
            until: How long to wait for the answer, in seconds of `time.monotonic`.

        """
        self._take_answers()
        while number not in self._answers and number > self._num_dropped:
            # Answers come in the order of the questions.
            if (left := until - time.monotonic()) <= 0:
                return None
            self._take_answers(left)
        answer = self._answers.pop(number, None)
        if answer is None:
            return []
        self._num_kept -= len(answer) + 1
        return answer

    def _take_answers(self, wait_s: float = 0.0) -> None:
        """Receive answers. Waits up to `wait_s` for the first one."""
        with suppress(queue.Empty):
            while True:
                number, answer, seconds = self._told.get(wait_s > 0, wait_s)
                wait_s = 0.0
                if number == 0:
                    self._num_come -= len(answer)
                    continue
                num_keys, _ = self._open.pop(number)
                self._num_open -= num_keys
                if seconds >= 0:
                    self.ask_s = seconds
                self._answers[number] = answer
                # Count one more, since there may be many empty answers.
                self._num_kept += len(answer) + 1
                if self._num_kept > MAX_ANSWERS:
                    self._drop()

    def _drop(self) -> None:
        """Drop the older half of the answers."""
        while self._num_kept > MAX_ANSWERS // 2:
            self._num_dropped = next(iter(self._answers))
            self._num_kept -= len(self._answers.pop(self._num_dropped)) + 1


class _Misses:
    """Answers no for keys that were missing a moment ago, and asks for the others."""

    def __init__(
        self, exists: Exists, miss_s: float, clock: Callable[[], float]
    ) -> None:
        self._exists = exists
        self._miss_s, self._clock = miss_s, clock
        # Times until which keys count as missing, oldest first.
        self._until: dict[bytes, float] = {}

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
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

    def forget(self, keys: Sequence[bytes]) -> None:
        """Stop treating `keys` as missing."""
        for key in keys:
            self._until.pop(key, None)


def _run(
    misses: _Misses,
    questions: "queue.SimpleQueue[Question | None]",
    told: "queue.SimpleQueue[Answer]",
) -> None:
    while (question := questions.get()) is not None:
        number, keys, until = question
        if number == 0:
            misses.forget(keys)
            told.put((0, [True] * len(keys), -1.0))
            continue
        begun = time.monotonic()
        if begun > until:
            told.put((number, [], -1.0))
            continue
        try:
            with fast_switching():
                answer = misses.exists(keys)
        except BaseException:
            # Stores answer False if they cannot tell. An exception is a defect, of any
            # class, and must not end this thread.
            logger.exception("KV tier: a secondary tier could not be asked.")
            answer = [False] * len(keys)
        told.put((number, answer, time.monotonic() - begun))
