# SPDX-License-Identifier: Apache-2.0
"""Objects that are written side by side: the cap, open files, and errors among them."""

import errno
import os
import resource
from contextlib import suppress
from pathlib import Path

import pytest

from vllm.v1.kv_tier.stores import breaker

from .objects import (
    KEYS,
    OBJECT_BYTES,
    OWN_BYTES,
    empty,
    logged_by,
    open_fs,
    row,
    total,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def open_files(root: Path) -> list[str]:
    """Objects that the process has open, also those being written. Other threads of
    it open and close files, too, and look through folders."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            path = os.readlink(f"/proc/self/fd/{name}")
            is_object = path.startswith(str(root)) and not Path(path).is_dir()
            found += [path] if is_object and Path(path).name != ".look" else []
    return sorted(found)


def test_a_batch_may_be_larger_than_the_cap(root: Path) -> None:
    store = open_fs(root, objects=4)
    many = range(11)
    assert store.put([KEYS[i] for i in many], [row(i) for i in many]) == [True] * 11
    assert 1 <= sum(store.exists(KEYS[:11])) <= 4
    assert total(root) <= 4 * OBJECT_BYTES + OWN_BYTES
    assert not list(root.rglob("*.tmp"))
    store.close()


def test_many_objects_at_once_need_few_files_open(root: Path) -> None:
    store = open_fs(root, objects=400)
    many = range(300)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (250, limits[1]))
    try:
        answers = store.put([KEYS[i] for i in many], [row(i) for i in many])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert answers == [True] * 300
    before = open_files(root)
    assert store.get(KEYS[:300], [empty() for _ in many]) == [True] * 300
    assert store.put([KEYS[300]], [row(300)]) == [True]
    assert open_files(root) == before
    store.close()


def test_a_disk_that_fills_up_amid_a_batch(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written before is there, and nothing else is."""
    store, calls, writev = open_fs(root), [], os.writev

    def fills_up(fd: int, buffers: list) -> int:
        calls.append(fd)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "full")
        return writev(fd, buffers)

    many = range(40)
    before = open_files(root)
    with monkeypatch.context() as patch, logged_by(breaker.__name__) as logged:
        patch.setattr(os, "writev", fills_up)
        answers = store.put([KEYS[i] for i in many], [row(i) for i in many])
    assert sum(answers) == 3 and len(calls) < 40 and len(logged) == 1
    assert store.get(KEYS[:40], [empty() for _ in many]) == answers
    assert not list(root.rglob("*.tmp"))
    assert open_files(root) == before
    store.close()
