# SPDX-License-Identifier: Apache-2.0
"""How fast is a store below the host, beside the plain way to move the same bytes?

    python scripts/bench/store_rate.py ['{"type": "fs", "root_dir": …, "max_gib": 8}' …]

Each argument is an entry of `secondary_tiers`, whose server runs already; without any,
files in a temporary folder. Beside files: as many threads that read and write plain
files. Beside Mooncake: its own batch calls, all objects at once. Beside Valkey or
Redis: the packages `redis` and `valkey-glide-sync`, where they are installed.

Store and plain way take turns, in each round in another order; the median of the
rounds is given as a ratio to the plain rate, and beside it the same of this process's
CPU time, which other programs of a busy machine hardly change. Files come from the page
cache, which is the hard case: a disk is slower than a checksum. The exit status is 1 if
a bar is missed.

    python scripts/bench/store_rate.py --start 100000

How long a directory takes to be opened that has so many objects, as it is left by an
engine, and without its counter, when all of them are looked at.

    python scripts/bench/store_rate.py --busy

The same store beside a thread that computes in Python, see `store_busy.py`.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from store_busy import Rows, measure_busy, new_keys

from vllm.v1.kv_tier.memory.shared import SharedMemory
from vllm.v1.kv_tier.stores.base import BlockStore, MemoryFile
from vllm.v1.kv_tier.stores.disk_quota import COUNTER
from vllm.v1.kv_tier.stores.format import CHECKSUMS
from vllm.v1.kv_tier.stores.settings import parse_entry

BARS = {"fs": {"put": 0.8, "get": 0.9}, "mooncake": {"put": 0.95, "get": 0.95}}
"""Of the plain rate."""
EXISTS_BAR_MS = 3.0
START_BAR_S = 2.0
NUM_LOOKUPS = 1024


class Way(ABC):
    """To move rows."""

    @abstractmethod
    def put(self, keys: Sequence[bytes], rows: Rows) -> None: ...

    @abstractmethod
    def get(self, keys: Sequence[bytes], rows: Rows) -> None: ...

    @abstractmethod
    def delete(self, keys: Sequence[bytes]) -> None: ...


class Store(Way):
    def __init__(self, store: BlockStore) -> None:
        self.store = store

    def put(self, keys: Sequence[bytes], rows: Rows) -> None:
        assert all(self.store.put(keys, rows)), "not all was taken"

    def get(self, keys: Sequence[bytes], rows: Rows) -> None:
        assert all(self.store.get(keys, rows)), "not all came back"

    def delete(self, keys: Sequence[bytes]) -> None:
        self.store.delete(keys)


class PlainFiles(Way):
    def __init__(self, folder: Path, threads: int) -> None:
        self._folder = folder
        self._threads = ThreadPoolExecutor(threads)

    def put(self, keys: Sequence[bytes], rows: Rows) -> None:
        list(self._threads.map(self._write, keys, rows))

    def get(self, keys: Sequence[bytes], rows: Rows) -> None:
        list(self._threads.map(self._read, keys, rows))

    def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            (self._folder / key.hex()).unlink()

    def _write(self, key: bytes, row: memoryview) -> None:
        fd = os.open(self._folder / key.hex(), os.O_WRONLY | os.O_CREAT, 0o600)
        os.writev(fd, [row])
        os.close(fd)

    def _read(self, key: bytes, row: memoryview) -> None:
        fd = os.open(self._folder / key.hex(), os.O_RDONLY)
        os.preadv(fd, [row], 0)
        os.close(fd)


class PlainMooncake(Way):
    """One call for all objects."""

    def __init__(self, store: Any) -> None:
        with store._client.use() as client:
            self._calls = client.calls

    def put(self, keys: Sequence[bytes], rows: Rows) -> None:
        codes = self._calls.batch_put_from(*self._arguments(keys, rows))
        assert not any(codes), f"codes {set(codes)}"

    def get(self, keys: Sequence[bytes], rows: Rows) -> None:
        assert min(self._calls.batch_get_into(*self._arguments(keys, rows))) > 0

    def delete(self, keys: Sequence[bytes]) -> None:
        self._calls.batch_remove([key.hex() for key in keys], True)

    @staticmethod
    def _arguments(keys: Sequence[bytes], rows: Rows) -> tuple[list, list, list]:
        places = [np.frombuffer(row, np.uint8).ctypes.data for row in rows]
        return [key.hex() for key in keys], places, [row.nbytes for row in rows]


class RedisPackage(Way):
    def __init__(self, url: str) -> None:
        import redis

        self._client: Any = redis.Redis.from_url(url)

    def put(self, keys: Sequence[bytes], rows: Rows) -> None:
        for key, row in zip(keys, rows):
            self._client.set(key, row)

    def get(self, keys: Sequence[bytes], rows: Rows) -> None:
        for key, row in zip(keys, rows):
            row[:] = self._client.get(key)

    def delete(self, keys: Sequence[bytes]) -> None:
        self._client.unlink(*keys)


class Glide(RedisPackage):
    def __init__(self, url: str) -> None:
        import glide_sync as glide

        host, _, port = url.rpartition("/")[2].partition(":")
        address = glide.NodeAddress(host, int(port))
        config = glide.GlideClientConfiguration([address], request_timeout=60_000)
        self._client = glide.GlideClient.create(config)

    def put(self, keys: Sequence[bytes], rows: Rows) -> None:
        for key, row in zip(keys, rows):
            self._client.set(key, bytes(row))

    def delete(self, keys: Sequence[bytes]) -> None:
        self._client.unlink(list(keys))


def plain_ways(config: Any, store: BlockStore, kind: str) -> dict[str, Way]:
    if kind == "fs":
        folder = Path(config.root_dir).parent / f"plain-{os.getpid()}"
        folder.mkdir(exist_ok=True)
        return {"plain files": PlainFiles(folder, config.debug.num_threads)}
    if kind == "mooncake":
        return {"batch calls": PlainMooncake(store)}
    ways: dict[str, Way] = {}
    for name, way in (("redis-py", RedisPackage), ("valkey-glide", Glide)):
        try:
            ways[name] = way(config.url)
        except ImportError as e:
            print(f"  no {name}: {e}")
    return ways


def timed(work: Callable[..., object], *arguments: object) -> tuple[float, float]:
    """Seconds that `work` took, and of these of all CPUs together."""
    # To look for processes takes longer than some of what is timed.
    others = psutil.Process().children()
    used, started = cpu_seconds(others), time.perf_counter()
    work(*arguments)
    seconds = time.perf_counter() - started
    return seconds, cpu_seconds(others) - used


def cpu_seconds(others: Sequence[psutil.Process]) -> float:
    """Of this process and of `others`."""
    times = [each.cpu_times() for each in others]
    return time.process_time() + sum(each.user + each.system for each in times)


def one_round(
    ways: dict[str, Way], seed: int, out: Rows, back: Rows
) -> dict[tuple[str, str], tuple[float, float]]:
    """Times of each way to put and get. All of them write what is not there."""
    keys = new_keys(out)
    times: dict[tuple[str, str], tuple[float, float]] = {}
    turns = list(ways.items())
    random.Random(seed).shuffle(turns)
    for name, way in turns:
        times[name, "put"] = timed(way.put, keys, out)
    for name, way in turns:
        for row in back:
            row[:64] = bytes(64)
        times[name, "get"] = timed(way.get, keys, back)
        assert list(back) == list(out), f"{name}: other bytes came back"
    looked = (keys * NUM_LOOKUPS)[:NUM_LOOKUPS]
    store = ways["store"]
    assert isinstance(store, Store)
    times["store", "exists"] = timed(store.store.exists, looked)
    for way in ways.values():
        way.delete(keys)
    # Servers free memory behind.
    time.sleep(0.1)
    return times


def measure(entry: dict[str, Any], args: argparse.Namespace) -> bool:
    """Print the rates of a store. Returns whether it clears its bars."""
    debug = entry.get("debug", {}) | {"deadline_ms": 600_000}
    config, _ = parse_entry(entry | {"debug": debug})
    config.check()
    num_bytes = args.mib << 20
    shared = SharedMemory.create(2 * args.objects, num_bytes, num_ranks=1)
    memory = memoryview(shared.bytes.numpy())
    rows = [memory[i : i + num_bytes] for i in range(0, len(memory), num_bytes)]
    out, back = rows[: args.objects], rows[args.objects :]
    for row in out:
        row[:] = os.urandom(num_bytes)
    store = config.open("0" * 32, 0, num_bytes)
    store.register(memory)
    store.register_file(MemoryFile(shared.fd, (shared.board_at,)))
    kind = entry["type"]
    ways = {"store": Store(store)} | plain_ways(config, store, kind)
    rounds = [one_round(ways, i, out, back) for i in range(args.rounds + 1)][1:]
    is_good = not args.busy or measure_busy(store, shared.board[0, :1], out, back)
    store.close()
    gb = args.objects * num_bytes / 1e9
    print(f"{config.name}, {list(CHECKSUMS)[-1].decode()}")
    for what in ("put", "get"):
        rate = gb / statistics.median(r["store", what][0] for r in rounds)
        print(f"  {what}: {rate:.2f} GB/s")
        for name in list(ways)[1:]:
            ratio, by_cpu = (
                statistics.median(
                    r[name, what][i] / r["store", what][i] for r in rounds
                )
                for i in range(2)
            )
            bar = BARS.get(kind, {}).get(what)
            told = f" (bar {bar})" if bar else ""
            print(f"    {ratio:.2f} of {name}{told}, {by_cpu:.2f} by CPU time")
            is_good &= bar is None or ratio >= bar
    exists_ms, cpu_ms = (
        statistics.median(r["store", "exists"][i] for r in rounds) * 1e3
        for i in range(2)
    )
    print(
        f"  {NUM_LOOKUPS} exists: {exists_ms:.2f} ms (bar {EXISTS_BAR_MS}), "
        f"{cpu_ms:.2f} of CPU time"
    )
    return is_good and exists_ms <= EXISTS_BAR_MS


def measure_start(folder: Path, num_objects: int) -> bool:
    """Print how long it takes to open a directory of so many objects. Returns whether
    it clears its bar."""
    entry = {"type": "fs", "root_dir": str(folder / "kv"), "max_gib": 4}
    config, _ = parse_entry(entry)

    def opened() -> BlockStore:
        config.check()
        return config.open("0" * 32, 0, 64)

    store = opened()
    row = memoryview(bytes(64))
    for i in range(0, num_objects, 1000):
        keys = [(i + j).to_bytes(36, "big") for j in range(1000)]
        # Spread over the folders, as hashes are.
        assert all(store.put([key[::-1] for key in keys], [row] * 1000))
    store.close()
    is_good = True
    for what in ("as left", "without its counter"):
        begun = time.perf_counter()
        opened().close()
        seconds = time.perf_counter() - begun
        print(f"{num_objects} objects, {what}: {seconds:.3f} s (bar {START_BAR_S:g})")
        is_good &= seconds <= START_BAR_S
        (folder / "kv" / COUNTER).unlink()
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("entries", nargs="*", type=json.loads)
    parser.add_argument("--objects", type=int, default=64)
    parser.add_argument("--mib", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--start", type=int, metavar="OBJECTS")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.start:
            return 0 if measure_start(Path(folder), args.start) else 1
        files = {"type": "fs", "root_dir": f"{folder}/kv", "max_gib": 4}
        results = [measure(entry, args) for entry in args.entries or [files]]
    sys.stdout.flush()
    # Mooncake's threads outlive its clients.
    os._exit(0 if all(results) else 1)


if __name__ == "__main__":
    sys.exit(main())
