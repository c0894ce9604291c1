# SPDX-License-Identifier: Apache-2.0
"""How much a directory may hold, for all engines that share it.

The sizes of all files in the directory never add up to more than the cap. One counter
for all processes lies in a file whose lock one of them holds at a time, for a moment.
It is never less than the truth: it grows before a file does, and shrinks after files
were evicted. So a process may be killed at any point.

Nobody waits for a look through all files, which can be millions. To evict, a process
looks at the next few thousand objects, goes on from there the next time, and removes
those that were least recently used. A thread counts all files when the counter is lost
or may be too high, and removes what killed writers left: files with a temporary name
that nobody has locked. Others write meanwhile. What they create or rename while it
counts is added to what it saw, so that a file may count twice, but none is missed; and
nobody but the process that counts evicts.

The directory may be emptied or replaced at any time: each who locks the counter sees
that it is still the file of that name.
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
"""The counter, and the lock of everybody who changes the directory."""
USERS = ".users"
"""Locked by all who use the directory, so that one knows that it is alone."""
LOOK = ".look"
"""Locked by the process that counts, and by one that evicts."""
OBJECT, TEMPORARY = ".kv", ".tmp"

_NUMBER = struct.Struct("<8sQ")
_MAGIC = b"KVUSAGE1"
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW
_LOW_WATERMARK = 0.9
_WAIT_S = 2.0
SAMPLE = 4096
"""Objects of which the least recently used are evicted."""
STEP = 256
# A process counts again after so many times what it took to count.
_COUNT_PAUSE = 20


# The standard library has only the C library's emulation of it, which writes to each
# block of the file where the file system cannot reserve.
try:
    _fallocate: Any = ctypes.CDLL(None, use_errno=True).fallocate
except AttributeError:
    _fallocate = None
if _fallocate is not None:
    _fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class NoSpace(OSError):
    """The cap does not allow another object, and nothing is left to evict."""


class Busy(OSError):
    """There is no room yet: it is being made, or files are being counted."""


class Locked(OSError):
    """Another process holds the lock of the directory, and does not go on."""


def used_bytes(root: Path, most_files: int = 10_000) -> int | None:
    """What a directory holds, or somewhat more. It need not be in use. None: it has no
    counter, and too many files to count them now."""
    with contextlib.suppress(OSError):
        fd = os.open(root / COUNTER, os.O_RDONLY | _OPEN)
        with os.fdopen(fd, "rb") as file:
            if (number := _number(file.read(_NUMBER.size + 1))) is not None:
                return number
    sizes = [size for *_, size in islice(_files(root), most_files + 1)]
    return sum(sizes) if len(sizes) <= most_files else None


class _Count(NamedTuple):
    """A count of all files that is under way."""

    used: int
    """The counter when it began."""
    is_lost: bool
    """There was none. Nothing is known until this count is over."""


class Space:
    """A share in a directory with a cap.

    Args:
        root: The directory, which exists.
        max_bytes: The cap.
        wait_s: How long a write waits for the lock. For room it waits less.

    Raises:
        OSError: The directory cannot be used.

    """

    def __init__(self, root: Path, max_bytes: int, wait_s: float = _WAIT_S) -> None:
        self._root, self._max_bytes, self._wait_s = root, max_bytes, wait_s
        # Threads share descriptors, and so their locks: they take turns before.
        self._mutex = threading.Lock()
        self._evicting = threading.Lock()
        self._state = threading.Lock()
        self._evicted_bytes = 0
        self._device: int | None = None
        self._counter = self._users = self._look_lock = -1
        # Where the last look for objects to evict ended.
        self._walk: Iterator[tuple[float, int, str]] | None = None
        self._count: _Count | None = None
        self._evicted_meanwhile = 0
        self._next_count, self._asked_at = 0.0, 0
        self._is_closed = False
        self._open()
        # Raises where files cannot be locked.
        if _lock_now(self._counter):
            fcntl.flock(self._counter, fcntl.LOCK_UN)
        # Nobody waits for it: the counter that an earlier process left is not less
        # than the truth.
        self._look = self._begin(self._join)

    def open_root(self) -> int:
        """A file descriptor of the directory, which may be another one than before. One
        that was removed is made again, but not in the place of another file system.

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
            raise PermissionError(errno.EPERM, "it is not its user's alone")
        self._device = status.st_dev
        return fd

    def close(self) -> None:
        """Nothing may be called afterwards."""
        self._is_closed = True
        self._look.join(self._wait_s)
        # A thread that hangs keeps its files.
        if self._mutex.acquire(timeout=self._wait_s):
            self._close_files()

    def create(
        self, folder: int, subfolders: Sequence[str], size: int
    ) -> tuple[list[tuple[int, str]], OSError | None]:
        """Make files of `size` bytes each (zeros) under temporary names: as many as
        possible at once, since others wait for the lock.

        Args:
            folder: File descriptor of a folder in the directory.
            subfolders: For each file one in that folder, made if it is not there.
            size: What each file has now and must have at the end.

        Returns:
            For each of the first of them, a file descriptor to write with, which locks
            the file until it is closed, and the file's name in `folder`. And why there
            are no more: `NoSpace`, if the cap is reached and nothing can be evicted;
            `Busy`, if it may be possible in a moment.

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
        """Files of so many bytes together are renamed: who counts could miss them."""
        with self.locked():
            used = self._read()
            if used is not None and self._is_counted():
                self._write(used + num_bytes)
            yield

    def take_evicted_bytes(self) -> int:
        """Of what was evicted here since the last call."""
        with self._state:
            taken, self._evicted_bytes = self._evicted_bytes, 0
        return taken

    # ------------------------------------------------------------------ the lock

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else changes the directory.

        Raises:
            Locked: Somebody holds the lock for too long.
            OSError: The directory cannot be used any more.

        """
        until = time.monotonic() + self._wait_s
        if not self._mutex.acquire(timeout=self._wait_s):
            raise Locked(errno.ETIMEDOUT, "its lock is not to be had")
        try:
            self._lock(until)
            try:
                yield
            finally:
                if not self._is_current():
                    # Replaced meanwhile. Who has counted the new one may have missed
                    # what was done here.
                    with contextlib.suppress(OSError):
                        self._lock(until)
                        os.ftruncate(self._counter, 0)
                fcntl.flock(self._counter, fcntl.LOCK_UN)
        finally:
            self._mutex.release()

    def _lock(self, until: float) -> None:
        """Lock the file that is the counter now."""
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
                raise Locked(errno.ETIMEDOUT, "its lock is not to be had")
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, 1e-3)

    def _is_current(self) -> bool:
        """Whether the files of these names are those that are open here."""
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
        """Open the files that belong to the directory, which may be another one."""
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
        """Bytes that may be created; 0: also, that nobody knows."""
        used = self._read()
        return 0 if used is None else max(0, self._max_bytes - used)

    def _is_counted(self) -> bool:
        """Whether some process counts."""
        if self._count is not None:
            return True
        if not _lock_now(self._look_lock):
            return True
        fcntl.flock(self._look_lock, fcntl.LOCK_UN)
        return False

    # -------------------------------------------------------------------- counting

    def _begin(self, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            # The counter stays as it is, and the next one counts. Files may have been
            # closed meanwhile, which is a ValueError.
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
        """Set the counter right, and remove what killed writers left."""
        began = time.monotonic()
        with self.locked():
            if self._count is not None or not _lock_now(self._look_lock):
                return
            used = self._read()
            is_lost = used is None
            if used is None:
                # Who is killed in here leaves it to the next one.
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
                raise Busy(errno.EBUSY, "the count is of no use any more")
            if path.endswith(TEMPORARY):
                # Who makes one locks it before anybody else may look.
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
                # Another process counts, or nobody knows how much there is.
                time.sleep(0.01)
            elif not is_more:
                # Then the counter may be too high.
                if is_counted:
                    raise NoSpace(errno.ENOSPC, "The cap leaves no room.")
                is_counted = self._counts_room(size) or not self._look.is_alive()
            if time.monotonic() >= until:
                raise Busy(errno.EBUSY, "room is being made")

    def _must_count(self) -> bool:
        with self.locked():
            return self._read() is None or time.monotonic() >= self._next_count

    def _counts_room(self, size: int) -> bool:
        """Whether there is room, once all files have been counted. A count that takes
        long is not waited for."""
        with self._state:
            if not self._look.is_alive() and not self._is_closed:
                self._look = self._begin(self._count_all)
        self._look.join(self._wait_s / 8)
        return self._has_room(size)

    def _has_room(self, size: int) -> bool:
        with self.locked():
            return self._room() >= size

    def _evict_some(self, size: int, until: float) -> bool | None:
        """Evict those of the next few thousand objects that were least recently used,
        unless there is room for `size` bytes.

        Returns:
            Whether there may be more to evict. None: it is not this one's turn.

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
        """Evict the first of `objects`: down to the low watermark, or the same part of
        them if these are not all. Returns how many bytes; None: others count."""
        used, count = self._read(), self._count
        if used is None or (count is not None and count.is_lost):
            return None
        if used + size <= self._max_bytes:
            return 1
        if count is None and not _lock_now(self._look_lock):
            # Ask who counts.
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
            # It may not have seen them.
            self._evicted_meanwhile += freed
        with self._state:
            self._evicted_bytes += freed
        return freed


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


def _lock_now(fd: int, how: int = fcntl.LOCK_EX) -> bool:
    """Whether it could be locked without waiting."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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


def _entries(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    """What lies in a folder. What vanishes meanwhile, or is not ours to look into, is
    left out.

    Raises:
        OSError: The disk is in trouble.

    """
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return


def _files(folder: str | Path) -> Iterator[tuple[str, float, int]]:
    """Path, time of last use and size of all that lies in a folder and its folders.
    Symbolic links are not followed."""
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False):
            yield from _files(entry.path)
            continue
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            yield entry.path, status.st_mtime, status.st_size


def _objects(root: Path) -> Iterator[tuple[float, int, str]]:
    """Time of last use, size and path of all objects: first those of all namespaces and
    ranks whose keys begin with one byte, then with another. A part of them is a fair
    sample, and another one for each process."""
    first = random.randrange(256)
    ranks = [rank.path for each in _entries(root) for rank in _entries(each.path)]
    for byte in range(first, first + 256):
        for rank in ranks:
            for path, last_use, size in _files(f"{rank}/{byte % 256:02x}"):
                if path.endswith(OBJECT):
                    yield last_use, size, path


def _remove_if_left(path: str) -> bool:
    """Remove a file with a temporary name, unless its writer lives."""
    try:
        # Where locks are a server's, only who may write locks it for itself.
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
