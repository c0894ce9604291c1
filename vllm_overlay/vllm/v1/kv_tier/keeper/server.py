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
import fcntl
import json
import logging
import mmap
import os
import re
import secrets
import selectors
import socket
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
from vllm.v1.kv_tier.keeper.partition import MAX_ENGINES, Partition
from vllm.v1.kv_tier.memory.limits import available_host_bytes

logger = logging.getLogger(__name__)

_HUGE_PAGE_BYTES = 2 << 20
_PIECE_BYTES = 256 << 20
_MADV_POPULATE_WRITE = 23
_GiB = 1 << 30
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


@dataclass(eq=False)
class _Peer:
    """A process that has connected."""

    connection: socket.socket
    process: int
    """A file that becomes readable when the process has ended."""


@dataclass
class _Lease:
    """Who has a partition."""

    number: int = field(default_factory=lambda: secrets.randbits(47))
    """Of the engine that has it: one more than that of the engine before. No other
    keeper gives the same one, so that a rank never joins an engine that has its memory
    from a keeper that has died."""
    peers: set[_Peer] = field(default_factory=set)
    """The engine and its ranks."""


class Keeper:
    """Memory, and who has which partition of it.

    Args:
        size_bytes: Memory of all partitions together.
        num_engines: Number of partitions.
        path: Of the socket.

    Raises:
        OSError: The socket cannot be made, or the kernel is older than Linux 5.3.
        ValueError: The size or the number does not work. The message has the fix.

    """

    def __init__(self, size_bytes: int, num_engines: int, path: Path) -> None:
        if not 1 <= num_engines <= MAX_ENGINES:
            raise ValueError(
                f"--engines must be from 1 to {MAX_ENGINES}, got {num_engines}."
            )
        each = size_bytes // num_engines // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        if not each:
            raise ValueError(
                f"--size: {size_bytes} bytes for {num_engines} engines are less than "
                "2 MiB for each. Give more, or lower --engines."
            )
        available = available_host_bytes()
        if each * num_engines > available:
            raise ValueError(
                f"--size {size_bytes / _GiB:g} does not fit: {available / _GiB:.1f} "
                "GiB of host memory are available. Lower it, or end the engines that "
                "still have the memory of an earlier keeper."
            )
        self.geometry = Geometry(num_engines, each)
        self._data_fd = _make_file("kv-tier-pool", self.geometry.data_bytes)
        self._index_fd = _make_file("kv-tier-index", self.geometry.index_bytes)
        self.partitions: Sequence[Partition] = map_partitions(
            self._index_fd, self.geometry
        )
        for partition in self.partitions:
            partition.lock.create()
        self._leases = [_Lease() for _ in self.partitions]
        self._num_peers = 0
        # Dead readers whose pins are not cleared yet: (partition, reader).
        self._to_clear: set[tuple[int, int]] = set()
        self._selector = selectors.DefaultSelector()
        self._path = path
        self._listener = _listen(path)
        self._listen_to(self._listener, self._accept)
        self._is_closed = False

    def touch(self) -> None:
        """Let all pages exist, so that no engine pays for page faults.

        Raises:
            OSError: The machine has no more memory.

        """
        memory = mmap.mmap(self._data_fd, self.geometry.data_bytes)
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
        if self._to_clear:
            timeout_s = _RETRY_S
        for key, _ in self._selector.select(timeout_s):
            key.data()
        self._clear_pins()

    def close(self) -> None:
        """Stop serving. Engines keep the memory that they have."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._path.unlink()
        for lease in self._leases:
            for peer in lease.peers:
                os.close(peer.process)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        os.close(self._data_fd)
        os.close(self._index_fd)

    @property
    def num_attached(self) -> int:
        """Partitions with a live engine."""
        return sum(bool(lease.peers) for lease in self._leases)

    def _clear_pins(self) -> None:
        self._to_clear = {
            (number, reader)
            for number, reader in self._to_clear
            if not self.partitions[number].clear_reader(reader)
        }

    # ------------------------------------------------------------------ connections

    def _listen_to(self, file: socket.socket | int, act: Callable[[], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, act)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        pid, uid = peer_of(connection)
        if uid != os.getuid() or self._num_peers == _MAX_PEERS:
            logger.warning("Process %d of user %d was refused.", pid, uid)
            connection.close()
            return
        try:
            peer = _Peer(connection, os.pidfd_open(pid))
        except OSError:
            # It has ended, or is in a PID namespace that is not seen from here.
            peer = _Peer(connection, -1)
        self._num_peers += 1
        self._listen_to(connection, partial(self._receive, peer))

    def _receive(self, peer: _Peer) -> None:
        """Answer the first message of a process, which asks for a partition.

        The second one gives it back.
        """
        connection = peer.connection
        if connection.fileno() < 0:
            # Its process has ended, which was seen first.
            return
        try:
            message = connection.recv(MAX_MESSAGE_BYTES)
        except OSError:
            message = b""
        if (lease := self._lease_of(peer)) is None:
            if message and self._answer(peer, message):
                return
            self._forget(peer)
        elif message:
            self._end(peer, lease)
        else:
            # The process still runs. Maybe it is being killed.
            self._hang_up(peer)

    def _answer(self, peer: _Peer, message: bytes) -> bool:
        """Whether a process gets what it asks for."""
        fds: list[int] = []
        try:
            reply = self._grant(peer, _wish_of(message))
            fds = [self._data_fd, self._index_fd]
        except Refused as e:
            reply = {"refused": str(e)}
        with contextlib.suppress(OSError):
            socket.send_fds(peer.connection, [json.dumps(reply).encode()], fds)
        return bool(fds)

    def _grant(self, peer: _Peer, wish: _Wish) -> dict[str, Any]:
        if peer.process < 0:
            raise Refused("the process cannot be watched: it is not seen from here")
        number = wish["partition"]
        if wish["rank_bytes"]:
            number = self._assign(wish["identity"], wish["rank_bytes"])
            self._leases[number].number += 1
        elif not (
            number < len(self._leases)
            and self._leases[number].number == wish["lease"]
            and self.partitions[number].identity == wish["identity"]
        ):
            raise Refused(f"partition {number} has another engine by now")
        lease = self._leases[number]
        lease.peers.add(peer)
        self._listen_to(peer.process, partial(self._end, peer, lease))
        return {
            "partition": number,
            "lease": lease.number,
            "geometry": list(self.geometry),
        }

    def _assign(self, identity: bytes, rank_bytes: Sequence[int]) -> int:
        """A partition for an engine: what one of its identity has left, else an empty
        one, else one of another identity, whose content is lost."""
        num_slots = self.geometry.num_slots(rank_bytes)
        if num_slots < 1:
            raise Refused(
                f"a block of {sum(rank_bytes)} bytes does not fit a partition of "
                f"{self.geometry.partition_bytes}. Raise --size of the keeper, or "
                "lower its --engines"
            )
        # The pins of its last engine must not be taken for those of the next.
        self._clear_pins()
        unclear = {reader for _, reader in self._to_clear}
        free = [i for i, lease in enumerate(self._leases) if not lease.peers]
        if not free:
            raise Refused(
                f"all {len(self._leases)} partitions have an engine. Start the keeper "
                "with more --engines"
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

    def _lease_of(self, peer: _Peer) -> _Lease | None:
        return next((each for each in self._leases if peer in each.peers), None)

    def _hang_up(self, peer: _Peer) -> None:
        if peer.connection.fileno() >= 0:
            self._selector.unregister(peer.connection)
        peer.connection.close()

    def _forget(self, peer: _Peer) -> None:
        self._hang_up(peer)
        if peer.process >= 0:
            os.close(peer.process)
        self._num_peers -= 1

    def _end(self, peer: _Peer, lease: _Lease) -> None:
        """A process of an engine has ended, or gives the partition back."""
        if peer not in lease.peers:
            # Both at once.
            return
        lease.peers.remove(peer)
        self._selector.unregister(peer.process)
        self._forget(peer)
        if not lease.peers:
            # Neither the engine nor a rank reads any more.
            number = self._leases.index(lease)
            self._to_clear |= {(other, number) for other in range(len(self._leases))}
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


def _make_file(name: str, num_bytes: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, num_bytes)
    # No process can truncate the file under the others.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def _listen(path: Path) -> socket.socket:
    """Listen at `path`, for this user only.

    Raises:
        OSError: Another keeper is there, or the path cannot be used.

    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            if not stat.S_ISSOCK(path.stat().st_mode):
                raise OSError(
                    f"--socket {path}: it is no socket. Give another path."
                ) from None
            # Left by a keeper that was killed.
            path.unlink()
        except FileNotFoundError:
            pass
        else:
            raise OSError(f"--socket {path}: another keeper is there.")
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(64)
    listener.setblocking(False)
    return listener
