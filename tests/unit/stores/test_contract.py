# SPDX-License-Identifier: Apache-2.0
"""What every store promises, with real servers: put, get, damage, and their end."""

import mmap
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm.v1.kv_tier.stores import format as form
from vllm.v1.kv_tier.stores.base import BlockStore

from ...settings import store_config, with_debug
from .objects import KEYS, NAMESPACE
from .servers import Mooncake, Servers, Valkey, until

ROW_BYTES = 5000
NUM_ROWS = 64
OTHER = "f" * 32


class Files(Servers):
    """No server: files."""

    names = ()

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root
        self.entry = {"type": "fs", "root_dir": str(root), "max_gib": 0.01}

    def start(self) -> None:
        pass

    def read(self, name: str) -> bytes | None:
        path = self._root / name
        return path.read_bytes() if path.exists() else None

    def write(self, name: str, content: bytes) -> None:
        (self._root / name).write_bytes(content)

    def object_name(self, namespace: str, rank: int, key: bytes) -> str:
        return f"{namespace}/r{rank}/{key.hex()[:2]}/{key.hex()}.kv"


@pytest.fixture(scope="module", params=["fs", "redis", "mooncake"])
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    if request.param == "fs":
        servers: Servers = Files(tmp_path_factory.mktemp("files") / "kv")
    else:
        servers = Valkey() if request.param == "redis" else Mooncake()
    try:
        servers.start()
        store_config(servers.entry).check()
        yield servers
    finally:
        servers.close()


class Client:
    """A store, and memory of it: rows to put from, and as many to get into."""

    def __init__(self, servers: Servers, **options: Any) -> None:
        place = {"namespace": NAMESPACE, "rank": 0}
        place |= {name: options.pop(name) for name in place if name in options}
        config = store_config(
            with_debug(servers.entry, **{"deadline_ms": 60_000} | options)
        )
        self.store: BlockStore = config.open(slot_bytes=ROW_BYTES, **place)
        self.memory = memoryview(mmap.mmap(-1, 2 * NUM_ROWS * ROW_BYTES))
        self.memory[: NUM_ROWS * ROW_BYTES] = random.Random(1).randbytes(
            NUM_ROWS * ROW_BYTES
        )
        self.store.register(self.memory)
        if hasattr(self.store, "_breaker"):
            self.store._breaker._retry_s = 1.0

    def row(self, i: int) -> memoryview:
        return self.memory[i * ROW_BYTES : (i + 1) * ROW_BYTES]

    def place(self, i: int) -> memoryview:
        return self.row(NUM_ROWS + i)

    def put(self, *indices: int) -> list[bool]:
        return self.store.put(
            [KEYS[i] for i in indices], [self.row(i) for i in indices]
        )

    def get(self, *indices: int) -> list[bool]:
        """Which rows came. Those that did have the right bytes."""
        places = [self.place(i) for i in indices]
        for place in places:
            place[:] = bytes(ROW_BYTES)
        answers = self.store.get([KEYS[i] for i in indices], places)
        for i, place, is_there in zip(indices, places, answers):
            assert not is_there or place == self.row(i), i
        return answers

    def exists(self, *indices: int) -> list[bool]:
        return self.store.exists([KEYS[i] for i in indices])

    def clear(self) -> None:
        self.store.delete(KEYS[:NUM_ROWS])


@pytest.fixture
def client(servers: Servers) -> Iterator[Client]:
    client = Client(servers)
    client.clear()
    yield client
    client.store.close()


def test_what_is_put_comes_back(client: Client) -> None:
    n = NUM_ROWS // 2
    assert client.put(*range(n)) == [True] * n
    assert client.get(*range(2 * n)) == [True] * n + [False] * n
    assert client.exists(*range(2 * n)) == [True] * n + [False] * n
    # It need not be written again.
    assert client.put(*range(n)) == [True] * n
    client.store.delete(KEYS[: n // 2])
    assert client.get(*range(n)) == [False] * (n // 2) + [True] * (n - n // 2)
    client.store.delete(KEYS[n // 2 : n : 3])
    assert client.put(*range(2 * n)) == client.get(*range(2 * n)) == [True] * 2 * n
    assert client.put() == client.get() == client.exists() == []


LENGTHS = (ROW_BYTES, 64, 1000, ROW_BYTES - 1)


def test_rows_of_several_lengths(client: Client) -> None:
    """KV cache groups need less than a slot, each as much as it does."""
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(NUM_ROWS)]
    keys, rows = KEYS[:NUM_ROWS], [client.row(i)[:n] for i, n in enumerate(lengths)]
    assert client.store.put(keys, rows) == [True] * NUM_ROWS
    assert client.store.put(keys, rows) == [True] * NUM_ROWS
    for i in range(NUM_ROWS):
        client.place(i)[:] = b"x" * ROW_BYTES
    places = [client.place(i)[:n] for i, n in enumerate(lengths)]
    assert client.store.get(keys, places) == [True] * NUM_ROWS
    for i, n in enumerate(lengths):
        assert places[i] == rows[i]
        assert client.place(i)[n:] == b"x" * (ROW_BYTES - n)


@pytest.mark.parametrize("asked", [936, 999, 1001, 1064, ROW_BYTES])
def test_an_object_of_another_length_is_a_miss(client: Client, asked: int) -> None:
    assert client.store.put([KEYS[0]], [client.row(0)[:1000]]) == [True]
    client.place(0)[:] = b"x" * ROW_BYTES
    assert client.store.get([KEYS[0]], [client.place(0)[:asked]]) == [False]
    assert client.place(0)[asked:] == b"x" * (ROW_BYTES - asked)
    # The next one of the length that is asked for can be put.
    client.store.delete([KEYS[0]])
    assert client.store.put([KEYS[0]], [client.row(0)[:asked]]) == [True]
    assert client.store.get([KEYS[0]], [client.place(0)[:asked]]) == [True]


def test_another_client_finds_it(servers: Servers, client: Client) -> None:
    assert client.put(1, 2) == [True, True]
    other = Client(servers)
    assert other.get(2, 1, 3) == [True, True, False]
    other.store.close()


def test_ranks_and_namespaces_do_not_meet(servers: Servers, client: Client) -> None:
    assert client.put(1) == [True]
    for place in ({"rank": 1}, {"namespace": OTHER}):
        other = Client(servers, **place)
        assert other.exists(1) == other.get(1) == [False]
        other.store.close()


def test_many_threads(client: Client) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        for n in range(15):
            # Places are a thread's own.
            i = seed + 4 * (n % 12)
            if client.put(i) != [True] or client.get(i) != [True]:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def flip(place: int) -> Any:
    def flipped(content: bytes) -> bytes:
        damaged = bytearray(content)
        damaged[place] ^= 1
        return bytes(damaged)

    return flipped


DAMAGES = {
    "magic": flip(0),
    "checksum": flip(17),
    "key": flip(70),
    "first byte": flip(-ROW_BYTES),
    "last byte": flip(-1),
    "truncated": lambda content: content[:-1],
    "half": lambda content: content[: len(content) // 2],
    "extended": lambda content: content + b"x",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_a_miss_and_is_removed(
    servers: Servers, client: Client, damage: str
) -> None:
    assert client.put(1, 2) == [True, True]
    name = servers.object_name(NAMESPACE, 0, KEYS[1])
    content = servers.read(name)
    assert content is not None and content.endswith(client.row(1))
    servers.write(name, DAMAGES[damage](content))
    assert client.get(1, 2) == [False, True]
    assert servers.read(name) is None and client.exists(1) == [False]
    assert client.put(1) == [True] and client.get(1) == [True]


def test_what_nobody_here_can_check_is_left_to_those_who_can(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.put(1, 2) == [True, True]
    with monkeypatch.context() as without:
        blake3 = {b"blake3": form.CHECKSUMS[b"blake3"]}
        without.setattr(form, "CHECKSUMS", blake3)
        assert client.put(3) == [True]
        assert client.get(1, 2, 3) == [False, False, True]
    assert client.get(1, 2, 3) == [True, True, True]


def test_damage_among_many(servers: Servers, client: Client) -> None:
    assert all(client.put(*range(NUM_ROWS)))
    damaged = (0, 7, 40, NUM_ROWS - 1)
    for i in damaged:
        name = servers.object_name(NAMESPACE, 0, KEYS[i])
        content = servers.read(name)
        assert content is not None
        servers.write(name, flip(-1)(content))
    expected = [i not in damaged for i in range(NUM_ROWS)]
    assert client.get(*range(NUM_ROWS)) == expected
    assert client.exists(*range(NUM_ROWS)) == expected


def test_an_object_of_another_name_is_a_miss(servers: Servers, client: Client) -> None:
    others = [client, Client(servers, rank=1), Client(servers, namespace=OTHER)]
    for other in others:
        assert other.put(1, 2) == [True, True]
    name = servers.object_name(NAMESPACE, 0, KEYS[1])
    for namespace, rank, i in ((NAMESPACE, 0, 2), (NAMESPACE, 1, 1), (OTHER, 0, 1)):
        content = servers.read(servers.object_name(namespace, rank, KEYS[i]))
        assert content is not None
        servers.write(name, content)
        assert client.get(1) == [False] and servers.read(name) is None
    for other in others[1:]:
        other.clear()
        other.store.close()


def test_what_has_not_begun_at_the_deadline_is_a_miss(
    servers: Servers, client: Client
) -> None:
    assert client.put(1) == [True]
    late = Client(servers, deadline_ms=1e-6)
    assert late.exists(1) == [True] and late.get(1) == [False]
    late.store.close()


# ------------------------------------------------------------------- servers


@pytest.fixture(params=["server", "node", "master"])
def process(request: pytest.FixtureRequest, servers: Servers) -> Iterator[str]:
    if request.param not in servers.names:
        pytest.skip("no such process")
    if isinstance(servers, Mooncake) and os.environ.get("KV_TIER_STORES") != "all":
        pytest.skip("slow, and by its own timeouts of seconds: KV_TIER_STORES=all")
    yield request.param
    if request.param in servers._processes:
        servers.send(request.param, signal.SIGCONT)
    servers.start()


def work(client: Client, n: int) -> None:
    """What came back from an earlier test may take a moment."""
    indices = range(n)
    until(lambda: all(client.put(*indices)) and all(client.get(*indices)), 30)


def in_seconds(limit: float, call: Any, *indices: int) -> list[bool]:
    begun = time.monotonic()
    answers = call(*indices)
    assert time.monotonic() - begun < limit
    return answers


def test_a_process_that_stands_still(
    servers: Servers, client: Client, process: str
) -> None:
    """Calls end in time, nothing is written to rows later, and it is used again."""
    n = NUM_ROWS // 2
    work(client, n)
    servers.send(process, signal.SIGSTOP)
    in_seconds(12, client.get, *range(n))
    rows = client.memory[NUM_ROWS * ROW_BYTES :]
    rows[:] = b"\7" * len(rows)
    # Now it is known that nobody answers.
    in_seconds(3, client.exists, 1)
    assert in_seconds(0.3, client.exists, 1) == [False]
    servers.send(process, signal.SIGCONT)
    time.sleep(1.5)
    assert rows == b"\7" * len(rows), "a late write"
    until(lambda: client.put(1) == [True] and client.get(1) == [True], 30)


def test_putting_and_asking_end_in_time(
    servers: Servers, client: Client, process: str
) -> None:
    work(client, 2)
    servers.send(process, signal.SIGSTOP)
    in_seconds(15, client.put, *range(2, 34))
    servers.send(process, signal.SIGCONT)
    until(lambda: client.exists(1) == [True] or client.put(1) == [True], 30)
    servers.send(process, signal.SIGSTOP)
    in_seconds(3, client.exists, *range(2, 34))


def test_a_process_that_is_killed(
    servers: Servers, client: Client, process: str
) -> None:
    work(client, 2)
    servers.kill(process)
    assert in_seconds(15, client.get, 1) == [False]
    in_seconds(15, client.put, 2)
    servers.start()
    until(lambda: client.put(3) == [True] and client.get(3) == [True], 60)


def test_a_process_that_is_killed_in_the_middle(
    servers: Servers, client: Client, process: str
) -> None:
    """Gets and puts of two threads, on and on: no wrong row, and none hangs."""
    ends, counts = threading.Event(), {"put": 0, "get": 0}

    def go_on(name: str, call: Any, indices: range) -> None:
        while not ends.is_set():
            counts[name] += sum(call(*indices))

    work(client, 16)
    threads = [
        threading.Thread(target=go_on, args=("get", client.get, range(16))),
        threading.Thread(target=go_on, args=("put", client.put, range(16, 32))),
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    servers.kill(process)
    time.sleep(1)
    servers.start()
    before = counts["put"]
    until(lambda: counts["put"] > before, 60)
    ends.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
