# SPDX-License-Identifier: Apache-2.0
"""Engines of the end-to-end tests, each started once for the whole session.

Every engine is a process of `driver` and runs all its workloads. A test says
which ones it reads, `@pytest.mark.engines("write_back", ...)`, and only those are
started: engines of one rank side by side, those of two ranks one by one.
"""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler.loadfile import LoadFileScheduling

from . import ray_cpu
from .forks import start
from .jobs import JOBS, Job
from .model import make_eagle, make_llama

ROOT = Path(__file__).parents[2]
ENGINE_TIMEOUT_S = 600


class Workloads(dict[str, Any]):
    """Results by workload. What the release at hand cannot run skips the test."""

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if "lacks" in found:
            pytest.skip(found["lacks"])
        return found


Results = Callable[[str], dict[str, Any]]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engines(*names): engines a test reads")


class EnginesInOneProcess(LoadFileScheduling):
    """Files by turns, and those that read `results` in one process: each that reads
    them starts all of their engines."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        files = Path(__file__).parent.glob("test_*.py")
        self._readers = {f.name for f in files if "results: Results" in f.read_text()}

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "results" if Path(file).name in self._readers else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> EnginesInOneProcess:
    return EnginesInOneProcess(config, log)


def environment(**others: str) -> dict[str, str]:
    """For a process that must find `vllm` and these tests as this one does, and what
    is in `PYTHONPATH` of `others`."""
    paths = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    paths.append(others.pop("PYTHONPATH", ""))
    # Else every engine compiles programs to see whether vectors work: 15 to 30 s.
    fast = {"TORCHINDUCTOR_VEC_ISA_OK": "1"}
    found = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return fast | others | os.environ | found


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


def is_skipped(item: pytest.Item) -> bool:
    """Its engines need not start. Conditions are values here, not strings."""
    return any(mark.args[0] for mark in item.iter_markers("skipif"))


@pytest.fixture(scope="session")
def results(
    request: pytest.FixtureRequest,
    llama: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Results]:
    """Results of an engine's workloads by its name. See `driver`."""
    folder = tmp_path_factory.mktemp("engines")
    items = [item for item in request.session.items if not is_skipped(item)]
    marks = [m for item in items for m in item.iter_markers("engines")]
    wanted = {name for mark in marks for name in mark.args}
    names = sorted(wanted, key=lambda name: JOBS[name].num_ranks)

    def run(name: str, before: list[Future]) -> dict[str, Any]:
        for other in before:
            other.exception()
        return run_engine(name, JOBS[name], llama, folder)

    with ThreadPoolExecutor(max_workers=2) as workers:
        running: dict[str, Future] = {}
        for name in names:
            # Two ranks want both cores.
            alone = JOBS[name].num_ranks > 1
            before = list(running.values()) if alone else []
            running[name] = workers.submit(run, name, before)
        yield lambda name: running[name].result()
        for future in running.values():
            future.cancel()


def run_engine(
    name: str,
    spec: Job,
    model: Path,
    folder: Path,
    driver: str = "driver",
    timeout_s: float = ENGINE_TIMEOUT_S,
) -> dict[str, Any]:
    """What a driver found, in a process of its own.

    Raises:
        RuntimeError: The engine failed; with the end of its log.

    """
    job, result, log = (folder / f"{name}.{s}" for s in ("json", "result", "log"))
    llm = {**spec.llm, "model": str(model)}
    storage = folder / f"{name}.storage"
    storage.mkdir()
    speculative = llm.get("speculative_config", {})
    if speculative.get("model") == "eagle":
        draft = make_eagle(folder / f"{name}-draft", model)
        llm["speculative_config"] = speculative | {"model": str(draft)}
    text = json.dumps({"llm": llm, "workloads": spec.workloads})
    job.write_text(text.replace('"STORAGE"', json.dumps(str(storage))))
    ray: AbstractContextManager[dict[str, str]] = nullcontext({})
    if spec.llm.get("distributed_executor_backend") == "ray":
        ray = ray_cpu.environment()
    with ray as others:
        arguments = [str(job), str(result)]
        process = start(f"tests.e2e.{driver}", arguments, environment(**others), log)
        try:
            returncode = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if returncode != 0:
        raise RuntimeError(f"engine {name} failed:\n{log.read_text()[-6000:]}")
    found = json.loads(result.read_text())
    return {**found, "workloads": Workloads(found["workloads"])}
