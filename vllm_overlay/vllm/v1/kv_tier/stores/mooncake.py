# SPDX-License-Identifier: Apache-2.0
"""A store of objects in the memory of a Mooncake Store.

A transfer that Mooncake gave up can still write to its buffers later: a node that had
stalled for a minute overwrote 125 of 128 MiB when it continued. Unregistering the
memory did not prevent that; closing the client did. So transfers get deadlines, and
after a failed one the client is closed before `get` returns. Closing waits for calls of
other threads, since closing during a call would crash the process.

An object is stored under `kvtier/NAMESPACE/rRANK/KEY`. Header and row are moved by
Mooncake's batch calls for several buffers, directly from and to the slots.
"""

import mmap
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from functools import partial
from time import monotonic
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass

from vllm.logger import init_logger
from vllm.v1.kv_tier.options import SETTINGS, Above0, From0, Text
from vllm.v1.kv_tier.stores.base import BlockStore
from vllm.v1.kv_tier.stores.breaker import Breaker
from vllm.v1.kv_tier.stores.format import ObjectFormat
from vllm.v1.kv_tier.stores.settings import StoreConfig, StoreDebug
from vllm.v1.kv_tier.stores.threads import Threads

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
        self._timeout_s = config.timeout_s
        self._num_single = MAX_BATCH
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

    def move(
        self,
        call: Callable[..., list[int]],
        names: Sequence[str],
        addresses: list[list[int]],
        sizes: list[list[int]],
    ) -> list[int]:
        """Run a call for several buffers, and return its codes.

        The handshake with a node that has stalled takes a minute, which cannot be set,
        and is repeated for each object of a call. So a new client moves its first
        objects in calls of their own, and gives up after one that is too slow.
        """
        codes: list[int] = []
        while self._num_single > 0 and (n := len(codes)) < len(names):
            begun = monotonic()
            part = slice(n, n + 1)
            codes += call(names[part], addresses[part], sizes[part])
            # A miss does not reach a node.
            self._num_single -= codes[-1] >= 0
            if codes[-1] < 0 and monotonic() - begun >= self._timeout_s:
                return codes + codes[-1:] * (len(names) - len(codes))
        rest = slice(len(codes), None)
        if names[rest]:
            codes += call(names[rest], addresses[rest], sizes[rest])
        return codes

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
        ("MC_HANDSHAKE_CONNECT_TIMEOUT", seconds),
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
        self.is_closed = False
        """Whether no client is connected any more."""

    @contextmanager
    def use(self) -> Iterator[Client]:
        """Use the client. If it is dropped meanwhile, this waits until it is closed.

        Raises:
            OSError: There is no connection.

        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._dropped is None, CLOSE_S):
                raise OSError("a call does not end, and its client cannot be closed")
            if self.is_closed:
                raise OSError("it is closed")
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
            # A job that still runs must not connect another client between its calls.
            self.is_closed = True
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


GiB = 1 << 30
_BATCH_BYTES = 64 << 20
# Objects of a batch whose checksums are made at a time.
_PART = MAX_BATCH // 8
# Mooncake has its own threads, and two calls at once slow each other down. So one
# thread calls while the other one makes checksums.
_NUM_THREADS = 2
# Mooncake's error codes: object missing, another engine is writing it, lease expired
# before it was read; no memory.
_MISSES = _NOT_THERE, _NOT_READY, _LEASE_OVER = (-704, -703, -707)
_NO_ROOM = -200


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class MooncakeDebug(StoreDebug):
    """`debug` of an entry of type `mooncake`."""

    metadata_server: Annotated[Text, Field(min_length=1)] = "P2PHANDSHAKE"
    """Mooncake's metadata server. `P2PHANDSHAKE`: none."""

    rdma_devices: Text = ""
    """Devices for `rdma`, separated by commas. Empty: Mooncake chooses."""

    local_hostname: Text = ""
    """Name or address by which other nodes reach this one. Empty: the address that
    reaches the master."""

    global_segment_gib: From0 = 0.0
    """GiB of memory that this engine gives to the store, in its first rank."""

    timeout_ms: Above0 = 4000.0
    """How long an operation that makes no progress may take, in milliseconds, about. A
    single transfer has a quarter of it: a second at least."""


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class MooncakeConfig(StoreConfig):
    """`{"type": "mooncake", …}` of `secondary_tiers`: a Mooncake Store."""

    example = '{"type": "mooncake", "master": "127.0.0.1:50051"}'

    master: Text
    """`host:port` of `mooncake_master`."""

    protocol: Literal["tcp", "rdma"] = "tcp"
    """`tcp` or `rdma`."""

    debug: MooncakeDebug = field(default_factory=MooncakeDebug)

    @field_validator("master")
    @classmethod
    def _check_master(cls, master: str) -> str:
        host, _, port = master.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(
                f"must be host:port, got {master!r}. Give one like 127.0.0.1:50051."
            )
        return master

    @property
    def name(self) -> str:
        return f"mooncake at {self.master}"

    @property
    def timeout_s(self) -> int:
        """Seconds for a transfer, or for a call to the master."""
        return max(1, round(self.debug.timeout_ms / 4e3))

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.master.rpartition(":")
        return host.strip("[]"), int(port)

    def of_a_reader(self) -> "MooncakeConfig":
        # The reader has the rank number of the rank that writes, which provides the
        # memory.
        return replace(self, debug=replace(self.debug, global_segment_gib=0.0))

    def check(self) -> None:
        try:
            import_client()
        except ImportError as e:
            raise ValueError(
                f"{self.setting('type')} 'mooncake' needs Mooncake's client, which "
                f"cannot be imported ({e}). pip install mooncake-transfer-engine (or "
                "mooncake-transfer-engine-non-cuda), and the libraries libibverbs, "
                "librdmacm and libnuma of the system."
            ) from e
        try:
            Client(self).close()
        except (OSError, RuntimeError) as e:
            raise ValueError(
                f"{self.setting('master')} {self.master} cannot be used ({e}). Start "
                "mooncake_master there, or correct the address; debug.metadata_server "
                f"{self.debug.metadata_server} and protocol {self.protocol} must be "
                "those of its nodes."
            ) from e

    def open(self, namespace: str, rank: int, slot_bytes: int) -> "MooncakeStore":
        return MooncakeStore(self, namespace, rank, slot_bytes)


class MooncakeStore(BlockStore):
    """The objects of one rank in one namespace, in a Mooncake Store.

    It connects on first use.

    Args:
        config: Checked settings.
        namespace: Digest of everything that shapes the bytes, in hex digits.
        rank: Number of the rank.
        slot_bytes: Most bytes of a row.

    """

    def __init__(
        self, config: MooncakeConfig, namespace: str, rank: int, slot_bytes: int
    ) -> None:
        self._config = config
        self._prefix = f"kvtier/{namespace}/r{rank}/"
        self._gives = rank == 0 and config.debug.global_segment_gib > 0
        self._format = ObjectFormat(namespace, rank)
        self._deadline_s = config.debug.deadline_ms / 1e3
        self._batch = min(MAX_BATCH, max(1, _BATCH_BYTES // slot_bytes))
        self._threads = Threads(_NUM_THREADS, "mooncake")
        self._client = SharedClient(config)
        self._giver: Client | None = None
        self._breaker = Breaker(config.name)
        self._writing = Breaker(config.name, "nothing more is written to it")

    def register(self, memory: memoryview) -> None:
        self._client.memory = memory
        if self._gives:
            # A separate client, which stays open when a transfer fails: closing it
            # would lose the objects in its memory.
            num_bytes = int(self._config.debug.global_segment_gib * GiB)
            self._giver = Client(self._config, segment_bytes=num_bytes)

    def put(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        if not self._writing.begin_try():
            return [False] * len(keys)
        done = self.exists(keys)
        missing = [i for i, is_there in enumerate(done) if not is_there]
        batches = [
            missing[i : i + self._batch] for i in range(0, len(missing), self._batch)
        ]
        headers = [
            [
                self._threads.begin(partial(self._headers, part, keys, rows))
                for part in _parts(batch)
            ]
            for batch in batches
        ]
        for batch, parts in zip(batches, headers):
            names = [self._name(keys[i]) for i in batch]
            made = [header for part in parts for header in part()]
            answers = self._put(names, made, [rows[i] for i in batch])
            for i, is_there in zip(batch, answers):
                done[i] = is_there
        return done

    def get(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        deadline = monotonic() + self._deadline_s
        damaged: list[str] = []
        checks: list[Callable[[], list[bool]]] = []
        for i in range(0, len(keys), self._batch):
            if monotonic() > deadline:
                break
            batch = slice(i, i + self._batch)
            checks += self._get(keys[batch], rows[batch], damaged)
        # In reverse, since the helper has begun with the first ones.
        parts = [check() for check in reversed(checks)]
        self._remove(damaged)
        answers = [answer for part in reversed(parts) for answer in part]
        return answers + [False] * (len(keys) - len(answers))

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        names = [self._name(key) for key in keys]
        codes = self._call(lambda client: client.calls.batch_is_exist(names), [0])
        return [code == 1 for code in codes or [0] * len(keys)]

    def delete(self, keys: Sequence[bytes]) -> None:
        self._remove([self._name(key) for key in keys])

    def close(self) -> None:
        self._threads.close()
        self._client.close()
        if self._giver is not None:
            self._giver.close()

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    def _headers(
        self, part: Sequence[int], keys: Sequence[bytes], rows: Sequence[memoryview]
    ) -> list[bytes]:
        return [self._format.header(keys[i], rows[i]) for i in part]

    def _put(
        self, names: list[str], headers: list[bytes], rows: Sequence[memoryview]
    ) -> list[bool]:
        """Store the missing objects of a batch. True: the object exists now."""

        def put(client: Client) -> list[int]:
            with client.headers() as places:
                for place, header in zip(places, headers):
                    place[: len(header)] = header
                return client.move(
                    client.calls.batch_put_from_multi_buffers,
                    names,
                    *buffers(places, headers, rows),
                )

        codes = self._call(put, [0, _NO_ROOM]) or []
        if _NO_ROOM in codes:
            self._writing.record_failure("it has no room")
        elif 0 in codes:
            self._writing.record_success()
        return [code == 0 for code in codes or [_NO_ROOM] * len(names)]

    def _get(
        self,
        keys: Sequence[bytes],
        rows: Sequence[memoryview],
        damaged: list[str],
    ) -> list[Callable[[], list[bool]]]:
        """Read the objects of a batch.

        Returns:
            Functions that check some rows each, return their answers, and add names of
            damaged objects to `damaged`.

        """
        names = [self._name(key) for key in keys]
        headers = [bytearray(self._format.header_bytes(key)) for key in keys]
        sizes = [self._format.size(*each) for each in zip(keys, map(len, rows))]

        def get(client: Client) -> list[int]:
            with client.headers() as places:
                codes = client.move(
                    client.calls.batch_get_into_multi_buffers,
                    names,
                    *buffers(places, headers, rows),
                )
                for place, header in zip(places, headers):
                    header[:] = place[: len(header)]
            # An object of another size looks like a failed transfer.
            for i, code in enumerate(codes):
                if code < 0 and code not in _MISSES:
                    size = client.calls.get_size(names[i])
                    if size < 0:
                        break
                    if size != sizes[i]:
                        damaged.append(names[i])
                        codes[i] = _NOT_THERE
                        self._client.drop(client)
            return codes

        codes = self._call(get, _MISSES) or [_NOT_THERE] * len(keys)

        def check(part: Sequence[int]) -> list[bool]:
            answers = []
            for i in part:
                is_read = codes[i] == sizes[i]
                is_right = is_read and self._format.is_right(
                    headers[i], keys[i], rows[i]
                )
                answers.append(is_right is True)
                if is_read and is_right is False:
                    damaged.append(names[i])
            return answers

        return [
            self._threads.begin(partial(check, part))
            for part in _parts(range(len(keys)))
        ]

    def _remove(self, names: list[str]) -> None:
        if names:
            self._call(lambda client: client.calls.batch_remove(names, True), _MISSES)

    def _call(
        self, call: Callable[[Client], list[int]], harmless: Sequence[int]
    ) -> list[int] | None:
        """Run a call and return its codes; None if the store failed.

        After negative codes other than the harmless ones, the client is closed before
        this returns.
        """
        if self._client.is_closed or not self._breaker.begin_try():
            return None
        try:
            with self._client.use() as client:
                try:
                    codes = call(client)
                except BaseException:
                    # A transfer may be in flight.
                    self._client.drop(client)
                    raise
                wrong = {code for code in codes if code < 0} - set(harmless)
                if wrong:
                    self._client.drop(client)
        except Exception as e:
            # Mooncake raises exceptions of any class.
            self._breaker.record_failure(e)
            return None
        if wrong:
            self._breaker.record_failure(f"code {min(wrong)}")
        else:
            self._breaker.record_success()
        return codes


def _parts(batch: Sequence[int]) -> list[Sequence[int]]:
    return [batch[i : i + _PART] for i in range(0, len(batch), _PART)]
