# SPDX-License-Identifier: Apache-2.0
"""The host memory of one rank: one exact, anonymous allocation."""

import time
import weakref
from collections.abc import Iterator

import torch

from vllm.logger import init_logger

logger = init_logger(__name__)

# One registration of 512 GiB or more fails in the driver (upstream #51080).
_REGISTER_BYTES = 64 << 30


class HostBuffer:
    """Memory for the slots of one rank.

    Slots lie one after the other, and all regions of a slot together, so that a
    slot is one piece for whatever tier comes below.

    Args:
        num_slots: Number of slots.
        slot_bytes: Bytes of one slot on this rank.
        pin: Register the memory with the GPU driver.

    Raises:
        MemoryError: The machine cannot give that much memory.

    """

    def __init__(self, num_slots: int, slot_bytes: int, pin: bool) -> None:
        started = time.perf_counter()
        try:
            # Not pin_memory=True, which rounds up to 1.9 times (upstream #53042).
            memory = torch.empty(num_slots * slot_bytes, dtype=torch.uint8)
        except RuntimeError as e:
            raise MemoryError(
                f"--kv-offloading-size: allocating {num_slots * slot_bytes} bytes of "
                "host memory on this rank failed. Lower the size."
            ) from e
        # Touched now: a request must not pay for page faults.
        memory.zero_()
        self.slots = memory.view(num_slots, slot_bytes)
        """`[num_slots, slot_bytes]`, uint8."""
        self.pinned = pin and self._register(memory)
        logger.info(
            "KV tier: %d host slots of %d bytes (%.2f GiB, %s) on this rank in %.1f s.",
            num_slots,
            slot_bytes,
            memory.numel() / 2**30,
            "pinned" if self.pinned else "not pinned",
            time.perf_counter() - started,
        )

    def _register(self, memory: torch.Tensor) -> bool:
        cudart = torch.cuda.cudart()
        registered: list[int] = []
        # The address may be registered again by a later engine of this process.
        weakref.finalize(self, _unregister, registered)
        for pointer, size in _pieces(memory):
            error = cudart.cudaHostRegister(pointer, size, 0)
            if int(error) != 0:
                _unregister(registered)
                logger.warning(
                    "KV tier: the driver refused to pin host memory (error %d, at "
                    "%d of %d bytes). It is used unpinned: copies run at a fraction "
                    "of the PCIe rate and stall the step they belong to. Raise the "
                    "memlock limit (ulimit -l unlimited; --ulimit memlock=-1 for "
                    "containers) or lower --kv-offloading-size.",
                    int(error),
                    pointer - memory.data_ptr(),
                    memory.numel(),
                )
                return False
            registered.append(pointer)
        return True


def _pieces(memory: torch.Tensor) -> Iterator[tuple[int, int]]:
    """(address, bytes) of the parts to register."""
    for start in range(0, memory.numel(), _REGISTER_BYTES):
        size = min(_REGISTER_BYTES, memory.numel() - start)
        yield memory.data_ptr() + start, size


def _unregister(pointers: list[int]) -> None:
    while pointers:
        torch.cuda.cudart().cudaHostUnregister(pointers.pop())
