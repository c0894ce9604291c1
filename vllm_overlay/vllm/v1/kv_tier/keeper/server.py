# SPDX-License-Identifier: Apache-2.0
"""The keeper: owns the memory of the pool, and gives partitions to engines.

It takes no part in steps. An engine asks once, at its start, and gets open files of the
memory; so does each of its ranks. A partition whose processes have all ended goes to
the next engine of the same identity with all it has published, else, empty, to any.

The end of a process is what counts, not that of its connection: the kernel closes the
connection of a killed process before the GPU's driver has stopped its copies.
"""

import contextlib
import ctypes
import errno
import json
import logging
import mmap
import os
import re
import selectors
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from vllm.v1.kv_tier.keeper.client import (
    MAX_MESSAGE_BYTES,
    VERSION,
    Geometry,
    map_partitions,
    peer_of,
    pid_namespace,
)
from vllm.v1.kv_tier.keeper.partition import Partition
from vllm.v1.kv_tier.keeper.state import SUCCEED, KeeperState, Lease, Peer

logger = logging.getLogger(__name__)

_PIECE_BYTES = 256 << 20
_MADV_POPULATE_WRITE = 23
_RETRY_S = 0.02
# Most processes that are connected. Each takes two open files.
_MAX_PEERS = 256


class Refused(Exception):
    """The message says why an engine gets no partition."""


class _Wish(TypedDict):
    """What a process asks for."""

    identity: bytes
    rank_bytes: list[int]
    """Of a new engine, bytes of a block on each rank; empty for a rank."""
    partition: int
    """Of a rank's engine."""
    lease: int
    """Of a rank's engine: none other may have taken the partition since."""


class Keeper:
    """Serves the pool.

    Args:
        state: Its memory, and who has which partition of it.
        path: Of the socket.

    """

    def __init__(self, state: KeeperState, path: Path) -> None:
        self._state, self._path = state, path
        self.partitions: Sequence[Partition] = map_partitions(
            state.index_fd, state.geometry
        )
        self._selector = selectors.DefaultSelector()
        self._listen_to(state.listener, self._accept)
        for peer in state.waiting:
            self._hear(peer)
        for lease in state.leases:
            for peer in lease.peers:
                self._hear(peer)
                self._watch(peer, lease)
        self._is_closed = False

    @classmethod
    def make(cls, size_bytes: int, num_engines: int, path: Path) -> "Keeper":
        """A keeper of new memory.

        Args:
            size_bytes: Memory of all partitions together.
            num_engines: Number of partitions.
            path: Of the socket.

        Raises:
            OSError: The socket cannot be made, or the kernel is older than Linux 5.3.
            ValueError: The size or the number does not work. The message has the fix.

        """
        keeper = cls(KeeperState.make(size_bytes, num_engines, path), path)
        for partition in keeper.partitions:
            partition.lock.create()
        return keeper

    @classmethod
    def succeed(cls, path: Path) -> "Keeper":
        """Take over from the keeper at `path`, which ends. Engines notice nothing.

        Raises:
            OSError: There is none, or it gives nothing.
            ValueError: What it has cannot be used by this build.

        """
        return cls(KeeperState.receive(path), path)

    @property
    def geometry(self) -> Geometry:
        return self._state.geometry

    def touch(self) -> None:
        """Let all pages exist, so that no engine pays for page faults.

        Raises:
            OSError: The machine has no more memory.

        """
        memory = mmap.mmap(self._state.data_fd, self.geometry.data_bytes)
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(memory, np.uint8)
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

        def populate(start: int) -> None:
            size = min(_PIECE_BYTES, array.size - start)
            if madvise(array.ctypes.data + start, size, _MADV_POPULATE_WRITE):
                if (error := ctypes.get_errno()) != errno.EINVAL:
                    raise OSError(error, os.strerror(error))
                # Before Linux 5.14.
                array[start : start + size : mmap.PAGESIZE] = 0

        cpus = min(len(os.sched_getaffinity(0)), 16)
        with ThreadPoolExecutor(cpus) as pool:
            for _ in pool.map(populate, range(0, array.size, _PIECE_BYTES)):
                pass

    def serve(self) -> None:
        """Serve until `close`."""
        while not self._is_closed:
            self.serve_once(None)

    def serve_once(self, timeout_s: float | None) -> None:
        """Serve what has come, or comes within `timeout_s`."""
        if self._state.to_clear:
            timeout_s = _RETRY_S
        for key, _ in self._selector.select(timeout_s):
            key.data()
            if self._is_closed:
                # The rest is for the next keeper. So are pins: their column may be that
                # of another engine by now.
                return
        self._clear_pins()

    def close(self) -> None:
        """Stop serving. Engines keep the memory that they have."""
        self._is_closed = True
        if not self._state.is_given:
            with contextlib.suppress(OSError):
                self._path.unlink()
        self._selector.close()
        self._state.close()

    @property
    def num_attached(self) -> int:
        """Partitions with a live engine."""
        return sum(bool(lease.peers) for lease in self._state.leases)

    @property
    def num_peers(self) -> int:
        """Processes that are connected, or have a partition."""
        return self._state.num_peers

    def _clear_pins(self) -> None:
        self._state.to_clear = {
            (number, reader)
            for number, reader in self._state.to_clear
            if not self.partitions[number].clear_reader(reader)
        }

    # ------------------------------------------------------------------ connections

    def _listen_to(self, file: socket.socket | int, act: Callable[[], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, act)

    def _accept(self) -> None:
        try:
            connection, _ = self._state.listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        pid, uid = peer_of(connection)
        if uid != os.getuid() or self._state.num_peers == _MAX_PEERS:
            logger.warning("Process %d of user %d was refused.", pid, uid)
            connection.close()
            return
        try:
            peer = Peer(connection, os.pidfd_open(pid))
        except OSError:
            # It has ended, or is in a PID namespace that is not seen from here.
            peer = Peer(connection, None)
        self._state.waiting.add(peer)
        self._hear(peer)

    def _hear(self, peer: Peer) -> None:
        if peer.connection is not None:
            self._listen_to(peer.connection, partial(self._receive, peer))

    def _watch(self, peer: Peer, lease: Lease) -> None:
        assert peer.process is not None
        self._listen_to(peer.process, partial(self._end, peer, lease))

    def _receive(self, peer: Peer) -> None:
        """Answer the first message of a process, which asks for a partition, or for all
        of them as the next keeper.

        The second one gives it back.
        """
        if peer.connection is None:
            # Its process has ended, which was seen first.
            return
        try:
            message = peer.connection.recv(MAX_MESSAGE_BYTES)
        except OSError:
            message = b""
        if (lease := self._lease_of(peer)) is None:
            self._state.waiting.discard(peer)
            if message == SUCCEED:
                self._hand_over(peer.connection)
            elif message and self._answer(peer, message):
                return
            self._forget(peer)
        elif message:
            self._end(peer, lease)
        else:
            # The process still runs. Maybe it is being killed.
            self._hang_up(peer)

    def _hand_over(self, connection: socket.socket) -> None:
        self._state.send(connection)
        if self._state.is_given:
            logger.info("Another keeper has taken over.")
            self._is_closed = True

    def _answer(self, peer: Peer, message: bytes) -> bool:
        """Whether a process gets what it asks for."""
        assert peer.connection is not None
        fds: list[int] = []
        try:
            reply = self._grant(peer, _wish_of(message))
            fds = [self._state.data_fd, self._state.index_fd]
        except Refused as e:
            reply = {"refused": str(e)}
        with contextlib.suppress(OSError):
            socket.send_fds(peer.connection, [json.dumps(reply).encode()], fds)
        return bool(fds)

    def _grant(self, peer: Peer, wish: _Wish) -> dict[str, Any]:
        if peer.process is None:
            raise Refused("the process cannot be watched: it is not seen from here")
        leases, number = self._state.leases, wish["partition"]
        if wish["rank_bytes"]:
            number = self._assign(wish["identity"], wish["rank_bytes"])
            leases[number].number += 1
        elif not (
            number < len(leases)
            and leases[number].number == wish["lease"]
            and self.partitions[number].identity == wish["identity"]
        ):
            raise Refused(f"partition {number} has another engine by now")
        lease = leases[number]
        lease.peers.add(peer)
        self._watch(peer, lease)
        return {
            "partition": number,
            "lease": lease.number,
            "geometry": list(self.geometry),
        }

    def _assign(self, identity: bytes, rank_bytes: Sequence[int]) -> int:
        """A partition for an engine: what one of its identity has left, else an empty
        one, else one of another identity, whose content is lost."""
        leases = self._state.leases
        num_slots = self.geometry.num_slots(rank_bytes)
        if num_slots < 1:
            raise Refused(
                f"a block of {sum(rank_bytes)} bytes does not fit a partition of "
                f"{self.geometry.partition_bytes}. Raise --size of the keeper, or "
                "lower its --engines"
            )
        # The pins of its last engine must not be taken for those of the next.
        self._clear_pins()
        unclear = {reader for _, reader in self._state.to_clear}
        free = [i for i, lease in enumerate(leases) if not lease.peers]
        if not free:
            raise Refused(
                f"all {len(leases)} partitions have an engine. Start the keeper with "
                "more --engines"
            )
        free = [i for i in free if i not in unclear]
        owners = {i: self.partitions[i].identity for i in free}
        for number in free:
            had = owners[number], self.partitions[number].num_slots
            if had == (identity, num_slots):
                return number
        for number in sorted(free, key=lambda i: owners[i] != bytes(32)):
            if self.partitions[number].assign(identity, num_slots):
                return number
        raise Refused("busy")

    # ------------------------------------------------------------------ the end

    def _lease_of(self, peer: Peer) -> Lease | None:
        return next((each for each in self._state.leases if peer in each.peers), None)

    def _hang_up(self, peer: Peer) -> None:
        if peer.connection is not None:
            self._selector.unregister(peer.connection)
            peer.connection.close()
            peer.connection = None

    def _forget(self, peer: Peer) -> None:
        self._hang_up(peer)
        peer.close()

    def _end(self, peer: Peer, lease: Lease) -> None:
        """A process of an engine has ended, or gives the partition back."""
        if peer not in lease.peers:
            # Both at once.
            return
        lease.peers.remove(peer)
        assert peer.process is not None
        self._selector.unregister(peer.process)
        self._forget(peer)
        if not lease.peers:
            # Neither the engine nor a rank reads any more.
            leases = self._state.leases
            number = leases.index(lease)
            self._state.to_clear |= {(other, number) for other in range(len(leases))}
            logger.info("The engine of partition %d has ended.", number)


def _wish_of(message: bytes) -> _Wish:
    """What a process asks for, in a message that may have anything in it.

    Raises:
        Refused: It is not understood, or may not be granted.

    """
    try:
        wanted = json.loads(message)
    except (ValueError, RecursionError):
        wanted = None
    if not isinstance(wanted, dict):
        raise Refused("the message is not understood")
    if wanted.get("version") != VERSION:
        raise Refused(
            f"the keeper has version {VERSION} of the protocol, the engine "
            f"{wanted.get('version')!r}: run both from the same build"
        )
    if wanted.get("pid_namespace") != pid_namespace():
        raise Refused(
            "it runs in another PID namespace, but the locks in its memory name "
            "processes by their numbers. Let both see the processes of the machine "
            "(Kubernetes: hostPID: true; Docker: --pid host)"
        )
    numbers = [wanted.get(name, 0) for name in ("partition", "lease")]
    identity, rank_bytes = wanted.get("identity"), wanted.get("rank_bytes", [])
    if not (
        isinstance(rank_bytes, list)
        and all(
            type(number) is int and 0 <= number < 1 << 48
            for number in (*numbers, *rank_bytes)
        )
        and all(rank_bytes)
        and isinstance(identity, str)
        and re.fullmatch("[0-9a-f]{64}", identity)
    ):
        raise Refused("the message is not understood")
    partition, lease = numbers
    return _Wish(
        identity=bytes.fromhex(identity),
        rank_bytes=rank_bytes,
        partition=partition,
        lease=lease,
    )
