# SPDX-License-Identifier: Apache-2.0
"""The cap of a directory: held to the byte, whatever happens."""

import ctypes
import errno
import fcntl
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm.v1.kv_tier.stores import breaker, disk_quota
from vllm.v1.kv_tier.stores.disk_quota import (
    COUNTER,
    LOOK,
    USERS,
    DiskQuota,
    used_bytes,
)

from .objects import (
    KEYS,
    OBJECT_BYTES,
    OWN_BYTES,
    empty,
    logged_by,
    open_fs,
    path_of,
    row,
    total,
)

CAP = 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def put_many(root: Path, seed: int, count: int = 150, rank: int = 0) -> None:
    store = open_fs(root, objects=CAP, rank=rank)
    chosen = random.Random(seed)
    for _ in range(count):
        batch = chosen.sample(range(len(KEYS)), 4)
        store.put([KEYS[i] for i in batch], [row(i) for i in batch])
    store.close()


def watch_until(root: Path, is_over: threading.Event) -> list[int]:
    sizes = []
    while not is_over.is_set():
        if (root / COUNTER).exists():
            sizes.append(total(root))
        time.sleep(0.001)
    return sizes


def highest_total(root: Path, writers: list) -> int:
    is_over, sizes = threading.Event(), []
    watcher = threading.Thread(target=lambda: sizes.extend(watch_until(root, is_over)))
    watcher.start()
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    is_over.set()
    watcher.join()
    return max(*sizes, total(root))


def test_the_cap_holds_from_several_threads(root: Path) -> None:
    writers = [threading.Thread(target=put_many, args=(root, i)) for i in range(3)]
    highest = highest_total(root, writers)
    # Full once, to the last object.
    assert CAP * OBJECT_BYTES < highest <= CAP * OBJECT_BYTES + OWN_BYTES
    assert not list(root.rglob("*.tmp"))


def test_the_cap_holds_from_two_processes(root: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=put_many, args=(root, i, 100, i)) for i in range(2)]
    highest = highest_total(root, writers)
    assert [w.exitcode for w in writers] == [0, 0]
    assert CAP * OBJECT_BYTES < highest <= CAP * OBJECT_BYTES + OWN_BYTES


def test_one_byte_less_is_one_object_less(root: Path) -> None:
    store = open_fs(root, objects=CAP - 1 / OBJECT_BYTES)
    for i in range(CAP):
        assert store.put([KEYS[i]], [row(i)]) == [True]
    assert sum(store.exists(KEYS[:CAP])) < CAP
    store.close()


def test_the_least_recently_used_goes_first(root: Path) -> None:
    store = open_fs(root, objects=CAP)
    now = time.time()
    for i in range(CAP):
        assert store.put([KEYS[i]], [row(i)]) == [True]
        os.utime(path_of(root, i), (now - 1000 + i, now - 1000 + i))
    assert store.get([KEYS[0]], [empty()]) == [True]
    assert store.put([KEYS[CAP]], [row(CAP)]) == [True]
    # Down to nine tenths, then the new one.
    there = store.exists(KEYS[: CAP + 1])
    assert [i for i in range(CAP + 1) if not there[i]] == [1, 2, 3]
    evicted = [store.take_evicted_bytes() for _ in range(2)]
    assert evicted == [3 * OBJECT_BYTES, 0]
    store.close()


def test_all_namespaces_and_ranks_are_one_queue(root: Path) -> None:
    stores = [open_fs(root, objects=4, rank=rank) for rank in range(2)]
    for i in range(4):
        assert stores[i % 2].put([KEYS[i]], [row(i)]) == [True]
        os.utime(path_of(root, i, rank=i % 2), (1000 + i, 1000 + i))
    assert stores[1].put([KEYS[9]], [row(9)]) == [True]
    assert stores[0].exists(KEYS[:4]) == [False, False, True, False]
    for store in stores:
        store.close()


# ------------------------------------------------------------- killed writers

KILLED = """
import os, signal, sys
from pathlib import Path
from tests.unit.stores.objects import KEYS, open_fs, row
store = open_fs(Path(sys.argv[1]))
assert store.put(KEYS[:3], [row(i) for i in range(3)]) == [True] * 3
os.writev = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
store.put([KEYS[3]], [row(3)])
"""


def kill_writer(root: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(root)]
    done = subprocess.run(command, cwd=Path(__file__).parents[3])
    assert done.returncode == -signal.SIGKILL


def test_what_a_killed_writer_left_is_removed_at_start(root: Path) -> None:
    kill_writer(root)
    (left,) = root.rglob("*.tmp")
    assert left.stat().st_size == OBJECT_BYTES
    store = open_fs(root)
    limit = time.monotonic() + 10
    while left.exists() or used_bytes(root) != total(root):
        assert time.monotonic() < limit
        time.sleep(0.001)
    assert used_bytes(root) == total(root) == 3 * OBJECT_BYTES + OWN_BYTES
    assert store.exists(KEYS[:4]) == [True] * 3 + [False]
    store.close()


def test_beside_others_it_is_removed_when_room_is_needed(root: Path) -> None:
    other = open_fs(root, objects=4)
    kill_writer(root)
    store = open_fs(root, objects=4)
    assert len(list(root.rglob("*.tmp"))) == 1
    # Room for this one is what the killed writer had: nothing is evicted.
    assert store.put([KEYS[5]], [row(5)]) == [True]
    assert store.exists(KEYS[:3]) == [True] * 3
    assert not list(root.rglob("*.tmp"))
    for each in (store, other):
        each.close()


def test_what_is_being_written_stays(root: Path) -> None:
    store = open_fs(root, objects=4)
    writing = DiskQuota(root, 4 * OBJECT_BYTES + OWN_BYTES)
    folder = os.open(root, os.O_RDONLY)
    [(fd, name)], error = writing.create(folder, ["aa"], OBJECT_BYTES)
    assert error is None
    for i in range(8):
        assert store.put([KEYS[i]], [row(i)]) == [True]
        assert total(root) <= 4 * OBJECT_BYTES + OWN_BYTES
    assert (root / name).stat().st_size == OBJECT_BYTES
    os.close(fd)
    os.close(folder)
    writing.close()
    store.close()


@pytest.mark.parametrize("content", [b"", b"x", bytes(16)])
def test_a_damaged_counter_is_counted_anew(root: Path, content: bytes) -> None:
    store = open_fs(root)
    assert store.put(KEYS[:5], [row(i) for i in range(5)]) == [True] * 5
    (root / COUNTER).write_bytes(content)
    assert store.put([KEYS[5]], [row(5)]) == [True]
    store.close()
    assert used_bytes(root) >= total(root) >= 6 * OBJECT_BYTES  # type: ignore[operator]


# ---------------------------------------------------------------- a full disk


@pytest.fixture
def logged() -> Iterator[list[str]]:
    with logged_by(breaker.__name__) as lines:
        yield lines


def test_a_full_disk_stops_writing_for_a_minute(
    root: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    store = open_fs(root)
    assert store.put([KEYS[0]], [row(0)]) == [True]
    calls = []

    def full(*args: object) -> int:
        calls.append(args)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    clock = time.monotonic
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        for i in range(1, 5):
            assert store.put([KEYS[i]], [row(i)]) == [False]
    assert len(calls) == 1 and len(logged) == 1
    assert f"{root} is in trouble (its disk is full; free space" in logged[0]
    assert "nothing more is written to it" in logged[0]
    assert not list(root.rglob("*.tmp"))
    assert store.put([KEYS[1]], [row(1)]) == [False]
    assert store.get([KEYS[0]], [empty()]) == [True]
    monkeypatch.setattr(store._writing, "_clock", lambda: clock() + 61)
    assert store.put([KEYS[1]], [row(1)]) == [True]
    assert store.put([KEYS[2]], [row(2)]) == [True]
    assert logged[1:] == [f"KV tier: {root} works again."]
    store.close()


def test_room_is_found_before_anything_is_written(
    root: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    """A full disk says so then; one that cannot reserve is written to all the same."""
    calls: list[tuple[int, ...]] = []

    def refuses(number: int) -> None:
        def fallocate(*args: int) -> int:
            calls.append(args)
            ctypes.set_errno(number)
            return -1

        monkeypatch.setattr(disk_quota, "_fallocate", fallocate)

    store = open_fs(root)
    refuses(errno.EOPNOTSUPP)
    assert store.put([KEYS[0]], [row(0)]) == [True]
    assert calls[0][1:] == (0, 0, OBJECT_BYTES)
    refuses(errno.ENOSPC)
    monkeypatch.setattr(os, "writev", lambda *args: pytest.fail("it was written to"))
    assert store.put([KEYS[1]], [row(1)]) == [False]
    assert len(logged) == 1 and "its disk is full" in logged[0]
    assert not list(root.rglob("*.tmp"))
    assert store.get([KEYS[0]], [empty()]) == [True]
    store.close()


def test_files_of_others_that_fill_it_are_left(root: Path, logged: list[str]) -> None:
    store = open_fs(root, objects=3)
    # Else it might write the counter that it had made before.
    store._files._space._look.join()
    (root / "theirs").write_bytes(bytes(3 * OBJECT_BYTES))
    (root / COUNTER).write_bytes(b"")
    assert store.put([KEYS[0]], [row(0)]) == [False]
    assert (root / "theirs").exists()
    assert len(logged) == 1 and "leave no room for a block" in logged[0]
    store.close()


# ------------------------------------------------------- looks at all the files


def slow_count(monkeypatch: pytest.MonkeyPatch, root: Path) -> threading.Event:
    """Counts of all files wait for the event, looks at a part of them do not."""
    may_count, look = threading.Event(), disk_quota._files

    def slowly(folder: Path) -> Iterator[tuple[str, float, int]]:
        if folder == root:
            assert may_count.wait(30)
        yield from look(folder)

    monkeypatch.setattr(disk_quota, "_files", slowly)
    return may_count


def fill(root: Path, objects: int) -> None:
    store = open_fs(root, objects=objects)
    for i in range(objects):
        assert store.put([KEYS[i]], [row(i)]) == [True]
        os.utime(path_of(root, i), (1000 + i, 1000 + i))
    store.close()


def test_a_count_holds_up_neither_a_start_nor_writes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(root, CAP)
    may_count = slow_count(monkeypatch, root)
    store = open_fs(root, objects=CAP)
    assert store.get([KEYS[CAP - 1]], [empty()]) == [True]
    for i in range(CAP, 2 * CAP):
        assert store.put([KEYS[i]], [row(i)]) == [True]
        assert total(root) <= CAP * OBJECT_BYTES + OWN_BYTES
    may_count.set()
    store._files._space._look.join()
    used = used_bytes(root)
    assert used is not None and used >= total(root)
    store.close()


def test_who_counts_makes_room_for_others(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(root, CAP)
    look, has_begun, may_end = disk_quota._files, threading.Event(), threading.Event()

    def slowly(folder: Path) -> Iterator[tuple[str, float, int]]:
        for each in look(folder):
            if folder == root:
                has_begun.set()
                may_end.wait(0.02)
            yield each

    monkeypatch.setattr(disk_quota, "_files", slowly)
    monkeypatch.setattr(disk_quota, "STEP", 1)
    counting = open_fs(root, objects=CAP)
    assert has_begun.wait(20)
    store = open_fs(root, objects=CAP)
    store._files._space._wait_s = 20
    assert store.put([KEYS[CAP]], [row(CAP)]) == [True]
    assert not store.take_evicted_bytes()
    may_end.set()
    counting._files._space._look.join()
    assert CAP * OBJECT_BYTES + OWN_BYTES >= used_bytes(root) >= total(root)  # type: ignore[operator]
    for each in (store, counting):
        each.close()


def test_to_evict_a_part_of_the_objects_is_looked_at(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next part the next time: each object once, before one of them twice."""
    many = 300
    fill(root, many)
    monkeypatch.setattr(disk_quota, "SAMPLE", 40)
    store, seen = open_fs(root, objects=many), []
    store._files._space._look.join()
    store._files._space._next_count = float("inf")
    look = disk_quota._files

    def noted(folder: Path) -> Iterator[tuple[str, float, int]]:
        for each in look(folder):
            seen.append(each[0])
            yield each

    monkeypatch.setattr(disk_quota, "_files", noted)
    for i in range(10):
        assert store.put([KEYS[many + i]], [row(many + i)]) == [True]
        assert len(seen) <= 40 * (i + 1)
        assert total(root) <= many * OBJECT_BYTES + OWN_BYTES
    assert len(seen) == len(set(seen)) >= 80
    left = [i for i in range(many) if path_of(root, i).exists()]
    gone = set(range(many)) - set(left)
    assert sum(gone) / len(gone) < many / 3
    store.close()


def test_writes_meanwhile_are_in_the_count(root: Path) -> None:
    """Renamed and new files among them, however they meet."""
    fill(root, CAP)
    stores = [open_fs(root, objects=10 * CAP) for _ in range(2)]
    ends = threading.Event()

    def count() -> None:
        while not ends.is_set():
            stores[1]._files._space._count_all()

    counting = threading.Thread(target=count)
    counting.start()
    for i in range(CAP, 6 * CAP, 4):
        batch = range(i, i + 4)
        assert all(stores[0].put([KEYS[j] for j in batch], [row(j) for j in batch]))
        used = used_bytes(root)
        assert used is not None and used >= total(root)
    ends.set()
    counting.join()
    stores[1]._files._space._count_all()
    assert used_bytes(root) == total(root)
    for each in stores:
        each.close()


def test_a_disk_in_trouble_leaves_the_counter(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(root, 5)
    before = used_bytes(root)

    def fail(folder: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "scandir", fail)
    store = open_fs(root)
    store._files._space._look.join()
    assert used_bytes(root) == before
    store.close()


def test_many_files_without_a_counter_are_not_counted_at_start(tmp_path: Path) -> None:
    for i in range(5):
        (tmp_path / f"{i}").write_bytes(b"12")
    assert used_bytes(tmp_path, most_files=5) == 10
    assert used_bytes(tmp_path, most_files=4) is None


# ----------------------------------------------------------------- the lock


def test_a_lock_that_nobody_gives_back_stops_writing_only(
    root: Path, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(root, 3)
    store = open_fs(root)
    store._files._space._look.join()
    held = os.open(root / COUNTER, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    store._files._space._wait_s = 0.1
    assert store.put([KEYS[3]], [row(3)]) == [False]
    assert len(logged) == 1 and "a stalled process holds its lock" in logged[0]
    assert store.get([KEYS[1]], [empty()]) == [True]
    late = open_fs(root)
    late.close()
    os.close(held)
    clock = time.monotonic
    monkeypatch.setattr(store._writing, "_clock", lambda: clock() + 61)
    assert store.put([KEYS[3]], [row(3)]) == [True]
    store.close()


class LocksOfAServer:
    """`fcntl` as on NFS: who locks a file for itself must have it open for writing."""

    def __getattr__(self, name: str) -> object:
        return getattr(fcntl, name)

    def flock(self, fd: int, how: int) -> None:
        mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        if how & fcntl.LOCK_EX and mode == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        fcntl.flock(fd, how)


def test_what_is_left_on_a_server_is_removed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(root, 3)
    left = path_of(root, 0).with_suffix(".tmp")
    left.write_bytes(bytes(100))
    monkeypatch.setattr(disk_quota, "fcntl", LocksOfAServer())
    store = open_fs(root)
    store._files._space._look.join()
    assert not left.exists() and used_bytes(root) == total(root)
    store.close()


# ------------------------------------------- a directory that is another one


def empty_it(root: Path) -> None:
    for path in root.iterdir():
        if path.is_dir():
            shutil.rmtree(path)


def empty_all(root: Path) -> None:
    shutil.rmtree(root)
    root.mkdir(mode=0o700)


def rename(root: Path) -> None:
    root.rename(root.with_name("old"))


def rename_and_make(root: Path) -> None:
    rename(root)
    root.mkdir(mode=0o700)


def without(*names: str) -> Callable[[Path], None]:
    def remove(root: Path) -> None:
        for name in names:
            (root / name).unlink()

    remove.__name__ = f"without {names}"
    return remove


def damage(root: Path) -> None:
    (root / COUNTER).write_bytes(b"KVUSAGE1")


CHANGES = [
    empty_it,
    empty_all,
    shutil.rmtree,
    rename,
    rename_and_make,
    damage,
    without(COUNTER),
    without(LOOK),
    without(USERS),
    without(COUNTER, LOOK, USERS),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_a_directory_that_changes_is_used_again_and_the_cap_holds(
    root: Path, change: Callable[[Path], None]
) -> None:
    fill(root, CAP)
    stores = [open_fs(root, objects=CAP) for _ in range(2)]
    reader = open_fs(root, objects=CAP)
    for each in (*stores, reader):
        each._files._space._look.join()
    change(root)
    for i in range(CAP, 3 * CAP):
        assert stores[i % 2].put([KEYS[i]], [row(i)]) == [True], i
        assert total(root) <= CAP * OBJECT_BYTES + OWN_BYTES
        assert reader.get([KEYS[i]], [empty()]) == reader.exists([KEYS[i]]) == [True]
    left = open_fs(root, objects=CAP)
    left._files._space._look.join()
    assert sum(left.exists(KEYS)) >= 0.8 * CAP
    for each in (*stores, reader, left):
        each.close()


def test_a_counter_that_is_replaced_while_files_are_made(root: Path) -> None:
    fill(root, CAP)
    store = open_fs(root, objects=CAP)
    store._files._space._look.join()
    with store._files._space.locked():
        (root / COUNTER).unlink()
        other = open_fs(root, objects=CAP)
        other._files._space._look.join()
    # It may have missed what was made meanwhile.
    assert (root / COUNTER).read_bytes() == b""
    assert other.put([KEYS[CAP]], [row(CAP)]) == [True]
    assert used_bytes(root) == total(root) <= CAP * OBJECT_BYTES + OWN_BYTES
    for each in (store, other):
        each.close()


@pytest.mark.parametrize("made", [0o755, None])
def test_a_directory_that_is_nobodys_own_is_not_used(
    root: Path, logged: list[str], made: int | None
) -> None:
    fill(root, 3)
    store = open_fs(root)
    store._files._space._look.join()
    shutil.rmtree(root)
    if made is not None:
        root.mkdir(mode=0o700)
        root.chmod(made)
    else:
        # As if another file system had been there.
        store._files._space._device = -1
    assert store.put([KEYS[3]], [row(3)]) == [False]
    assert store.get([KEYS[1]], [empty()]) == store.exists([KEYS[1]]) == [False]
    assert len(logged) == 1 and "with mode 700" in logged[0]
    assert not list(root.parent.rglob("*.kv"))
    store.close()


def test_a_file_system_that_is_mounted_over_it_is_used(root: Path) -> None:
    fill(root, 3)
    store = open_fs(root)
    store._files._space._look.join()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "kv", str(root)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs root, and a kernel that mounts")
    try:
        assert store.put(KEYS[1:3], [row(1), row(2)]) == [True, True]
        assert path_of(root, 1).exists() and not path_of(root, 0).exists()
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)
    assert store.exists(KEYS[:2]) == [True, True]
    assert store.put([KEYS[5]], [row(5)]) == [True] and path_of(root, 5).exists()
    store.close()


NOBODY = """
import os, sys, tempfile
from pathlib import Path
from tests.unit.stores.objects import KEYS, empty, open_fs, row
os.setuid(65534)
with tempfile.TemporaryDirectory() as folder:
    root = Path(folder, "kv")
    store = open_fs(root)
    assert store.put(KEYS[:3], [row(i) for i in range(3)]) == [True] * 3
    folders = [p for p in root.rglob("*") if p.is_dir()]
    for path in folders:
        path.chmod(0o500)
    put = [store.put([KEYS[i]], [row(i)]) for i in (3, 4)]
    got = store.get(KEYS[:3], [empty() for _ in range(3)])
    for path in folders:
        path.chmod(0o700)
    store.close()
assert put == [[False], [False]] and got == [True] * 3, (put, got)
"""


def test_a_permission_that_is_lost_stops_writing_only() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become a user to whom permissions apply")
    command = [sys.executable, "-c", NOBODY]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[3], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("a write failed (Permission denied)") <= 1


def test_a_read_only_file_system_stops_writing_only(
    root: Path, logged: list[str]
) -> None:
    store = open_fs(root)
    many = range(5)
    assert store.put(KEYS[:5], [row(i) for i in many]) == [True] * 5
    # With the store's files open the kernel remounts no file system; it does so itself
    # when a disk fails. Folders of objects become so here.
    folders = sorted({path_of(root, i).parent for i in many})
    mounted = []
    try:
        for path in folders:
            bind = ["mount", "--bind", str(path), str(path)]
            if (
                os.geteuid() != 0
                or subprocess.run(bind, capture_output=True).returncode
            ):
                pytest.skip("needs root, and a kernel that mounts")
            mounted.append(path)
            subprocess.run(["mount", "-o", "remount,bind,ro", str(path)], check=True)
        there = [i for i in range(5, len(KEYS)) if path_of(root, i).parent in folders]
        assert there, "no other key in these folders"
        assert [store.put([KEYS[i]], [row(i)]) for i in there[:1] * 2] == [[False]] * 2
        assert store.get(KEYS[:5], [empty() for _ in many]) == [True] * 5
        assert len(logged) == 1 and "Read-only file system" in logged[0]
    finally:
        for path in mounted:
            subprocess.run(["umount", "-l", str(path)], check=True)
    store.close()


def test_a_small_file_system(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "kv", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs root, and a kernel that mounts")
    try:
        root = tmp_path / "kv"
        root.mkdir(mode=0o700)
        (root / "theirs").write_bytes(bytes(40 << 10))
        store = open_fs(root, objects=5)
        many = range(30)
        config_cap = DiskQuota(root, 1 << 30)
        store._files._space = config_cap
        answers = store.put([KEYS[i] for i in many], [row(i) for i in many])
        assert any(answers) and not all(answers)
        assert store.exists([KEYS[i] for i in many]) == answers
        assert not list(root.rglob("*.tmp"))
        store.close()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
