# SPDX-License-Identifier: Apache-2.0
"""The host slots of a rank in the memory of a pool, which all engines of it map."""

import contextlib
import mmap
import socket
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.logger import init_logger
from vllm.v1.kv_tier.copying.engine import slot_bytes
from vllm.v1.kv_tier.keeper.client import Mapped, Place, join, map_early
from vllm.v1.kv_tier.memory.buffer import HostBuffer, allow_during_capture
from vllm.v1.kv_tier.memory.regions import build_regions
from vllm.v1.kv_tier.worker.slots import EMPTY, FILLED

logger = init_logger(__name__)


@dataclass(frozen=True)
class PoolMemory:
    """Memory of all partitions."""

    bytes: torch.Tensor
    """`[num_bytes]`, uint8."""


@dataclass(frozen=True)
class PooledSlots:
    """Slots of all engines of the pool, as a rank of one of them sees them."""

    buffer: HostBuffer
    states: NDArray[np.uint8]
    """As of `RankSlots`. What others have stored counts as filled: their schedulers let
    find only what is complete."""
    empty: tuple[int, ...]
    """Slots that copy engines may be tested on."""
    connection: socket.socket
    """To the keeper, which gives the partition to no other engine before the process
    of the rank has ended."""


class EarlyPool:
    """Maps and registers the memory of a pool in a thread, while the engine warms up.

    Without it the start would wait for the driver, which registers some GiB a second.

    Args:
        path: Of the keeper's socket.
        slot_bytes: Bytes of a block.
        device: Device of the rank, a GPU.

    """

    def __init__(self, path: str, slot_bytes: int, device: torch.device) -> None:
        self._wanted = path, slot_bytes
        self._made: Future[tuple[HostBuffer, tuple[int, int]]] = Future()
        threading.Thread(
            target=self._run, args=(device,), name="kv-tier-pool", daemon=True
        ).start()

    def _run(self, device: torch.device) -> None:
        path, slot_bytes = self._wanted
        try:
            allow_during_capture()
            mapped = map_early(path)
            self._made.set_result((_buffer(mapped, slot_bytes, device), mapped.file))
        except BaseException as e:
            self._made.set_exception(e)

    def take(self, place: Place, file: tuple[int, int]) -> HostBuffer | None:
        """Wait for the memory. None if it is other memory than this, or failed."""
        try:
            buffer, made_of = self._made.result()
        except Exception as e:
            # What joins the pool now says it better, if it fails too.
            logger.info("KV tier: the pool was not registered early (%s).", e)
            return None
        is_same = (place.path, place.slot_bytes, file) == (*self._wanted, made_of)
        return buffer if is_same else None


def begin_early(wrapper: Any, path: str, num_blocks: int) -> None:
    """Begin with the memory of a pool on the only rank of an engine.

    Args:
        wrapper: A `WorkerWrapperBase` that has its KV caches; gets `kv_pool`.
        path: Of the keeper's socket.
        num_blocks: Device blocks.

    """
    runner = wrapper.worker.model_runner
    regions = build_regions(runner.kv_caches, num_blocks)
    if regions and wrapper.vllm_config.parallel_config.world_size == 1:
        wrapper.kv_pool = EarlyPool(path, slot_bytes(regions), runner.device)


def take_early(wrapper: Any) -> EarlyPool | None:
    """What `begin_early` has begun with, if anything."""
    early: EarlyPool | None = vars(wrapper).pop("kv_pool", None)
    return early


def _buffer(mapped: Mapped, slot_bytes: int, device: torch.device) -> HostBuffer:
    memory = mapped.memory
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    num_slots = len(memory) // slot_bytes
    num_bytes = num_slots * slot_bytes
    on_gpu = device.type == "cuda"
    return HostBuffer(
        num_slots,
        slot_bytes,
        pin=on_gpu,
        device=device if on_gpu else None,
        shared=PoolMemory(torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]),
    )


def join_pool(
    place: Place, device: torch.device, early: EarlyPool | None = None
) -> PooledSlots:
    """Map the memory of the pool on a rank, and register it with the GPU driver.

    Args:
        place: Where it is.
        device: Device of the rank.
        early: Has begun with it, if anything.

    Raises:
        PoolRefused: The keeper cannot be reached.
        NotShared: The driver refused to register it.

    """
    connection, mapped = join(place)
    buffer = early.take(place, mapped.file) if early is not None else None
    if buffer is None:
        buffer = _buffer(mapped, place.slot_bytes, device)
    states = np.full(len(buffer.slots), FILLED, np.uint8)
    states[list(place.empty)] = EMPTY
    return PooledSlots(buffer, states, place.empty, connection)
