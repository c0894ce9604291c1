# SPDX-License-Identifier: Apache-2.0
"""Routers of others as processes: NVIDIA Dynamo's indexer and vllm-router.

They live in an environment of their own, `build/routers`, made from
`ci/requirements-routers.txt` when it is first asked for.
"""

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "routers"
REQUIREMENTS = ROOT / "ci" / "requirements-routers.txt"
START_TIMEOUT_S = 60
COLORS = re.compile(r"\x1b\[[0-9;]*m")


def environment() -> Path:
    """`bin` of the routers' environment."""
    done = FOLDER / "requirements.txt"
    if not done.is_file() or done.read_text() != REQUIREMENTS.read_text():
        venv.create(FOLDER, with_pip=True, clear=True)
        pip: list[str | Path] = [
            FOLDER / "bin" / "python",
            "-m",
            "pip",
            "install",
            "-q",
        ]
        # No wheel for this Python means no test: they take minutes to build.
        flags: list[str | Path] = ["--only-binary", ":all:", "-r", REQUIREMENTS]
        subprocess.run([*pip, *flags], check=True, timeout=600)
        done.write_text(REQUIREMENTS.read_text())
    return FOLDER / "bin"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def post(url: str, body: dict[str, Any], timeout_s: float = 60) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return json.load(response)


class _Process:
    """One that is ready once its port answers.

    Raises:
        RuntimeError: It ended, or was not ready in time. Has the end of its log.

    """

    def __init__(self, command: Sequence[str | Path], port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("a") as output:
            self._process = subprocess.Popen(
                list(map(str, command)),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except OSError:
                time.sleep(0.2)
        self.stop()
        raise RuntimeError(f"{command[0]} did not start:\n{self.log()[-3000:]}")

    def log(self) -> str:
        return COLORS.sub("", self._log.read_text(errors="replace"))

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


class Indexer(_Process):
    """NVIDIA Dynamo's indexer, as it runs beside any router.

    Args:
        model: Name of the served model.
        events: Endpoint of vLLM's events.
        replay: Endpoint at which it replays them.
        block_size: Tokens in a KV block.
        log: File to append the log to.

    """

    def __init__(
        self, model: str, events: str, replay: str, block_size: int, log: Path
    ) -> None:
        port = free_port()
        python = environment() / "python"
        super().__init__(
            [python, "-m", "dynamo.indexer", "--port", str(port)], port, log
        )
        self._model, self._block_size = model, block_size
        post(
            f"{self.url}/register",
            {
                "instance_id": 1,
                "endpoint": events,
                "replay_endpoint": replay,
                "model_name": model,
                "block_size": block_size,
            },
        )

    def prefix(self, tokens: list[int]) -> int:
        """Tokens of a prompt that the server has, on either tier."""
        query = {"token_ids": tokens, "model_name": self._model}
        found = post(f"{self.url}/query", query | {"block_size": self._block_size})
        instances = found["instances"]
        return instances["1"]["longest_matched"] if instances else 0


class Router(_Process):
    """vllm-router with its policy `kv_aware`; a host hit counts as one of the device.

    Args:
        server: URL of vLLM.
        model: Name of the served model.
        events: Endpoint of vLLM's events.
        replay: Endpoint at which it replays them.
        block_size: Tokens in a KV block.
        log: File to append the log to.

    """

    _DECISION = re.compile(
        r'KV prefix decision outcome="(\w+)".* credited_prefix_tokens=(\d+)'
    )

    def __init__(
        self,
        server: str,
        model: str,
        events: str,
        replay: str,
        block_size: int,
        log: Path,
    ) -> None:
        port = free_port()
        flags = {
            "worker-urls": server,
            "policy": "kv_aware",
            "kv-penalty-host": "1.0",
            "kv-event-source": f"{server}={events}",
            "kv-event-replay-source": f"{server}={replay}",
            "kv-event-block-size": str(block_size),
            "kv-event-model": model,
            "port": str(port),
            "prometheus-port": str(free_port()),
            "log-level": "debug",
        }
        arguments = [part for k, v in flags.items() for part in (f"--{k}", v)]
        super().__init__([environment() / "vllm-router", *arguments], port, log)

    def prefixes(self) -> list[int]:
        """What it credited the server with for each request until now.

        Raises:
            ValueError: It decided by anything else than prefixes.

        """
        found = self._DECISION.findall(self.log())
        if others := {outcome for outcome, _ in found} - {"prefix_cost"}:
            raise ValueError(f"the router decided by {others}")
        return [int(tokens) for _, tokens in found]


if __name__ == "__main__":
    sys.exit(print(environment()))
