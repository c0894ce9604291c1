# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with files below the host, whose processes fail in the middle of it."""

import mmap
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from ..settings import with_debug
from ..unit.stores.servers import until
from .jobs import BLOCK_BYTES, BLOCK_TOKENS
from .model import make_llama, make_tokenizer
from .secondary import (
    HIT,
    NEEDS_KEYS,
    ask,
    counted,
    directory,
    prompts,
    serving,
    writes,
)
from .server import Server
from .test_http import NUM_SLOTS
from .workloads import text

pytestmark = NEEDS_KEYS

PROMPTS = prompts(700, 4)
LIVES_S = 5
"""A process that ends sooner is not replaced."""
NUM_OTHERS = NUM_SLOTS // 5 + 8
"""Prompts after which the host has forgotten those before."""
NUM_OTHERS_ON_DEVICE = 8
"""Prompts after which the device has forgotten those before, and the host has not."""
CHANGED = "do not hold what was stored in them"


def processes(server: Server) -> list[psutil.Process]:
    """Those that read and write files."""
    return [
        each
        for each in psutil.Process(server.process.pid).children(recursive=True)
        if each.is_running() and any("file_process.py" in a for a in each.cmdline())
    ]


def change_slots(process: psutil.Process) -> None:
    """Change some bytes of each slot, in the memory that the process fills."""
    (path,) = [
        path
        for path in Path(f"/proc/{process.pid}/fd").iterdir()
        if "memfd:kv-tier" in str(path.readlink())
    ]
    num_bytes = NUM_SLOTS * BLOCK_BYTES
    with path.open("r+b") as file, mmap.mmap(file.fileno(), num_bytes) as memory:
        slots = np.frombuffer(memory, np.uint8)
        slots[3::64] ^= 0x40
        del slots


def forget(server: Server, first: int, num_others: int = NUM_OTHERS) -> None:
    for i in range(num_others):
        server.complete(text(first + i, 5 * BLOCK_TOKENS), max_tokens=2)


@pytest.mark.compat("faults", "a slot that changed since its store (`verify`)")
def test_what_is_killed_or_stopped_costs_time_only(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    model = make_llama(tmp_path_factory.mktemp("processes"))
    make_tokenizer(model)
    entry = with_debug(directory(tmp_path / "kv") | {"max_gib": 1}, deadline_ms=2000)
    with serving(model, [entry], tmp_path / "log", verify=True) as server:
        right = [ask(server, prompt)[0] for prompt in PROMPTS]
        writes(server, 5 * len(PROMPTS), before=0)
        forget(server, 800)
        first = processes(server)
        assert len(first) == 2
        age_s = time.time() - max(each.create_time() for each in first)
        time.sleep(max(0, LIVES_S + 1 - age_s))
        first[0].kill()
        first[1].send_signal(signal.SIGSTOP)
        # Not more of them: three that wait in vain would keep all others from it.
        assert ask(server, PROMPTS[0])[0] == right[0]
        until(lambda: server.log().count("count as failed") == 2)
        # All is fetched again, by others.
        forget(server, 1000)
        loaded = counted(server, "secondary_loaded_blocks")
        found = [ask(server, prompt) for prompt in PROMPTS]
        assert [answer for answer, _ in found] == right
        assert sum(hits for _, hits in found) == HIT * len(PROMPTS)
        assert counted(server, "secondary_loaded_blocks") > loaded
        second = processes(server)
        assert len(second) == 2 and not {*first} & {*second}
        assert server.log().count("count as failed") == 2
        assert CHANGED not in server.log()
        # What they fill is checked as what is stored: the device gets nothing of it.
        forget(server, 1200, NUM_OTHERS_ON_DEVICE)
        change_slots(second[0])
        assert [ask(server, prompt)[0] for prompt in PROMPTS] == right
        assert CHANGED in server.log()
        pids = [each.pid for each in second]
    until(lambda: not any(map(psutil.pid_exists, pids)))
