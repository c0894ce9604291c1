# SPDX-License-Identifier: Apache-2.0
"""How engines and their ranks get the memory of the pool from its keeper."""

import json
import mmap
import os
import socket
import time
from typing import Any, NamedTuple

import numpy as np

from vllm.v1.kv_tier.keeper.partition import (
    Partition,
    Published,
    partition_bytes,
)

VERSION = 1
"""Of the messages, and of the layout of the shared memory."""

MAX_MESSAGE_BYTES = 4096
MIN_SLOT_BYTES = 4096
"""Blocks of fewer bytes take as much."""

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

    def slots_of(self, number: int, slot_bytes: int) -> tuple[int, int]:
        """The first slot of a partition, and how many it has.

        Slots of all engines with blocks of this size lie on one grid, so that a number
        means the same to all of them.
        """
        first = -(-number * self.partition_bytes // slot_bytes)
        end = (number + 1) * self.partition_bytes // slot_bytes
        return first, min(end - first, self.capacity)


class Place(NamedTuple):
    """Where a rank finds the memory of its engine."""

    path: str
    identity: bytes
    number: int
    slot_bytes: int
    free: tuple[int, ...]
    """Some slots of the whole pool that hold nothing, and that no process reads."""
    adopted: tuple[int, ...]
    """Slots of the whole pool that hold what an earlier engine has stored."""


class Member:
    """An engine's part of the pool. The connection lives as long as this object.

    Args:
        path: Of the keeper's socket.
        identity: 32 bytes that name everything that shapes the engine's KV.
        slot_bytes: Bytes of a block.

    Raises:
        PoolRefused: The keeper cannot be reached, or gives no partition.

    """

    def __init__(self, path: str, identity: bytes, slot_bytes: int) -> None:
        self.path, self.identity, self.slot_bytes = path, identity, slot_bytes
        wanted = {"identity": identity.hex(), "slot_bytes": slot_bytes}
        self._connection, reply, fds = _ask(path, wanted)
        self.number = int(reply.pop("partition"))
        self.geometry = Geometry(**reply)
        self.partitions = map_partitions(fds[1], self.geometry)
        for fd in fds:
            os.close(fd)
        self.own = self.partitions[self.number]
        until = time.monotonic() + _TIMEOUT_S
        while (found := self.own.take_over()) is None:
            if time.monotonic() > until:
                raise PoolRefused(f"{_setting(path)}: its lock stays busy.")
        self.adopted: Published = found
        self.first_slot, self.num_slots = self.geometry.slots_of(
            self.number, slot_bytes
        )

    def close(self) -> None:
        """Give the partition back, for the next engine of this identity."""
        self._connection.close()


def join(place: Place) -> tuple[socket.socket, mmap.mmap]:
    """Map the memory of all partitions, on a rank of the engine.

    Returns:
        The connection, to be kept open while the rank runs, and the memory.

    Raises:
        PoolRefused: The keeper cannot be reached.

    """
    wanted = {"identity": place.identity.hex(), "partition": place.number}
    connection, reply, fds = _ask(place.path, wanted)
    del reply["partition"]
    memory = mmap.mmap(fds[0], Geometry(**reply).data_bytes)
    for fd in fds:
        os.close(fd)
    # A fork would copy all pinned memory at once, and a core dump contain prompts.
    memory.madvise(mmap.MADV_DONTFORK)
    memory.madvise(mmap.MADV_DONTDUMP)
    return connection, memory


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
    message = json.dumps({"version": VERSION, **wanted}).encode()
    until = time.monotonic() + _TIMEOUT_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect(path)
            connection.send(message)
            data, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 2)
            if not data:
                raise OSError("it closed the connection; is it of another user?")
        except OSError as e:
            connection.close()
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


def _setting(path: str) -> str:
    return f"--kv-offloading-config: pool {path!r}"
