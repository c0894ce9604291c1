# SPDX-License-Identifier: Apache-2.0
"""The keeper: owns the memory of the pool, and gives partitions to engines.

It takes no part in steps. An engine asks once, at its start, and gets open files of the
memory; the connection stays open for as long as the engine, or one of its ranks, runs.
A partition whose connections have all closed goes to the next engine of the same
identity with all it has published, else, empty, to any.
"""

import contextlib
import ctypes
import fcntl
import json
import logging
import mmap
import os
import selectors
import socket
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vllm.v1.kv_tier.keeper.client import (
    MAX_MESSAGE_BYTES,
    VERSION,
    Geometry,
    map_partitions,
)
from vllm.v1.kv_tier.keeper.partition import MAX_ENGINES, Partition

logger = logging.getLogger(__name__)

_HUGE_PAGE_BYTES = 2 << 20
_PIECE_BYTES = 256 << 20
_MADV_POPULATE_WRITE = 23
_RETRY_S = 0.02


class Refused(Exception):
    """The message says why an engine gets no partition."""


@dataclass
class Lease:
    """Who has a partition."""

    connections: set[socket.socket] = field(default_factory=set)
    """Of the engine and its ranks."""


class Keeper:
    """Memory, and who has which partition of it.

    Args:
        size_bytes: Memory of all partitions together.
        num_engines: Number of partitions.
        path: Of the socket.

    Raises:
        OSError: There is not that much memory, or the socket cannot be made.
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
        self.geometry = Geometry(num_engines, each)
        self._data_fd = _make_file("kv-tier-pool", self.geometry.data_bytes)
        self._index_fd = _make_file("kv-tier-index", self.geometry.index_bytes)
        self.partitions: Sequence[Partition] = map_partitions(
            self._index_fd, self.geometry
        )
        for partition in self.partitions:
            partition.lock.create()
        self._leases = [Lease() for _ in self.partitions]
        # Dead readers whose pins are not cleared yet: (partition, reader).
        self._to_clear: set[tuple[int, int]] = set()
        self._selector = selectors.DefaultSelector()
        self._path = path
        self._listener = _listen(path)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
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
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error))

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
            key.data(key.fileobj)
        self._clear_pins()

    def close(self) -> None:
        """Stop serving. Engines keep the memory that they have."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._path.unlink()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        os.close(self._data_fd)
        os.close(self._index_fd)

    @property
    def num_attached(self) -> int:
        """Partitions with a live engine."""
        return sum(bool(lease.connections) for lease in self._leases)

    def _clear_pins(self) -> None:
        self._to_clear = {
            (number, reader)
            for number, reader in self._to_clear
            if not self.partitions[number].clear_reader(reader)
        }

    # ------------------------------------------------------------------ connections

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, _ = struct.unpack("3i", credentials)
        if uid != os.getuid():
            logger.warning("Process %d of user %d was refused.", pid, uid)
            connection.close()
            return
        self._selector.register(connection, selectors.EVENT_READ, self._receive)

    def _receive(self, connection: socket.socket) -> None:
        try:
            message = connection.recv(MAX_MESSAGE_BYTES)
        except OSError:
            message = b""
        if not message:
            self._disconnect(connection)
            return
        try:
            reply = self._answer(connection, json.loads(message))
        except Refused as e:
            reply = {"refused": str(e)}
        except (ValueError, KeyError, TypeError) as e:
            reply = {"refused": f"the message is not understood ({e})"}
        fds = [] if "refused" in reply else [self._data_fd, self._index_fd]
        with contextlib.suppress(OSError):
            socket.send_fds(connection, [json.dumps(reply).encode()], fds)

    def _answer(
        self, connection: socket.socket, message: dict[str, Any]
    ) -> dict[str, Any]:
        if message["version"] != VERSION:
            raise Refused(
                f"the keeper has version {VERSION} of the protocol, the engine "
                f"{message['version']}: run both from the same build"
            )
        identity = bytes.fromhex(message["identity"])
        if "partition" in message:
            number = int(message["partition"])
            if self.partitions[number].identity != identity:
                raise Refused(f"partition {number} is of another identity")
        else:
            number = self._assign(identity, int(message["slot_bytes"]))
        self._leases[number].connections.add(connection)
        return {"partition": number, **self.geometry._asdict()}

    def _assign(self, identity: bytes, slot_bytes: int) -> int:
        """A partition for an engine: what one of its identity has left, else an empty
        one, else one of another identity, whose content is lost."""
        if len(identity) != 32 or slot_bytes < 1:
            raise Refused("it needs an identity of 32 bytes and slot_bytes from 1")
        first, num_slots = self.geometry.slots_of(0, slot_bytes)
        if num_slots < 1:
            raise Refused(
                f"a block of {slot_bytes} bytes does not fit a partition of "
                f"{self.geometry.partition_bytes}. Raise --size of the keeper, or "
                "lower its --engines"
            )
        # The pins of its last engine must not be taken for those of the next.
        self._clear_pins()
        unclear = {reader for _, reader in self._to_clear}
        free = [i for i, lease in enumerate(self._leases) if not lease.connections]
        if not free:
            raise Refused(
                f"all {len(self._leases)} partitions have an engine. Start the keeper "
                "with more --engines"
            )
        free = [i for i in free if i not in unclear]
        owners = {i: self.partitions[i].identity for i in free}
        for number in free:
            shape = self.geometry.slots_of(number, slot_bytes)
            partition = self.partitions[number]
            had = partition.first_slot, partition.num_slots
            if owners[number] == identity and had == shape:
                return number
        for number in sorted(free, key=lambda i: owners[i] != bytes(32)):
            first, num_slots = self.geometry.slots_of(number, slot_bytes)
            if self.partitions[number].assign(identity, first, num_slots):
                return number
        raise Refused("busy")

    def _disconnect(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        for number, lease in enumerate(self._leases):
            if connection in lease.connections:
                lease.connections.remove(connection)
                if not lease.connections:
                    # Neither the engine nor a rank reads any more.
                    self._to_clear |= {
                        (other, number) for other in range(len(self.partitions))
                    }
                    logger.info("The engine of partition %d has ended.", number)


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
            # Left by a keeper that was killed.
            path.unlink()
        except FileNotFoundError:
            pass
        else:
            listener.close()
            raise OSError(f"--socket {path}: another keeper is there.")
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(64)
    return listener
