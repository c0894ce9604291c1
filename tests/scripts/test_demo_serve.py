# SPDX-License-Identifier: Apache-2.0
"""The demo's server process: ready before use, gone after use, whatever happens."""

import os
import signal
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from demo.serve import ServerError, serving

# Answers on /health, and has a child that does not listen to SIGTERM.
SERVER = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
child = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
print("child", subprocess.Popen([sys.executable, "-c", child]).pid, flush=True)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
address = sys.argv[sys.argv.index("--host") + 1], sys.argv[-1]
HTTPServer((address[0], int(address[1])), Handler).serve_forever()
"""


def child_pid(log: Path) -> int:
    words = log.read_text().split()
    return int(words[words.index("child") + 1])


def is_running(pid: int) -> bool:
    """Whether a process is there and not only waiting to be reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_running(pid)


def test_serves_and_leaves_no_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving([sys.executable, "-c", SERVER], log, print) as url:
        assert urllib.request.urlopen(f"{url}/health").status == 200
        child = child_pid(log)
        assert is_running(child)
    assert wait_until_gone(child)


def test_a_killed_server_hears_of_nothing(tmp_path: Path) -> None:
    server = "import signal, sys\n"
    server += "end = lambda *_: (print('TERM', flush=True), sys.exit())\n"
    server += "signal.signal(15, end)\n" + SERVER
    for kill in (False, True):
        log = tmp_path / f"log-{kill}"
        with serving([sys.executable, "-c", server], log, print, kill=kill):
            child = child_pid(log)
        assert wait_until_gone(child)
        assert ("TERM" in log.read_text()) is not kill


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_error_in_the_block_leaves_no_process(
    tmp_path: Path, error: type[BaseException]
) -> None:
    log = tmp_path / "log"
    with (
        pytest.raises(error),
        serving([sys.executable, "-c", SERVER], log, print),
    ):
        child = child_pid(log)
        raise error("stop")
    assert wait_until_gone(child)


def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    notes: list[str] = []
    command = [sys.executable, "-c", "print('no room'); raise SystemExit(3)"]
    with (
        pytest.raises(ServerError, match="while it started, exit code 3"),
        serving(command, tmp_path / "log", notes.append),
    ):
        pytest.fail("not ready")
    assert "no room" in notes[-1]


def test_a_server_that_dies_shows_its_log(tmp_path: Path) -> None:
    notes: list[str] = []
    log = tmp_path / "log"
    with (
        pytest.raises(OSError),
        serving([sys.executable, "-c", SERVER], log, notes.append) as url,
    ):
        child = child_pid(log)
        os.kill(int(Path(f"/proc/{child}/stat").read_text().split()[3]), signal.SIGKILL)
        time.sleep(0.2)
        urllib.request.urlopen(f"{url}/health")
    assert "child" in notes[-1]
    assert wait_until_gone(child)
