# SPDX-License-Identifier: Apache-2.0
"""A store of files: local disk, or a directory that several engines share."""

import errno
import math
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass

from vllm.logger import init_logger
from vllm.v1.kv_tier.options import SETTINGS, Above0, Count, Text, Whole
from vllm.v1.kv_tier.stores.base import BlockStore, MemoryFile
from vllm.v1.kv_tier.stores.breaker import Breaker
from vllm.v1.kv_tier.stores.disk_quota import COUNTER, Locked, NoSpace, used_bytes
from vllm.v1.kv_tier.stores.file_processes import (
    MAX_PROCESSES,
    FileProcesses,
    NoProcesses,
)
from vllm.v1.kv_tier.stores.files import Files, Place, Written
from vllm.v1.kv_tier.stores.settings import StoreConfig, StoreDebug
from vllm.v1.kv_tier.stores.threads import MAX_THREADS

logger = init_logger(__name__)

_WRITE_PAUSE_S = 60.0
_FREE = "free space there, or set max_gib to what it can hold"


def _trouble(root: str, error: OSError) -> str:
    """Why a write failed, and what to do."""
    if isinstance(error, NoSpace):
        return "max_gib, or files that are not KV, leave no room for a block; " + _FREE
    if isinstance(error, Locked):
        counter = os.path.join(root, COUNTER)
        return (
            "a stalled process holds its lock; end it: "
            f"fuser -v {counter} lists the candidates"
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "its disk is full; " + _FREE
    return (
        f"a write failed: {error.strerror}; it must be a directory with mode 700 in "
        f"which user {os.geteuid()} can write"
    )


GiB = 1 << 30

# Mount options of NFS, Lustre and SMB.
_LOCAL_LOCKS = {
    "local_lock=flock",
    "local_lock=all",
    "nolock",
    "localflock",
    "nobrl",
}


def local_locks(root: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """The mount option that limits file locks in `root` to this machine, if any.

    Not all file systems report one.
    """
    device = os.stat(root).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return None
    options = (
        option
        for fields in lines
        if len(fields) > 2 and fields[2] == name
        for option in ",".join((fields[5], fields[-1])).split(",")
    )
    return next((each for each in options if each in _LOCAL_LOCKS), None)


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class FsDebug(StoreDebug):
    """`debug` of an entry of type `fs`."""

    num_threads: Annotated[Count, Field(le=MAX_THREADS)] = 16
    """Reading threads of each rank, and as many writing ones, in all its processes
    together."""

    num_processes: Annotated[Whole, Field(ge=0, le=MAX_PROCESSES)] = 2
    """Processes of each rank that have these threads, so that they and the engine do
    not wait for each other's Python lock. Each maps the rank's host memory: page tables
    of 2 MiB for a GiB. `0`: the threads are in the engine's own processes."""


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class FsConfig(StoreConfig):
    """`{"type": "fs", …}` of `secondary_tiers`: a directory below the host tier."""

    example = '{"type": "fs", "root_dir": "/mnt/kv", "max_gib": 200}'
    locality = "LOCAL"

    root_dir: Text
    """Where the files are: an absolute path. The directory is created if it does not
    exist, readable for its owner alone. Engines may share it."""

    max_gib: Above0
    """GiB that all files under `root_dir` may take together, whoever wrote them."""

    debug: FsDebug = field(default_factory=FsDebug)

    @field_validator("root_dir")
    @classmethod
    def _check_root_dir(cls, path: str) -> str:
        if not os.path.isabs(path) or "\0" in path:
            raise ValueError(
                f"must be the absolute path of a directory, got {path!r}. Give one "
                "like /mnt/kv."
            )
        return path

    @property
    def name(self) -> str:
        return f"{self.root_dir} ({self.max_gib:g} GiB)"

    @property
    def max_bytes(self) -> int:
        return int(self.max_gib * GiB)

    @property
    def uses_memory_file(self) -> bool:
        return self.debug.num_processes > 0

    def open(self, namespace: str, rank: int, slot_bytes: int) -> "FsStore":
        return FsStore(self, namespace, rank)

    def check(self) -> None:
        """Make the directory if it is missing, and check that it can be used.

        Raises:
            ValueError: It cannot be used, or others could read its content.

        """
        setting = f"{self.setting('root_dir')} {self.root_dir}"
        root = Path(self.root_dir)
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = root.lstat()
        except OSError as e:
            raise ValueError(
                f"{setting} cannot be made ({e.strerror}). Make it, owned by user "
                f"{os.geteuid()} with mode 700, or set another directory."
            ) from e
        if stat.S_ISLNK(status.st_mode):
            raise ValueError(
                f"{setting} is a symbolic link, which could be redirected. Set its "
                f"target instead: {os.path.realpath(root)}."
            )
        if status.st_uid != os.geteuid():
            raise ValueError(
                f"{setting} belongs to user {status.st_uid}, but this is user "
                f"{os.geteuid()}. Set a directory of your own, or change its owner."
            )
        if status.st_mode & 0o077:
            raise ValueError(
                f"{setting} is open to other users (mode {status.st_mode & 0o777:o}), "
                "and KV is user data. Set its mode to 700, or set a new directory in "
                "it, which will be made."
            )
        if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
            raise ValueError(
                f"{setting} is not writable. Set its mode to 700, mount its file "
                "system for writing, or set another directory."
            )
        if (option := local_locks(root)) is not None:
            logger.warning(
                "KV tier: locks in %s hold on this machine only, since it is mounted "
                "with %s. If other machines use it too, max_gib is not kept. Mount it "
                "without that option, or give each machine its own root_dir.",
                root,
                option,
            )
        disk, used = os.statvfs(root), used_bytes(root)
        free = disk.f_bavail * disk.f_frsize
        if used is not None and free < self.max_bytes - used:
            raise ValueError(
                f"{self.setting('max_gib')} {self.max_gib:g} does not fit: {root} "
                f"holds {used / GiB:.1f} GiB, and its disk has {free / GiB:.1f} GiB "
                f"free. Lower max_gib to {math.floor((free + used) / GiB * 10) / 10:g},"
                " or free space there."
            )


class FsStore(BlockStore):
    """The objects of one rank in one namespace, as files.

    Args:
        config: Checked settings.
        namespace: Digest of everything that shapes the bytes, in hex digits.
        rank: Number of the rank.

    Raises:
        OSError: The directory cannot be used.

    """

    def __init__(self, config: FsConfig, namespace: str, rank: int) -> None:
        assert re.fullmatch("[0-9a-f]+", namespace), namespace
        self._config = config
        self._place = Place(config.root_dir, config.max_bytes, namespace, rank)
        self._files = Files(self._place, config.debug.num_threads)
        self._writing = Breaker(
            config.root_dir,
            "nothing more is written to it, and its files are still read",
            _WRITE_PAUSE_S,
        )
        self._deadline_s = config.debug.deadline_ms / 1e3
        # A writing and a reading thread may use it at once.
        self._lock = threading.Lock()
        self._evicted_bytes = 0
        self._wait: Callable[[], None] = lambda: None
        self._memory: memoryview | None = None
        # Processes that move bytes, if this one does not.
        self._processes: FileProcesses | None = None

    def register(self, memory: memoryview) -> None:
        self._memory = memory

    def register_file(self, file: MemoryFile) -> None:
        assert self._memory is not None, "register comes first"
        if not (num := self._config.debug.num_processes):
            return
        num_threads = -(-self._config.debug.num_threads // num)
        try:
            self._processes = FileProcesses(
                self._place, self._memory, file, num, num_threads
            )
        except NoProcesses as e:
            self._go_on_alone(e)

    @property
    def is_apart(self) -> bool:
        return self._processes is not None

    def give_way(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def put(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        written = self._put(keys, rows, self._writing.begin_try())
        if written.error is not None:
            reason = _trouble(self._config.root_dir, written.error)
            self._writing.record_failure(reason)
        elif written.num_new:
            self._writing.record_success()
        with self._lock:
            self._evicted_bytes += written.evicted_bytes
        return written.done

    def get(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        deadline = time.monotonic() + self._deadline_s
        if (processes := self._processes) is not None:
            try:
                return processes.get(keys, rows, deadline)
            except NoProcesses as e:
                self._go_on_alone(e)
        return self._files.get(keys, rows, deadline)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return self._files.exists(keys)

    def delete(self, keys: Sequence[bytes]) -> None:
        self._files.delete(keys)

    def take_evicted_bytes(self) -> int:
        with self._lock:
            taken, self._evicted_bytes = self._evicted_bytes, 0
        return taken

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()
        self._files.close()

    def _put(
        self, keys: Sequence[bytes], rows: Sequence[memoryview], may_write: bool
    ) -> Written:
        if (processes := self._processes) is not None:
            try:
                return processes.put(keys, rows, may_write)
            except NoProcesses as e:
                self._go_on_alone(e)
        return self._files.put(keys, rows, may_write, self._wait)

    def _go_on_alone(self, reason: NoProcesses) -> None:
        with self._lock:
            processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()
        logger.warning(
            "KV tier: threads of the engine's processes read and write %s from now "
            "on, which is slower, since separate processes cannot be used: %s.",
            self._place.root_dir,
            reason,
        )
