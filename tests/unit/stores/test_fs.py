# SPDX-License-Identifier: Apache-2.0
"""A store of files: what is put comes back, or is a plain miss."""

import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm.v1.kv_tier.stores.fs import FsConfig, FsDebug, FsStore

from .objects import KEYS, NAMESPACE, empty, open_fs, path_of, row


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def store(root: Path) -> Iterator[FsStore]:
    store = open_fs(root)
    yield store
    store.close()


def get(store: FsStore, i: int) -> bytes | None:
    place = empty()
    return bytes(place) if store.get([KEYS[i]], [place]) == [True] else None


def put(store: FsStore, i: int) -> bool:
    return store.put([KEYS[i]], [row(i)]) == [True]


def test_what_is_put_comes_back(store: FsStore) -> None:
    n = 20
    assert store.put(KEYS[:n], [row(i) for i in range(n)]) == [True] * n
    places = [empty() for _ in range(2 * n)]
    assert store.get(KEYS[: 2 * n], places) == [True] * n + [False] * n
    assert places[:n] == [row(i) for i in range(n)]
    assert store.exists(KEYS[: 2 * n]) == [True] * n + [False] * n


def test_it_comes_back_after_a_restart(root: Path, store: FsStore) -> None:
    assert put(store, 1)
    store.close()
    again = open_fs(root)
    assert get(again, 1) == row(1)
    again.close()
    store.__init__(FsConfig(root_dir=str(root), max_gib=1), NAMESPACE, 0)  # type: ignore[misc]


def test_what_is_there_is_not_written_again(root: Path, store: FsStore) -> None:
    assert put(store, 1)
    before = path_of(root, 1).stat().st_ino
    assert put(store, 1)
    assert path_of(root, 1).stat().st_ino == before


def test_what_is_deleted_is_gone(store: FsStore) -> None:
    assert put(store, 1)
    store.delete(KEYS[:3])
    assert store.exists(KEYS[:3]) == [False] * 3
    assert get(store, 1) is None
    assert put(store, 1) and get(store, 1) == row(1)


def test_ranks_and_namespaces_do_not_meet(root: Path, store: FsStore) -> None:
    assert put(store, 1)
    for other in (open_fs(root, rank=1), open_fs(root, namespace="f" * 32)):
        assert other.exists(KEYS[1:2]) == [False] and get(other, 1) is None
        other.close()


def test_nobody_else_can_read_it(root: Path, store: FsStore) -> None:
    os.umask(old := os.umask(0))
    assert put(store, 1)
    for path in (root, *root.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert os.umask(old) == old


def test_many_threads(store: FsStore) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        for n in range(60):
            i = (seed * 7 + n) % 40
            if not put(store, i) or get(store, i) != row(i):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# -------------------------------------------------------------------- damage


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def extend(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def swap(path: Path) -> None:
    """Another object of the same rank lies under this name."""
    shutil.copy(path_of(path.parents[3], 2), path)


def from_another_rank(path: Path) -> None:
    shutil.copy(path_of(path.parents[3], 1, rank=1), path)


def from_another_namespace(path: Path) -> None:
    other = Path(str(path).replace(NAMESPACE, "f" * 32))
    shutil.copy(other, path)


def link(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def readable_for_others(path: Path) -> None:
    path.chmod(0o604)


def without_permission(path: Path) -> None:
    path.chmod(0o000)
    if os.geteuid() == 0:
        path.chmod(0o040)


def another_version(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[7] += 1
    path.write_bytes(content)


DAMAGES = [
    truncate,
    extend,
    swap,
    from_another_rank,
    from_another_namespace,
    link,
    pipe,
    readable_for_others,
    without_permission,
    another_version,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_damage_is_a_miss_and_is_removed(
    root: Path, store: FsStore, damage: Callable[[Path], None]
) -> None:
    others = open_fs(root, rank=1), open_fs(root, namespace="f" * 32)
    for each in (store, *others):
        assert put(each, 1) and put(each, 2)
        assert get(each, 1) == row(1)
    path = path_of(root, 1)
    damage(path)
    assert get(store, 1) is None
    assert not os.path.lexists(path)
    assert get(store, 2) == row(2)
    assert put(store, 1) and get(store, 1) == row(1)
    for other in others:
        other.close()


def test_a_deleted_object_is_a_miss(root: Path, store: FsStore) -> None:
    assert put(store, 1)
    path_of(root, 1).unlink()
    assert store.exists(KEYS[1:2]) == [False] and get(store, 1) is None


def test_a_directory_in_its_place_is_a_miss(root: Path, store: FsStore) -> None:
    path_of(root, 1).mkdir(parents=True)
    assert get(store, 1) is None and not put(store, 1)
    assert not list(root.rglob("*.tmp"))


def test_what_belongs_to_another_user_is_a_miss(
    store: FsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert put(store, 1)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert get(store, 1) is None and store.exists(KEYS[1:2]) == [False]


def test_a_disk_in_trouble_removes_nothing(
    root: Path, store: FsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert put(store, 1)

    def fail(*args: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        patch.setattr(os, "writev", fail)
        assert get(store, 1) is None
        assert not put(store, 2)
    assert get(store, 1) == row(1)
    assert not list(root.rglob("*.tmp"))


def test_behind_an_error_no_more_is_tried(
    store: FsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def fail(*args: object) -> int:
        tried.append(args)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "writev", fail)
    many = range(40)
    assert not any(store.put([KEYS[i] for i in many], [row(i) for i in many]))
    # Each of its threads may be at it.
    assert 1 <= len(tried) <= 3


def test_what_has_not_begun_at_the_deadline_is_a_miss(
    root: Path, store: FsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = FsConfig(
        root_dir=str(root),
        max_gib=1,
        debug=FsDebug(num_threads=1, deadline_ms=100),
    )
    slow = FsStore(config, NAMESPACE, 0)
    assert slow.put(KEYS[:9], [row(i) for i in range(9)]) == [True] * 9
    read = os.preadv

    def read_slowly(*args: object) -> int:
        time.sleep(0.06)
        return read(*args)

    monkeypatch.setattr(os, "preadv", read_slowly)
    answers = slow.get(KEYS[:9], [empty() for _ in range(9)])
    slow.close()
    assert answers[0] and not answers[-1]
    assert store.exists(KEYS[:9]) == [True] * 9


def test_who_reads_has_all_threads_while_the_disk_takes_no_more(
    store: FsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(put(store, i) for i in (0, 1, 2))
    takes_more, read = threading.Event(), os.preadv
    # All three threads that read at once.
    together = threading.Barrier(3)

    def write_late(*args: object) -> int:
        takes_more.wait(30)
        raise OSError(28, "No space left on device")

    def read_together(*args: object) -> int:
        together.wait(10)
        return read(*args)

    monkeypatch.setattr(os, "writev", write_late)
    monkeypatch.setattr(os, "preadv", read_together)
    writer = threading.Thread(
        target=store.put, args=(KEYS[3:9], [row(i) for i in range(3, 9)])
    )
    writer.start()
    try:
        places = [empty() for _ in range(3)]
        assert store.get(KEYS[:3], places) == [True] * 3
        assert [bytes(each) for each in places] == [row(i) for i in range(3)]
    finally:
        takes_more.set()
        writer.join()


# ------------------------------------------------------------------ last use


@pytest.mark.parametrize("use", [get, put])
def test_use_is_noted_at_most_once_a_minute(
    root: Path, store: FsStore, use: Callable[[FsStore, int], object]
) -> None:
    assert put(store, 1)
    path, now = path_of(root, 1), time.time()
    for age, is_noted in ((30, False), (90, True)):
        os.utime(path, (now - age, now - age))
        assert use(store, 1)
        assert (path.stat().st_mtime > now - 5) == is_noted
