# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with files below the host is told to end: what it still writes."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ..settings import with_debug
from .dropped import NUM_BLOCKS, NUM_PROMPTS
from .jobs import BLOCK_TOKENS, WITH_RANKS
from .model import make_llama, make_tokenizer
from .secondary import (
    HIT,
    NEEDS_KEYS,
    ask,
    counted,
    directory,
    objects,
    prompts,
    serving,
)
from .server import Server
from .workloads import text

pytestmark = NEEDS_KEYS

PROMPTS = prompts(600, 6)
WROTE = "blocks that the secondary tier lacked"
PROJECT = Path(__file__).parents[2]
NEVER = 1000
"""A use that no block has: nothing is written while the server serves."""
END_S = 25
"""`flush_s` of 2, 5 s, and what upstream takes to end, on a slow machine."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_llama(tmp_path_factory.mktemp("ended"))
    make_tokenizer(model)
    return model


def entry(root: Path, **more: object) -> dict[str, Any]:
    return with_debug(directory(root), store_from_use=NEVER, **more)


def answers(server: Server) -> list[str]:
    """To all prompts, which are in the host afterwards."""
    texts = [ask(server, prompt)[0] for prompt in PROMPTS]
    assert len(set(texts)) == len(PROMPTS)
    for i in range(8):
        ask(server, text(900 + i % 4, 5 * BLOCK_TOKENS))
    assert counted(server, "stored_blocks") >= 5 * len(PROMPTS)
    assert counted(server, "secondary_stored_blocks") == 0
    return texts


def test_an_engine_without_requests_writes_what_it_was_to_write(
    model: Path, tmp_path: Path
) -> None:
    root = tmp_path / "kv"
    tiers = [directory(root)]
    with serving(model, tiers, tmp_path / "log", store_policy="write_through") as one:
        # Its last steps store what those before have computed, and begin no write.
        one.complete(PROMPTS[0], max_tokens=3, ignore_eos=True)
        limit = time.monotonic() + 10
        while len(objects(root)) < HIT // BLOCK_TOKENS:
            assert time.monotonic() < limit, "not all is written"
            time.sleep(0.05)
        time.sleep(0.5)
        before = cpu_seconds(one)
        time.sleep(2.0)
        # And then it sleeps.
        assert cpu_seconds(one) - before < 0.5


def cpu_seconds(server: Server) -> float:
    """That all of its processes have taken."""
    times = [psutil.Process(pid).cpu_times() for pid in server.pids()]
    return sum(each.user + each.system for each in times)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([], id="one rank"),
        pytest.param(["--tensor-parallel-size", "2"], id="two ranks", marks=WITH_RANKS),
    ],
)
def test_what_was_never_written_outlives_a_restart(
    model: Path, tmp_path: Path, flags: list[str]
) -> None:
    root = tmp_path / "kv"
    with serving(model, [entry(root)], tmp_path / "log1", flags) as server:
        right = answers(server)
        assert not objects(root)
        assert server.terminate() == 0
        assert server.leftover_processes() == []
        assert WROTE in server.log()
    assert not list(root.rglob("*.tmp"))
    with serving(model, [entry(root)], tmp_path / "log2", flags) as server:
        found = [ask(server, prompt) for prompt in PROMPTS]
        assert [answer for answer, _ in found] == right
        assert [hits for _, hits in found] == [HIT] * len(PROMPTS)


@pytest.mark.parametrize("how", ["dropped", "kept"])
def test_an_engine_that_nobody_ends_writes_when_its_process_ends(
    how: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the scheduler in the process of its user."""
    # Block hashes of older releases begin with a random number otherwise.
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    root = tmp_path / "kv"
    command = [sys.executable, "-m", "tests.e2e.dropped", str(model), str(root), how]
    run = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert len(objects(root)) == NUM_PROMPTS * NUM_BLOCKS
    assert not list(root.rglob("*.tmp"))


def test_no_time_nothing_written(model: Path, tmp_path: Path) -> None:
    """The negative control."""
    root = tmp_path / "kv"
    with serving(model, [entry(root, flush_s=0)], tmp_path / "log") as server:
        answers(server)
        assert server.terminate() == 0
        assert WROTE not in server.log()
    assert not objects(root)


def test_a_store_that_hangs_does_not_keep_the_server(
    model: Path, tmp_path: Path
) -> None:
    hanging = entry(tmp_path / "kv", flush_s=2)
    hanging["type"] = "tests.e2e.hanging_store.HangingConfig"
    with serving(model, [hanging], tmp_path / "log") as server:
        answers(server)
        begun = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(1)
        # Nor does a second signal make it longer.
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(END_S)
        assert server.leftover_processes(END_S) == []
        assert time.monotonic() - begun < END_S
        assert "KV tier: wrote 0 of " in server.log() or WROTE not in server.log()
