# SPDX-License-Identifier: Apache-2.0
"""The host memory of one rank: one exact, anonymous allocation."""

import contextlib
import math
import os
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from vllm.logger import init_logger
from vllm.v1.kv_tier.numa import gpu_node, prefer_node, usable_cpus
from vllm.v1.kv_tier.pages import HUGE_PAGE_BYTES, PAGE_BYTES, anonymous, touch

logger = init_logger(__name__)

GiB = 1 << 30

# One registration of 512 GiB or more fails in the driver (upstream #51080).
_MAX_PIECE_BYTES = 64 * GiB
# More of them wait for one another in the kernel and for the memory bus.
_MAX_THREADS = 16
_PROGRESS_SECONDS = 5.0


class HostBuffer:
    """Memory for the slots of one rank.

    Slots lie one after the other, and all regions of a slot together, so that a
    slot is one piece for whatever tier comes below.

    All pages are there when it is made: a request must not pay for page faults.
    Threads take it piece by piece, so that the driver registers one piece while the
    next are touched.

    Args:
        num_slots: Number of slots.
        slot_bytes: Bytes of one slot on this rank.
        pin: Register the memory with the GPU driver.
        device: The GPU to be near to; the current one if not given. Of no meaning
            without `pin`.
        threads: How many touch and register; if not given, this GPU's share of
            the CPUs.
        piece_bytes: What one thread does at a time. Pieces are whole slots, at most
            64 GiB.
        huge_pages: Ask for huge pages.

    Raises:
        MemoryError: The machine cannot give that much memory.

    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        pin: bool,
        device: torch.device | None = None,
        *,
        threads: int | None = None,
        piece_bytes: int = GiB // 4,
        huge_pages: bool = True,
    ) -> None:
        started = time.perf_counter()
        if pin and (device is None or device.index is None):
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device if pin else None
        self._registered: list[int] = []
        # (error, offset) of what the driver did not register.
        self._refused: list[tuple[int, int]] = []
        # The address may be registered again by a later engine of this process.
        weakref.finalize(self, _unregister, self._registered)
        try:
            memory = anonymous(num_slots * slot_bytes, huge_pages)
            cpus = self._place(memory)
            pieces = _pieces(num_slots, slot_bytes, piece_bytes)
            self._prepare(memory, pieces, cpus, threads or self._share_of(cpus))
        except OSError as e:
            raise MemoryError(
                f"--kv-offloading-size: allocating {num_slots * slot_bytes} bytes of "
                "host memory on this rank failed. Lower the size."
            ) from e
        if self._refused:
            self._give_up_pinning(memory.numel())
        self.slots = memory.view(num_slots, slot_bytes)
        """`[num_slots, slot_bytes]`, uint8."""
        self.pinned = pin and not self._refused
        logger.info(
            "KV tier: %d host slots of %d bytes (%.2f GiB, %s) on this rank in %.1f s.",
            num_slots,
            slot_bytes,
            memory.numel() / GiB,
            "pinned" if self.pinned else "not pinned",
            time.perf_counter() - started,
        )

    def _place(self, memory: torch.Tensor) -> set[int]:
        """Have pages come from the GPU's NUMA node. Returns the CPUs to touch from.

        By policy and by touching from there: a container may forbid either.
        """
        node = gpu_node(self._device) if self._device else None
        if node is None:
            return usable_cpus(None)
        preferred = prefer_node(memory.data_ptr(), memory.numel(), node)
        cpus = usable_cpus(node)
        if not preferred and not cpus:
            logger.warning(
                "KV tier: host memory could not be placed on NUMA node %d of the GPU, "
                "and copies may be slower: none of the node's CPUs may be used, and "
                "the system forbids mbind. Allow some of these CPUs, or add "
                "CAP_SYS_NICE.",
                node,
            )
        return cpus or usable_cpus(None)

    def _share_of(self, cpus: set[int]) -> int:
        # Ranks on the other GPUs start at the same time.
        gpus = torch.cuda.device_count() if self._device else 1
        return min(max(len(cpus) // max(gpus, 1), 1), _MAX_THREADS)

    def _prepare(
        self,
        memory: torch.Tensor,
        pieces: Sequence[tuple[int, int]],
        cpus: set[int],
        threads: int,
    ) -> None:
        """Touch and register all pieces, or register none and raise."""
        address = memory.data_ptr()

        def begin() -> None:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, cpus)
            if self._device:
                # Else the thread's first call makes a context on GPU 0.
                torch.cuda.set_device(self._device)

        def prepare(piece: tuple[int, int]) -> int:
            offset, size = piece
            touch(address + offset, size)
            if self._device and not self._refused:
                self._register(address, offset, size)
            return size

        ready, logged = 0, time.perf_counter()
        try:
            with ThreadPoolExecutor(threads, "kv-tier-start", begin) as pool:
                # The first error cancels what no thread has begun.
                for size in pool.map(prepare, pieces):
                    ready += size
                    if time.perf_counter() - logged >= _PROGRESS_SECONDS:
                        logged = time.perf_counter()
                        logger.info(
                            "KV tier: %.1f of %.1f GiB of host memory ready.",
                            ready / GiB,
                            memory.numel() / GiB,
                        )
        except BaseException:
            _unregister(self._registered)
            raise

    def _register(self, address: int, offset: int, size: int) -> None:
        error = int(torch.cuda.cudart().cudaHostRegister(address + offset, size, 0))
        if error:
            # It stays the last CUDA error of this thread, which soon ends: a check
            # of a later kernel must not find it.
            self._refused.append((error, offset))
        else:
            self._registered.append(address + offset)

    def _give_up_pinning(self, num_bytes: int) -> None:
        _unregister(self._registered)
        error, offset = self._refused[0]
        logger.warning(
            "KV tier: the driver refused to pin host memory (error %d, at "
            "%d of %d bytes). It is used unpinned: copies run at a fraction "
            "of the PCIe rate and stall the step they belong to. Raise the "
            "memlock limit (ulimit -l unlimited; --ulimit memlock=-1 for "
            "containers) or lower --kv-offloading-size.",
            error,
            offset,
            num_bytes,
        )


def _pieces(
    num_slots: int, slot_bytes: int, piece_bytes: int
) -> Sequence[tuple[int, int]]:
    """(offset, bytes) of what is touched and registered at once.

    Whole slots, since a copy must not cross from one registration to the next. Whole
    pages too, where slots are not so odd that a piece would be too large.
    """
    piece_bytes = min(piece_bytes, _MAX_PIECE_BYTES)
    units = [math.lcm(slot_bytes, page) for page in (HUGE_PAGE_BYTES, PAGE_BYTES)]
    unit = next((unit for unit in units if unit <= piece_bytes), slot_bytes)
    step = max(piece_bytes // unit, 1) * unit
    total = num_slots * slot_bytes
    return [(start, min(step, total - start)) for start in range(0, total, step)]


def _unregister(pointers: list[int]) -> None:
    while pointers:
        torch.cuda.cudart().cudaHostUnregister(pointers.pop())
