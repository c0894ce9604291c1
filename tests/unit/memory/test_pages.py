# SPDX-License-Identifier: Apache-2.0
"""Anonymous memory: exact, zeroed, private, given back."""

import ctypes
import gc
import os
from pathlib import Path

import pytest
import torch

from vllm.v1.kv_tier.memory.pages import HUGE_PAGE_BYTES, PAGE_BYTES, anonymous, touch

MiB = 1 << 20


def resident() -> int:
    """Bytes of this process that pages back, counted one by one."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line[:4] == "Rss:")


def num_resident(memory: torch.Tensor) -> int:
    """Bytes of a memory that pages back, whatever else the process does.

    Source: mincore(2), one byte for each page.
    """
    first = memory.data_ptr() // PAGE_BYTES * PAGE_BYTES
    num_bytes = memory.data_ptr() + memory.numel() * memory.itemsize - first
    pages = (ctypes.c_ubyte * -(-num_bytes // PAGE_BYTES))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), pages):
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in pages) * PAGE_BYTES


def mapping(address: int) -> dict[str, str]:
    """What the kernel says of the mapping at an address."""
    found: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(" ")
        if "-" in name:
            first, last = (int(part, 16) for part in name.split("-"))
            inside = first <= address < last
            if inside:
                found["path"] = value
        elif inside:
            found[name.removesuffix(":")] = value.strip()
    return found


def test_the_size_is_exact_and_a_huge_page_starts_it() -> None:
    memory = anonymous(3 * MiB + 64)
    assert memory.shape == (3 * MiB + 64,) and memory.dtype == torch.uint8
    assert memory.untyped_storage().nbytes() == 3 * MiB + 64
    assert memory.data_ptr() % HUGE_PAGE_BYTES == 0


@pytest.mark.parametrize("huge_pages", [True, False])
def test_memory_is_taken_by_touching_and_given_back(huge_pages: bool) -> None:
    # What other tests have left would be given back in between.
    gc.collect()
    before = resident()
    memory = anonymous(64 * MiB, huge_pages)
    assert num_resident(memory) < MiB
    touch(memory.data_ptr(), 64 * MiB)
    assert num_resident(memory) == 64 * MiB
    assert not memory.any()
    view = memory[5:]
    del memory
    gc.collect()
    assert num_resident(view) == 64 * MiB
    del view
    gc.collect()
    # The first sum of a process starts threads.
    assert resident() - before < 8 * MiB


def test_no_more_than_asked_is_touched() -> None:
    memory = anonymous(64 * MiB, huge_pages=False)
    touch(memory.data_ptr() + 16 * MiB, 8 * MiB)
    assert num_resident(memory[16 * MiB : 24 * MiB]) == 8 * MiB
    assert abs(num_resident(memory) - 8 * MiB) < MiB


def test_memory_is_private_has_no_name_and_is_neither_forked_nor_dumped() -> None:
    memory = anonymous(8 * MiB)
    found = mapping(memory.data_ptr())
    # Permissions, offset, device, inode and no path.
    assert found["path"].split() == ["rw-p", "00000000", "00:00", "0"]
    assert {"dc", "dd"} <= set(found["VmFlags"].split())


@pytest.mark.parametrize("huge_pages, flag", [(True, "hg"), (False, "nh")])
def test_huge_pages_are_asked_for(huge_pages: bool, flag: str) -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("a kernel without huge pages")
    memory = anonymous(8 * MiB, huge_pages)
    assert flag in mapping(memory.data_ptr())["VmFlags"].split()


def test_an_older_kernel_and_odd_starts_are_touched_by_writing() -> None:
    memory = anonymous(32 * MiB)
    touch(memory.data_ptr() + 64, 16 * MiB)
    assert num_resident(memory) >= 16 * MiB
    # No kernel knows this advice.
    touch(memory.data_ptr(), 32 * MiB, advice=9999)
    assert num_resident(memory) == 32 * MiB and not memory.any()


def test_memory_that_is_not_there_is_an_error() -> None:
    with pytest.raises(OSError):
        anonymous(1 << 60)
    # The zero page of the address space is never mapped.
    with pytest.raises(OSError, match=os.strerror(12)):
        touch(0, PAGE_BYTES)
