# SPDX-License-Identifier: Apache-2.0
"""What a directory of millions of objects costs the engine that shares it.

    python scripts/bench/many_objects.py FOLDER --make 6000000
    python scripts/bench/many_objects.py FOLDER

The first command fills FOLDER with objects of the right size without content, which
take an inode and no bytes: 10,000 in a second on one core. The second one measures,
each in a process of its own:

- how much longer a store takes to open than in an empty directory, with the counter of
  an earlier engine, and without;
- the longest of many puts and gets while all objects are counted, with room and with a
  full cap, with the counter and without; and after how long the first put succeeds;
- how long a thread that computes in Python is stopped meanwhile, as one that launches
  steps is;
- whether the cap holds to the byte while writers are killed.

For an answer from the disk, mount the file system of FOLDER anew before the second
command. The exit status is 1 if a bar is missed.
"""

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from vllm.v1.kv_tier.memory.shared import SharedMemory
from vllm.v1.kv_tier.stores.base import BlockStore, MemoryFile
from vllm.v1.kv_tier.stores.disk_quota import COUNTER, _files, used_bytes
from vllm.v1.kv_tier.stores.format import ObjectFormat
from vllm.v1.kv_tier.stores.fs import FsConfig, GiB

NAMESPACE = "0" * 32
ROW_BYTES = 4096
KEY_BYTES = 36
BATCH = 16
DEADLINE_S = 5.0
START_BAR_S = 2.0
SIZE = ObjectFormat.header_bytes(bytes(KEY_BYTES)) + ROW_BYTES


def make(root: Path, num_objects: int) -> None:
    """Fill a directory."""
    folder = root / NAMESPACE / "r0"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in (root, folder.parent):
        each.chmod(0o700)
    with ProcessPoolExecutor() as workers:
        args = (folder, num_objects // 256)
        list(workers.map(_make_some, range(256), *([each] * 256 for each in args)))


def _make_some(byte: int, folder: Path, count: int) -> None:
    part = folder / f"{byte:02x}"
    part.mkdir(mode=0o700, exist_ok=True)
    keys = random.Random(byte)
    fd = os.open(part, os.O_RDONLY)
    for _ in range(count):
        name = f"{byte:02x}{keys.randbytes(KEY_BYTES - 1).hex()}.kv"
        file = os.open(name, os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=fd)
        os.ftruncate(file, SIZE)
        os.close(file)
    os.close(fd)


CASES = {
    "lost, room": (4 << 30, True),
    "counter, room": (4 << 30, False),
    "counter, full": (0, False),
    "lost, full": (0, True),
}
"""Bytes of room, and whether the counter is lost."""


class Opened:
    """An open store, and how long opening took."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        shared = SharedMemory.create(2 * BATCH, ROW_BYTES, num_ranks=1)
        memory = memoryview(shared.bytes.numpy())
        begun = time.perf_counter()
        config = FsConfig(root_dir=str(root), max_gib=max_bytes / GiB)
        config.check()
        self.store: BlockStore = config.open(NAMESPACE, 0, ROW_BYTES)
        self.store.register(memory)
        self.store.register_file(MemoryFile(shared.fd, (shared.board_at,)))
        self.seconds = time.perf_counter() - begun
        rows = [memory[i : i + ROW_BYTES] for i in range(0, len(memory), ROW_BYTES)]
        self.out, self.back = rows[:BATCH], rows[BATCH:]
        for row in self.out:
            row[:] = os.urandom(ROW_BYTES)


class Stops(threading.Thread):
    """Computes in Python, and notes the longest time between two of its turns."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest_s, self.num_turns, self.is_over = 0.0, 0, False

    def run(self) -> None:
        last = time.perf_counter()
        while not self.is_over:
            sum(range(200))
            now = time.perf_counter()
            self.longest_s = max(self.longest_s, now - last)
            self.num_turns += 1
            last = now
            if self.num_turns % 1000 == 0:
                time.sleep(0.001)
                last = time.perf_counter()


def measure_use(root: Path, max_bytes: int, seconds: float, answers: object) -> None:
    """Put and get for so long, and until one put succeeds."""
    opened = Opened(root, max_bytes)
    longest = {"put": 0.0, "get": 0.0, "exists": 0.0}
    begun, first, num_put = time.perf_counter(), None, 0
    stops = Stops()
    stops.start()

    def timed(what: str, work: Callable[..., list[bool]], *args: object) -> list[bool]:
        since = time.perf_counter()
        done = work(*args)
        longest[what] = max(longest[what], time.perf_counter() - since)
        return done

    store = opened.store
    while (now := time.perf_counter() - begun) < seconds or first is None:
        if now > 60 + 10 * seconds:
            break
        keys = [os.urandom(KEY_BYTES) for _ in range(BATCH)]
        done = timed("put", store.put, keys, opened.out)
        num_put += sum(done)
        if first is None and any(done):
            first = time.perf_counter() - begun
        timed("exists", store.exists, keys)
        there = timed("get", store.get, keys, opened.back)
        assert sum(there) <= sum(done)
        time.sleep(0.005)
    stops.is_over = True
    stops.join()
    store.close()
    answers.put(  # type: ignore[attr-defined]
        {"open_s": opened.seconds, "first_put_s": first, "num_put": num_put}
        | {f"{what}_s": each for what, each in longest.items()}
        | {"stopped_s": stops.longest_s, "turns_per_s": stops.num_turns / (now or 1.0)}
    )


def in_a_process(work: Callable[..., None], *args: object) -> dict[str, float]:
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    process = spawn.Process(target=work, args=(*args, answers))
    process.start()
    answer = answers.get(timeout=500)
    process.join()
    return answer


def put_for_ever(root: Path, max_bytes: int, answers: object) -> None:
    opened = Opened(root, max_bytes)
    answers.put(None)  # type: ignore[attr-defined]
    while True:
        keys = [os.urandom(KEY_BYTES) for _ in range(BATCH)]
        opened.store.put(keys, opened.out)


def kill_writers(root: Path, max_bytes: int, num_kills: int) -> None:
    """Kill writers of a full directory, one after the other, with their processes."""
    spawn = multiprocessing.get_context("spawn")
    for n in range(num_kills):
        answers = spawn.Queue()
        writer = spawn.Process(target=put_for_ever, args=(root, max_bytes, answers))
        writer.start()
        answers.get(timeout=100)
        time.sleep(0.2 + 0.1 * n)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        # Its processes end when they see that it is gone.
        time.sleep(0.5)


def measure_kills(root: Path, num_kills: int) -> bool:
    """Kill writers of a full directory. Returns whether its cap holds."""
    # As small as what is there, so that each writer evicts.
    _, cap, count_s = total(root)
    kill_writers(root, cap, num_kills)
    num_files, num_bytes, _ = total(root)
    told = used_bytes(root) or 0
    print(
        f"{num_kills} killed writers: {num_files} files of {num_bytes} bytes, cap "
        f"{cap}, the counter says {told}; {count_s:.0f} s to count"
    )
    # The counter may be too high until the next count, never too low.
    return num_bytes <= min(told, cap)


def total(root: Path) -> tuple[int, int, float]:
    """Files and bytes of a directory that nothing uses, and seconds to count them."""
    begun, num_files, num_bytes = time.perf_counter(), 0, 0
    for _, _, size in _files(root):
        num_files, num_bytes = num_files + 1, num_bytes + size
    return num_files, num_bytes, time.perf_counter() - begun


def show(name: str, answer: dict[str, float], none: dict[str, float]) -> bool:
    """Print a row, compared with `none`. Returns whether it is within the bars."""
    longer_s = answer["open_s"] - none["open_s"]
    first = answer["first_put_s"]
    print(
        f"{name:18} open +{longer_s:.2f} s; longest put "
        f"{answer['put_s']:.2f}, get {answer['get_s']:.2f}, exists "
        f"{answer['exists_s']:.2f} s; first put after "
        + ("never" if first is None else f"{first:.1f} s")
        + f" ({answer['num_put']} put); Python stopped "
        f"{answer['stopped_s'] * 1e3:.0f} ms, at "
        f"{answer['turns_per_s'] / none['turns_per_s']:.2f} of its speed",
        flush=True,
    )
    longest = max(answer[f"{what}_s"] for what in ("put", "get", "exists"))
    return longer_s <= START_BAR_S and longest <= DEADLINE_S


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--make", type=int, metavar="OBJECTS")
    parser.add_argument("cases", nargs="*", default=[*CASES, "kills"])
    parser.add_argument("--objects", type=int, default=0, help="at least so many")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--kills", type=int, default=8)
    args = parser.parse_args()
    root = args.folder / "kv"
    if args.make:
        make(root, args.make)
        return 0
    empty = args.folder / "empty"
    none = in_a_process(measure_use, empty, 1 << 30, 2.0)
    shutil.rmtree(empty)
    is_good = show("empty", none, none)
    for case in args.cases:
        if case == "kills":
            is_good &= measure_kills(root, args.kills)
            continue
        room, is_lost = CASES[case]
        cap = max(used_bytes(root) or 0, args.objects * SIZE) + room
        if is_lost:
            (root / COUNTER).unlink(missing_ok=True)
        answer = in_a_process(measure_use, root, cap, args.seconds)
        is_good &= show(case, answer, none)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
