# SPDX-License-Identifier: Apache-2.0
"""A process that reads and writes files for a rank (`FileProcesses`).

Moving an object takes several system calls, and a thread waits for the GIL after each.
A separate process has its own GIL, and does not hold up the thread that launches steps.
Both processes map the slots as shared memory.

The script runs by its path and imports only what moves objects: importing vLLM would
take seconds and hundreds of MB. Its arguments are the file descriptors of two
connections, for put and get requests; the first message has the settings. It ends with
its rank, whose end closes the connections.
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

# As in `memory.pages`, which imports torch.
_MADV_POPULATE_WRITE = 23
# Launching a step takes some milliseconds.
_LOOK_S = 0.3e-3
_NUMBER = struct.Struct("=q")


def main() -> None:
    """Serve requests until the rank is gone."""
    # A rank that was asked to end may still have blocks to write.
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
        arguments = (connection, move, memoryview(memory))
        serving.append(threading.Thread(target=_serve, args=arguments))
        serving[-1].start()
    _populate(memory, told["num_bytes"])
    # A thread pool accepts no work after the main thread has ended.
    for thread in serving:
        thread.join()


def _serve(asked: Connection, move: Any, memory: memoryview) -> None:
    """Handle requests of one connection, and send the answers."""
    try:
        asked.send(True)
        while True:
            keys, spans, *rest = asked.recv()
            rows = [memory[start:end] for start, end in spans]
            asked.send(move(keys, rows, *rest))
    except (EOFError, ConnectionError):
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        # The exit tells the rank, which waits for an answer.
        os._exit(1)


def _keep_quiet(
    memory: mmap.mmap, quiet_at: Sequence[int], lock: threading.Lock
) -> None:
    """Wait while the rank launches a step or waits for reads.

    Writing would compete with both for cores and memory. One thread polls for all, to
    leave CPU time to the threads that read.
    """
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
    """Map the pages that the rank has touched, before they are needed.

    Has no effect on older kernels.
    """
    # `mmap.madvise` would hold the GIL meanwhile.
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise(start, num_bytes, _MADV_POPULATE_WRITE)


def _leave_out_vllm() -> None:
    """Make `vllm.v1.kv_tier.stores` importable without running its parent packages."""
    folder = Path(__file__).parents[3]
    for name in ("vllm", "vllm.v1", "vllm.v1.kv_tier"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package


if __name__ == "__main__":
    main()
