# SPDX-License-Identifier: Apache-2.0
"""How engines and their ranks get the memory of the pool from its keeper."""

import ctypes
import json
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

from vllm.v1.kv_tier.keeper.partition import (
    Partition,
    Published,
    partition_bytes,
)

VERSION = 2
"""Of the messages, and of the layout of the shared memory."""

MAX_MESSAGE_BYTES = 4096
MIN_SLOT_BYTES = 4096
"""Blocks of fewer bytes take as much."""

# Copy engines are tested on empty slots: one in so many, at least one, at most 64. What
# an heir has to drop for it may be the end of a prefix.
_EMPTY_PART, _MAX_EMPTY = 100, 64

# Parts of ranks are whole huge pages where they have so many, so that the kernel maps
# them as such.
_HUGE_PAGE_BYTES = 2 << 20
_MANY_HUGE_PAGES = 64

_MAP_FIXED = 0x10

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
        is_large = min(shares) >= _MANY_HUGE_PAGES * _HUGE_PAGE_BYTES
        unit = _HUGE_PAGE_BYTES if is_large else mmap.PAGESIZE
        return [share // unit * unit for share in shares]

    def slots_of(self, number: int, rank_bytes: Sequence[int]) -> tuple[int, int]:
        """The first slot of a partition, and how many it has.

        A rank maps its parts of all partitions one after the other. Slots of all
        engines with blocks of these sizes lie on one grid there, so that a number means
        the same to all of them, and to all of their ranks.
        """
        sizes = [*zip(self.parts(rank_bytes), rank_bytes)]
        first = max(-(-number * part // each) for part, each in sizes)
        end = min((number + 1) * part // each for part, each in sizes)
        return first, max(0, min(end - first, self.capacity))


class Place(NamedTuple):
    """Where a rank finds the memory of its engine."""

    path: str
    identity: bytes
    number: int
    lease: int
    """Number of the engine among those that have had the partition."""
    rank_bytes: tuple[int, ...]
    """Bytes of a block on each rank."""
    num_slots: int
    """Of the whole pool."""
    own: range
    """Slots of the partition, as numbers in the whole pool."""
    empty: tuple[int, ...]
    """Those that hold nothing, and that no process reads."""


@dataclass(frozen=True)
class Membership:
    """An engine's part of the pool, and that of its neighbours."""

    partitions: Sequence[Partition]
    number: int
    """Its own partition, and its column of pins in the others."""
    identity: bytes
    """32 bytes that name everything that shapes the engine's KV."""
    adopted: Published
    """What an earlier engine of this identity has left in it."""
    unread: Sequence[int]
    """Its slots that no neighbour reads."""

    @classmethod
    def take(
        cls, partitions: Sequence[Partition], number: int, identity: bytes
    ) -> "Membership":
        """Take over a partition that has no other owner.

        Raises:
            PoolRefused: Its lock stays busy, or neighbours read all that is to be
                empty.

        """
        own, until = partitions[number], time.monotonic() + _TIMEOUT_S
        num_empty = min(own.num_slots // _EMPTY_PART + 1, _MAX_EMPTY)
        while True:
            adopted = own.take_over(own.num_slots - num_empty)
            unread = own.unpinned(range(own.num_slots))
            if (
                adopted is not None
                and unread is not None
                and not {*unread} <= {*adopted.slots}
            ):
                return cls(partitions, number, identity, adopted, unread)
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
    def first_slot(self) -> int:
        """Number of its first slot in the whole pool."""
        return self.own.first_slot

    @property
    def num_slots(self) -> int:
        return self.own.num_slots


class Member:
    """An engine's partition, until `close` or the end of the process.

    Args:
        path: Of the keeper's socket.
        identity: As in `Membership`.
        rank_bytes: Bytes of a block on each rank of the engine.

    Raises:
        PoolRefused: The keeper cannot be reached, or gives no partition.

    """

    def __init__(self, path: str, identity: bytes, rank_bytes: Sequence[int]) -> None:
        self._path, self._rank_bytes = path, tuple(rank_bytes)
        wanted = {"identity": identity.hex(), "rank_bytes": self._rank_bytes}
        self._connection, reply, fds = _ask(path, wanted)
        self._lease: int = reply["lease"]
        self._geometry = Geometry(*reply["geometry"])
        partitions = map_partitions(fds[1], self._geometry)
        for fd in fds:
            os.close(fd)
        try:
            number: int = reply["partition"]
            self.membership = Membership.take(partitions, number, identity)
        except PoolRefused:
            self.close()
            raise

    def place(self) -> Place:
        """Where the ranks of the engine find its memory."""
        member = self.membership
        first, used = member.first_slot, {*member.adopted.slots}
        last = self._geometry.num_partitions - 1
        return Place(
            self._path,
            member.identity,
            member.number,
            self._lease,
            self._rank_bytes,
            sum(self._geometry.slots_of(last, self._rank_bytes)),
            range(first, first + member.num_slots),
            tuple(first + slot for slot in member.unread if slot not in used),
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


def join(place: Place, rank: int) -> tuple[socket.socket, mmap.mmap]:
    """Map what a rank uses of the memory: its part of every partition.

    Args:
        place: Where its engine has it.
        rank: Number of the rank.

    Returns:
        The connection, and the parts one after the other. The partition is the engine's
        until `end_lease`, or the end of the process, on all of its ranks.

    Raises:
        PoolRefused: The keeper cannot be reached.

    """
    wanted = {
        "identity": place.identity.hex(),
        "partition": place.number,
        "lease": place.lease,
    }
    connection, reply, fds = _ask(place.path, wanted)
    geometry = Geometry(*reply["geometry"])
    parts = geometry.parts(place.rank_bytes)
    memory = _map_parts(fds[0], geometry, sum(parts[:rank]), parts[rank])
    for fd in fds:
        os.close(fd)
    # A fork would copy all pinned memory at once, and a core dump contain prompts.
    memory.madvise(mmap.MADV_DONTFORK)
    memory.madvise(mmap.MADV_DONTDUMP)
    return connection, memory


def _map_parts(fd: int, geometry: Geometry, offset: int, size: int) -> mmap.mmap:
    """Map the bytes from `offset` on of every partition, one after the other."""
    # All of it is mapped again, unless the whole partitions are wanted.
    memory = mmap.mmap(fd, geometry.num_partitions * size)
    if size == geometry.partition_bytes:
        return memory
    start = np.frombuffer(memory, np.uint8).ctypes.data
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    long, number = ctypes.c_long, ctypes.c_int
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[number] * 3, long]
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    for i in range(geometry.num_partitions):
        at, source = start + i * size, i * geometry.partition_bytes + offset
        if call(at, size, access, flags, fd, source) != at:
            error = ctypes.get_errno()
            raise OSError(error, f"mmap: {os.strerror(error)}")
    return memory


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
