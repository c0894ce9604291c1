# SPDX-License-Identifier: Apache-2.0
"""Objects as files, on a local disk or in a directory that several engines share.

An object is a file `ROOT/NAMESPACE/rRANK/ab/KEY.kv`, where `ab` are the first digits of
the key. It is written under a temporary name, then renamed, so a file under its final
name is complete, unless the machine lost power; checksums detect that. Damaged files
are removed. Imports nothing else of vLLM, since `file_process` needs it without.
"""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from vllm.v1.kv_tier.stores.disk_quota import OBJECT, Busy, DiskQuota, NoSpace, reserve
from vllm.v1.kv_tier.stores.format import ObjectFormat
from vllm.v1.kv_tier.stores.threads import Threads

_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW
# Seconds between updates of a file's time of last use, which orders eviction.
_TOUCH_S = 60.0
# Files written at a time. A process may often have only 1,024 open.
_MAX_OPEN = 64
# A symbolic link, or a file that this user may not read.
_NOT_OURS = (errno.ELOOP, errno.EACCES, errno.EPERM)


class Place(NamedTuple):
    """Where the objects of one rank in one namespace are."""

    root_dir: str
    max_bytes: int
    """Cap of the directory in bytes."""
    namespace: str
    """Digest of everything that shapes the bytes, in hex digits."""
    rank: int


class Written(NamedTuple):
    """Result of writing a batch."""

    done: list[bool]
    """For each object, whether it exists and is complete."""
    num_new: int = 0
    """How many of them are new."""
    evicted_bytes: int = 0
    """Bytes evicted since the last batch to make room."""
    error: OSError | None = None
    """Why objects could not be written. After an error, no more are tried."""


def _at_once() -> None:
    pass


class Files:
    """Reads and writes the objects of one rank.

    Args:
        place: Where they are.
        num_threads: Threads that read, and as many that write.

    Raises:
        OSError: The directory cannot be used.

    """

    def __init__(self, place: Place, num_threads: int) -> None:
        namespace, rank = place.namespace, place.rank
        self._format = ObjectFormat(namespace, rank)
        self._space = DiskQuota(Path(place.root_dir), place.max_bytes)
        self._names = (namespace, f"r{rank}")
        self._path = os.path.join(place.root_dir, *self._names)
        self._last = _Folder(self._space.open_root(), self._names)
        # Separate threads, so that a disk that stops accepting writes does not block
        # reads.
        self._readers = Threads(num_threads, "fs-get")
        self._writers = Threads(num_threads, "fs-put")

    def put(
        self,
        keys: Sequence[bytes],
        rows: Sequence[memoryview],
        may_write: bool = True,
        wait: Callable[[], None] = _at_once,
    ) -> Written:
        """Write rows.

        Args:
            keys: Keys of the objects.
            rows: One row for each key.
            may_write: If False, only check which objects exist.
            wait: Called at the start, and before each object is written.

        """
        wait()
        try:
            folder = self._folder()
        except OSError as e:
            return Written([False] * len(keys), error=e)
        done = [self._has(folder, key, len(row)) for key, row in zip(keys, rows)]
        left = [i for i, is_there in enumerate(done) if may_write and not is_there]
        num_new, error = 0, None
        while left:
            # Space is reserved for files of one size at a time.
            size = len(rows[left[0]])
            some = [i for i in left if len(rows[i]) == size][:_MAX_OPEN]
            written, error = self._write(
                folder, [keys[i] for i in some], [rows[i] for i in some], wait
            )
            for i in written:
                done[some[i]] = True
            num_new += len(written)
            left = [i for i in left if not done[i]]
            # With a small cap, these may be evicted to make room for the rest.
            if error is not None and not (written and isinstance(error, NoSpace)):
                break
        if isinstance(error, Busy):
            # There may be room soon.
            error = None
        return Written(done, num_new, self._space.take_evicted_bytes(), error)

    def get(
        self, keys: Sequence[bytes], rows: Sequence[memoryview], deadline: float
    ) -> list[bool]:
        """Fill rows. True: the row has exactly the bytes that were put under its key.

        Args:
            keys: Keys of the objects.
            rows: One row for each key.
            deadline: In seconds of `time.monotonic`. No read begins later.

        """
        try:
            folder = self._folder()
        except OSError:
            return [False] * len(keys)

        def get(key: bytes, row: memoryview) -> bool:
            return time.monotonic() < deadline and self._read(folder, key, row)

        return self._readers.spread(get, keys, rows)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Which files exist.

        Does not check owner and size, as `get` does, which would take twice as long.
        """
        try:
            folder = self._folder()
        except OSError:
            return [False] * len(keys)
        there, fd = os.access, folder.fd
        return [there(_name(key), os.F_OK, dir_fd=fd) for key in keys]

    def delete(self, keys: Sequence[bytes]) -> None:
        """Remove objects; missing ones are ignored."""
        with contextlib.suppress(OSError):
            folder = self._folder()
            for key in keys:
                _remove(folder, _name(key))

    def close(self) -> None:
        """Release threads and files. No method may be called afterwards."""
        self._readers.close()
        self._writers.close()
        self._space.close()

    def _folder(self) -> "_Folder":
        """The open folder of the objects.

        The directory may have been emptied or replaced since the last call.

        Raises:
            OSError: It cannot be used.

        """
        if not self._last.is_at(self._path):
            self._last = _Folder(self._space.open_root(), self._names)
        return self._last

    def _write(
        self,
        folder: "_Folder",
        keys: Sequence[bytes],
        rows: Sequence[memoryview],
        wait: Callable[[], None],
    ) -> tuple[list[int], OSError | None]:
        """Write objects of one size in parallel, with two locks of the directory.

        Writing one object takes less time than other writers hold the lock.

        Returns:
            Indices of the objects that exist now, and why others do not.

        """
        size = self._format.size(keys[0], len(rows[0]))
        names = [_name(key) for key in keys]
        files, error = self._space.create(folder.fd, [name[:2] for name in names], size)
        errors: list[OSError] = []

        def write(i: int, fd: int) -> bool:
            wait()
            if errors:
                return False
            try:
                reserve(fd, size)
                self._format.write(fd, keys[i], rows[i])
            except OSError as e:
                errors.append(e)
                return False
            return True

        done: list[int] = []
        try:
            fds = [fd for fd, _ in files]
            is_written = self._writers.spread(write, range(len(fds)), fds)
            num_bytes = size * sum(is_written)
            with self._space.renaming(num_bytes) if num_bytes else nullcontext():
                for i, (_, old) in enumerate(files):
                    if is_written[i]:
                        os.rename(
                            old, names[i], src_dir_fd=folder.fd, dst_dir_fd=folder.fd
                        )
                        done.append(i)
        except OSError as e:
            errors.append(e)
        finally:
            for i, (fd, temporary) in enumerate(files):
                if i not in done:
                    _remove(folder, temporary)
                os.close(fd)
        return done, errors[0] if errors else error

    def _read(self, folder: "_Folder", key: bytes, row: memoryview) -> bool:
        name = _name(key)
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _OPEN, dir_fd=folder.fd)
        except OSError as e:
            if e.errno in _NOT_OURS:
                _remove(folder, name)
            return False
        try:
            status = os.fstat(fd)
            is_ours = self._is_ours(status, key, len(row))
            is_right = is_ours and self._format.read(fd, key, row)
            if is_right:
                _touch(fd, status)
        except OSError:
            # The disk failed, which says nothing about the object.
            return False
        finally:
            os.close(fd)
        if is_right is False:
            _remove(folder, name)
        return is_right is True

    def _has(self, folder: "_Folder", key: bytes, row_bytes: int) -> bool:
        """Whether the key has a file. If so, renew its time of last use."""
        name = _name(key)
        try:
            status = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
        except OSError:
            return False
        if not self._is_ours(status, key, row_bytes):
            return False
        if _is_old(status):
            with contextlib.suppress(OSError):
                os.utime(name, dir_fd=folder.fd, follow_symlinks=False)
        return True

    def _is_ours(self, status: os.stat_result, key: bytes, row_bytes: int) -> bool:
        return (
            stat.S_ISREG(status.st_mode)
            and status.st_uid == os.geteuid()
            and not status.st_mode & 0o077
            and status.st_size == self._format.size(key, row_bytes)
        )


class _Folder:
    """A folder that stays open as long as it is referenced.

    Args:
        root: File descriptor of the directory. Owned by this object.
        names: Path of the folder in it, as a sequence of names. Missing folders are
            made.

    Raises:
        OSError: It cannot be used.

    """

    def __init__(self, root: int, names: Sequence[str]) -> None:
        self.fd = root
        for name in names:
            parent = self.fd
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=parent)
                flags = os.O_RDONLY | os.O_DIRECTORY | _OPEN
                self.fd = os.open(name, flags, dir_fd=parent)
            except OSError:
                self.fd = -1
                raise
            finally:
                os.close(parent)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def is_at(self, path: str) -> bool:
        """Whether the folder is still at this path."""
        try:
            there = os.stat(path, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self.fd))


def _remove(folder: _Folder, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder.fd)


def _name(key: bytes) -> str:
    """Path of an object in its rank's folder."""
    name = key.hex()
    return f"{name[:2]}/{name}{OBJECT}"


def _is_old(status: os.stat_result) -> bool:
    return time.time() - status.st_mtime > _TOUCH_S


def _touch(fd: int, status: os.stat_result) -> None:
    if _is_old(status):
        with contextlib.suppress(OSError):
            os.utime(fd)
