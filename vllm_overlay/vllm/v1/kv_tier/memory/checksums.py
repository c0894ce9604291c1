# SPDX-License-Identifier: Apache-2.0
"""Whether a host slot still holds what was stored in it.

A checksum is taken when the store of a slot has ended, and compared before the slot is
loaded. In between, bad memory or a stray write may have changed it; loaded as it is, a
slot full of NaNs would harm whoever has the device block next, too.

No checksum needs a version. The fences of the plans put the loads of a slot between its
store and the next one, and what waits for a copy waits for its launch: so a load finds
the checksum of the store before it, and has compared it when the slot is overwritten.
"""

import os
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


class SlotChanged(RuntimeError):
    """Host slots do not hold what was stored. The message names them."""


class SlotChecksums:
    """Checksums of the slots of one rank.

    Args:
        slots: `[num_slots, slot_bytes]`, uint8, host memory.
        device: Whose copies fill it. On a GPU a store ends some time after its launch,
            and threads take the checksum then.
        shared: `[num_slots, 8]`, uint8: where other ranks find them, if any do.

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

    def stored(self, slots: Sequence[int]) -> None:
        """The stores of `slots` are on the current stream, or done where there is
        none."""
        if self._takers is None:
            for slot in slots:
                self._sums[slot] = Future()
                self._sums[slot].set_result(self._take(slot))
            return
        wait = self._end_of_copies()
        for slot in slots:
            self._sums[slot] = self._takers.submit(self._sum_after, wait, slot)

    def are_taken(self, slots: Sequence[int]) -> bool:
        """Whether nothing is left to do of what `stored` was told of `slots`."""
        taken = (self._sums.get(slot) for slot in slots)
        return all(each is None or each.done() for each in taken)

    def check(self, slots: Sequence[int]) -> None:
        """Before `slots` are loaded. Waits for the end of their stores.

        Raises:
            SlotChanged: Some do not hold what was stored, or nothing ever was.

        """
        are_good = self._map(self._is_good, slots)
        changed = [slot for slot, is_good in zip(slots, are_good) if not is_good]
        if changed:
            raise SlotChanged(
                f"Host slots {changed} do not hold what was stored in them. Bad "
                "memory, or a write of another program part, has changed them. Check "
                "the machine's memory (EDAC or MCE messages of the kernel) when this "
                "comes again."
            )

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

    def _is_good(self, slot: int) -> bool:
        taken = self._sums.get(slot)
        return taken is not None and taken.result() == self._sum(slot)

    def _sum_after(self, wait: Callable[[], object], slot: int) -> bytes:
        wait()
        return self._take(slot)

    def _take(self, slot: int) -> bytes:
        taken = self._sum(slot)
        if self._shared is not None:
            self._shared[slot] = np.frombuffer(taken, np.uint8)
        return taken

    def _sum(self, slot: int) -> bytes:
        return blake3(self._memory[slot]).digest(DIGEST_BYTES)

    def _end_of_copies(self) -> Callable[[], object]:
        """Waits on the host for what is on the current stream by now."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize


class PeerChecksums(SlotChecksums):
    """Of slots that another rank stores in, and takes the checksums of.

    Args:
        slots: As of `SlotChecksums`.
        device: As of `SlotChecksums`.
        shared: Where that rank leaves them.

    """

    def __init__(
        self, slots: torch.Tensor, device: torch.device, shared: NDArray[np.uint8]
    ) -> None:
        super().__init__(slots, device)
        self._taken = shared

    def stored(self, slots: Sequence[int]) -> None:
        raise AssertionError("This rank stores nothing.")

    def _is_good(self, slot: int) -> bool:
        return self._taken[slot].tobytes() == self._sum(slot)
