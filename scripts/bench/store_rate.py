# SPDX-License-Identifier: Apache-2.0
"""How fast is a store of files, beside plain reads and writes of the same files?

    python scripts/bench/store_rate.py [--root DIR] [--objects 64] [--mib 2]

Store and plain threads take turns in one run, with as many threads and objects of the
same size; the median of the rounds is given as a ratio to the plain rate. Reads come
from the page cache, which is the hard case: a disk is slower than a checksum. The exit
status is 1 if a bar is missed.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm.v1.kv_tier.stores.format import CHECKSUMS
from vllm.v1.kv_tier.stores.fs import FsConfig, FsStore

GET_BAR, PUT_BAR, EXISTS_BAR_MS = 0.9, 0.8, 3.0
NUM_LOOKUPS = 1024
Rows = list[memoryview]


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def plain_write(path: Path, row: memoryview) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.writev(fd, [row])
    os.close(fd)


def plain_read(path: Path, row: memoryview) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.preadv(fd, [row], 0)
    os.close(fd)


def one_round(
    root: Path, pool: ThreadPoolExecutor, threads: int, out: Rows, back: Rows
) -> dict[str, float]:
    """Seconds of each way. Both write files that are not there."""
    shutil.rmtree(root)
    root.mkdir(mode=0o700)
    config = FsConfig(str(root / "kv"), max_gib=64, num_threads=threads)
    (root / "kv").mkdir(mode=0o700)
    store = FsStore(config, "0" * 32, 0, out[0].nbytes)
    keys = [os.urandom(36) for _ in out]
    plain = [root / f"plain{i}" for i in range(len(out))]
    times = {
        "plain put": timed(lambda: list(pool.map(plain_write, plain, out))),
        "put": timed(lambda: store.put(keys, out)),
    }
    files = sorted((root / "kv").rglob("*.kv"))
    times["plain get"] = timed(lambda: list(pool.map(plain_read, files, back)))
    times["get"] = timed(lambda: store.get(keys, back))
    assert back == out, "other bytes came back"
    looked = (keys * NUM_LOOKUPS)[:NUM_LOOKUPS]
    times["exists"] = timed(lambda: store.exists(looked))
    store.close()
    return times


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", help="where to write (default: a temporary folder)")
    parser.add_argument("--objects", type=int, default=64)
    parser.add_argument("--mib", type=int, default=2)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    num_bytes = args.mib << 20
    out = [memoryview(bytearray(os.urandom(num_bytes))) for _ in range(args.objects)]
    back = [memoryview(bytearray(num_bytes)) for _ in out]
    root = Path(tempfile.mkdtemp(dir=args.root))
    try:
        with ThreadPoolExecutor(args.threads) as pool:
            rounds = [
                one_round(root, pool, args.threads, out, back)
                for _ in range(args.rounds + 1)
            ][1:]
    finally:
        shutil.rmtree(root)
    checksum = list(CHECKSUMS)[-1].decode()
    gb = args.objects * num_bytes / 1e9
    is_good = True
    for name, bar in (("put", PUT_BAR), ("get", GET_BAR)):
        ratio = statistics.median(r[f"plain {name}"] / r[name] for r in rounds)
        rate = gb / statistics.median(r[name] for r in rounds)
        print(f"{name}: {ratio:.2f} of plain (bar {bar}), {rate:.1f} GB/s, {checksum}")
        is_good &= ratio >= bar
    exists_ms = statistics.median(r["exists"] for r in rounds) * 1e3
    print(f"{NUM_LOOKUPS} exists: {exists_ms:.2f} ms (bar {EXISTS_BAR_MS})")
    return 0 if is_good and exists_ms <= EXISTS_BAR_MS else 1


if __name__ == "__main__":
    raise SystemExit(main())
