# SPDX-License-Identifier: Apache-2.0
"""Memory of an exact size in pages: touched without holding the GIL, and given back,
that of device blocks on a CPU too.
"""

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Sequence

import torch

from vllm.logger import init_logger
from vllm.v1.kv_tier.memory.regions import Region

logger = init_logger(__name__)

PAGE_BYTES = mmap.PAGESIZE
HUGE_PAGE_BYTES = 2 << 20

# Linux 5.14 or newer. Python has no name for it.
MADV_POPULATE_WRITE = 23
MADV_REMOVE = 9

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def anonymous(num_bytes: int, huge_pages: bool = True) -> torch.Tensor:
    """Allocate private memory without pages. It is freed with its last view.

    Args:
        num_bytes: Size.
        huge_pages: Ask for huge pages: fewer faults, and fewer runs of memory for the
            GPU driver to map. Kernels without huge pages use small ones.

    Returns:
        `[num_bytes]`, uint8, aligned to a huge page.

    Raises:
        OSError: The machine does not have that much.

    """
    # The alignment takes addresses only; what lies outside is never touched.
    mapping = mmap.mmap(
        -1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    # A fork would copy all pinned memory at once.
    mapping.madvise(mmap.MADV_DONTFORK)
    # A core dump would take minutes and contain prompts.
    mapping.madvise(mmap.MADV_DONTDUMP)
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    start = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    return torch.frombuffer(
        mapping, dtype=torch.uint8, count=num_bytes, offset=-start % HUGE_PAGE_BYTES
    )


def touch(address: int, num_bytes: int, advice: int = MADV_POPULATE_WRITE) -> None:
    """Back never-written memory with zeroed pages.

    Args:
        address: Start.
        num_bytes: Size.
        advice: The `madvise` value to use, if the kernel has it.

    Raises:
        OSError: The machine has no more memory.

    """
    if not _populate(address, num_bytes, advice):
        # An older kernel, or a start within a page.
        ctypes.memset(address, 0, num_bytes)


def map_touched(address: int, num_bytes: int) -> None:
    """Map pages that another process has touched, to save a fault for each.

    Does nothing on older kernels, where pages are mapped by faults.

    Args:
        address: Start.
        num_bytes: Size.

    Raises:
        OSError: The machine has no memory for it.

    """
    _populate(address, num_bytes, MADV_POPULATE_WRITE)


def discard(address: int, num_bytes: int) -> int:
    """Give pages back to the system. The next access finds zeros.

    Args:
        address: Start, at a page.
        num_bytes: Size, in whole pages.

    Returns:
        0, or the error number if the pages stay.

    """
    if _madvise(address, num_bytes, mmap.MADV_DONTNEED) == 0:
        return 0
    return ctypes.get_errno()


def give_back(address: int, num_bytes: int, is_file: bool) -> int:
    """As `discard`, for the whole pages in a range.

    Args:
        address: Start.
        num_bytes: Size.
        is_file: The memory is that of a file, which keeps its pages otherwise.

    """
    start = -(-address // PAGE_BYTES) * PAGE_BYTES
    size = (address + num_bytes) // PAGE_BYTES * PAGE_BYTES - start
    if size <= 0:
        return 0
    if _madvise(start, size, MADV_REMOVE if is_file else mmap.MADV_DONTNEED) == 0:
        return 0
    return ctypes.get_errno()


def _populate(address: int, num_bytes: int, advice: int) -> bool:
    """Populate pages. Returns False if the kernel lacks the call.

    Raises:
        OSError: The kernel has it, but it failed.

    """
    if _madvise(address, num_bytes, advice) == 0:
        return True
    error = ctypes.get_errno()
    if error != errno.EINVAL:
        raise OSError(error, os.strerror(error))
    return False


def blocks_per_page(regions: Sequence[Region], num_blocks: int) -> int:
    """How many blocks to give back together.

    Enough for a whole huge page in each region, but at most an eighth of all blocks. A
    huge page that two of these groups share is freed only with the second.

    Args:
        regions: KV memory of a rank; at least one.
        num_blocks: Number of device blocks.

    """
    width = min(region.block_bytes for region in regions)
    return max(1, min(-(-HUGE_PAGE_BYTES // width), num_blocks // 8))


def discard_blocks(regions: Sequence[Region], first: int, end: int) -> None:
    """Give the memory of blocks `first` to `end - 1` back to the system.

    Their content is lost. They get memory again when they are written to.

    Args:
        regions: KV memory of the rank, in host memory.
        first: First device block.
        end: Device block after the last one.

    """
    for region in regions:
        rows = region.blocks[first:end]
        address = rows.data_ptr()
        until = address + (rows.shape[0] - 1) * rows.stride(0) + rows.shape[1]
        # System pages that other blocks share stay.
        address = -(-address // PAGE_BYTES) * PAGE_BYTES
        num_bytes = until // PAGE_BYTES * PAGE_BYTES - address
        if num_bytes > 0 and (error := discard(address, num_bytes)):
            # For example because memory is locked. It works, but frees nothing.
            logger.warning_once(
                "KV tier: device memory could not be given back (%s). Take "
                "shrink_after_s out of --kv-offloading-config, which has no "
                "effect here.",
                os.strerror(error),
            )
