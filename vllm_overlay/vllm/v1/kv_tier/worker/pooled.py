# SPDX-License-Identifier: Apache-2.0
"""The host slots of a rank in the memory of a pool, which all engines of it map."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.v1.kv_tier.keeper.client import Place, PoolRefused, join
from vllm.v1.kv_tier.memory.buffer import HostBuffer, Parts
from vllm.v1.kv_tier.memory.opener import FIRST_BYTES
from vllm.v1.kv_tier.memory.shared import NotShared
from vllm.v1.kv_tier.worker.slots import EMPTY, FILLED


@dataclass(frozen=True)
class PoolMemory:
    """Memory of all partitions."""

    bytes: torch.Tensor
    """`[num_bytes]`, uint8."""


class RingChecksums:
    """Checksums of slots of all engines, in memory that these share.

    Args:
        of_partitions: `[num_slots, 8]` of each, in the order of a rank's memory.
        stride: Slots from the first one of a partition to that of the next.

    """

    def __init__(self, of_partitions: Sequence[NDArray[np.uint8]], stride: int) -> None:
        self._of_partitions, self._stride = of_partitions, stride

    def __getitem__(self, slot: int) -> NDArray[np.uint8]:
        partition, number = divmod(slot, self._stride)
        return self._of_partitions[partition][number]

    def __setitem__(self, slot: int, checksum: NDArray[np.uint8]) -> None:
        self[slot][:] = checksum


@dataclass(frozen=True)
class PooledSlots:
    """Slots of all engines of the pool, as a rank of one of them numbers them: those of
    its own engine first."""

    buffer: HostBuffer
    states: NDArray[np.uint8]
    """As of `RankSlots`. What others have stored counts as filled: their schedulers let
    find only what is complete."""
    num_own: int
    """The first ones are of its own engine, so many."""
    checksums: RingChecksums
    empty: tuple[int, ...]
    """Slots that copy engines may be tested on."""
    connection: socket.socket
    """To the keeper, which gives the partition to no other engine before the process
    of the rank has ended."""


def join_pool(place: Place, rank: int, device: torch.device) -> PooledSlots:
    """Map a rank's parts of the pool, and open the first slots: register them with the
    GPU driver.

    Args:
        place: Where the engine has them.
        rank: Number of the rank.
        device: Device of the rank.

    Raises:
        PoolRefused: The keeper cannot be reached, or the driver refused to register
            the memory. The message has the setting and the fix.

    """
    connection, memory, checksums = join(place, rank)
    slot_bytes = place.rank_bytes[rank]
    num_slots = len(memory) // slot_bytes
    on_gpu = device.type == "cuda"
    try:
        buffer = HostBuffer(
            num_slots,
            slot_bytes,
            pin=on_gpu,
            device=device if on_gpu else None,
            shared=PoolMemory(torch.from_numpy(memory)),
            first_bytes=FIRST_BYTES,
            parts=Parts(place.num_slots, place.stride),
        )
    except NotShared as e:
        raise PoolRefused(
            f"--kv-offloading-config: pool: {e}. Let the engine lock memory (ulimit -l "
            "unlimited), or remove pool."
        ) from e
    states = np.full(num_slots, FILLED, np.uint8)
    states[list(place.empty)] = EMPTY
    return PooledSlots(
        buffer,
        states,
        place.num_slots,
        RingChecksums(checksums, place.stride),
        place.empty,
        connection,
    )
