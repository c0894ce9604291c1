# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with files below the host on a disk that takes no more."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .jobs import BLOCK_TOKENS
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
    writes,
)
from .server import Server
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


@contextmanager
def read_only(root: Path) -> Iterator[None]:
    """All folders in which objects can be become read-only.

    With the server's files open the kernel remounts no file system; it does so itself
    when a disk fails.
    """
    mount, unmount = (getattr(ctypes.CDLL(None), n) for n in ("mount", "umount2"))
    bind, remount, no_writes, lazily = 4096, 32, 1, 2
    (folder,) = {path.parent.parent for path in objects(root)}
    paths = [folder / f"{i:02x}" for i in range(256)]
    for path in paths:
        path.mkdir(mode=0o700, exist_ok=True)
    names = [os.fsencode(path) for path in paths]
    try:
        for name in names:
            assert mount(name, name, None, bind, None) == 0
            assert mount(None, name, None, bind | remount | no_writes, None) == 0
        yield
    finally:
        for name in names:
            unmount(name, lazily)


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
        reads_on_and_writes_no_more(server, root, right, "its disk is full")
        assert not unfinished(root)


def test_a_disk_that_becomes_read_only_stops_writing_only(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, disk: Path
) -> None:
    model = make_llama(tmp_path_factory.mktemp("read_only"))
    make_tokenizer(model)
    root = disk / "kv"
    with serving(model, [directory(root)], tmp_path / "log") as server:
        right = [ask(server, prompt)[0] for prompt in PROMPTS]
        writes(server, 5 * len(PROMPTS), before=0)
        with read_only(root):
            reads_on_and_writes_no_more(server, root, right, "Read-only file system")


def reads_on_and_writes_no_more(
    server: Server, root: Path, right: list[str], reason: str
) -> None:
    """All requests are answered, `PROMPTS` from what is there, and one line of the log
    says why nothing is written."""
    written = len(objects(root))
    for i in range(NUM_OTHERS):
        answer = server.complete(text(800 + i, 5 * BLOCK_TOKENS), max_tokens=2)
        assert answer["choices"][0]["finish_reason"] == "length"
    assert counted(server, "secondary_refused_blocks") > 0
    # One write was on its way. A disk that has become read-only also keeps its file.
    assert len(objects(root)) + len(unfinished(root)) <= written + 1
    assert server.log().count(STOPPED) == 1
    assert reason in server.log()
    # By now the host has forgotten these.
    loaded = counted(server, "secondary_loaded_blocks")
    found = [ask(server, prompt) for prompt in PROMPTS]
    assert [answer for answer, _ in found] == right
    assert sum(hits for _, hits in found) == HIT * len(PROMPTS)
    assert counted(server, "secondary_loaded_blocks") > loaded


def unfinished(root: Path) -> list[Path]:
    return list(root.rglob("*.tmp"))
