# SPDX-License-Identifier: Apache-2.0
"""The processes of `elastic.py`, and the memory of the GPU as others see it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from suite.room import gpu_bytes

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Job:
    """What an engine is, and what its bursts are made of.

    Attributes:
        shape: one of `suite.model.SHAPES`.
        dtype: torch's name of it.
        llm: arguments of the engine.
        name: of the engine; its prompts are its own.
        requests: of a burst.
        sets: of prefixes; bursts have them in turns.
        prefix: tokens of a request that later bursts have again.
        tail: tokens behind them that are new.
        output: tokens of an answer.
        out: a line for each thing that it was asked.

    """

    shape: str
    dtype: str
    llm: dict[str, Any]
    name: str
    requests: int
    sets: int
    prefix: int
    tail: int
    output: int
    out: str


class Engine:
    """A process with an engine.

    Args:
        job: What it is.
        python_path: Where it finds vLLM, before all else.
        env: More of its environment.

    """

    def __init__(self, job: Job, python_path: str, env: dict[str, str]) -> None:
        self.job = job
        self._out = Path(job.out)
        self._out.unlink(missing_ok=True)
        file = self._out.with_suffix(".job")
        file.write_text(json.dumps(asdict(job)))
        paths = [env.get("PYTHONPATH", ""), python_path, str(HERE), str(HERE.parent)]
        paths.append(os.environ.get("PYTHONPATH", ""))
        env = os.environ | env | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with self._out.with_suffix(".log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "elastic_engine.py"), str(file)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                text=True,
                start_new_session=True,
            )
        self._num_told = 0

    def told(self, timeout_s: float) -> dict[str, Any]:
        """The next thing that it tells.

        Raises:
            RuntimeError: It ended, or took too long. Has the end of its log.

        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            lines = self._out.read_text().splitlines() if self._out.exists() else []
            if len(lines) > self._num_told:
                self._num_told += 1
                return json.loads(lines[self._num_told - 1])
            if self._process.poll() is not None:
                break
            time.sleep(0.02)
        log = self._out.with_suffix(".log").read_text()
        raise RuntimeError(f"{self.job.name} did not answer:\n{log[-3000:]}")

    def ask(self, timeout_s: float = 120.0, **what: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self.told(timeout_s)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            # Its engine core is of the same session.
            os.killpg(self._process.pid, 9)
            self._process.wait()


def used_bytes() -> int:
    """Memory of the first GPU that is in use, by all processes; 0 without one."""
    return next(iter(gpu_bytes("used")), 0)


@contextmanager
def taken_away(keep_bytes: int | None) -> Iterator[None]:
    """Leave so much of the GPU's free memory, and take all else."""
    if keep_bytes is None:
        yield
        return
    code = (
        "import sys, torch; free = torch.cuda.mem_get_info()[0]; "
        f"kept = torch.empty(max(0, free - {keep_bytes}), dtype=torch.int8, "
        "device='cuda'); print('taken', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdin is not None
    process.stdout.readline()
    try:
        yield
    finally:
        process.stdin.close()
        process.wait()
