# SPDX-License-Identifier: Apache-2.0
"""Checksums of host slots: whether a slot still holds what filled it.

Bad memory or a stray write may change a slot. Loaded as it is, a slot full of NaNs
would harm whoever has the device block next, too.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from vllm.v1.kv_tier.memory.shared import DIGEST_BYTES

# They read host memory beside the copies: more of them take from these.
_MAX_THREADS = 8
_MEASURED_SLOTS = 64

_T = TypeVar("_T")


class SlotChecksums:
    """Checksums of the slots of one rank. `RankSlots` says when they are taken.

    Args:
        slots: `[num_slots, slot_bytes]`, uint8, host memory.
        device: Whose copies fill it. On a GPU a store ends some time after its launch,
            and threads take the checksum then.
        shared: `[num_slots, 8]`, uint8: where ranks that share the slots find the
            checksums that the rank took which stores.

    """

    def __init__(
        self,
        slots: torch.Tensor,
        device: torch.device,
        shared: NDArray[np.uint8] | None = None,
    ) -> None:
        self._memory = slots.numpy()
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
            # Two pools: a check must not stand behind stores that have not ended.
            self._takers = ThreadPoolExecutor(threads, "kv-tier-sum")
            self._checkers = ThreadPoolExecutor(threads, "kv-tier-check")

    def take_after_copies(self, slots: Sequence[int]) -> None:
        """Take those of `slots` when the copies on the current stream have ended; now,
        where there is no stream."""
        if self._takers is None:
            self.take(slots)
            return
        wait = self._end_of_copies()
        try:
            for slot in slots:
                taken = self._begin(slot)
                self._takers.submit(self._take_after, wait, slot, taken)
        except BaseException:
            # Nobody may wait for them.
            self.forget(slots)
            raise

    def take(self, slots: Sequence[int]) -> None:
        """Take those of `slots` now."""
        begun = [self._begin(slot) for slot in slots]
        try:
            for slot, taken, value in zip(slots, begun, self._map(self._sum, slots)):
                self._set(slot, taken, value)
        except BaseException:
            self.forget(slots)
            raise

    def forget(self, slots: Sequence[int]) -> None:
        """What `slots` held is void, with checksums that are still to be taken."""
        with self._lock:
            for slot in slots:
                self._sums.pop(slot, None)

    def are_taken(self, slots: Sequence[int]) -> bool:
        """Whether no checksum of `slots` is still to be taken."""
        taken = (self._sums.get(slot) for slot in slots)
        return all(each is None or each.done() for each in taken)

    def are_right(self, slots: Sequence[int]) -> list[bool]:
        """Which of `slots` hold what their checksums were taken of. Waits for those
        that are still to be taken."""
        return list(self._map(self._is_right, slots))

    def seconds_per_slot(self) -> float:
        """How long a check takes for each of many slots, measured now."""
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
        """A checksum is to be taken, which nobody has before `_set`."""
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
            # Else the slot has been filled again, and other ranks would take this for
            # the checksum of that.
            if self._shared is not None and self._sums.get(slot) is taken:
                self._shared[slot] = np.frombuffer(value, np.uint8)
        taken.set_result(value)

    def _sum(self, slot: int) -> bytes:
        return blake3(self._memory[slot]).digest(DIGEST_BYTES)

    def _end_of_copies(self) -> Callable[[], object]:
        """Waits on the host for what is on the current stream by now."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize
