# SPDX-License-Identifier: Apache-2.0
"""Clients of a Mooncake Store, and when they are closed.

A transfer that Mooncake gives up can still write to its buffers later (a node that had
stood still for a minute overwrote 125 of 128 MiB when it went on; taking back the
registration of the memory did not hinder it, closing the client did). So its transport
is told to end transfers in time, and after one that failed the client is closed before
`get` returns. To close it while another thread is in it ends the process, so that
waits for the others.
"""

import mmap
import os
import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.v1.kv_tier.stores.mooncake import MooncakeConfig

logger = init_logger(__name__)

MAX_BATCH = 32
"""Objects that are moved by one call. A call on a node that stands still takes so much
longer as there are more of them."""

_LOCAL_BUFFER_BYTES = 16 << 20
_HEADER_BYTES, _NUM_CALLS = 1024, 4
# How long one that wants a client waits for another one to be closed.
CLOSE_S = 10.0


def import_client() -> Any:
    """Mooncake's class.

    Raises:
        ImportError: The package or a library of the system is not there.

    """
    # It logs each failed transfer, and thinks of much as worth telling.
    os.environ.setdefault("GLOG_minloglevel", "3")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    from mooncake.store import MooncakeDistributedStore

    return MooncakeDistributedStore


class Client:
    """A client of Mooncake's that is set up.

    Args:
        config: Settings, checked.
        segment_bytes: Memory to give to the store.

    Raises:
        OSError: The master is not there, or takes no client.

    """

    def __init__(self, config: "MooncakeConfig", segment_bytes: int = 0) -> None:
        _set_deadlines(config.timeout_s)
        # Without a master, setting up takes a minute and a half.
        with socket.create_connection(config.address, config.timeout_s) as connection:
            hostname = config.debug.local_hostname or connection.getsockname()[0]
        self._free: queue.SimpleQueue[list[memoryview]] = queue.SimpleQueue()
        self.calls = import_client()()
        code = self.calls.setup(
            hostname,
            config.debug.metadata_server,
            segment_bytes,
            _LOCAL_BUFFER_BYTES,
            config.protocol,
            config.debug.rdma_devices,
            config.master,
        )
        if code:
            raise OSError(f"setup failed with code {code}")
        if not segment_bytes:
            headers = memoryview(mmap.mmap(-1, _NUM_CALLS * MAX_BATCH * _HEADER_BYTES))
            self.register(headers)
            places = [
                headers[i : i + _HEADER_BYTES]
                for i in range(0, len(headers), _HEADER_BYTES)
            ]
            for i in range(0, len(places), MAX_BATCH):
                self._free.put(places[i : i + MAX_BATCH])

    @contextmanager
    def headers(self) -> Iterator[list[memoryview]]:
        """Memory for the headers of a batch, for one call at a time."""
        places = self._free.get()
        try:
            yield places
        finally:
            self._free.put(places)

    def register(self, memory: memoryview) -> None:
        """Raises OSError where that fails. The client is closed then: it cannot move
        what it does not know."""
        code = self.calls.register_buffer(address_of(memory), memory.nbytes)
        if code:
            self.close()
            raise OSError(f"memory could not be registered: code {code}")

    def close(self) -> None:
        self.calls.close()


def _set_deadlines(seconds: int) -> None:
    """Have the transport and the calls to the master end by themselves in time.
    Mooncake reads these again and again, so they are the same for all of a process;
    those that are set already stay."""
    for name, value in (
        ("MC_TCP_STATUS_TIMEOUT_SEC", seconds),
        ("MC_TCP_PROGRESS_TIMEOUT_SEC", seconds),
        # As many transfers of a node that stands still end at a time.
        ("MC_TCP_LANES_PER_PEER", MAX_BATCH // 2),
        ("MC_RPC_TIMEOUT_MS", seconds * 1000),
        ("MC_RPC_CONNECT_TIMEOUT_MS", seconds * 1000),
        ("MC_STORE_CLIENT_SETUP_RETRIES", 1),
    ):
        if os.environ.setdefault(name, str(value)) != str(value):
            logger.info_once(
                "KV tier: %s is %s, not the %s that follows from timeout_ms: calls to "
                "Mooncake may take as long as that.",
                name,
                os.environ[name],
                value,
            )


def address_of(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data


def buffers(
    places: Sequence[memoryview],
    headers: Sequence[bytes | bytearray],
    rows: Sequence[memoryview],
) -> tuple[list[list[int]], list[list[int]]]:
    """Addresses and sizes of headers and rows, as Mooncake wants them."""
    addresses = [[address_of(p), address_of(r)] for p, r in zip(places, rows)]
    return addresses, [[len(h), r.nbytes] for h, r in zip(headers, rows)]


class SharedClient:
    """A client for several threads, connected when it is used and not there.

    Args:
        config: Settings, checked.

    """

    def __init__(self, config: "MooncakeConfig") -> None:
        self.memory: memoryview | None = None
        """In which rows lie, to be set before they are moved."""
        self._config = config
        self._client: Client | None = None
        self._dropped: Client | None = None
        self._num_users = 0
        self._changed = threading.Condition()

    @contextmanager
    def use(self) -> Iterator[Client]:
        """The client. Where it was dropped, this ends when it is closed.

        Raises:
            OSError: There is no connection.

        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._dropped is None, CLOSE_S):
                raise OSError("a call does not end, and its client cannot be closed")
            if self._client is None:
                client = Client(self._config)
                if self.memory is not None:
                    client.register(self.memory)
                self._client = client
            client = self._client
            self._num_users += 1
        try:
            yield client
        finally:
            with self._changed:
                self._num_users -= 1
                self._changed.notify_all()
                if self._dropped is client:
                    # To close it under a call of another thread ends the process, and
                    # before it is closed it may write to the rows of this one.
                    self._changed.wait_for(
                        lambda: self._dropped is not client or not self._num_users
                    )
                    self._close_dropped(client)

    def drop(self, client: Client) -> None:
        """By a user of the client: nobody else begins to use it."""
        with self._changed:
            if self._client is client:
                self._client, self._dropped = None, client

    def close(self) -> None:
        with self._changed:
            # A call that hangs keeps it: the process ends anyway.
            if self._changed.wait_for(lambda: not self._num_users, CLOSE_S):
                client, self._client = self._client, None
                if client is not None:
                    client.close()

    def _close_dropped(self, client: Client) -> None:
        """Unless another one has, and maybe dropped a younger client since."""
        if self._dropped is client:
            self._dropped = None
            client.close()
            self._changed.notify_all()
