# SPDX-License-Identifier: Apache-2.0
"""Host memory that several ranks of one machine map, and what they tell others in it.

It has no name in any file system: the rank that made it keeps an open file, which the
others open by way of `/proc`. So it goes with the last process that maps it, whatever
ends them, and the size of `/dev/shm` is of no meaning.
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
"""Of the checksum of a slot."""

_LINE = 64
# Numbers of the first line: what those that open the file know it by.
_NUM_SECRETS = 2


class NotShared(RuntimeError):
    """Ranks cannot share memory here. The message is the reason."""


class Address(NamedTuple):
    """Where another process of this machine finds the memory."""

    pid: int
    fd: int
    secret: tuple[int, ...]
    """Written in the memory: a process of another container may have the same id."""


class SharedMemory:
    """Memory for slots, a board of numbers, and a checksum and a state for each slot.

    The file has the slots first, so that they start at a huge page; behind them a line
    that tells which memory it is, a line of numbers for each rank, the checksums, and
    the states.

    Args:
        fd: The open file, which it closes.
        num_slots: Number of slots.
        slot_bytes: Bytes of one slot.
        num_ranks: How many share it.

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
            # As of private memory: see `pages.anonymous`.
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
        """`[num_ranks, 8]`, int64: a line for each rank, which nobody else writes to.
        What a rank wrote before a number is seen by whoever has seen the number."""
        sums = np.frombuffer(told, np.uint8, offset=lines.nbytes)
        self.sums = sums[: num_slots * DIGEST_BYTES].reshape(num_slots, DIGEST_BYTES)
        """`[num_slots, 8]`, uint8: checksums of what the slots hold."""
        self.states = sums[num_slots * DIGEST_BYTES :][:num_slots]
        """`[num_slots]`, uint8: what they hold, see `RankSlots`."""

    @classmethod
    def create(cls, num_slots: int, slot_bytes: int, num_ranks: int) -> "SharedMemory":
        """New memory, full of zeros, that no page backs yet.

        Raises:
            NotShared: This machine cannot.

        """
        if num_ranks > 1 and platform.machine() != "x86_64":
            # Python has no barriers: others might see a number before the bytes.
            raise NotShared(f"{platform.machine()} may reorder what ranks write")
        try:
            fd = os.memfd_create("kv-tier", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as e:
            raise NotShared(f"memfd_create failed ({e})") from e
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, _sizes(num_slots, slot_bytes, num_ranks)[1])
            # Nobody can take pages away from under the others.
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
        """The memory that another rank has created.

        Raises:
            NotShared: It is out of reach.

        """
        path = f"/proc/{address.pid}/fd/{address.fd}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as e:
            raise NotShared(f"{path} cannot be opened ({e.strerror})") from e
        try:
            if os.fstat(fd).st_size != _sizes(num_slots, slot_bytes, num_ranks)[1]:
                raise NotShared(f"{path} is something else")
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
        """Where the board lies in the file."""
        return self._board_at

    @property
    def address(self) -> Address:
        """For `join`, until `close`."""
        return Address(os.getpid(), self._fd, tuple(self._secret.tolist()))

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """None of the others is in such a block meanwhile, until `close`."""
        # The kernel lets go of it when a process ends.
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """All have joined: the file is of no use any more, the memory stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _sizes(num_slots: int, slot_bytes: int, num_ranks: int) -> tuple[int, int]:
    """Bytes of the slots, in whole huge pages, and of the whole file."""
    start = -(-num_slots * slot_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    told = (1 + num_ranks) * _LINE + num_slots * (DIGEST_BYTES + 1)
    return start, start + -(-told // PAGE_BYTES) * PAGE_BYTES
