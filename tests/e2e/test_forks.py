# SPDX-License-Identifier: Apache-2.0
"""Forks of a template are as processes that import everything themselves."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .forks import Forked, Process, start

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
    def run() -> tuple[Process, int, list[str]]:
        process = start("some_module", ["begin", "7"], env, log)
        return process, process.wait(60), sorted(log.read_text().splitlines())

    first, *found = run()
    assert isinstance(first, subprocess.Popen)
    assert found == [7, ["['begin', '7'] red True some_module", "error"]]
    for _ in range(2):
        other, *of_fork = run()
        assert isinstance(other, Forked)
        assert of_fork == found
        assert other.poll() == other.returncode == 7


def test_forks_have_the_environment_that_is_asked_for(
    env: dict[str, str], log: Path
) -> None:
    for color in ("red", "blue", "red", "blue"):
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
