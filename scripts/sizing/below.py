# SPDX-License-Identifier: Apache-2.0
"""A store below the host that has nothing but a size, rates and a latency.

What decides which blocks are written and fetched is the tier's own code. The store
keeps the least recently used objects up to its size, answers after its latency, and
carries out jobs one after another, reads beside writes.
"""

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm.v1.kv_tier.layout import Answer, SecondaryLayout, SecondaryTier
from vllm.v1.kv_tier.opening import secondary_layout
from vllm.v1.kv_tier.plan import SecondaryJob, SecondaryResult
from vllm.v1.kv_tier.stats import SecondaryStats
from vllm.v1.kv_tier.stores.fs import FsDebug

DEADLINE_MS = FsDebug().deadline_ms
STORE_FROM_USE = FsDebug().store_from_use

_MINUTE_S = 60.0


@dataclass(frozen=True)
class Below:
    """A tier below the host to try."""

    num_bytes: int
    """0: none."""
    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float
    """Of an answer, and of each job beside its bytes."""
    store_from_use: int
    deadline_s: float

    def layout(
        self, asker: "SimulatedStore", block_size: int, block_bytes: int, num_slots: int
    ) -> SecondaryLayout:
        """What the block pool is told of it, as the engine tells it of a real one."""
        tier = SecondaryTier(
            "the simulated store",
            "simulated",
            "LOCAL",
            asker,
            self.store_from_use,
            self.deadline_s,
        )
        return secondary_layout(
            [tier], 1, [block_size], num_slots, block_bytes, block_size
        )


@dataclass(frozen=True)
class Traffic:
    """What a store had to do, over a whole trace."""

    read_bytes: int
    written_bytes: int
    dropped_bytes: int
    """Were to be written, and left the host before their turn."""
    read_bytes_per_s: float
    """Of the busiest minute."""
    written_bytes_per_s: float
    """Of the busiest minute."""
    late_requests: int
    """Went on without what had not come by their deadline."""
    seconds: float
    """From the first arrival to the last end of a prefill."""


class SimulatedStore:
    """Objects by their keys, and a clock that says when what is asked of it is done.

    Args:
        below: Its size and speed.
        block_bytes: Of an object.
        clock: Seconds.

    """

    def __init__(
        self, below: Below, block_bytes: int, clock: Callable[[], float]
    ) -> None:
        self.ask_s = below.latency_s
        self._below = below
        self._block_bytes = block_bytes
        self._max_objects = below.num_bytes // block_bytes
        self._clock = clock
        self._objects: OrderedDict[bytes, None] = OrderedDict()
        self._numbers = itertools.count(1)
        # When something is over, and the job and its seconds if it is one.
        self._ends: list[tuple[float, int, SecondaryJob | None, float]] = []
        self._free_at = {True: 0.0, False: 0.0}
        self._bytes = {True: Counter[int](), False: Counter[int]()}

    # ------------------------------------------------ as the scheduler sees it

    def ask(self, keys: Sequence[bytes]) -> Answer:
        """As of a `Lookup`."""
        due = self._clock() + self._below.latency_s
        answer = [key in self._objects for key in keys]
        heapq.heappush(self._ends, (due, next(self._numbers), None, 0.0))
        return lambda until: answer if due <= self._clock() else None

    def mark_present(self, keys: Sequence[bytes]) -> None:
        """Nothing is remembered of earlier answers."""

    # -------------------------------------------------------- as a rank sees it

    def begin(self, jobs: Sequence[SecondaryJob]) -> None:
        """Queue jobs behind those of the same direction."""
        below, now = self._below, self._clock()
        for job in jobs:
            rate = below.write_bytes_per_s if job.is_put else below.read_bytes_per_s
            num_bytes = len(job.keys) * self._block_bytes
            seconds = below.latency_s + num_bytes / rate
            begins = max(now, self._free_at[job.is_put])
            self._free_at[job.is_put] = end = begins + seconds
            self._bytes[job.is_put][int(begins // _MINUTE_S)] += num_bytes
            heapq.heappush(self._ends, (end, next(self._numbers), job, seconds))

    @property
    def next_end(self) -> float:
        """When a job or a question ends that has not been taken."""
        return self._ends[0][0] if self._ends else float("inf")

    def take_end(self) -> SecondaryResult | None:
        """The job that ends next; None: it is a question."""
        _, _, job, seconds = heapq.heappop(self._ends)
        if job is None:
            return None
        done = [self._put(k) if job.is_put else self._get(k) for k in job.keys]
        return SecondaryResult(job.number, done, seconds)

    def _put(self, key: bytes) -> bool:
        self._objects[key] = None
        self._objects.move_to_end(key)
        if len(self._objects) > self._max_objects:
            self._objects.popitem(last=False)
        return key in self._objects

    def _get(self, key: bytes) -> bool:
        if is_there := key in self._objects:
            self._objects.move_to_end(key)
        return is_there

    def traffic(self, stats: SecondaryStats, seconds: float) -> Traffic:
        """What it had to do.

        Args:
            stats: Of the whole trace.
            seconds: That the trace took.

        """
        read, written = self._bytes[False], self._bytes[True]
        return Traffic(
            read.total(),
            written.total(),
            stats.dropped_blocks * self._block_bytes,
            max(read.values(), default=0) / _MINUTE_S,
            max(written.values(), default=0) / _MINUTE_S,
            stats.late_requests,
            seconds,
        )
