# SPDX-License-Identifier: Apache-2.0
"""Objects as files: local disk, or a directory that several engines share.

An object is a file `ROOT/NAMESPACE/rRANK/ab/KEY.kv`, where `ab` is how the key begins.
It is written under a temporary name, then renamed: a name that is there is complete,
unless the machine lost power, and then the checksum says so. Damage is removed.

Nothing here needs anything else of vLLM: see `file_process`.
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

from vllm.v1.kv_tier.stores.format import ObjectFormat
from vllm.v1.kv_tier.stores.space import OBJECT, Busy, NoSpace, Space, reserve
from vllm.v1.kv_tier.stores.threads import Threads

_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW
# Of the time of last use, by which is evicted.
_TOUCH_S = 60.0
# Files that are written side by side: a process may have 1,024 open.
_MAX_OPEN = 64
# A symbolic link, or not ours to read.
_NOT_OURS = (errno.ELOOP, errno.EACCES, errno.EPERM)


class Place(NamedTuple):
    """Where the objects of one rank under one namespace are."""

    root_dir: str
    max_bytes: int
    """The cap of the directory."""
    namespace: str
    """What shaped the bytes: hex digits."""
    rank: int
    row_bytes: int
    """Bytes of each object, without its header."""


class Written(NamedTuple):
    """What became of a batch."""

    done: list[bool]
    """For each object, whether it is there and complete."""
    num_new: int = 0
    """How many of them were not there before."""
    evicted_bytes: int = 0
    """What was removed to make room since the last batch."""
    error: OSError | None = None
    """Why others could not be written. No more than one is tried then."""


def _at_once() -> None:
    pass


class Files:
    """Reads and writes objects.

    Args:
        place: Where they are.
        num_threads: That read, and as many that write.

    Raises:
        OSError: The directory cannot be used.

    """

    def __init__(self, place: Place, num_threads: int) -> None:
        namespace, rank = place.namespace, place.rank
        self._format = ObjectFormat(namespace, rank, place.row_bytes)
        self._space = Space(Path(place.root_dir), place.max_bytes)
        self._names = (namespace, f"r{rank}")
        self._path = os.path.join(place.root_dir, *self._names)
        self._last = _Folder(self._space.open_root(), self._names)
        # A disk that takes no more for a while must keep nobody from reading.
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
            keys: Of the objects.
            rows: One for each key.
            may_write: Else it is only looked what is there.
            wait: Called before anything is done, and before each object is written.

        """
        wait()
        try:
            folder = self._folder()
        except OSError as e:
            return Written([False] * len(keys), error=e)
        done = [self._has(folder, key) for key in keys]
        left = [i for i, is_there in enumerate(done) if may_write and not is_there]
        num_new, error = 0, None
        while left:
            some = left[:_MAX_OPEN]
            written, error = self._write(
                folder, [keys[i] for i in some], [rows[i] for i in some], wait
            )
            for i in written:
                done[some[i]] = True
            num_new += len(written)
            left = [i for i in left if not done[i]]
            # A small cap has room for the rest when these may be evicted.
            if error is not None and not (written and isinstance(error, NoSpace)):
                break
        if isinstance(error, Busy):
            # There will be room in a moment.
            error = None
        return Written(done, num_new, self._space.take_evicted_bytes(), error)

    def get(
        self, keys: Sequence[bytes], rows: Sequence[memoryview], deadline: float
    ) -> list[bool]:
        """Fill rows. True: a row has exactly the bytes that were put under its key.

        Args:
            keys: Of the objects.
            rows: One for each key.
            deadline: In seconds of `time.monotonic`; nothing is begun afterwards.

        """
        try:
            folder = self._folder()
        except OSError:
            return [False] * len(keys)

        def get(key: bytes, row: memoryview) -> bool:
            return time.monotonic() < deadline and self._read(folder, key, row)

        return self._readers.spread(get, keys, rows)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Which files are there. Half the time of a look at owner and size, which `get`
        has."""
        try:
            folder = self._folder()
        except OSError:
            return [False] * len(keys)
        there, fd = os.access, folder.fd
        return [there(_name(key), os.F_OK, dir_fd=fd) for key in keys]

    def delete(self, keys: Sequence[bytes]) -> None:
        """Remove objects. Those that are not there are no trouble."""
        with contextlib.suppress(OSError):
            folder = self._folder()
            for key in keys:
                _remove(folder, _name(key))

    def close(self) -> None:
        """Nothing may be called afterwards."""
        self._readers.close()
        self._writers.close()
        self._space.close()

    def _folder(self) -> "_Folder":
        """Where the objects are now: the directory may have been emptied or replaced.

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
        """Write objects side by side, and take the lock of the directory twice for all
        of them: to write one takes less time than others hold it for.

        Returns:
            Places of those that are there now, and why others are not.

        """
        size = self._format.size(keys[0])
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
            is_right = self._is_ours(status, key) and self._format.read(fd, key, row)
            if is_right:
                _touch(fd, status)
        except OSError:
            # The disk is in trouble, which says nothing of the object.
            return False
        finally:
            os.close(fd)
        if is_right is False:
            _remove(folder, name)
        return is_right is True

    def _has(self, folder: "_Folder", key: bytes) -> bool:
        """Whether there is a file for the key, which is used now."""
        name = _name(key)
        try:
            status = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
        except OSError:
            return False
        if not self._is_ours(status, key):
            return False
        if _is_old(status):
            with contextlib.suppress(OSError):
                os.utime(name, dir_fd=folder.fd, follow_symlinks=False)
        return True

    def _is_ours(self, status: os.stat_result, key: bytes) -> bool:
        return (
            stat.S_ISREG(status.st_mode)
            and status.st_uid == os.geteuid()
            and not status.st_mode & 0o077
            and status.st_size == self._format.size(key)
        )


class _Folder:
    """A folder that is open as long as somebody uses it.

    Args:
        root: File descriptor of the directory, which is closed.
        names: Of the folder in it, and one in that, made if they are not there.

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
        """Whether that is its path still."""
        try:
            there = os.stat(path, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self.fd))


def _remove(folder: _Folder, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder.fd)


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
