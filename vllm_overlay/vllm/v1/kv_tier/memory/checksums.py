# SPDX-License-Identifier: Apache-2.0
"""Checksums of host slots, to notice slots that changed since they were filled.

Bad memory or a stray write may change a slot. Loading it would give wrong tokens, and
NaNs in it could even harm later users of the same device block.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from vllm.v1.kv_tier.memory.shared import DIGEST_BYTES

# The threads read host memory during copies, and more of them would slow these down.
_MAX_THREADS = 8
_MEASURED_SLOTS = 64

_T = TypeVar("_T")


class SharedChecksums(Protocol):
    """8 bytes for each slot, in memory that other processes read."""

    def __getitem__(self, slot: int, /) -> NDArray[np.uint8]: ...

    def __setitem__(self, slot: int, checksum: NDArray[np.uint8], /) -> None: ...


class SlotChecksums:
    """Checksums of the slots of one rank. `RankSlots` decides when they are taken.

    Args:
        slots: `[num_slots, slot_bytes]`, uint8, host memory.
        device: Device of the rank. On a GPU, stores end after their launch, so threads
            take the checksums.
        shared: Checksums in shared memory, written by the rank that stores and read by
            those that load what it has stored.

    """

    def __init__(
        self,
        slots: torch.Tensor,
        device: torch.device,
        shared: SharedChecksums | None = None,
    ) -> None:
        self._memory = slots.numpy()
        self.slot_bytes = slots.shape[1]
        # Of each slot, how many of its first bytes count.
        self._num_bytes = np.full(len(slots), self.slot_bytes, np.int64)
        self._shared = shared
        self._device = device
        self._lock = threading.Lock()
        self._sums: dict[int, Future[bytes]] = {}
        self._takers: ThreadPoolExecutor | None = None
        self._checkers: ThreadPoolExecutor | None = None
        if device.type == "cuda":
            gpus = max(torch.cuda.device_count(), 1)
            share = len(os.sched_getaffinity(0)) // gpus
            threads = min(max(share // 2, 1), _MAX_THREADS)
            # Two pools, so that a check never queues behind stores in flight.
            self._takers = ThreadPoolExecutor(threads, "kv-tier-sum")
            self._checkers = ThreadPoolExecutor(threads, "kv-tier-check")

    def compute_after_copies(self, slots: Sequence[int]) -> None:
        """Take the checksums of `slots` once the current stream's copies have ended.

        Where there is no stream, they are taken at once.
        """
        if self._takers is None:
            self.compute(slots)
            return
        wait = self._end_of_copies()
        try:
            for slot in slots:
                taken = self._begin(slot)
                self._takers.submit(self._take_after, wait, slot, taken)
        except BaseException:
            # No check may wait for checksums that are never taken.
            self.forget(slots)
            raise

    def compute(self, slots: Sequence[int]) -> None:
        """Take the checksums of `slots` at once."""
        begun = [self._begin(slot) for slot in slots]
        try:
            for slot, taken, value in zip(slots, begun, self._map(self._sum, slots)):
                self._set(slot, taken, value)
        except BaseException:
            self.forget(slots)
            raise

    def forget(
        self, slots: Sequence[int], num_bytes: Sequence[int] | None = None
    ) -> None:
        """Drop the checksums of `slots`, including those that are still to be taken.

        Args:
            slots: Slots whose content is void.
            num_bytes: How many of the first bytes of each the next content has; None
                if that is as before.

        """
        with self._lock:
            if num_bytes is not None:
                self._num_bytes[slots] = num_bytes
            for slot in slots:
                self._sums.pop(slot, None)

    def are_computed(self, slots: Sequence[int]) -> bool:
        """Whether no checksum of `slots` is still to be taken."""
        taken = (self._sums.get(slot) for slot in slots)
        return all(each is None or each.done() for each in taken)

    def are_right(self, slots: Sequence[int]) -> list[bool]:
        """Check which of `slots` still match their checksums.

        Waits for checksums that are still to be taken. A slot without one does not
        match.
        """
        return list(self._map(self._is_right, slots))

    def seconds_per_slot(self) -> float:
        """Measure how long a check takes for each of many slots."""
        slots = range(min(len(self._memory), _MEASURED_SLOTS))
        started = time.perf_counter()
        list(self._map(self._sum, slots))
        return (time.perf_counter() - started) / len(slots)

    def _map(self, function: Callable[[int], _T], slots: Sequence[int]) -> Iterator[_T]:
        if self._checkers is None:
            return map(function, slots)
        return self._checkers.map(function, slots)

    def _is_right(self, slot: int) -> bool:
        taken = self._sums.get(slot)
        if taken is not None:
            return taken.result() == self._sum(slot)
        if self._shared is None:
            return False
        return self._shared[slot].tobytes() == self._sum(slot)

    def _begin(self, slot: int) -> "Future[bytes]":
        """Announce a checksum that `_set` will provide."""
        taken: Future[bytes] = Future()
        with self._lock:
            self._sums[slot] = taken
        return taken

    def _take_after(
        self, wait: Callable[[], object], slot: int, taken: "Future[bytes]"
    ) -> None:
        try:
            wait()
            self._set(slot, taken, self._sum(slot))
        except BaseException as e:
            taken.set_exception(e)
            raise

    def _set(self, slot: int, taken: "Future[bytes]", value: bytes) -> None:
        with self._lock:
            # If the slot has been filled again since, other ranks would take this old
            # checksum for that of the new content.
            if self._shared is not None and self._sums.get(slot) is taken:
                self._shared[slot] = np.frombuffer(value, np.uint8)
        taken.set_result(value)

    def _sum(self, slot: int) -> bytes:
        content = self._memory[slot, : self._num_bytes[slot]]
        return blake3(content).digest(DIGEST_BYTES)

    def _end_of_copies(self) -> Callable[[], object]:
        """A function that waits on the host for the current stream's work so far."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize
