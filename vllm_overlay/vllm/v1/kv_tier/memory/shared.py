# SPDX-License-Identifier: Apache-2.0
"""Host memory that several processes of one machine map.

It has no name in any file system: its creator keeps an open file, which the others open
through `/proc`. So it is freed with the last process that maps it, however that ends,
and the size of `/dev/shm` does not matter.
"""

import contextlib
import fcntl
import mmap
import os
import platform
import secrets
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from vllm.v1.kv_tier.memory.pages import HUGE_PAGE_BYTES, PAGE_BYTES

DIGEST_BYTES = 8
"""Bytes of a slot's checksum."""

_LINE = 64
# Numbers at the start of the first line that identify the memory.
_NUM_SECRETS = 2


class NotShared(RuntimeError):
    """Processes cannot share memory here. The message is the reason."""


class Address(NamedTuple):
    """Where another process of this machine finds the memory."""

    pid: int
    fd: int
    secret: tuple[int, ...]
    """Also written in the memory: a process in another container may have the same
    id."""


class SharedMemory:
    """Memory for slots, a board of numbers, and a checksum and state of each slot.

    The slots come first in the file, so that they start at a huge page. After them come
    a line that identifies the memory, a line of numbers for each rank, the checksums,
    and the states.

    Args:
        fd: The open file. Owned by this object.
        num_slots: Number of slots.
        slot_bytes: Bytes of one slot.
        num_ranks: Number of ranks that share it.

    """

    def __init__(
        self, fd: int, num_slots: int, slot_bytes: int, num_ranks: int
    ) -> None:
        self._fd = fd
        num_bytes = num_slots * slot_bytes
        start, size = _sizes(num_slots, slot_bytes, num_ranks)
        self._board_at = start + _LINE
        slots = mmap.mmap(fd, start, mmap.MAP_SHARED)
        told = mmap.mmap(fd, size - start, mmap.MAP_SHARED, offset=start)
        for mapping in (slots, told):
            # For the same reasons as in `pages.anonymous`.
            mapping.madvise(mmap.MADV_DONTFORK)
            mapping.madvise(mmap.MADV_DONTDUMP)
        with contextlib.suppress(OSError):
            slots.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(slots, dtype=torch.uint8, count=num_bytes)
        """`[num_slots * slot_bytes]`, uint8."""
        numbers = np.frombuffer(told, np.int64, (1 + num_ranks) * _LINE // 8)
        lines = numbers.reshape(1 + num_ranks, _LINE // 8)
        self._secret = lines[0, :_NUM_SECRETS]
        self.board = lines[1:]
        """`[num_ranks, 8]`, int64: one line per rank, which only that rank writes.
        Whoever reads a number also sees everything that its rank wrote before it."""
        sums = np.frombuffer(told, np.uint8, offset=lines.nbytes)
        self.sums = sums[: num_slots * DIGEST_BYTES].reshape(num_slots, DIGEST_BYTES)
        """`[num_slots, 8]`, uint8: checksums of the slots."""
        self.states = sums[num_slots * DIGEST_BYTES :][:num_slots]
        """`[num_slots]`, uint8: states of the slots, see `RankSlots`."""

    @classmethod
    def create(cls, num_slots: int, slot_bytes: int, num_ranks: int) -> "SharedMemory":
        """Create zeroed memory without pages.

        Raises:
            NotShared: This machine does not support it.

        """
        if num_ranks > 1 and platform.machine() != "x86_64":
            # Python has no memory barriers: others might see a number before the bytes.
            raise NotShared(f"{platform.machine()} may reorder what ranks write")
        try:
            fd = os.memfd_create("kv-tier", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as e:
            raise NotShared(f"memfd_create failed ({e})") from e
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, _sizes(num_slots, slot_bytes, num_ranks)[1])
            # Prevents that a process truncates the file under the others.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            memory = cls(fd, num_slots, slot_bytes, num_ranks)
        except OSError as e:
            os.close(fd)
            raise NotShared(f"the memory could not be made ({e})") from e
        memory._secret[:] = [secrets.randbits(63) for _ in range(_NUM_SECRETS)]
        return memory

    @classmethod
    def join(
        cls, address: Address, num_slots: int, slot_bytes: int, num_ranks: int
    ) -> "SharedMemory":
        """Map memory that another process has created.

        Raises:
            NotShared: It cannot be reached.

        """
        path = f"/proc/{address.pid}/fd/{address.fd}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as e:
            raise NotShared(f"{path} cannot be opened ({e.strerror})") from e
        try:
            if os.fstat(fd).st_size != _sizes(num_slots, slot_bytes, num_ranks)[1]:
                raise NotShared(f"{path} has an unexpected size")
            memory = cls(fd, num_slots, slot_bytes, num_ranks)
            if memory._secret.tolist() != list(address.secret):
                raise NotShared(f"{path} is other memory")
        except NotShared:
            os.close(fd)
            raise
        except (OSError, ValueError) as e:
            os.close(fd)
            raise NotShared(f"{path} cannot be mapped ({e})") from e
        return memory

    @property
    def fd(self) -> int:
        """The open file, until `close`."""
        return self._fd

    @property
    def board_at(self) -> int:
        """Offset of the board in the file."""
        return self._board_at

    @property
    def address(self) -> Address:
        """Address for `join`, until `close`."""
        return Address(os.getpid(), self._fd, tuple(self._secret.tolist()))

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold a lock that only one process can hold at a time; not after `close`."""
        # The kernel releases it when a process ends.
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file once all processes have joined. The memory stays mapped."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _sizes(num_slots: int, slot_bytes: int, num_ranks: int) -> tuple[int, int]:
    """(bytes of the slots in whole huge pages, bytes of the file)."""
    start = -(-num_slots * slot_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    told = (1 + num_ranks) * _LINE + num_slots * (DIGEST_BYTES + 1)
    return start, start + -(-told // PAGE_BYTES) * PAGE_BYTES
