# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` as a subprocess that does not outlive its `with` block."""

import os
import signal
import socket
import subprocess
import sysconfig
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 20
LOG_TAIL_LINES = 30


class ServerError(Exception):
    """The server did not start."""


def vllm_serve(model: Path, flags: Sequence[str]) -> list[str]:
    """The command that serves `model` with this Python's vLLM.

    Raises:
        ServerError: it has none.

    """
    vllm = Path(sysconfig.get_path("scripts"), "vllm")
    if not vllm.exists():
        raise ServerError(f"{vllm} is missing: run this with `make demo`")
    return [str(vllm), "serve", str(model), *flags]


@contextmanager
def serving(
    command: Sequence[str],
    log: Path,
    note: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
    kill: bool = False,
) -> Iterator[str]:
    """Runs a server on a free port while the `with` block lasts.

    Args:
        command: takes `--host` and `--port`, and answers `/health` once it is ready.
        log: where its output goes.
        note: called with a line of progress now and then while it starts.
        environment: variables that the server has beside this process's.
        kill: end it by SIGKILL, as if it had crashed.

    Yields:
        The server's URL, once it is ready.

    Raises:
        ServerError: it did not become ready.

    """
    port = _free_port()
    # Nothing here may depend on a network, and nothing may report to one.
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | quiet | dict(environment or {}),
            # A group of its own: the engine and its workers end with the server.
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(process, f"{url}/health", log, note)
        yield url
    except Exception:
        note(_tail(log))
        raise
    finally:
        _stop(process, kindly=not kill)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _wait_until_ready(
    process: subprocess.Popen[bytes], url: str, log: Path, note: Callable[[str], None]
) -> None:
    start = time.monotonic()
    told = start
    # A proxy from the environment has no business with a local server.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while (now := time.monotonic()) < start + START_TIMEOUT_S:
        if process.poll() is not None:
            raise ServerError(
                f"the server ended while it started, exit code {process.returncode}"
            )
        # Until it listens and says 200, urllib raises some kind of OSError.
        with suppress(OSError), opener.open(url, timeout=5):
            return
        if now > told + 15:
            told = now
            note(f"still starting, see {log}")
        time.sleep(0.25)
    raise ServerError(f"the server was not ready after {START_TIMEOUT_S} s")


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n    ".join([f"the end of {log}:", *lines])


def _stop(process: subprocess.Popen[bytes], kindly: bool) -> None:
    """Ends the group: first kindly, if so, then whatever is left of it."""
    if kindly and process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
