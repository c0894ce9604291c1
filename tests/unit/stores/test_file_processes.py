# SPDX-License-Identifier: Apache-2.0
"""Files that processes of their own read and write: what ends, and how."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from vllm.v1.kv_tier.memory.shared import SharedMemory
from vllm.v1.kv_tier.stores import file_process, file_processes
from vllm.v1.kv_tier.stores.base import MemoryFile
from vllm.v1.kv_tier.stores.fs import FsConfig, FsDebug, FsStore, GiB

from .objects import (
    KEYS,
    NAMESPACE,
    OBJECT_BYTES,
    OWN_BYTES,
    ROW_BYTES,
    logged_by,
    path_of,
    row,
)
from .servers import until

NUM_ROWS = 40


class Rank:
    """A store of files, and slots that its processes map."""

    def __init__(self, root: Path, objects: float = 1000, **debug: Any) -> None:
        max_gib = (objects * OBJECT_BYTES + OWN_BYTES) / GiB
        config = FsConfig(root_dir=str(root), max_gib=max_gib, debug=FsDebug(**debug))
        config.check()
        self.store = FsStore(config, NAMESPACE, 0)
        memory = SharedMemory.create(NUM_ROWS, ROW_BYTES, 1)
        slots = memory.bytes.view(NUM_ROWS, ROW_BYTES)
        self.rows = [memoryview(slots[i].numpy()) for i in range(NUM_ROWS)]
        before = children()
        self.store.register(memoryview(slots.numpy()).cast("B"))
        self.quiet = memory.board[0, :2]
        places = memory.board_at, memory.board_at + 8
        self.store.register_file(MemoryFile(memory.fd, places))
        memory.close()
        self.processes = [each for each in children() if each not in before]

    def put(self, *numbers: int) -> list[bool]:
        for place, i in enumerate(numbers):
            self.rows[place][:] = row(i)
        return self.store.put([KEYS[i] for i in numbers], self.rows[: len(numbers)])

    def get(self, *numbers: int) -> list[bytes | None]:
        """What comes for each key, into rows that had other bytes."""
        for each in self.rows:
            each[:] = bytes(ROW_BYTES)
        keys = [KEYS[i] for i in numbers]
        done = self.store.get(keys, self.rows[: len(numbers)])
        assert not any(any(each) for each in self.rows[len(numbers) :])
        return [bytes(r) if is_there else None for r, is_there in zip(self.rows, done)]


def children() -> list[psutil.Process]:
    """The processes of stores, as they were started."""
    found = [p for p in psutil.Process().children() if is_of_a_store(p)]
    return sorted(found, key=lambda process: process.pid)


def is_of_a_store(process: psutil.Process) -> bool:
    try:
        return file_process.__file__ in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def right(*numbers: int) -> list[bytes]:
    return [bytes(row(i)) for i in numbers]


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    assert not children()
    yield
    for process in children():
        process.kill()
        process.wait()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def rank(root: Path) -> Iterator[Rank]:
    rank = Rank(root)
    yield rank
    rank.store.close()


@pytest.fixture
def logged() -> Iterator[list[str]]:
    with logged_by("vllm.v1.kv_tier.stores") as lines:
        yield lines


# ------------------------------------------------------------------ bytes


def stop(process: subprocess.Popen[bytes]) -> None:
    """Have a process stand still, and wait until it does."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def test_what_is_put_comes_back(root: Path, rank: Rank) -> None:
    assert len(rank.processes) == 2 and rank.store.is_apart
    assert rank.put(*range(9)) == [True] * 9
    assert rank.get(3, 399, 8, 0) == [row(3), None, row(8), row(0)]
    assert rank.get(5) == right(5)
    assert rank.store.put([], []) == rank.store.get([], []) == []
    assert not list(root.rglob("*.tmp"))


def test_rows_lie_anywhere(rank: Rank) -> None:
    assert rank.put(1, 2, 3, 4) == [True] * 4
    for each in rank.rows:
        each[:] = bytes(ROW_BYTES)
    places = {1: 31, 4: 7, 2: 39, 3: 0}
    keys, rows = [KEYS[i] for i in places], [rank.rows[i] for i in places.values()]
    assert rank.store.get(keys, rows) == [True] * 4
    filled = {place: bytes(each) for place, each in enumerate(rank.rows) if any(each)}
    assert filled == {place: bytes(row(i)) for i, place in places.items()}


def test_threads_and_processes_write_the_same_files(root: Path, rank: Rank) -> None:
    threads = Rank(root, num_processes=0)
    assert not threads.processes and not threads.store.is_apart
    assert rank.put(1, 2) == threads.put(3, 4) == [True, True]
    assert rank.get(1, 2, 3, 4) == threads.get(1, 2, 3, 4) == right(1, 2, 3, 4)
    assert [path_of(root, i).stat().st_mode & 0o777 for i in (1, 3)] == [0o600] * 2
    threads.store.close()


def test_a_damaged_object_is_a_miss_and_goes(root: Path, rank: Rank) -> None:
    assert rank.put(1, 2, 3) == [True] * 3
    content = bytearray(path_of(root, 2).read_bytes())
    content[-1] ^= 1
    path_of(root, 2).write_bytes(content)
    assert rank.get(1, 2, 3) == [row(1), None, row(3)]
    assert not path_of(root, 2).exists()


def test_both_directions_at_once(rank: Rank) -> None:
    assert rank.put(*range(10)) == [True] * 10
    wrong: list[int] = []

    def read() -> None:
        keys, rows = KEYS[:10], rank.rows[30:]
        for _ in range(100):
            if rank.store.get(keys, rows) != [True] * 10:
                wrong.append(1)

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(10, 40):
        assert rank.put(i, i + 40, i + 80) == [True] * 3
    reader.join()
    assert not wrong
    assert [bytes(each) for each in rank.rows[30:]] == right(*range(10))


@pytest.mark.parametrize("place", [0, 1])
def test_nothing_is_begun_while_all_is_to_be_quiet(
    place: int, root: Path, rank: Rank
) -> None:
    rank.quiet[place] = time.monotonic_ns() + 60e9
    writer = threading.Thread(target=rank.put, args=(1, 2))
    writer.start()
    time.sleep(0.2)
    assert not list(root.rglob("*.kv"))
    # What is there can be read.
    assert rank.store.get(KEYS[:1], rank.rows[30:31]) == [False]
    rank.quiet[place] = 0
    writer.join(20)
    assert not writer.is_alive()
    assert rank.get(1, 2) == right(1, 2)


def test_it_is_over_when_it_was_said_to_be(rank: Rank) -> None:
    begun = time.monotonic()
    rank.quiet[:] = time.monotonic_ns() + 0.5e9, time.monotonic_ns() - 1e9
    assert rank.put(1, 2) == [True, True]
    assert 0.5 <= time.monotonic() - begun < 10
    assert rank.get(1, 2) == right(1, 2)


def test_what_had_to_go_is_told(root: Path) -> None:
    rank = Rank(root, objects=10)
    for i in range(0, 40, 4):
        assert rank.put(i, i + 1, i + 2, i + 3) == [True] * 4
    evicted = rank.store.take_evicted_bytes()
    left = len(list(root.rglob("*.kv")))
    assert evicted == (40 - left) * OBJECT_BYTES and left <= 10
    assert rank.store.take_evicted_bytes() == 0
    rank.store.close()


def test_a_cap_that_leaves_no_room_is_told_once(root: Path, logged: list[str]) -> None:
    rank = Rank(root, objects=2)
    # Both have found the counter by then.
    assert rank.put(9, 10) == [True, True]
    (root / "theirs").write_bytes(bytes(3 * OBJECT_BYTES))
    (root / ".usage").write_bytes(b"")
    assert rank.put(1, 2, 3, 4) == [False] * 4
    assert rank.put(1) == [False]
    assert len(logged) == 1 and "leave no room for a block" in logged[0]
    rank.store.close()


# ------------------------------------------------------------------ ends


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_fails_costs_its_part_and_another_takes_its_place(
    root: Path, how: int, logged: list[str]
) -> None:
    rank = Rank(root, deadline_ms=3000)
    processes = rank.store._processes
    assert processes is not None
    processes._least_life_s, processes._grace_s = 0.0, 1.0
    numbers = range(8)
    assert rank.put(*numbers) == [True] * 8
    failing = rank.processes[1]
    failing.send_signal(how)
    over = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    until(lambda: failing.status() in over)
    begun = time.monotonic()
    came = rank.get(*numbers)
    assert time.monotonic() - begun < 15
    # The other process has every second one.
    assert came[::2] == right(0, 2, 4, 6) and came[1::2] == [None] * 4
    # It cannot write to a row any more.
    assert failing not in children()
    assert len(logged) == 1 and "count as failed" in logged[0]
    assert rank.get(*numbers) == right(*numbers)
    until(lambda: len(children()) == 2)
    assert len(logged) == 1
    rank.store.close()


def test_one_that_writes_for_too_long_is_replaced(
    root: Path, logged: list[str]
) -> None:
    rank = Rank(root)
    processes = rank.store._processes
    assert processes is not None
    processes._least_life_s, processes._put_s = 0.0, 0.5
    stop(rank.processes[1])
    assert rank.put(*range(8)) == [True, False] * 4
    assert len(logged) == 1 and "did not answer in time" in logged[0]
    processes._put_s = 60
    assert rank.put(*range(8)) == [True] * 8
    rank.store.close()


def test_one_that_starts_slowly_is_waited_for_by_nobody(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(root)
    processes = rank.store._processes
    assert processes is not None
    processes._least_life_s = 0.0
    assert rank.put(*range(8)) == [True] * 8
    slow, may_start = tmp_path / "python", tmp_path / "go"
    wait = f"while [ ! -e {may_start} ]; do sleep 0.05; done"
    slow.write_text(f'#!/bin/sh\n{wait}\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    rank.processes[0].kill()
    rank.processes[0].wait()
    assert rank.get(*range(8))[1::2] == right(1, 3, 5, 7)
    # The other one does all of it meanwhile.
    assert rank.get(*range(8)) == right(*range(8))
    begun = time.monotonic()
    rank.processes[1].kill()
    rank.processes[1].wait()
    rank.get(1)
    deadline = begun + 0.5
    assert processes.get(KEYS[:1], rank.rows[:1], deadline - 2) == [False]
    may_start.touch()
    assert rank.get(*range(8)) == right(*range(8)) and rank.store.is_apart
    rank.store.close()


def test_one_that_stands_still_takes_no_question_for_ever(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than fits between the two."""
    monkeypatch.setattr(file_processes, "END_S", 0.2)
    rank = Rank(root, deadline_ms=500)
    stop(rank.processes[1])
    keys, begun = [i.to_bytes(64, "big") for i in range(20_000)], time.monotonic()
    assert not any(rank.store.get(keys, [rank.rows[0]] * len(keys)))
    assert time.monotonic() - begun < 20
    rank.store.close()


def test_one_that_the_kernel_does_not_let_go_keeps_the_rows_that_it_reads_into(
    root: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    """As in a read from a disk that hangs. A stopped one that nobody kills is alike."""
    monkeypatch.setattr(file_processes, "END_S", 0.2)
    rank = Rank(root, deadline_ms=300)
    processes = rank.store._processes
    assert processes is not None
    processes._grace_s, processes._put_s = 0.1, 0.3
    assert rank.put(*range(8)) == [True] * 8
    first, second = rank.processes
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", lambda process: None)
        stop(first)
        assert rank.put(*range(8)) == [False, True] * 4
        assert len(logged) == 1 and "does not end although" in logged[0]
        stop(second)
        reader = threading.Thread(target=rank.get, args=range(8))
        reader.start()
        until(lambda: len(logged) == 2)
        reader.join(0.2)
        assert reader.is_alive()
        second.kill()
        reader.join(20)
        assert not reader.is_alive()
    first.kill()
    rank.store.close()


def test_one_that_ends_while_it_writes(root: Path, logged: list[str]) -> None:
    rank = Rank(root)
    for each in rank.processes:
        each.kill()
        each.wait()
    # None of them lived for long: others would not either.
    assert rank.put(1, 2) == [False, False]
    assert rank.put(1, 2) == [True, True] and not rank.store.is_apart
    assert rank.get(1, 2) == right(1, 2)
    assert not children() and len(logged) == 3
    assert "threads of the engine's processes" in logged[-1]
    rank.store.close()


def test_where_none_starts_threads_do_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    rank = Rank(root)
    assert not rank.store.is_apart and not children()
    assert "threads of the engine's processes" in logged[-1]
    assert rank.put(1) == [True] and rank.get(1) == right(1)
    rank.store.close()


def test_they_outlive_a_signal_and_end_with_their_store(root: Path) -> None:
    gc.collect()
    num_files = psutil.Process().num_fds()
    rank = Rank(root)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        for each in rank.processes:
            each.send_signal(number)
    assert rank.put(1, 2) == [True, True]
    rank.store.close()
    assert not children()
    del rank
    until(lambda: gc.collect() >= 0 and psutil.Process().num_fds() <= num_files)


RANK = """
import sys, time
from pathlib import Path
from tests.unit.stores.test_file_processes import Rank
rank = Rank(Path(sys.argv[1]))
assert rank.put(1, 2) == [True, True]
print(*(each.pid for each in rank.processes), flush=True)
time.sleep(60)
"""


def test_they_end_with_their_rank(root: Path) -> None:
    command = [sys.executable, "-c", RANK, str(root)]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2 and all(map(psutil.pid_exists, pids))
        process.kill()
        until(lambda: not any(map(is_running, pids)))


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_all_of_their_threads_work(rank: Rank) -> None:
    # Behind the begin, in which the main thread finds the pages of the memory.
    time.sleep(0.3)
    for move in (rank.put, rank.get):
        before = [each.num_threads() for each in rank.processes]
        move(*range(10))
        for process, num in zip(rank.processes, before, strict=True):
            assert process.num_threads() > num


def test_they_are_small(rank: Rank) -> None:
    for each in rank.processes:
        maps = Path(f"/proc/{each.pid}/maps").read_text()
        assert "libtorch" not in maps and "memfd:kv-tier" in maps
        assert each.memory_info().rss < 64 << 20


def test_an_error_that_nobody_thought_of_ends_it(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rank = Rank(root)
    assert rank.put(1) == [True]
    # No key is a number.
    assert rank.store.get([7], rank.rows[:1]) == [False]  # type: ignore[list-item]
    rank.store.close()
    assert "AttributeError" in capfd.readouterr().err
