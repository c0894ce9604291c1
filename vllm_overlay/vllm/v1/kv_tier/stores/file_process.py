# SPDX-License-Identifier: Apache-2.0
"""A process that reads and writes objects for a rank (`FileProcesses`).

To open, check, read, compare and close a file takes calls of the system, after each of
which a thread waits for Python's lock. A process of its own has that lock for itself,
and takes none of it from the thread that launches the engine's steps. The slots are
memory that both map.

It is run by its path, and imports what moves objects and nothing else of vLLM, which
would take it seconds and hundreds of MB. What it is to do, a line of JSON, comes by
standard input. It ends when that does, so with its rank, whatever ended it.
"""

import contextlib
import json
import mmap
import os
import signal
import sys
import threading
import traceback
import types
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# As of `memory.pages`, which needs torch.
_MADV_POPULATE_WRITE = 23
_POPULATED_BYTES = 64 << 20


def main() -> None:
    """Do what is asked for until standard input ends."""
    # A rank that is told to end may still have much to write.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    told = json.loads(sys.stdin.readline())
    sys.path[:] = told["path"]
    _leave_out_vllm()
    from vllm.v1.kv_tier.stores.files import Files, Place

    files = Files(Place(*told["place"]), told["num_threads"])
    memory = _mapped(told["memory_fd"], told["memory_bytes"])
    rows, row_bytes = memoryview(memory), Place(*told["place"]).row_bytes
    for name, move in (("put", files.put), ("get", files.get)):
        asked = Connection(told[name])
        threading.Thread(
            target=_serve, args=(asked, move, rows, row_bytes), name=name, daemon=True
        ).start()
    _populate(memory)
    sys.stdin.read()
    os._exit(0)


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


def _mapped(fd: int, num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED)
    os.close(fd)
    memory.madvise(mmap.MADV_DONTDUMP)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _populate(memory: mmap.mmap) -> None:
    """Find the pages, which the rank has touched, before they are needed."""
    # In pieces, since meanwhile no other thread runs. Older kernels do not know how.
    with contextlib.suppress(OSError):
        for start in range(0, len(memory), _POPULATED_BYTES):
            size = min(_POPULATED_BYTES, len(memory) - start)
            memory.madvise(_MADV_POPULATE_WRITE, start, size)


def _leave_out_vllm() -> None:
    """Have `vllm.v1.kv_tier.stores` without what its parents import."""
    folder = Path(__file__).parents[3]
    for name in ("vllm", "vllm.v1", "vllm.v1.kv_tier"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package


if __name__ == "__main__":
    main()
