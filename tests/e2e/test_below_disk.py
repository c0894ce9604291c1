# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with files below the host on a disk that takes no more."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .below import (
    HIT,
    NEEDS_KEYS,
    ask,
    counted,
    directory,
    objects,
    prompts,
    serving,
    writes,
)
from .jobs import BLOCK_TOKENS
from .model import make_llama, make_tokenizer
from .test_http import NUM_SLOTS
from .workloads import text

pytestmark = NEEDS_KEYS

PROMPTS = prompts(700, 4)
NUM_OTHERS = NUM_SLOTS // 5 + 8
"""Prompts after which the host has forgotten those before."""
STOPPED = "nothing more is written to"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, hardly larger than the cap."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128m", "kv", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs root, and a kernel that mounts")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_stops_writing_only(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, disk: Path
) -> None:
    model = make_llama(tmp_path_factory.mktemp("full"))
    make_tokenizer(model)
    root = disk / "kv"
    with serving(model, [directory(root)], tmp_path / "log") as server:
        right = [ask(server, prompt)[0] for prompt in PROMPTS]
        writes(server, 5 * len(PROMPTS), before=0)
        # Another one's file takes what is left.
        with pytest.raises(OSError), (disk / "theirs").open("wb", 0) as theirs:
            while True:
                theirs.write(bytes(1 << 16))
        written = len(objects(root))
        for i in range(NUM_OTHERS):
            answer = server.complete(text(800 + i, 5 * BLOCK_TOKENS), max_tokens=2)
            assert answer["choices"][0]["finish_reason"] == "length"
        assert counted(server, "secondary_refused_blocks") > 0
        assert len(objects(root)) <= written + 1
        assert server.log().count(STOPPED) == 1
        assert "its disk is full" in server.log()
        # By now the host has forgotten these.
        loaded = counted(server, "secondary_loaded_blocks")
        found = [ask(server, prompt) for prompt in PROMPTS]
        assert [answer for answer, _ in found] == right
        assert sum(hits for _, hits in found) == HIT * len(PROMPTS)
        assert counted(server, "secondary_loaded_blocks") > loaded
        assert not list(root.rglob("*.tmp"))
