# SPDX-License-Identifier: Apache-2.0
"""Enforces the cap of a directory across all engines that share it.

The sizes of all files in the directory never exceed the cap. A file holds one counter
for all processes; they take its lock for a moment to change it. The counter is never
less than the truth: it grows before files do, and shrinks after files were evicted. So
a process may be killed at any point.

There may be millions of files, so no write waits for a scan of all. To evict, a process
looks at the next few thousand objects, continuing where it stopped the last time, and
removes the least recently used of them. A thread counts all files when the counter is
lost or may be too high, and removes files that killed writers left: those with a
temporary name and no lock. Other processes keep writing during a count. Files that they
create or rename are added to its result, so that a file may count twice but is never
missed. Meanwhile only the counting process evicts.

The directory may be emptied or replaced at any time. So after locking the counter, a
process checks that it is still the file of that name.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import random
import secrets
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

COUNTER = ".usage"
"""The counter, and the lock for changes of the directory."""
USERS = ".users"
"""Locked (shared) by all users of the directory; an exclusive lock shows that there is
only one."""
LOOK = ".look"
"""Locked by the process that counts or evicts."""
OBJECT, TEMPORARY = ".kv", ".tmp"

_NUMBER = struct.Struct("<8sQ")
_MAGIC = b"KVUSAGE1"
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW
_LOW_WATERMARK = 0.9
_WAIT_S = 2.0
SAMPLE = 4096
"""Number of objects from which the least recently used are evicted."""
STEP = 256
# Least time between counts of a process, as a multiple of the time a count takes.
_COUNT_PAUSE = 20


# The standard library has only the C library's emulation, which writes to each block of
# the file where the file system cannot reserve space.
try:
    _fallocate: Any = ctypes.CDLL(None, use_errno=True).fallocate
except AttributeError:
    _fallocate = None
if _fallocate is not None:
    _fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class NoSpace(OSError):
    """The cap does not allow another object, and nothing is left to evict."""


class Busy(OSError):
    """There is no room yet: files are being evicted or counted."""


class Locked(OSError):
    """Another process holds the lock of the directory, and does not release it."""


def used_bytes(root: Path, most_files: int = 10_000) -> int | None:
    """Bytes in a directory, or somewhat more; it need not be in use.

    None if it has no counter, and too many files to count them now.
    """
    with contextlib.suppress(OSError):
        fd = os.open(root / COUNTER, os.O_RDONLY | _OPEN)
        with os.fdopen(fd, "rb") as file:
            if (number := _number(file.read(_NUMBER.size + 1))) is not None:
                return number
    sizes = [size for *_, size in islice(_files(root), most_files + 1)]
    return sum(sizes) if len(sizes) <= most_files else None


class _Count(NamedTuple):
    """A count of all files in progress."""

    used: int
    """The counter when it began."""
    is_lost: bool
    """There was no counter, so its value is unknown until the count ends."""


class DiskQuota:
    """Access to a directory with a cap.

    Args:
        root: An existing directory.
        max_bytes: The cap.
        wait_s: Seconds that a write waits for the lock; it waits less for room.

    Raises:
        OSError: The directory cannot be used.

    """

    def __init__(self, root: Path, max_bytes: int, wait_s: float = _WAIT_S) -> None:
        self._root, self._max_bytes, self._wait_s = root, max_bytes, wait_s
        # File locks belong to descriptors, which threads share, so threads take this
        # first.
        self._mutex = threading.Lock()
        self._evicting = threading.Lock()
        self._state = threading.Lock()
        self._evicted_bytes = 0
        self._device: int | None = None
        self._counter = self._users = self._look_lock = -1
        # Position of the scan for objects to evict.
        self._walk: Iterator[tuple[float, int, str]] | None = None
        self._count: _Count | None = None
        self._evicted_meanwhile = 0
        self._next_count, self._asked_at = 0.0, 0
        self._is_closed = False
        self._open()
        # Raises if files cannot be locked.
        if _lock_now(self._counter):
            fcntl.flock(self._counter, fcntl.LOCK_UN)
        # In the background: the counter that an earlier process left is not too low.
        self._look = self._begin(self._join)

    def open_root(self) -> int:
        """A file descriptor of the directory, which may have been replaced.

        A removed directory is made again, unless its file system is no longer mounted.

        Raises:
            OSError: It cannot be used.

        """
        flags = os.O_RDONLY | os.O_DIRECTORY | _OPEN
        try:
            fd = os.open(self._root, flags)
        except FileNotFoundError:
            if os.stat(self._root.parent).st_dev != self._device:
                raise
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._root, 0o700)
            fd = os.open(self._root, flags)
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            os.close(fd)
            raise PermissionError(errno.EPERM, "others can use it too")
        self._device = status.st_dev
        return fd

    def close(self) -> None:
        """Release the files. No method may be called afterwards."""
        self._is_closed = True
        self._look.join(self._wait_s)
        # If a thread hangs, its files stay open.
        if self._mutex.acquire(timeout=self._wait_s):
            self._close_files()

    def create(
        self, folder: int, subfolders: Sequence[str], size: int
    ) -> tuple[list[tuple[int, str]], OSError | None]:
        """Create files of `size` bytes (zeros) under temporary names.

        Creates as many as possible per lock, since other processes wait for it.

        Args:
            folder: File descriptor of a folder in the directory.
            subfolders: For each file its subfolder in `folder`, made if missing.
            size: Bytes of each file, now and at the end.

        Returns:
            For the files that were made, in order, a writable file descriptor, which
            locks the file until it is closed, and the name in `folder`. Then the reason
            why there are not all: `NoSpace` if the cap is reached and nothing can be
            evicted, `Busy` if it may succeed soon.

        """
        made: list[tuple[int, str]] = []
        try:
            while left := subfolders[len(made) :]:
                with self.locked():
                    room = self._room()
                    some = left[: room // size]
                    if some:
                        self._write(self._max_bytes - room + len(some) * size)
                    for each in some:
                        made.append(_make(folder, each, size))
                if not some:
                    self._make_room(size)
        except OSError as e:
            return made, e
        return made, None

    @contextmanager
    def renaming(self, num_bytes: int) -> Iterator[None]:
        """Hold the lock to rename files of `num_bytes`, which a count could miss."""
        with self.locked():
            used = self._read()
            if used is not None and self._is_counted():
                self._write(used + num_bytes)
            yield

    def take_evicted_bytes(self) -> int:
        """Bytes that this object evicted since the last call."""
        with self._state:
            taken, self._evicted_bytes = self._evicted_bytes, 0
        return taken

    # ------------------------------------------------------------------ the lock

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the directory.

        Raises:
            Locked: Another process holds it for too long.
            OSError: The directory cannot be used any more.

        """
        until = time.monotonic() + self._wait_s
        if not self._mutex.acquire(timeout=self._wait_s):
            raise Locked(errno.ETIMEDOUT, "its lock is held by another process")
        try:
            self._lock(until)
            try:
                yield
            finally:
                if not self._is_current():
                    # Replaced meanwhile. A count of the new directory may have missed
                    # what was done here, so make it count again.
                    with contextlib.suppress(OSError):
                        self._lock(until)
                        os.ftruncate(self._counter, 0)
                fcntl.flock(self._counter, fcntl.LOCK_UN)
        finally:
            self._mutex.release()

    def _lock(self, until: float) -> None:
        """Lock the current file of the counter."""
        wait_s = 5e-5
        while True:
            if self._is_closed:
                raise Locked(errno.ESHUTDOWN, "it is closed")
            if _lock_now(self._counter):
                try:
                    if self._is_current():
                        return
                    self._open()
                except OSError:
                    fcntl.flock(self._counter, fcntl.LOCK_UN)
                    raise
                continue
            if time.monotonic() >= until:
                raise Locked(errno.ETIMEDOUT, "its lock is held by another process")
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, 1e-3)

    def _is_current(self) -> bool:
        """Whether the open files are still those of these names."""
        try:
            return all(
                os.path.samestat(
                    os.stat(self._root / name, follow_symlinks=False), os.fstat(fd)
                )
                for name, fd in ((COUNTER, self._counter), (LOOK, self._look_lock))
            )
        except OSError:
            return False

    def _open(self) -> None:
        """Open the files of the directory, which may have been replaced."""
        root = self.open_root()
        flags = os.O_RDWR | os.O_CREAT | _OPEN
        try:
            new = [
                os.open(name, flags, 0o600, dir_fd=root)
                for name in (COUNTER, USERS, LOOK)
            ]
        finally:
            os.close(root)
        is_another = self._counter >= 0
        self._close_files()
        self._counter, self._users, self._look_lock = new
        if is_another:
            _lock_now(self._users, fcntl.LOCK_SH)
        self._count = None

    def _close_files(self) -> None:
        for fd in (self._counter, self._users, self._look_lock):
            if fd >= 0:
                os.close(fd)
        self._counter = self._users = self._look_lock = -1

    # --------------------------------------- what follows in it needs the lock

    def _read(self) -> int | None:
        return _number(os.pread(self._counter, _NUMBER.size, 0))

    def _write(self, used: int) -> None:
        os.pwrite(self._counter, _NUMBER.pack(_MAGIC, used), 0)

    def _room(self) -> int:
        """Bytes that may be created; 0 also if the counter is lost."""
        used = self._read()
        return 0 if used is None else max(0, self._max_bytes - used)

    def _is_counted(self) -> bool:
        """Whether any process counts."""
        if self._count is not None:
            return True
        if not _lock_now(self._look_lock):
            return True
        fcntl.flock(self._look_lock, fcntl.LOCK_UN)
        return False

    # -------------------------------------------------------------------- counting

    def _begin(self, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            # After an error the counter stays, and the next user counts. Closed files
            # raise ValueError.
            with contextlib.suppress(OSError, ValueError):
                work()

        thread = threading.Thread(target=run, name="kv-tier-space", daemon=True)
        thread.start()
        return thread

    def _join(self) -> None:
        with self.locked():
            is_due = _lock_now(self._users) or self._read() is None
            _lock_now(self._users, fcntl.LOCK_SH)
        if is_due:
            self._count_all()

    def _count_all(self) -> None:
        """Correct the counter, and remove files that killed writers left."""
        began = time.monotonic()
        with self.locked():
            if self._count is not None or not _lock_now(self._look_lock):
                return
            used = self._read()
            is_lost = used is None
            if used is None:
                # If this process is killed, the next one counts again.
                used = self._max_bytes
                self._write(used)
            self._evicted_meanwhile = 0
            self._asked_at = os.fstat(self._look_lock).st_mtime_ns
            count = self._count = _Count(used, is_lost)
        try:
            seen = self._add_up(count)
            with self.locked():
                now = self._read()
                if now is not None and self._count is count:
                    self._write(seen + now - used + self._evicted_meanwhile)
                    self._end_count(count)
        finally:
            self._end_count(count)
        ended = time.monotonic()
        self._next_count = ended + _COUNT_PAUSE * (ended - began)

    def _end_count(self, count: _Count) -> None:
        if self._count is count:
            self._count = None
            fcntl.flock(self._look_lock, fcntl.LOCK_UN)

    def _add_up(self, count: _Count) -> int:
        seen = 0
        for n, (path, _, size) in enumerate(_files(self._root)):
            if self._is_closed or self._count is not count:
                raise Busy(errno.EBUSY, "the count was cancelled")
            if path.endswith(TEMPORARY):
                # Writers lock a file before they release the lock of the directory.
                with self.locked():
                    if _remove_if_left(path):
                        continue
            seen += size
            if n % STEP == 0 and not count.is_lost:
                self._make_room_for_others()
        return seen

    def _make_room_for_others(self) -> None:
        asked_at = os.fstat(self._look_lock).st_mtime_ns
        if asked_at != self._asked_at:
            self._asked_at = asked_at
            tenth = self._max_bytes - int(self._max_bytes * _LOW_WATERMARK)
            self._evict_some(tenth, time.monotonic() + self._wait_s)

    # -------------------------------------------------------------------- evicting

    def _make_room(self, size: int) -> None:
        """Evict until there is room for `size` bytes.

        Raises:
            NoSpace: There is nothing to evict.
            Busy: It takes too long.

        """
        if self._must_count() and self._counts_room(size):
            return
        is_counted, until = False, time.monotonic() + self._wait_s / 4
        while True:
            is_more = self._evict_some(size, until)
            if self._has_room(size):
                return
            if is_more is None:
                # Another process counts, or the counter is lost.
                time.sleep(0.01)
            elif not is_more:
                # With nothing to evict, the counter may be too high.
                if is_counted:
                    raise NoSpace(errno.ENOSPC, "The cap leaves no room.")
                is_counted = self._counts_room(size) or not self._look.is_alive()
            if time.monotonic() >= until:
                raise Busy(errno.EBUSY, "files are being evicted")

    def _must_count(self) -> bool:
        with self.locked():
            return self._read() is None or time.monotonic() >= self._next_count

    def _counts_room(self, size: int) -> bool:
        """Count all files, and return whether there is room. Does not wait for long."""
        with self._state:
            if not self._look.is_alive() and not self._is_closed:
                self._look = self._begin(self._count_all)
        self._look.join(self._wait_s / 8)
        return self._has_room(size)

    def _has_room(self, size: int) -> bool:
        with self.locked():
            return self._room() >= size

    def _evict_some(self, size: int, until: float) -> bool | None:
        """Evict from the next few thousand objects, unless there is room already.

        Returns:
            Whether there may be more to evict; None if another thread or process
            evicts.

        """
        if not self._evicting.acquire(timeout=max(0.0, until - time.monotonic())):
            return None
        try:
            is_whole = self._walk is None
            walk = self._walk = self._walk or _objects(self._root)
            sample: list[tuple[float, int, str]] = []
            for each in walk:
                sample.append(each)
                if len(sample) == SAMPLE or time.monotonic() >= until:
                    is_whole = False
                    break
            else:
                self._walk = None
            with self.locked():
                freed = self._evict(sorted(sample), size, is_whole)
        finally:
            self._evicting.release()
        return None if freed is None else freed > 0 or not is_whole

    def _evict(
        self, objects: Sequence[tuple[float, int, str]], size: int, is_whole: bool
    ) -> int | None:
        """Evict the first of `objects`, down to the low watermark.

        If they are only a sample, evict the same part of them.

        Returns:
            Bytes evicted; None if another process counts or evicts.

        """
        used, count = self._read(), self._count
        if used is None or (count is not None and count.is_lost):
            return None
        if used + size <= self._max_bytes:
            return 1
        if count is None and not _lock_now(self._look_lock):
            # The new time of the file asks the counting process to evict.
            os.utime(self._look_lock)
            return None
        aim = max(0, min(int(self._max_bytes * _LOW_WATERMARK), self._max_bytes - size))
        goal, freed = used - aim, 0
        if not is_whole:
            goal = max(size, sum(o[1] for o in objects) * goal // used)
        for _, num_bytes, path in objects:
            if freed >= goal:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
                freed += num_bytes
        self._write(max(0, used - freed))
        if count is None:
            fcntl.flock(self._look_lock, fcntl.LOCK_UN)
        else:
            # The count may not have seen these files.
            self._evicted_meanwhile += freed
        with self._state:
            self._evicted_bytes += freed
        return freed


def reserve(fd: int, size: int) -> None:
    """Let the file system reserve `size` bytes for a file at once.

    Writing the file then takes a fifth less time on ext4. Without support, the write
    reserves as it goes.

    Raises:
        OSError: The disk is full.

    """
    if _fallocate is not None and _fallocate(fd, 0, 0, size) != 0:
        number = ctypes.get_errno()
        if number in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(number, os.strerror(number))


def _lock_now(fd: int, how: int = fcntl.LOCK_EX) -> bool:
    """Try to lock without waiting. Returns False if another process holds the lock."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make(folder: int, subfolder: str, size: int) -> tuple[int, str]:
    """Create a new, locked file. Returns its descriptor and name."""
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
    """The counter's value, or None if it is invalid."""
    if len(content) != _NUMBER.size or not content.startswith(_MAGIC):
        return None
    return _NUMBER.unpack(content)[1]


def _entries(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    """Entries of a folder; empty if it is missing or unreadable.

    Raises:
        OSError: The disk failed.

    """
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return


def _files(folder: str | Path) -> Iterator[tuple[str, float, int]]:
    """Path, time of last use and size of all files in a folder, recursively.

    Symbolic links are not followed.
    """
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False):
            yield from _files(entry.path)
            continue
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            yield entry.path, status.st_mtime, status.st_size


def _objects(root: Path) -> Iterator[tuple[float, int, str]]:
    """Time of last use, size and path of all objects.

    They come by the first byte of their keys, across all namespaces and ranks,
    beginning with a random byte. So any part of them is a fair sample.
    """
    first = random.randrange(256)
    ranks = [rank.path for each in _entries(root) for rank in _entries(each.path)]
    for byte in range(first, first + 256):
        for rank in ranks:
            for path, last_use, size in _files(f"{rank}/{byte % 256:02x}"):
                if path.endswith(OBJECT):
                    yield last_use, size, path


def _remove_if_left(path: str) -> bool:
    """Remove a file with a temporary name, unless its writer is alive."""
    try:
        # With server-side locks, an exclusive lock needs a writable descriptor.
        fd = os.open(path, os.O_RDWR | _OPEN | os.O_NONBLOCK)
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
