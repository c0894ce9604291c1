# SPDX-License-Identifier: Apache-2.0
"""How engines and their ranks get the memory of the pool from its keeper."""

import ctypes
import json
import math
import mmap
import os
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm.v1.kv_tier.keeper.partition import (
    Partition,
    Published,
    partition_bytes,
)

VERSION = 5
"""Of the messages, and of the layout of the shared memory."""

MAX_MESSAGE_BYTES = 4096
MIN_SLOT_BYTES = 4096
"""Blocks of fewer bytes take as much."""

# Copy engines are tested on empty slots: one in so many, at least one, at most 64. What
# an heir has to drop for it may be the end of a prefix.
_EMPTY_PART, _MAX_EMPTY = 100, 64

# Parts of ranks are whole huge pages where they have so many, so that the kernel maps
# them as such.
HUGE_PAGE_BYTES = 2 << 20
_MANY_HUGE_PAGES = 64
# Most of the addresses between two parts, as a part of them, for which the next one
# begins at a huge page.
_MAX_GAP = 1 / 8

# Python has no names for them.
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000

_TIMEOUT_S = 10.0
_RETRY_S = 0.1


class PoolRefused(ValueError):
    """An engine cannot use the pool. The message says what to change."""


class Geometry(NamedTuple):
    """How the memory of the pool is divided."""

    num_partitions: int
    partition_bytes: int

    @property
    def data_bytes(self) -> int:
        return self.num_partitions * self.partition_bytes

    @property
    def capacity(self) -> int:
        """Most slots of a partition."""
        return self.partition_bytes // MIN_SLOT_BYTES

    @property
    def index_bytes(self) -> int:
        return self.num_partitions * partition_bytes(self.capacity)

    def parts(self, rank_bytes: Sequence[int]) -> list[int]:
        """Bytes that each rank of an engine has of a partition, in their order.

        Args:
            rank_bytes: Bytes of a block on each rank.

        """
        shares = [self.partition_bytes * each // sum(rank_bytes) for each in rank_bytes]
        is_large = min(shares) >= _MANY_HUGE_PAGES * HUGE_PAGE_BYTES
        unit = HUGE_PAGE_BYTES if is_large else mmap.PAGESIZE
        return [share // unit * unit for share in shares]

    def num_slots(self, rank_bytes: Sequence[int]) -> int:
        """Slots of each partition. The first one begins at its first byte."""
        parts = self.parts(rank_bytes)
        return min(self.capacity, *(p // each for p, each in zip(parts, rank_bytes)))

    def stride(self, rank_bytes: Sequence[int]) -> int:
        """Slots from the first one of a partition to the first one of the next, where a
        rank maps its parts of all partitions one after the other.

        The next one begins at a page on every rank, at a huge one if that takes few
        addresses. There is nothing between the last slot of a partition and the next.
        """
        num_slots = self.num_slots(rank_bytes)
        units = [
            math.lcm(*(page // math.gcd(page, each) for each in rank_bytes))
            for page in (HUGE_PAGE_BYTES, mmap.PAGESIZE)
        ]
        huge, small = (-(-num_slots // unit) * unit for unit in units)
        return huge if huge <= (1 + _MAX_GAP) * num_slots else small


class Place(NamedTuple):
    """Where a rank finds the memory of its engine."""

    path: str
    identity: bytes
    number: int
    lease: int
    """Of the engine: no other one has the same, from any keeper."""
    rank_bytes: tuple[int, ...]
    """Bytes of a block on each rank."""
    num_slots: int
    """Of a partition."""
    stride: int
    """Slots from the first one of a partition to that of the next. The engine's own are
    the first ones."""
    empty: tuple[int, ...]
    """Own slots that hold nothing, and that no process reads."""


@dataclass(frozen=True)
class Membership:
    """An engine's part of the pool, and that of its neighbours."""

    partitions: Sequence[Partition]
    number: int
    """Its own partition, and its column of pins in the others."""
    identity: bytes
    """32 bytes that name everything that shapes the engine's KV."""
    stride: int
    """As in `Place`."""
    adopted: Published
    """What an earlier engine of this identity has left in it."""
    unread: Sequence[int]
    """Its slots that no neighbour reads."""
    empty: tuple[int, ...]
    """Those of the first ones that hold nothing, too."""

    @classmethod
    def take(
        cls,
        partitions: Sequence[Partition],
        number: int,
        identity: bytes,
        stride: int,
        num_first: int | None = None,
    ) -> "Membership":
        """Take over a partition that has no other owner.

        Args:
            partitions: All of them.
            number: Of its partition.
            identity: As above.
            stride: As above.
            num_first: Some of the first slots, so many, are to be empty; None for any.

        Raises:
            PoolRefused: Its lock stays busy, or neighbours read all that is to be
                empty.

        """
        own, until = partitions[number], time.monotonic() + _TIMEOUT_S
        first = range(min(own.num_slots, num_first or own.num_slots))
        num_empty = min(own.num_slots // _EMPTY_PART + 1, _MAX_EMPTY, len(first))
        while True:
            adopted = own.take_over(num_empty, len(first))
            unread = own.unpinned(range(own.num_slots))
            if adopted is not None and unread is not None:
                empty = {*first}.intersection(unread).difference(adopted.slots)
                if empty:
                    found = adopted, unread, tuple(sorted(empty))
                    return cls(partitions, number, identity, stride, *found)
            time.sleep(_RETRY_S)
            if time.monotonic() > until:
                raise PoolRefused(
                    "--kv-offloading-config: pool: its lock stays busy, or its slots "
                    "are read. Start the engine again."
                )

    @property
    def own(self) -> Partition:
        return self.partitions[self.number]

    @property
    def num_slots(self) -> int:
        return self.own.num_slots

    @property
    def end(self) -> int:
        """The number behind the last slot of the last neighbour."""
        return (len(self.partitions) - 1) * self.stride + self.num_slots

    @property
    def neighbours(self) -> list[tuple[int, Partition]]:
        """First slot, as the engine and its ranks number them, and partition of each
        neighbour, in their order: in a ring from its own."""
        ring = [*self.partitions[self.number :], *self.partitions[: self.number]]
        return [(i * self.stride, partition) for i, partition in enumerate(ring)][1:]


class Member:
    """An engine's partition, until `close` or the end of the process.

    Args:
        path: Of the keeper's socket.
        identity: As in `Membership`.
        rank_bytes: Bytes of a block on each rank of the engine.
        first_bytes: Bytes of the first slots of each rank of which some are to be
            empty; None for any.

    Raises:
        PoolRefused: The keeper cannot be reached, or gives no partition.

    """

    def __init__(
        self,
        path: str,
        identity: bytes,
        rank_bytes: Sequence[int],
        first_bytes: int | None = None,
    ) -> None:
        self._path, self._rank_bytes = path, tuple(rank_bytes)
        wanted = {"identity": identity.hex(), "rank_bytes": self._rank_bytes}
        self._connection, reply, fds = _ask(path, wanted)
        self._lease: int = reply["lease"]
        self._geometry = Geometry(*reply["geometry"])
        partitions = map_partitions(fds[1], self._geometry)
        for fd in fds:
            os.close(fd)
        try:
            self.membership = Membership.take(
                partitions,
                reply["partition"],
                identity,
                self._geometry.stride(rank_bytes),
                first_bytes and max(1, first_bytes // max(rank_bytes)),
            )
        except PoolRefused:
            self.close()
            raise

    def place(self) -> Place:
        """Where the ranks of the engine find its memory."""
        member = self.membership
        return Place(
            self._path,
            member.identity,
            member.number,
            self._lease,
            self._rank_bytes,
            member.num_slots,
            member.stride,
            member.empty,
        )

    def close(self) -> None:
        """Give the partition back, for the next engine of this identity."""
        end_lease(self._connection)


def end_lease(connection: socket.socket) -> None:
    """End what an engine or a rank has of a partition, before its process ends.

    None of its copies may be under way.
    """
    with suppress(OSError):
        connection.send(b"end")
    connection.close()


class Joined(NamedTuple):
    """What a rank has of the pool."""

    connection: socket.socket
    """To the keeper. The partition is the engine's until `end_lease`, or the end of the
    process, on all of its ranks."""
    memory: NDArray[np.uint8]
    """`[num_bytes]` up to the last slot: the engine's own part and those of its
    neighbours, `stride` slots from one to the next. What lies between is no memory of
    the pool."""
    checksums: Sequence[NDArray[np.uint8]]
    """Of the same partitions, see `Partition.checksums`."""


def join(place: Place, rank: int) -> Joined:
    """Map what a rank uses of the memory: its part of every partition.

    Args:
        place: Where its engine has it.
        rank: Number of the rank.

    Raises:
        PoolRefused: The keeper cannot be reached.

    """
    wanted = {
        "identity": place.identity.hex(),
        "partition": place.number,
        "lease": place.lease,
    }
    connection, reply, fds = _ask(place.path, wanted)
    geometry, number = Geometry(*reply["geometry"]), place.number
    memory = _map_ring(fds[0], geometry, place, rank)
    partitions = map_partitions(fds[1], geometry)
    for fd in fds:
        os.close(fd)
    ring = [*partitions[number:], *partitions[:number]]
    sums = [each.checksums(rank, place.num_slots) for each in ring]
    return Joined(connection, memory, sums)


def _map_ring(
    fd: int, geometry: Geometry, place: Place, rank: int
) -> NDArray[np.uint8]:
    """Map a rank's part of every partition, that of its engine first."""
    parts, num_parts = geometry.parts(place.rank_bytes), geometry.num_partitions
    offset, stride = sum(parts[:rank]), place.stride * place.rank_bytes[rank]
    size = min(parts[rank], stride)
    # Addresses only. Parts take their places in it.
    reserved = mmap.mmap(
        -1,
        num_parts * stride + HUGE_PAGE_BYTES,
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
    )
    array = np.frombuffer(reserved, np.uint8)
    memory = array[-array.ctypes.data % HUGE_PAGE_BYTES :]
    start = memory.ctypes.data
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    long, number = ctypes.c_long, ctypes.c_int
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[number] * 3, long]
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    for i in range(num_parts):
        partition = (place.number + i) % num_parts
        at, source = start + i * stride, partition * geometry.partition_bytes + offset
        if call(at, size, access, flags, fd, source) != at:
            error = ctypes.get_errno()
            raise OSError(error, f"mmap: {os.strerror(error)}")
    # A fork would copy all pinned memory at once, and a core dump contain prompts.
    reserved.madvise(mmap.MADV_DONTFORK)
    reserved.madvise(mmap.MADV_DONTDUMP)
    with suppress(OSError):
        reserved.madvise(mmap.MADV_HUGEPAGE)
    num_slots = (num_parts - 1) * place.stride + place.num_slots
    return memory[: num_slots * place.rank_bytes[rank]]


def map_partitions(fd: int, geometry: Geometry) -> list[Partition]:
    """The partitions in the index file `fd`."""
    memory = np.frombuffer(mmap.mmap(fd, geometry.index_bytes), np.uint8)
    size = partition_bytes(geometry.capacity)
    return [
        Partition(memory[i * size : (i + 1) * size], geometry.capacity)
        for i in range(geometry.num_partitions)
    ]


def _ask(
    path: str, wanted: dict[str, Any]
) -> tuple[socket.socket, dict[str, Any], list[int]]:
    common = {"version": VERSION, "pid_namespace": pid_namespace()}
    message = json.dumps({**common, **wanted}).encode()
    until = time.monotonic() + _TIMEOUT_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect(path)
            _, uid = peer_of(connection)
            if uid != os.getuid():
                raise OSError(f"it is of user {uid}, the engine of {os.getuid()}")
            connection.send(message)
            data, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 2)
            if not data:
                raise OSError("it closed the connection; is it of another user?")
        except OSError as e:
            connection.close()
            # As many as the kernel lets wait are there already.
            if isinstance(e, BlockingIOError) and time.monotonic() < until:
                time.sleep(_RETRY_S)
                continue
            raise PoolRefused(
                f"{_setting(path)}: no keeper answers there ({e}). Start it, with the "
                f"same user: python -m vllm.v1.kv_tier.keeper --socket {path} --size "
                "GIB --engines N. Or remove pool."
            ) from e
        reply = json.loads(data)
        if (reason := reply.get("refused")) is None:
            return connection, reply, fds
        connection.close()
        # Neighbours still read what the last engine has left.
        if reason != "busy" or time.monotonic() > until:
            raise PoolRefused(f"{_setting(path)}: the keeper refuses: {reason}.")
        time.sleep(_RETRY_S)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel knows them."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def pid_namespace() -> int:
    """Where the number of this process is unique: holders of locks are named by it."""
    return os.stat("/proc/self/ns/pid").st_ino


def _setting(path: str) -> str:
    return f"--kv-offloading-config: pool {path!r}"
