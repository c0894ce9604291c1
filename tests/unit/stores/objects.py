# SPDX-License-Identifier: Apache-2.0
"""Stores of files for tests: small objects in a real directory."""

import fcntl
import logging
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm.v1.kv_tier.stores.disk_quota import COUNTER
from vllm.v1.kv_tier.stores.fs import FsConfig, FsDebug, FsStore, GiB

NAMESPACE = "0123456789abcdef" * 2
ROW_BYTES = 1000
OBJECT_BYTES = 128 + ROW_BYTES
"""With keys as long as `KEYS`."""
OWN_BYTES = 16
"""Of the counter."""

KEYS = [random.Random(i).randbytes(36) for i in range(400)]


def row(i: int) -> memoryview:
    return memoryview(bytearray(random.Random(i).randbytes(ROW_BYTES)))


def empty() -> memoryview:
    return memoryview(bytearray(ROW_BYTES))


def open_fs(
    root: Path, objects: float = 1000, namespace: str = NAMESPACE, rank: int = 0
) -> FsStore:
    """A store with room for so many objects."""
    max_gib = (objects * OBJECT_BYTES + OWN_BYTES) / GiB
    config = FsConfig(root_dir=str(root), max_gib=max_gib, debug=FsDebug(num_threads=3))
    config.check()
    return FsStore(config, namespace, rank)


@contextmanager
def logged_by(name: str) -> Iterator[list[str]]:
    """Messages of a logger, also of those that it is not shown otherwise."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger(name), Handler()
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield lines
    logger.setLevel(level)
    logger.removeHandler(handler)


def path_of(root: Path, i: int, rank: int = 0) -> Path:
    name = KEYS[i].hex()
    return root / NAMESPACE / f"r{rank}" / name[:2] / f"{name}.kv"


def total(root: Path) -> int:
    """Bytes of all files, while nobody changes them."""
    fd = os.open(root / COUNTER, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        return sum(p.lstat().st_size for p in root.rglob("*") if not p.is_dir())
    finally:
        os.close(fd)
