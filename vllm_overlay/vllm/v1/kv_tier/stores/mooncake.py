# SPDX-License-Identifier: Apache-2.0
"""A store of objects in the memory of a Mooncake Store.

An object is one of Mooncake under `kvtier/NAMESPACE/rRANK/KEY`: header and row by its
batch calls for several buffers, straight from and to the slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from vllm.v1.kv_tier.stores.base import BlockStore
from vllm.v1.kv_tier.stores.breaker import Breaker
from vllm.v1.kv_tier.stores.format import ObjectFormat
from vllm.v1.kv_tier.stores.mooncake_client import (
    MAX_BATCH,
    Client,
    SharedClient,
    buffers,
    import_client,
)
from vllm.v1.kv_tier.stores.settings import StoreConfig
from vllm.v1.kv_tier.stores.threads import Threads

GiB = 1 << 30
_BATCH_BYTES = 32 << 20
# Mooncake has threads of its own. With two of ours, one makes checksums while what the
# other one has asked for is on its way.
_NUM_THREADS = 2
# Mooncake's codes: it is not there, it was not read in time; no memory for it.
_MISSES = _NOT_THERE, _LEASE_OVER = (-704, -707)
_NO_ROOM = -200


@dataclass(frozen=True)
class MooncakeConfig(StoreConfig):
    """`{"type": "mooncake", …}` of `secondary_tiers`: a Mooncake Store."""

    example = '{"type": "mooncake", "master": "127.0.0.1:50051"}'

    master: str
    """`host:port` of `mooncake_master`."""

    metadata_server: str = "P2PHANDSHAKE"
    """Mooncake's metadata server. With `P2PHANDSHAKE` there is none."""

    protocol: str = "tcp"
    """`tcp`, or `rdma`."""

    rdma_devices: str = ""
    """Devices for `rdma`, with commas between them. Empty: Mooncake chooses."""

    local_hostname: str = ""
    """Name or address by which other nodes reach this one. Empty: the address that
    reaches the master."""

    global_segment_gib: float = 0.0
    """GiB of memory that this engine gives to the store, in its first rank."""

    timeout_ms: float = 4000.0
    """How long an operation may take about that makes no progress, in milliseconds. The
    single transfer has a quarter of it: a second at least."""

    @property
    def name(self) -> str:
        return f"mooncake at {self.master}"

    @property
    def timeout_s(self) -> int:
        """Of a transfer, or a call to the master."""
        return max(1, round(self.timeout_ms / 4e3))

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.master.rpartition(":")
        return host.strip("[]"), int(port)

    def check_values(self) -> None:
        super().check_values()
        self.check_text("master", like="127.0.0.1:50051")
        host, _, port = self.master.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(
                f"{self.setting('master')} must be host:port, got {self.master!r}. "
                "Give one like 127.0.0.1:50051."
            )
        self.check_text("metadata_server", like="P2PHANDSHAKE")
        for name in ("rdma_devices", "local_hostname"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(
                    f"{self.setting(name)} must be a text, got {getattr(self, name)!r}."
                )
        if self.protocol not in ("tcp", "rdma"):
            raise ValueError(
                f"{self.setting('protocol')} must be tcp or rdma, got "
                f"{self.protocol!r}."
            )
        self.check_above_0("timeout_ms")
        self.check_above_0("global_segment_gib", or_0=True)

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
        except OSError as e:
            raise ValueError(
                f"{self.setting('master')} {self.master} cannot be used ({e}). Start "
                "mooncake_master there, or correct the address; metadata_server "
                f"{self.metadata_server} and protocol {self.protocol} must be those of "
                "its nodes."
            ) from e

    def open(self, namespace: str, rank: int, slot_bytes: int) -> "MooncakeStore":
        return MooncakeStore(self, namespace, rank, slot_bytes)


class MooncakeStore(BlockStore):
    """The objects of one rank under one namespace, in a Mooncake Store.

    Nothing is connected before it is used.

    Args:
        config: Settings, checked.
        namespace: What shaped the bytes: hex digits.
        rank: Whose part they are.
        slot_bytes: Size of a row.

    """

    def __init__(
        self, config: MooncakeConfig, namespace: str, rank: int, slot_bytes: int
    ) -> None:
        self._config = config
        self._prefix = f"kvtier/{namespace}/r{rank}/"
        self._gives = rank == 0 and config.global_segment_gib > 0
        self._format = ObjectFormat(namespace, rank, slot_bytes)
        self._deadline_s = config.deadline_ms / 1e3
        self._batch = max(1, min(MAX_BATCH, _BATCH_BYTES // slot_bytes) // _NUM_THREADS)
        self._threads = Threads(_NUM_THREADS, "mooncake")
        self._client = SharedClient(config)
        self._giver: Client | None = None
        self._breaker = Breaker(config.name)
        self._writing = Breaker(config.name, "nothing more is written to it")

    def register(self, memory: memoryview) -> None:
        self._client.memory = memory
        if self._gives:
            # One of its own, which is not closed when a transfer fails: what the store
            # keeps here would be lost.
            num_bytes = int(self._config.global_segment_gib * GiB)
            self._giver = Client(self._config, segment_bytes=num_bytes)

    def put(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        if not self._writing.allows():
            return [False] * len(keys)
        return self._threads.spread_batches(self._put, keys, rows, self._batch)

    def get(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        deadline = monotonic() + self._deadline_s
        return self._threads.spread_batches(
            self._get, keys, rows, self._batch, deadline
        )

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

    def _put(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        there = self.exists(keys)
        missing = [i for i, is_there in enumerate(there) if not is_there]
        names = [self._name(keys[i]) for i in missing]
        headers = [self._format.header(keys[i], rows[i]) for i in missing]

        def put(client: Client) -> list[int]:
            with client.headers() as places:
                for place, header in zip(places, headers):
                    place[: len(header)] = header
                return client.calls.batch_put_from_multi_buffers(
                    names, *buffers(places, headers, [rows[i] for i in missing])
                )

        codes = self._call(put, [0, _NO_ROOM]) if missing else []
        for i, code in zip(missing, codes or []):
            there[i] = code == 0
        if codes and _NO_ROOM in codes:
            self._writing.failed("it has no room")
        elif codes and 0 in codes:
            self._writing.succeeded()
        return there

    def _get(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        names = [self._name(key) for key in keys]
        headers = [bytearray(self._format.header_bytes(key)) for key in keys]
        damaged: list[str] = []

        def get(client: Client) -> list[int]:
            with client.headers() as places:
                codes = client.calls.batch_get_into_multi_buffers(
                    names, *buffers(places, headers, rows)
                )
                for place, header in zip(places, headers):
                    header[:] = place[: len(header)]
            # An object of another size looks like a failed transfer.
            for i, code in enumerate(codes):
                if code < 0 and code not in _MISSES:
                    size = client.calls.get_size(names[i])
                    if size < 0:
                        break
                    if size != self._format.size(keys[i]):
                        damaged.append(names[i])
                        codes[i] = _NOT_THERE
                        self._client.drop(client)
            return codes

        codes = self._call(get, _MISSES) or [_NOT_THERE] * len(keys)
        answers = []
        for i, (key, row) in enumerate(zip(keys, rows)):
            is_read = codes[i] == self._format.size(key)
            answers.append(is_read and self._format.is_right(headers[i], key, row))
            if is_read and not answers[i]:
                damaged.append(names[i])
        self._remove(damaged)
        return answers

    def _remove(self, names: list[str]) -> None:
        if names:
            self._call(lambda client: client.calls.batch_remove(names, True), _MISSES)

    def _call(
        self, call: Callable[[Client], list[int]], harmless: Sequence[int]
    ) -> list[int] | None:
        """Codes of a call; None if the store is in trouble.

        When this returns, the client of a call that had other negative codes than the
        harmless ones is closed.
        """
        if not self._breaker.allows():
            return None
        try:
            with self._client.use() as client:
                codes = call(client)
                wrong = {code for code in codes if code < 0} - set(harmless)
                if wrong:
                    self._client.drop(client)
        except OSError as e:
            self._breaker.failed(e)
            return None
        if wrong:
            self._breaker.failed(f"code {min(wrong)}")
        else:
            self._breaker.succeeded()
        return codes
