# SPDX-License-Identifier: Apache-2.0
"""A process that reads and writes objects for a rank (`FileProcesses`).

To open, check, read, compare and close a file takes calls of the system, after each of
which a thread waits for Python's lock. A process of its own has that lock for itself,
and takes none of it from the thread that launches the engine's steps. The slots are
memory that both map.

It is run by its path, and imports what moves objects and nothing else of vLLM, which
would take it seconds and hundreds of MB. Its arguments are the file descriptors of two
connections, by which it is asked to put and to get. The first message says where
objects and slots are. It ends when the rank does, whatever ended that: no connection
outlives its other end.
"""

import contextlib
import ctypes
import mmap
import os
import signal
import struct
import sys
import threading
import time
import traceback
import types
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# As of `memory.pages`, which needs torch.
_MADV_POPULATE_WRITE = 23
# A launch takes some milliseconds.
_LOOK_S = 0.3e-3
_NUMBER = struct.Struct("=q")


def main() -> None:
    """Do what is asked for, as long as somebody may ask."""
    # A rank that is told to end may still have much to write.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    asked = [Connection(int(fd)) for fd in sys.argv[1:]]
    told = asked[0].recv()
    sys.path[:] = told["path"]
    _leave_out_vllm()
    from vllm.v1.kv_tier.stores.files import Files, Place

    place = Place(*told["place"])
    files = Files(place, told["num_threads"])
    memory = _mapped(told["fd"])
    quiet = partial(_keep_quiet, memory, told["quiet_at"], threading.Lock())
    serving = []
    for connection, move in zip(asked, (partial(files.put, wait=quiet), files.get)):
        arguments = (connection, move, memoryview(memory), place.row_bytes)
        serving.append(threading.Thread(target=_serve, args=arguments))
        serving[-1].start()
    _populate(memory, told["num_bytes"])
    # Helpers are given no work any more once the main thread has ended.
    for thread in serving:
        thread.join()


def _serve(asked: Connection, move: Any, memory: memoryview, row_bytes: int) -> None:
    """Move objects as asked, and tell what became of them."""
    try:
        asked.send(True)
        while True:
            keys, starts, *rest = asked.recv()
            rows = [memory[start : start + row_bytes] for start in starts]
            asked.send(move(keys, rows, *rest))
    except (EOFError, ConnectionError):
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        # Who waits for an answer is to hear of it.
        os._exit(1)


def _keep_quiet(
    memory: mmap.mmap, quiet_at: Sequence[int], lock: threading.Lock
) -> None:
    """Wait while the rank launches a step or waits for what is read: both take cores
    and memory, too. One thread looks for all, and leaves the others' time to those that
    read."""
    for start in quiet_at:
        if _is_quiet(memory, start):
            with lock:
                while _is_quiet(memory, start):
                    time.sleep(_LOOK_S)


def _is_quiet(memory: mmap.mmap, start: int) -> bool:
    return time.monotonic_ns() < _NUMBER.unpack_from(memory, start)[0]


def _mapped(fd: int) -> mmap.mmap:
    memory = mmap.mmap(fd, 0, mmap.MAP_SHARED)
    os.close(fd)
    memory.madvise(mmap.MADV_DONTDUMP)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _populate(memory: mmap.mmap, num_bytes: int) -> None:
    """Find the pages, which the rank has touched, before they are needed. Older kernels
    do not know how."""
    # Not `mmap.madvise`: no other thread would run meanwhile.
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise(start, num_bytes, _MADV_POPULATE_WRITE)


def _leave_out_vllm() -> None:
    """Have `vllm.v1.kv_tier.stores` without what its parents import."""
    folder = Path(__file__).parents[3]
    for name in ("vllm", "vllm.v1", "vllm.v1.kv_tier"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package


if __name__ == "__main__":
    main()
