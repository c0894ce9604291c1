# SPDX-License-Identifier: Apache-2.0
"""Files in /dev/shm that a server of the end-to-end tests leaves behind."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ...e2e.server import SHM, Server

_MAPS = """
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(file, 4096)
memory = mmap.mmap(file, 4096)
print("mapped", flush=True)
sys.stdin.read()
"""


class Process:
    """One that has a file mapped, and leaves it when it is killed."""

    def __init__(self, name: str) -> None:
        self.name = f"kvtier-test-{os.getpid()}-{name}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", _MAPS, str(SHM / self.name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    some = [Process("own"), Process("other")]
    yield some
    for each in some:
        each.kill()
        with suppress(FileNotFoundError):
            (SHM / each.name).unlink()


def test_only_files_of_its_own_processes_count(
    processes: list[Process], tmp_path: Path
) -> None:
    own, other = processes
    server = Server.__new__(Server)
    server.process, server._log, server._own_shm = own.process, tmp_path / "log", set()
    server._log.touch()
    server.note_shared_memory()
    # Still in use.
    assert server.stranded_shared_memory(0.0) == set()
    own.kill()
    other.kill()
    assert server.stranded_shared_memory(0.0) == {own.name}
    (SHM / own.name).unlink()
    assert server.stranded_shared_memory(0.0) == set()
