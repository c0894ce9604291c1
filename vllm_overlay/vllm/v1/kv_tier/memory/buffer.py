# SPDX-License-Identifier: Apache-2.0
"""The host memory of one rank: one exact allocation, registered with the driver, or
made by it where it registers none.
"""

import contextlib
import ctypes
import math
import os
import threading
import time
import weakref
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import torch

from vllm.logger import init_logger
from vllm.v1.kv_tier.memory.numa import gpu_node, prefer_node, spread, usable_cpus
from vllm.v1.kv_tier.memory.pages import (
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    anonymous,
    discard_range,
    map_touched,
    touch,
)
from vllm.v1.kv_tier.memory.shared import NotShared, SharedMemory

logger = init_logger(__name__)


def allocate_pinned(num_bytes: int) -> torch.Tensor:
    """Allocate pinned memory. It is freed with its last view.

    The calling thread must have a current device.

    Args:
        num_bytes: Size. All pages exist on return.

    Returns:
        `[num_bytes]`, uint8.

    Raises:
        OSError: There is no such driver, or it refused.

    """
    lib = _driver()
    context, address = ctypes.c_void_p(), ctypes.c_void_p()
    _check(lib, "cuCtxGetCurrent", ctypes.byref(context))
    size = ctypes.c_size_t(num_bytes)
    _check(lib, "cuMemHostAlloc", ctypes.byref(address), size, ctypes.c_uint(0))
    memory = (ctypes.c_uint8 * num_bytes).from_address(address.value or 0)
    # Not at exit: other threads may still read, and the memory goes with the process.
    weakref.finalize(memory, _free, lib, context, address).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(lib: Any, function: str, *args: Any) -> None:
    code = lib[function](*args)
    if code:
        raise OSError(f"{function} failed with error {code}")


def _free(lib: Any, context: ctypes.c_void_p, address: ctypes.c_void_p) -> None:
    # The thread that drops the last view may never have used a GPU.
    lib.cuCtxSetCurrent(context)
    lib.cuMemFreeHost(address)


GiB = 1 << 30

# A single registration of 512 GiB or more fails in the driver (upstream #51080).
_MAX_PIECE_BYTES = 64 * GiB
# More threads only wait for one another in the kernel and on the memory bus.
_MAX_THREADS = 16


class MappedMemory(Protocol):
    """Memory that other processes map too."""

    @property
    def bytes(self) -> torch.Tensor:
        """`[num_bytes]`, uint8."""


class Parts(NamedTuple):
    """Slots in parts of the same size. Between two parts there is no memory."""

    num_slots: int
    """Of each part."""
    stride: int
    """Slots from the first one of a part to that of the next."""


class Refused(Exception):
    """The driver did not register memory. Args: its error code, and the offset."""


class HostBuffer:
    """Memory for the slots of one rank.

    Slots lie one after the other, and all regions of a slot together, so a secondary
    tier sees each slot as one contiguous piece.

    Only slots that are open may be used: their pages exist, so that no request pays for
    page faults, and are registered. Threads open the first ones before the constructor
    returns, in pieces: the driver registers one piece while the next are touched.
    `SlotOpener` opens the others. If the driver refuses to register the first ones, it
    is asked for pinned memory of its own, all of it at once; if that fails too, the
    memory is used unpinned.

    Args:
        num_slots: Number of slots.
        slot_bytes: Bytes of one slot on this rank.
        pin: Register the memory with the GPU driver.
        device: The GPU to place the memory near; None for the current one. Ignored
            without `pin`.
        threads: Threads that touch and register; None for this GPU's share of the CPUs.
        piece_bytes: Bytes that a thread prepares at a time, rounded to whole slots; at
            most 64 GiB.
        huge_pages: Ask for huge pages. Ignored with `shared`.
        progress_s: Seconds between log lines while memory is prepared.
        shared: Use this memory, which other processes map too.
        nodes: For the rank that touches `shared`: NUMA nodes of the GPUs that share it.
            None for a rank that joins later and finds the pages touched.
        first_bytes: Bytes of slots that the constructor opens at least, the first ones;
            None for all.
        parts: Where the slots lie in parts; None for one after the other.

    Raises:
        MemoryError: The machine does not have that much memory.
        NotShared: The driver refused to register shared memory.

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
        progress_s: float = 5.0,
        shared: MappedMemory | None = None,
        nodes: Set[int] | None = None,
        first_bytes: int | None = None,
        parts: Parts | None = None,
    ) -> None:
        started = time.perf_counter()
        if pin and (device is None or device.index is None):
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device if pin else None
        self._registered: list[int] = []
        # A later engine of this process may register the same address again.
        weakref.finalize(self, _unregister, self._registered)
        self._huge_pages = huge_pages
        self._progress_s = progress_s
        self._shared = shared
        self._joins = shared is not None and nodes is None
        self._nodes = nodes or set()
        self._node = gpu_node(self._device) if self._device else None
        cpus = usable_cpus(self._node)
        self._cpus = cpus or usable_cpus(None)
        self._threads = threads or self._share_of(self._cpus)
        # The rank that touches shared pages also places them.
        self._is_placed = bool(cpus) or self._joins
        num_bytes = num_slots * slot_bytes
        self._first_bytes = num_bytes if first_bytes is None else first_bytes
        self._parts = parts or Parts(num_slots, num_slots)
        # Bytes of each piece that is open, one after the other, and where they end.
        self._open: list[int] = []
        self._open_bytes = 0
        try:
            memory = self._allocate((num_slots, slot_bytes, piece_bytes))
        except OSError as e:
            raise MemoryError(
                f"--kv-offloading-size: allocating {num_bytes} bytes of "
                "host memory on this rank failed. Lower the size."
            ) from e
        if not self._is_placed:
            logger.warning(
                "KV tier: host memory could not be placed on NUMA node %d of the GPU, "
                "and copies may be slower: this process may use none of the node's "
                "CPUs, and the system forbids mbind. Allow some of these CPUs, or add "
                "CAP_SYS_NICE.",
                self._node,
            )
        self.slots = memory.view(num_slots, slot_bytes)
        """`[num_slots, slot_bytes]`, uint8."""
        logger.info(
            "KV tier: %d host slots of %d bytes (%.2f GiB, %s) on this rank in %.1f "
            "s%s.",
            num_slots,
            slot_bytes,
            num_bytes / GiB,
            ("pinned" if self.pinned else "not pinned")
            + (", shared" if shared is not None else ""),
            time.perf_counter() - started,
            f"; {self.num_open} are open" if self.num_open < num_slots else "",
        )

    pinned = False
    """Whether the GPU driver has pinned the memory."""

    @property
    def num_open(self) -> int:
        """Number of slots that may be used, the first ones."""
        num_slots, num_bytes = self.slots.shape
        return self._open_bytes // num_bytes if num_bytes else num_slots

    def _allocate(self, size: tuple[int, int, int]) -> torch.Tensor:
        """Allocate the memory of all slots, pinned if possible.

        Memory that the driver refused is released before other memory is allocated:
        there may not be enough for both.

        Args:
            size: Number of slots, bytes of a slot, bytes of a piece.

        """
        num_bytes = size[0] * size[1]
        if self._device is None:
            return self._touched(size, register=False)
        try:
            memory = self._touched(size, register=True)
            self.pinned = True
            return memory
        except Refused as e:
            error, offset = e.args
        if self._shared is not None:
            raise NotShared(
                f"the GPU driver refused to register memory that is shared (error "
                f"{error}, at {offset} of {num_bytes} bytes)"
            )
        try:
            with ThreadPoolExecutor(1, "kv-tier-start", self._begin) as pool:
                memory = pool.submit(allocate_pinned, num_bytes).result()
            self.pinned = True
        except OSError as e:
            reason = str(e)
        if self.pinned:
            # What the driver has made can only be open as a whole.
            self._open_bytes = num_bytes
            logger.info(
                "KV tier: the driver refused to register host memory (error %d, at %d "
                "of %d bytes), as it does in guests of confidential computing. It "
                "allocated pinned memory itself.",
                error,
                offset,
                num_bytes,
            )
            return memory
        logger.warning(
            "KV tier: the driver refused to pin host memory (error %d, at "
            "%d of %d bytes), and to allocate pinned memory itself (%s). It is used "
            "unpinned: copies run at a fraction of the PCIe rate and stall the step "
            "they belong to. Raise the memlock limit (ulimit -l unlimited; "
            "--ulimit memlock=-1 for containers) or lower --kv-offloading-size.",
            error,
            offset,
            num_bytes,
            reason,
        )
        return self._touched(size, register=False)

    def _share_of(self, cpus: set[int]) -> int:
        # Ranks on the other GPUs start at the same time.
        gpus = torch.cuda.device_count() if self._device else 1
        return min(max(len(cpus) // max(gpus, 1), 1), _MAX_THREADS)

    def _begin(self) -> None:
        """Start a thread that prepares memory: move it to the GPU's NUMA node."""
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, self._cpus)
        if self._device:
            # Without this, the thread's first call would create a context on GPU 0.
            torch.cuda.set_device(self._device)

    def _touched(self, size: tuple[int, int, int], register: bool) -> torch.Tensor:
        """Memory with all its pages touched, and registered if `register`.

        Pages come from the GPU's NUMA node both by memory policy and because threads
        touch them from there: a container may forbid either.

        Raises:
            Refused: The driver did not register all of it. Nothing stays registered.
            OSError: There is not enough memory.

        """
        if not size[1]:
            # A rank without KV memory.
            self._is_placed = True
            return torch.empty(0, dtype=torch.uint8)
        if self._shared is not None:
            memory = self._shared.bytes
        else:
            memory = anonymous(size[0] * size[1], self._huge_pages)
        address = memory.data_ptr()
        if not self._joins and self._place(address, memory.numel()):
            self._is_placed = True
        try:
            num_slots, stride = self._parts
            pieces = [
                (start * size[1] + offset, num_bytes)
                for start in range(0, size[0], stride)
                for offset, num_bytes in _pieces(num_slots, *size[1:])
            ]
            first = [piece for piece in pieces if piece[0] < self._first_bytes]
            self._prepare(address, first, register)
        except BaseException:
            # The traceback would keep the memory alive.
            del memory
            raise
        return memory

    def _place(self, address: int, num_bytes: int) -> bool:
        """Set the NUMA policy of the pages. False if the system refuses."""
        if len(self._nodes) > 1:
            # Memory on one node alone would serve the links of all GPUs.
            return spread(address, num_bytes, self._nodes)
        node = self._node
        return node is not None and prefer_node(address, num_bytes, node)

    def _prepare(
        self, address: int, pieces: Sequence[tuple[int, int]], register: bool
    ) -> None:
        """Touch and register all pieces, or register none and raise."""
        is_refused = threading.Event()

        def prepare(piece: tuple[int, int]) -> int:
            offset, size = piece
            # After a refusal, more touching would delay the start and take memory that
            # is needed elsewhere.
            if not is_refused.is_set():
                try:
                    self._prepare_piece(address, offset, size, register)
                except Refused:
                    is_refused.set()
                    raise
            return size

        ready, logged = 0, time.perf_counter()
        total = sum(size for _, size in pieces)
        try:
            with ThreadPoolExecutor(
                self._threads, "kv-tier-start", self._begin
            ) as pool:
                # The first error cancels the pieces that no thread has begun.
                for size in pool.map(prepare, pieces):
                    ready += size
                    if time.perf_counter() - logged >= self._progress_s:
                        logged = time.perf_counter()
                        logger.info(
                            "KV tier: %.1f of %.1f GiB of host memory ready.",
                            ready / GiB,
                            total / GiB,
                        )
        except BaseException:
            _unregister(self._registered)
            raise
        self._open = [size for _, size in pieces]
        self._open_bytes = sum(pieces[-1])

    def _prepare_piece(
        self, address: int, offset: int, size: int, register: bool
    ) -> None:
        # Another rank may already use the pages that it touched, and `touch` clears
        # them on older kernels.
        take = map_touched if self._joins else touch
        take(address + offset, size)
        if register and (error := self._register(address + offset, size)):
            raise Refused(error, offset)

    def begin_thread(self) -> None:
        """Prepare the calling thread for `open_next`."""
        self._begin()

    def open_next(self, piece_bytes: int) -> None:
        """Open the next piece of slots that are not open.

        Args:
            piece_bytes: As for the constructor.

        Raises:
            Refused: The driver did not register the piece.
            OSError: The machine has no memory for it.

        """
        num_bytes = self.slots.shape[1]
        num_slots, stride = self._parts
        number, first = divmod(self.num_open, stride)
        if first == num_slots:
            number, first = number + 1, 0
        _, size = _pieces(num_slots - first, num_bytes, piece_bytes)[0]
        address, offset = self.slots.data_ptr(), (number * stride + first) * num_bytes
        self._prepare_piece(address, offset, size, self._device is not None)
        self._open.append(size)
        self._open_bytes = offset + size

    def close_last(self, num_slots: int) -> bool:
        """Close the last piece, unless it has one of the first `num_slots` slots.

        Its memory goes back to the system. No copy may use it.

        Returns:
            Whether it was closed.

        """
        num_bytes = self.slots.shape[1]
        size = self._open[-1] if self._open else 0
        start = self._open_bytes - size
        if not size or start < num_slots * num_bytes:
            return False
        self._open.pop()
        self._open_bytes = start
        address = self.slots.data_ptr() + start
        if address in self._registered:
            self._registered.remove(address)
            torch.cuda.cudart().cudaHostUnregister(address)
        error = discard_range(address, size, is_file=self._shared is not None)
        if error:
            logger.warning_once(
                "KV tier: host memory could not be given back (%s). It stays with "
                "this rank, without content.",
                os.strerror(error),
            )
        return True

    def _register(self, address: int, size: int) -> int:
        """Register memory. Returns the driver's error code, 0 for success."""
        error = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
        # The error stays the last one of this thread, where a later check would find
        # it. The thread ends soon.
        if not error:
            self._registered.append(address)
        return error


def shared_buffer(
    memory: SharedMemory,
    num_slots: int,
    device: torch.device,
    nodes: Set[int] | None,
    first_bytes: int | None = None,
) -> HostBuffer:
    """The slots of a rank in memory that other processes map too.

    Args:
        memory: The shared memory. Its file is closed on errors.
        num_slots: Number of slots.
        device: Device of the rank.
        nodes: As in `HostBuffer`.
        first_bytes: As in `HostBuffer`.

    Raises:
        MemoryError: The machine does not have that much memory.
        NotShared: The driver refused to register shared memory.

    """
    on_gpu = device.type == "cuda"
    try:
        return HostBuffer(
            num_slots,
            memory.bytes.numel() // num_slots,
            pin=on_gpu,
            device=device if on_gpu else None,
            shared=memory,
            nodes=nodes,
            first_bytes=first_bytes,
        )
    except BaseException:
        memory.close()
        raise


def _pieces(
    num_slots: int, slot_bytes: int, piece_bytes: int
) -> Sequence[tuple[int, int]]:
    """(offset, bytes) of the pieces that are touched and registered at once.

    Pieces are whole slots, since a copy must not cross from one registration to the
    next. They are whole pages too, unless the size of a slot would make such a piece
    too large.
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
