# SPDX-License-Identifier: Apache-2.0
"""How much a directory may hold, for all engines that share it.

The sizes of all files below the directory never add up to more than the cap. A file is
counted before it is made, and has its full size from then on, so what is being written
needs no book of its own. One counter for all processes lies in a file whose lock one of
them holds at a time. It is never below the truth: it grows before a file does, deleting
does not change it, and whoever finds it too high looks through the directory and sets
it right. So a process may be killed at any point.

The same look finds what to evict, the objects that were least recently used, and what
killed writers left: files with a temporary name that nobody has locked.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import stat
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

COUNTER = ".usage"
"""The counter, and the lock of everybody who changes the directory."""
USERS = ".users"
"""Locked by all who use the directory, so that one knows that it is alone."""
OBJECT, TEMPORARY = ".kv", ".tmp"

_NUMBER = struct.Struct("<8sQ")
_MAGIC = b"KVUSAGE1"
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW
_LOW_WATERMARK = 0.9


# The standard library has only the C library's emulation of it, which writes to each
# block of the file where the file system cannot reserve.
_fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
if _fallocate is not None:
    _fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class NoSpace(OSError):
    """The cap does not allow another object, and nothing is left to evict."""


def used_bytes(root: Path) -> int:
    """What a directory holds, or somewhat more. It need not be in use."""
    try:
        fd = os.open(root / COUNTER, os.O_RDONLY | _OPEN)
    except OSError:
        return sum(size for *_, size in _files(root))
    with os.fdopen(fd, "rb") as file:
        return _number(file.read()) or sum(size for *_, size in _files(root))


class Space:
    """A share in a directory with a cap.

    Args:
        root: The directory, which exists.
        max_bytes: The cap.

    Raises:
        OSError: The directory cannot be used.

    """

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root, self._max_bytes = root, max_bytes
        self._mutex = threading.Lock()
        self._state = threading.Lock()
        self._evicted_bytes = 0
        flags = os.O_RDWR | os.O_CREAT | _OPEN
        self._counter = os.open(root / COUNTER, flags, 0o600)
        self._users = os.open(root / USERS, flags, 0o600)
        _see_that_it_locks(self._counter)
        # Nobody waits for a look through many files: the counter that an earlier
        # process left is not below the truth, and who needs room, or finds no counter,
        # waits for the lock.
        self._is_closed = False
        self._look = threading.Thread(target=self._join, name="kv-tier-space")
        self._look.daemon = True
        self._look.start()

    def _join(self) -> None:
        with self.locked():
            if self._is_alone() or _number(os.pread(self._counter, 16, 0)) is None:
                self._count()
            fcntl.flock(self._users, fcntl.LOCK_SH)

    def close(self) -> None:
        self._is_closed = True
        self._look.join()
        os.close(self._counter)
        os.close(self._users)

    def create(
        self, folder: int, subfolders: Sequence[str], size: int
    ) -> tuple[list[tuple[int, str]], OSError | None]:
        """Make files of `size` bytes each (zeros) under temporary names: all at once,
        since others wait for the lock.

        Args:
            folder: File descriptor of a folder below the directory.
            subfolders: For each file one in that folder, made if it is not there.
            size: What each file has now and must have at the end.

        Returns:
            For each of the first of them, a file descriptor to write with, which locks
            the file until it is closed, and the file's name in `folder`. And why there
            are no more: `NoSpace`, if the cap is reached and nothing can be evicted.

        """
        made: list[tuple[int, str]] = []
        try:
            with self.locked():
                used = _number(os.pread(self._counter, 16, 0))
                while left := subfolders[len(made) :]:
                    if used is None or used + size > self._max_bytes:
                        used = self._make_room(size)
                    some = left[: (self._max_bytes - used) // size]
                    used += len(some) * size
                    self._write(used)
                    for each in some:
                        made.append(_make(folder, each, size))
        except OSError as e:
            return made, e
        return made, None

    def take_evicted_bytes(self) -> int:
        """Of what was evicted here since the last call."""
        with self._state:
            taken, self._evicted_bytes = self._evicted_bytes, 0
        return taken

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else changes the directory, or looks through it: that could miss a
        file that is renamed."""
        # Threads share the descriptor, and so its lock: they take turns before.
        with self._mutex:
            fcntl.flock(self._counter, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._counter, fcntl.LOCK_UN)

    def _is_alone(self) -> bool:
        try:
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _write(self, used: int) -> None:
        os.pwrite(self._counter, _NUMBER.pack(_MAGIC, used), 0)

    def _count(self) -> tuple[int, list[tuple[float, int, str]]]:
        """Set the counter right, and remove what killed writers left.

        Returns:
            Bytes of all files, and last use, size and path of each object.

        """
        # Who is killed in here leaves it to the next one. The counter counts itself.
        self._write(self._max_bytes)
        used, objects = 0, []
        for path, last_use, size in _files(self._root):
            if self._is_closed:
                return self._max_bytes, []
            if path.endswith(TEMPORARY) and _remove_if_left(path):
                continue
            used += size
            if path.endswith(OBJECT):
                objects.append((last_use, size, path))
        self._write(used)
        return used, objects

    def _make_room(self, size: int) -> int:
        """Evict what was least recently used, down to the low watermark.

        Returns:
            Bytes of all files that are left.

        Raises:
            NoSpace: That is not enough.

        """
        used, objects = self._count()
        if used + size <= self._max_bytes:
            return used
        aim = min(int(self._max_bytes * _LOW_WATERMARK), self._max_bytes - size)
        for _, freed, path in sorted(objects):
            if used <= aim:
                break
            try:
                os.unlink(path)
            except OSError:
                continue
            used -= freed
            with self._state:
                self._evicted_bytes += freed
        self._write(used)
        if used + size > self._max_bytes:
            raise NoSpace(errno.ENOSPC, "The cap leaves no room.")
        return used


def reserve(fd: int, size: int) -> None:
    """Have the file system find room for a file of `size` bytes, all at once.

    A write that follows takes a fifth less time on ext4. Where it cannot be had, the
    write finds room as it goes.

    Raises:
        OSError: The disk is full.

    """
    if _fallocate is not None and _fallocate(fd, 0, 0, size) != 0:
        number = ctypes.get_errno()
        if number in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(number, os.strerror(number))


def _see_that_it_locks(fd: int) -> None:
    """Raises OSError where files cannot be locked."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)


def _make(folder: int, subfolder: str, size: int) -> tuple[int, str]:
    """A new file, locked, and its name."""
    name = f"{subfolder}/{secrets.token_hex(16)}{TEMPORARY}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN
    try:
        fd = os.open(name, flags, 0o600, dir_fd=folder)
    except FileNotFoundError:
        os.mkdir(subfolder, 0o700, dir_fd=folder)
        fd = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        os.unlink(name, dir_fd=folder)
        raise
    return fd, name


def _number(content: bytes) -> int | None:
    """The counter, or None if there is none."""
    if len(content) != _NUMBER.size or not content.startswith(_MAGIC):
        return None
    return _NUMBER.unpack(content)[1]


def _files(folder: str | Path) -> Iterator[tuple[str, float, int]]:
    """Path, time of last use and size of all that lies below a folder.

    What vanishes meanwhile, or is not ours to look into, is left out. Symbolic links
    are not followed.
    """
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(entry.path)
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        yield entry.path, status.st_mtime, status.st_size


def _remove_if_left(path: str) -> bool:
    """Remove a file with a temporary name, unless its writer lives."""
    try:
        fd = os.open(path, os.O_RDONLY | _OPEN | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
