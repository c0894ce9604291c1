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

# Linux 5.14 and newer; Python does not name it.
MADV_POPULATE_WRITE = 23

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def anonymous(num_bytes: int, huge_pages: bool = True) -> torch.Tensor:
    """Private memory that no page backs yet. It goes with its last view.

    Args:
        num_bytes: Size.
        huge_pages: Ask for huge pages: fewer faults, and the GPU driver has fewer
            runs of memory to map. Kernels without them give small ones.

    Returns:
        `[num_bytes]`, uint8, starting at a huge page.

    Raises:
        OSError: The machine cannot give that much.

    """
    # Only addresses are taken for the alignment: nobody touches what lies outside.
    mapping = mmap.mmap(
        -1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    # A fork would copy pinned memory, all of it and at once.
    mapping.madvise(mmap.MADV_DONTFORK)
    # A core dump would take minutes, and show prompts to whoever gets it.
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
        advice: What makes the kernel do so, if it knows it.

    Raises:
        OSError: The machine has no more of them.

    """
    if not _populate(address, num_bytes, advice):
        # An older kernel, or a start within a page.
        ctypes.memset(address, 0, num_bytes)


def map_touched(address: int, num_bytes: int) -> None:
    """Let this process find pages that another one has touched, without a fault for
    each; those of older kernels wait for the faults.

    Args:
        address: Start.
        num_bytes: Size.

    Raises:
        OSError: The machine has no memory for it.

    """
    _populate(address, num_bytes, MADV_POPULATE_WRITE)


def discard(address: int, num_bytes: int) -> int:
    """Give pages back to the machine. The next to touch them finds zeros.

    Args:
        address: Start, of a page.
        num_bytes: Size, of whole pages.

    Returns:
        0, or the error for which they stay.

    """
    if _madvise(address, num_bytes, mmap.MADV_DONTNEED) == 0:
        return 0
    return ctypes.get_errno()


def _populate(address: int, num_bytes: int, advice: int) -> bool:
    """Whether the kernel knows how.

    Raises:
        OSError: It does, and cannot.

    """
    if _madvise(address, num_bytes, advice) == 0:
        return True
    error = ctypes.get_errno()
    if error != errno.EINVAL:
        raise OSError(error, os.strerror(error))
    return False
