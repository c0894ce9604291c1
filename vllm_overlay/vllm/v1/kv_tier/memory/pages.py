# SPDX-License-Identifier: Apache-2.0
"""Anonymous memory of an exact size, touched without holding the GIL."""

import contextlib
import ctypes
import errno
import mmap
import os

import torch

PAGE_BYTES = mmap.PAGESIZE
HUGE_PAGE_BYTES = 2 << 20

# Linux 5.14 or newer. Python has no name for it.
MADV_POPULATE_WRITE = 23

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
