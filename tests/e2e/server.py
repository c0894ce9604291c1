# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` as a process."""

import json
import os
import re
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .forks import start
from .release import KILLED, LOGS_KILLS

VLLM = "vllm.entrypoints.cli.main"
SHM = Path("/dev/shm")
START_TIMEOUT_S = 240
UPSTREAMS_OWN = re.compile(r".*-cpushm_\d+|sem\.mp-.*")
"""What upstream leaves in /dev/shm, with the tier or without, where it kills its own
processes: buffers of the communicator of CPU ranks, and locks of Python. Some
releases do that at once to an engine that they have just told to end."""


def command(model: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", VLLM, "serve", str(model), *flags]


def refused(model: Path, *flags: str, env: dict[str, str], log: Path) -> str:
    """What a `vllm serve` prints that does not start."""
    arguments = ["serve", str(model), *flags, "--port", "0"]
    process = start(VLLM, arguments, env, log)
    try:
        assert process.wait(START_TIMEOUT_S) != 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return log.read_text()


class Server:
    """A running `vllm serve`.

    Raises:
        RuntimeError: It ended, or was not ready in time. Has the end of its log.

    """

    def __init__(
        self,
        model: Path,
        flags: Sequence[str],
        env: dict[str, str],
        log: Path,
        client_timeout_s: float = 120,
    ) -> None:
        self.model = str(model)
        self.flags = list(flags)
        self._client_timeout_s = client_timeout_s
        self._log = log
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        address = ["--host", "127.0.0.1", "--port", str(self.port)]
        self._own_shm: set[str] = set()
        self.process = start(VLLM, ["serve", str(model), *flags, *address], env, log)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.get("/health")
                self.note_shared_memory()
                return
            except OSError:
                time.sleep(0.1)
        self.kill()
        raise RuntimeError(f"the server did not start:\n{self.log()[-6000:]}")

    def log(self) -> str:
        return self._log.read_text()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return response.read().decode()

    def post(self, path: str, body: dict[str, Any], **headers: str) -> Any:
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **headers},
        )
        with urllib.request.urlopen(
            request, timeout=self._client_timeout_s
        ) as response:
            is_json = response.headers.get_content_type() == "application/json"
            return json.load(response) if is_json else response.read().decode()

    def complete(
        self, tokens: list[int], replica: int | None = None, **params: Any
    ) -> dict[str, Any]:
        """Answer of /v1/completions to a prompt of token ids.

        Of the data parallel engine `replica`, if it is given.
        """
        body = {"model": self.model, "prompt": tokens, "temperature": 0, **params}
        headers = {} if replica is None else {"X-data-parallel-rank": str(replica)}
        return self.post("/v1/completions", body, **headers)

    def metrics(self, prefix: str, engine: int | None = None) -> dict[str, float]:
        """Values at /metrics by name, of one engine or of all together."""
        found: dict[str, float] = {}
        labels = r"(?:\{.*\})?"
        if engine is not None:
            labels = rf'\{{.*engine="{engine}".*\}}'
        pattern = rf"^({re.escape(prefix)}\w*){labels} (\S+)$"
        for name, value in re.findall(pattern, self.get("/metrics"), re.MULTILINE):
            found[name] = found.get(name, 0) + float(value)
        return found

    def terminate(self, timeout_s: float = 60) -> int:
        """End it as a service manager would; its exit code."""
        self.note_shared_memory()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """End it and all that it started, at once."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait()

    def leftover_processes(self, timeout_s: float = 20) -> list[str]:
        """Command lines of what still runs some time after the server's end."""
        deadline = time.monotonic() + timeout_s
        while (found := self._processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return list(found.values())

    def pid_of(self, name: str) -> int:
        """The process that upstream gave a title with `name`.

        The API server, which has none when it is run as a module, is `APIServer`.
        """
        if name == "APIServer":
            return self.process.pid
        (pid,) = (p for p, line in self._processes().items() if name in line)
        return pid

    def _processes(self) -> dict[int, str]:
        """Command lines of all processes of the server that are alive, by id."""
        found = {}
        for pid in self.pids():
            try:
                line = Path(f"/proc/{pid}/cmdline").read_text()
            except OSError:
                continue
            found[pid] = line.replace("\0", " ")
        return found

    def pids(self) -> list[int]:
        """Processes that the server is made of."""
        return pids_of_session(self.process.pid)

    def note_shared_memory(self) -> None:
        """Remember which files in /dev/shm its processes use now. Others on the machine
        start and end engines, too, whose files are not to be taken for its own."""
        self._own_shm |= shared_memory(self.pids())

    def stranded_shared_memory(self, timeout_s: float = 5) -> set[str]:
        """Files in /dev/shm that its processes were seen to use, that are still there,
        and that no process uses for some time."""
        deadline = time.monotonic() + timeout_s
        found = self._unused_shared_memory()
        while found and time.monotonic() < deadline:
            time.sleep(0.2)
            found &= self._unused_shared_memory()
        if KILLED in self.log() or not LOGS_KILLS:
            return {name for name in found if not UPSTREAMS_OWN.fullmatch(name)}
        return found

    def _unused_shared_memory(self) -> set[str]:
        pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
        return self._own_shm & set(os.listdir(SHM)) - shared_memory(pids)


def pids_of_session(session: int) -> list[int]:
    """Processes of a session that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(folder.name))
    return found


def shared_memory(pids: Iterable[int]) -> set[str]:
    """Names of the files in /dev/shm that processes have mapped."""
    found: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found.update(re.findall(rf" {SHM}/(\S+)$", maps, re.MULTILINE))
    return found
