# SPDX-License-Identifier: Apache-2.0
"""What a keeper has: the memory of the pool, its socket, and who has which partition.

It is made once, and can go from one keeper to the next while engines run. All of it is
open files, which the kernel passes on over the socket: memory, the socket itself, so
that engines which ask meanwhile wait in its queue, and of each process of an engine its
connection and a file that shows its end. The old keeper owns all of it until it has
sent its last message, and the new one from then on.
"""

import fcntl
import json
import os
import re
import secrets
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.v1.kv_tier.keeper.client import (
    HUGE_PAGE_BYTES,
    VERSION,
    Geometry,
    peer_of,
    pid_namespace,
)
from vllm.v1.kv_tier.keeper.partition import MAX_ENGINES
from vllm.v1.kv_tier.memory.limits import available_host_bytes

SUCCEED = b"succeed"
"""What the next keeper sends."""

# Both keepers do nothing else meanwhile, and engines wait 10 seconds for an answer.
_TIMEOUT_S = 3.0
_TAKEN, _YOURS = b"taken", b"yours"
_MAX_BYTES = 64 << 10
_GiB = 1 << 30


@dataclass(eq=False)
class Peer:
    """A process that has connected."""

    connection: socket.socket | None
    """None once it is closed."""
    process: int | None
    """A file that becomes readable when the process has ended; None if it cannot be
    watched."""

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        if self.process is not None:
            os.close(self.process)


@dataclass
class Lease:
    """Who has a partition."""

    number: int = field(default_factory=lambda: secrets.randbits(47))
    """Of the engine that has it: one more than that of the engine before. No other
    keeper gives the same one, so that a rank never joins an engine that has its memory
    from a keeper that has died."""
    peers: set[Peer] = field(default_factory=set)
    """The engine and its ranks."""


@dataclass
class KeeperState:
    """All that a keeper has."""

    geometry: Geometry
    data_fd: int
    index_fd: int
    listener: socket.socket
    leases: list[Lease]
    to_clear: set[tuple[int, int]] = field(default_factory=set)
    """Dead readers whose pins are not cleared yet: (partition, reader)."""
    waiting: set[Peer] = field(default_factory=set)
    """Processes that have connected and not asked yet."""
    is_given: bool = False
    """Whether the next keeper has it all."""

    @classmethod
    def make(cls, size_bytes: int, num_engines: int, path: Path) -> "KeeperState":
        """Allocate the memory, and listen at `path`.

        Raises:
            OSError: The socket cannot be made.
            ValueError: The size or the number does not work. The message has the fix.

        """
        if not 1 <= num_engines <= MAX_ENGINES:
            raise ValueError(
                f"--engines must be from 1 to {MAX_ENGINES}, got {num_engines}."
            )
        each = size_bytes // num_engines // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
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
        geometry = Geometry(num_engines, each)
        data = _make_file("kv-tier-pool", geometry.data_bytes)
        index = _make_file("kv-tier-index", geometry.index_bytes)
        leases = [Lease() for _ in range(num_engines)]
        return cls(geometry, data, index, _listen(path), leases)

    @property
    def num_peers(self) -> int:
        """Processes that are connected, or have a partition."""
        return len(self.waiting) + sum(len(lease.peers) for lease in self.leases)

    def close(self) -> None:
        """Close all files."""
        for peer in self.waiting.union(*(lease.peers for lease in self.leases)):
            peer.close()
        self.listener.close()
        os.close(self.data_fd)
        os.close(self.index_fd)

    def send(self, connection: socket.socket) -> None:
        """Give all of it to the next keeper, or nothing: see `is_given`."""
        given = [(peer, -1) for peer in self.waiting]
        for number, lease in enumerate(self.leases):
            given += [(peer, number) for peer in lease.peers]
        facts = {
            "version": VERSION,
            "pid_namespace": pid_namespace(),
            "geometry": list(self.geometry),
            "leases": [lease.number for lease in self.leases],
            "to_clear": [list(each) for each in self.to_clear],
            "num_peers": len(given),
        }
        connection.settimeout(_TIMEOUT_S)
        with suppress(OSError):
            own = [self.data_fd, self.index_fd, self.listener.fileno()]
            _send(connection, facts, own)
            for peer, number in given:
                sent = {"process": peer.process}
                if peer.connection is not None:
                    sent["connection"] = peer.connection.fileno()
                files = {k: file for k, file in sent.items() if file is not None}
                of_peer = {"lease": number, "files": [*files]}
                _send(connection, of_peer, [*files.values()])
            if connection.recv(_MAX_BYTES) == _TAKEN:
                connection.send(_YOURS)
                self.is_given = True
                # It closes the connection when a service manager knows of it.
                connection.recv(_MAX_BYTES)

    @classmethod
    def receive(cls, path: Path) -> "KeeperState":
        """Take all from the keeper that listens at `path`, which then ends.

        Raises:
            OSError: There is none, or it gives nothing.
            ValueError: What it has cannot be used by this build.

        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_TIMEOUT_S)
            try:
                connection.connect(str(path))
            except OSError as e:
                raise OSError(
                    f"--succeed: no keeper answers at {path} ({e}). Start one with "
                    "--size and --engines."
                ) from e
            if (uid := peer_of(connection)[1]) != os.getuid():
                raise OSError(f"--succeed: the keeper at {path} is of user {uid}.")
            connection.send(SUCCEED)
            facts, files = _receive(connection, 3)
            if facts.get("version") != VERSION or len(files) != 3:
                raise ValueError(
                    f"--succeed: the keeper at {path} has version "
                    f"{facts.get('version')} of the shared memory, this build "
                    f"{VERSION}. End engines and keeper, and start without --succeed."
                )
            if facts["pid_namespace"] != pid_namespace():
                raise ValueError(
                    f"--succeed: the keeper at {path} runs in another PID namespace, "
                    "where its successor must run, too."
                )
            data, index, listener = files
            state = cls(
                Geometry(*facts["geometry"]),
                data,
                index,
                socket.socket(fileno=listener),
                [Lease(number) for number in facts["leases"]],
                {(partition, reader) for partition, reader in facts["to_clear"]},
            )
            for _ in range(facts["num_peers"]):
                of_peer, files = _receive(connection, 2)
                sent = dict(zip(of_peer["files"], files))
                peer = Peer(None, sent.get("process"))
                if "connection" in sent:
                    peer.connection = socket.socket(fileno=sent["connection"])
                number = of_peer["lease"]
                peers = state.leases[number].peers if number >= 0 else state.waiting
                peers.add(peer)
            connection.send(_TAKEN)
            if connection.recv(_MAX_BYTES) != _YOURS:
                raise OSError(f"--succeed: the keeper at {path} has not ended.")
            _tell_service_manager()
        return state


def _send(connection: socket.socket, facts: dict[str, Any], files: list[int]) -> None:
    socket.send_fds(connection, [json.dumps(facts).encode()], files)


def _receive(connection: socket.socket, most: int) -> tuple[dict[str, Any], list[int]]:
    data, files, _, _ = socket.recv_fds(connection, _MAX_BYTES, most)
    if not data:
        raise OSError("--succeed: the keeper closed the connection.")
    facts: dict[str, Any] = json.loads(data)
    for file in files:
        os.set_inheritable(file, False)
    return facts, files


def _tell_service_manager() -> None:
    """Let systemd take this process for the service."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with manager, suppress(OSError):
            # "@" stands for a name that is no file.
            manager.connect(re.sub("^@", "\0", address))
            manager.send(f"MAINPID={os.getpid()}".encode())


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
