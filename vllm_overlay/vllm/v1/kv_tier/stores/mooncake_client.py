# SPDX-License-Identifier: Apache-2.0
"""Clients of a Mooncake Store, and when to close them.

A transfer that Mooncake gave up can still write to its buffers later: a node that had
stalled for a minute overwrote 125 of 128 MiB when it continued. Unregistering the
memory did not prevent that; closing the client did. So transfers get deadlines, and
after a failed one the client is closed before `get` returns. Closing waits for calls of
other threads, since closing during a call would crash the process.
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
"""Objects moved by one call. A call to a stalled node takes longer the more there
are."""

_LOCAL_BUFFER_BYTES = 16 << 20
_HEADER_BYTES, _NUM_CALLS = 1024, 4
# Seconds to wait for a dropped client to be closed before using a new one.
CLOSE_S = 10.0


def import_client() -> Any:
    """Import Mooncake's client class.

    Raises:
        ImportError: The package or a system library is missing.

    """
    # Mooncake logs each failed transfer, and much else.
    os.environ.setdefault("GLOG_minloglevel", "3")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    from mooncake.store import MooncakeDistributedStore

    return MooncakeDistributedStore


class Client:
    """A connected client of Mooncake.

    Args:
        config: Checked settings.
        segment_bytes: Bytes of memory to give to the store.

    Raises:
        OSError: The master cannot be reached, or refuses the client.

    """

    def __init__(self, config: "MooncakeConfig", segment_bytes: int = 0) -> None:
        _set_deadlines(config.timeout_s)
        # Without a master, setup would take a minute and a half.
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
        """Memory for the headers of a batch, used by one call at a time."""
        places = self._free.get()
        try:
            yield places
        finally:
            self._free.put(places)

    def register(self, memory: memoryview) -> None:
        """Register memory for transfers.

        Raises:
            OSError: It failed. The client is closed, since it cannot use other memory.

        """
        code = self.calls.register_buffer(address_of(memory), memory.nbytes)
        if code:
            self.close()
            raise OSError(f"memory could not be registered: code {code}")

    def close(self) -> None:
        self.calls.close()


def _set_deadlines(seconds: int) -> None:
    """Set time limits for transfers and for calls to the master.

    Mooncake reads these variables repeatedly, so they apply to the whole process.
    Values that are already set stay.
    """
    for name, value in (
        ("MC_TCP_STATUS_TIMEOUT_SEC", seconds),
        ("MC_TCP_PROGRESS_TIMEOUT_SEC", seconds),
        # Number of transfers of a stalled node that end at the same time.
        ("MC_TCP_LANES_PER_PEER", MAX_BATCH // 2),
        ("MC_RPC_TIMEOUT_MS", seconds * 1000),
        ("MC_RPC_CONNECT_TIMEOUT_MS", seconds * 1000),
        ("MC_STORE_CLIENT_SETUP_RETRIES", 1),
    ):
        if os.environ.setdefault(name, str(value)) != str(value):
            logger.info_once(
                "KV tier: %s is set to %s instead of %s, which timeout_ms would give. "
                "Calls to Mooncake may take accordingly long.",
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
    """Addresses and sizes of headers and rows, in Mooncake's form."""
    addresses = [[address_of(p), address_of(r)] for p, r in zip(places, rows)]
    return addresses, [[len(h), r.nbytes] for h, r in zip(headers, rows)]


class SharedClient:
    """A client for several threads, connected on use.

    Args:
        config: Checked settings.

    """

    def __init__(self, config: "MooncakeConfig") -> None:
        self.memory: memoryview | None = None
        """Memory that contains all rows. Set it before the first transfer."""
        self._config = config
        self._client: Client | None = None
        self._dropped: Client | None = None
        self._num_users = 0
        self._changed = threading.Condition()

    @contextmanager
    def use(self) -> Iterator[Client]:
        """Use the client. If it is dropped meanwhile, this waits until it is closed.

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
                    # Closing it during another thread's call would crash the process,
                    # and until it is closed it may write to the rows of this call.
                    self._changed.wait_for(
                        lambda: self._dropped is not client or not self._num_users
                    )
                    self._close_dropped(client)

    def drop(self, client: Client) -> None:
        """Stop further use of the client. Called by one of its users."""
        with self._changed:
            if self._client is client:
                self._client, self._dropped = None, client

    def close(self) -> None:
        with self._changed:
            # If a call hangs, the client stays open; the process ends anyway.
            if self._changed.wait_for(lambda: not self._num_users, CLOSE_S):
                client, self._client = self._client, None
                if client is not None:
                    client.close()

    def _close_dropped(self, client: Client) -> None:
        """Close the dropped client, unless another thread has done so."""
        if self._dropped is client:
            self._dropped = None
            client.close()
            self._changed.notify_all()
