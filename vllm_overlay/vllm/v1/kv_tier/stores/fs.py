# SPDX-License-Identifier: Apache-2.0
"""A store of files: local disk, or a directory that several engines share.

An object is a file `ROOT/NAMESPACE/rRANK/ab/KEY.kv`, where `ab` is how the key begins.
It is written under a temporary name, then renamed: a name that is there is complete,
unless the machine lost power, and then the checksum says so. Damage is removed.
"""

import contextlib
import errno
import math
import os
import re
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm.v1.kv_tier.stores.base import BlockStore
from vllm.v1.kv_tier.stores.format import ObjectFormat
from vllm.v1.kv_tier.stores.settings import StoreConfig
from vllm.v1.kv_tier.stores.space import OBJECT, Space, reserve, used_bytes
from vllm.v1.kv_tier.stores.threads import MAX_THREADS, Threads

GiB = 1 << 30

_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW
# Of the time of last use, by which is evicted.
_TOUCH_S = 60.0
# A symbolic link, or not ours to read.
_NOT_OURS = (errno.ELOOP, errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class FsConfig(StoreConfig):
    """`{"type": "fs", …}` of `secondary_tiers`: a directory below the host tier."""

    example = '{"type": "fs", "root_dir": "/mnt/kv", "max_gib": 200}'
    locality = "LOCAL"

    root_dir: str
    """Where the files are: an absolute path. The directory is made if it is not there,
    readable for its owner alone. Engines may share it."""

    max_gib: float
    """GiB that all files below `root_dir` may take together, whoever wrote them."""

    num_threads: int = 8
    """Threads of each rank that read, and as many that write."""

    @property
    def name(self) -> str:
        return f"{self.root_dir} ({self.max_gib:g} GiB)"

    @property
    def max_bytes(self) -> int:
        return int(self.max_gib * GiB)

    def check_values(self) -> None:
        super().check_values()
        path = self.root_dir
        if not isinstance(path, str) or not os.path.isabs(path) or "\0" in path:
            raise ValueError(
                f"{self.setting('root_dir')} must be the absolute path of a directory, "
                f"got {path!r}. Give one like /mnt/kv."
            )
        self.check_above_0("max_gib")
        self.check_whole("num_threads", most=MAX_THREADS)

    def open(self, namespace: str, rank: int, slot_bytes: int) -> "FsStore":
        return FsStore(self, namespace, rank, slot_bytes)

    def check(self) -> None:
        """Make the directory if it is not there, and see that it can be used.

        Raises:
            ValueError: It cannot, or others could read what is in it.

        """
        setting = f"{self.setting('root_dir')} {self.root_dir}"
        root = Path(self.root_dir)
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = root.lstat()
        except OSError as e:
            raise ValueError(
                f"{setting} cannot be made ({e.strerror}). Make it, owned by user "
                f"{os.geteuid()} with mode 700, or name another."
            ) from e
        if stat.S_ISLNK(status.st_mode):
            raise ValueError(
                f"{setting} is a symbolic link, which somebody could turn elsewhere. "
                f"Give the path that it leads to, {os.path.realpath(root)}."
            )
        if status.st_uid != os.geteuid():
            raise ValueError(
                f"{setting} belongs to user {status.st_uid}, but this is user "
                f"{os.geteuid()}. Name a directory of your own, or change its owner."
            )
        if status.st_mode & 0o077:
            raise ValueError(
                f"{setting} is open to other users (mode {status.st_mode & 0o777:o}), "
                "and KV is user data. Set its mode to 700, or name a directory in it "
                "that is not there yet."
            )
        if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
            raise ValueError(
                f"{setting} is not writable. Set its mode to 700, mount its file "
                "system for writing, or name another."
            )
        disk, used = os.statvfs(root), used_bytes(root)
        free = disk.f_bavail * disk.f_frsize
        if free < self.max_bytes - used:
            raise ValueError(
                f"{self.setting('max_gib')} {self.max_gib:g} does not fit: {root} "
                f"holds {used / GiB:.1f} GiB, and its disk has {free / GiB:.1f} GiB "
                f"free. Lower max_gib to {math.floor((free + used) / GiB * 10) / 10:g},"
                " or free space there."
            )


class FsStore(BlockStore):
    """The objects of one rank under one namespace, as files.

    Args:
        config: Settings, checked.
        namespace: What shaped the bytes: hex digits.
        rank: Whose part they are.
        slot_bytes: Size of a row.

    Raises:
        OSError: The directory cannot be used.

    """

    def __init__(
        self, config: FsConfig, namespace: str, rank: int, slot_bytes: int
    ) -> None:
        assert re.fullmatch("[0-9a-f]+", namespace), namespace
        self._folder = _open_folder(config.root_dir, namespace, f"r{rank}")
        self._format = ObjectFormat(namespace, rank, slot_bytes)
        self._deadline_s = config.deadline_ms / 1e3
        self._space = Space(Path(config.root_dir), config.max_bytes)
        # A disk that takes no more for a while must keep nobody from reading.
        self._readers = Threads(config.num_threads, "fs-get")
        self._writers = Threads(config.num_threads, "fs-put")
        self._wait: Callable[[], None] = lambda: None

    def give_way(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def put(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        return self._writers.spread(self._put, keys, rows)

    def get(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        deadline = time.monotonic() + self._deadline_s

        def get_in_time(key: bytes, row: memoryview) -> bool:
            return time.monotonic() < deadline and self._get(key, row)

        return self._readers.spread(get_in_time, keys, rows)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        # Half the time of a look at owner and size, which `get` has.
        there, folder = os.access, self._folder
        return [there(_name(key), os.F_OK, dir_fd=folder) for key in keys]

    def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._remove(_name(key))

    def take_evicted_bytes(self) -> int:
        return self._space.take_evicted_bytes()

    def close(self) -> None:
        self._readers.close()
        self._writers.close()
        self._space.close()
        os.close(self._folder)

    def _put(self, key: bytes, row: memoryview) -> bool:
        self._wait()
        if self._has(key):
            return True
        name, size = _name(key), self._format.size(key)
        try:
            fd, temporary = self._space.create(self._folder, name[:2], size)
        except OSError as e:
            self._space.write_failed(e)
            return False
        try:
            reserve(fd, size)
            self._format.write(fd, key, row)
            self._space.rename(self._folder, temporary, name)
        except OSError as e:
            self._remove(temporary)
            self._space.write_failed(e)
            return False
        finally:
            os.close(fd)
        self._space.write_succeeded()
        return True

    def _get(self, key: bytes, row: memoryview) -> bool:
        name = _name(key)
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _OPEN, dir_fd=self._folder)
        except OSError as e:
            if e.errno in _NOT_OURS:
                self._remove(name)
            return False
        try:
            status = os.fstat(fd)
            is_right = self._is_ours(status, key) and self._format.read(fd, key, row)
            if is_right:
                _touch(fd, status)
        except OSError:
            # The disk is in trouble, which says nothing of the object.
            return False
        finally:
            os.close(fd)
        if is_right is False:
            self._remove(name)
        return is_right is True

    def _has(self, key: bytes) -> bool:
        """Whether there is a file for the key, which is used now."""
        name = _name(key)
        try:
            status = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        except OSError:
            return False
        if not self._is_ours(status, key):
            return False
        if _is_old(status):
            with contextlib.suppress(OSError):
                os.utime(name, dir_fd=self._folder, follow_symlinks=False)
        return True

    def _is_ours(self, status: os.stat_result, key: bytes) -> bool:
        return (
            stat.S_ISREG(status.st_mode)
            and status.st_uid == os.geteuid()
            and not status.st_mode & 0o077
            and status.st_size == self._format.size(key)
        )

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._folder)


def _open_folder(root: str, *names: str) -> int:
    """A file descriptor of a folder below the root, made if it is not there."""
    flags = os.O_RDONLY | os.O_DIRECTORY | _OPEN
    folder = os.open(root, flags)
    for name in names:
        parent = folder
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=parent)
            folder = os.open(name, flags, dir_fd=parent)
        finally:
            os.close(parent)
    return folder


def _name(key: bytes) -> str:
    """Where an object lies below the rank's folder."""
    name = key.hex()
    return f"{name[:2]}/{name}{OBJECT}"


def _is_old(status: os.stat_result) -> bool:
    return time.time() - status.st_mtime > _TOUCH_S


def _touch(fd: int, status: os.stat_result) -> None:
    if _is_old(status):
        with contextlib.suppress(OSError):
            os.utime(fd)
