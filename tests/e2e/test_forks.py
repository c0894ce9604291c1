# SPDX-License-Identifier: Apache-2.0
"""Forks of a template are as processes that import everything themselves."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .forks import MAX_TEMPLATES, start

CODE = """\
import os, sys, time
from pathlib import Path
if __name__ == "__main__":
    print(sys.argv[1:], os.environ["COLOR"], os.getsid(0) == os.getpid(), __spec__.name)
    print("error", file=sys.stderr)
    time.sleep(3600 if sys.argv[1] == "sleep" else 0)
    sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "some_module.py").write_text(CODE)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "COLOR": "red", "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "log"


def test_forks_print_and_exit_as_others(env: dict[str, str], log: Path) -> None:
    command = [sys.executable, "-m", "some_module", "begin", "7"]
    other = subprocess.run(
        command, env=env, capture_output=True, text=True, start_new_session=True
    )
    assert other.returncode == 7
    for _ in range(2):
        fork = start("some_module", ["begin", "7"], env, log)
        assert fork.wait(60) == fork.poll() == 7
        found = sorted(log.read_text().splitlines())
        assert found == sorted((other.stdout + other.stderr).splitlines())


def test_forks_have_the_environment_that_is_asked_for(
    env: dict[str, str], log: Path
) -> None:
    # Templates end, where there are more than are kept.
    colors = [f"red{i}" for i in range(MAX_TEMPLATES + 1)]
    for color in (*colors, *colors):
        process = start("some_module", ["begin", "0"], env | {"COLOR": color}, log)
        assert process.wait(60) == 0
        assert f" {color} True" in log.read_text()


def test_forks_get_signals(env: dict[str, str], log: Path) -> None:
    numbers = [signal.SIGKILL, signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        # Jobs in the background of a shell ignore it, and so do their children.
        numbers.append(signal.SIGINT)
    for number in numbers:
        ended, lasts = (
            start("some_module", ["sleep", "0"], env, log.with_name(name))
            for name in ("ended", "lasts")
        )
        with pytest.raises(subprocess.TimeoutExpired):
            ended.wait(0.5)
        ended.send_signal(number)
        # Python ends by the signal that interrupts it.
        assert ended.wait(60) == -number
        assert lasts.poll() is None
        os.killpg(lasts.pid, signal.SIGKILL)
        assert lasts.wait(60) == -signal.SIGKILL


SPAWNS = """\
import multiprocessing, os, signal, sys, time
CONTEXT = multiprocessing.get_context("spawn")

def spawned(pipe, session, level):
    parent = multiprocessing.parent_process()
    name = multiprocessing.current_process().name
    print(name, os.environ["COLOR"], sys.argv[1:], os.getsid(0) == session, flush=True)
    print(os.getppid() == parent.pid, "tests.e2e.spawned" in sys.modules, flush=True)
    pipe.send(level)
    if level == 2:
        time.sleep(3600)
    spawn(pipe, session, level + 1)
    sys.exit(level + 5)

def spawn(pipe, session, level):
    os.environ["COLOR"] = f"level {level}"
    args = pipe, session, level
    process = CONTEXT.Process(target=spawned, args=args, name=f"name {level}")
    process.start()
    process.join(0.5)
    print("runs", level, process.is_alive(), flush=True)
    if level == 2:
        os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    print("ended", level, process.exitcode, flush=True)

if __name__ == "__main__":
    ours, theirs = CONTEXT.Pipe()
    spawn(theirs, os.getsid(0), 0)
    print(*(ours.recv() for _ in range(3)))
"""


def test_what_forks_spawn_is_as_new_interpreters_are(
    env: dict[str, str], log: Path, tmp_path: Path
) -> None:
    (tmp_path / "some_parent.py").write_text(SPAWNS)
    command = [sys.executable, "-m", "some_parent", "a"]
    other = subprocess.run(command, env=env, capture_output=True, text=True)
    assert other.returncode == 0, other.stderr
    assert "name 2 level 2 ['a'] True\nTrue False\n" in other.stdout
    fork = start("some_parent", ["a"], env, log)
    assert fork.wait(60) == 0, log.read_text()
    expected = other.stdout.replace("True False\n", "True True\n")
    assert log.read_text() == expected
