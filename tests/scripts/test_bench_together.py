# SPDX-License-Identifier: Apache-2.0
"""Engines side by side: real processes that take turns, with an engine made up."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.suite.configs import Config
from bench.suite.jobs import UTILIZATION, Ready, Runner
from bench.suite.options import scaled
from bench.suite.records import read
from bench.suite.together import run_together

from .test_bench_turns import options

ENGINE = """
import json, sys, time
path, config, dies_at, cells = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]
def tell(**record):
    with open(path, "a") as file:
        file.write(json.dumps(record | {"config": config, "took_s": 1}) + "\\n")
tell(status="started", start_s=0, warm_up_s=0, at=time.time())
for i, cell in enumerate(cells):
    if not sys.stdin.readline() or i == dies_at:
        sys.exit()
    workload, repeat = cell.split(".")
    begun = time.time()
    time.sleep(0.05)
    tell(status="ok", workload=workload, repeat=int(repeat), cell=cell, metrics={},
         begun=begun, ended=time.time())
"""


class Engines(Runner):
    """Whose processes are made up."""

    dies_at = {"b": -1}

    def prepare(self, name: str, config: Config, *args: Any, **kw: Any) -> Ready:
        cells: Any = [(w, i, {}, f"{w}.{i}") for i in range(2) for w in ("x", "y")]
        out = self._args.out
        path, dies_at = str(out / "results.jsonl"), str(self.dies_at.get(name, -1))
        command = [sys.executable, "-c", ENGINE, path, name, dies_at]
        command += [cell[3] for cell in cells]
        about = {"config": name, "family": "plain", "scale": "tiny", "settings": "s"}
        log = out / f"{name}.log"
        return Ready(about, cells, command, {}, log)


@pytest.fixture
def runner(tmp_path: Path) -> Engines:
    args = options("--side-by-side")
    args.out = tmp_path
    return Engines(scaled(args), args, time.time() + 60)


def run(runner: Engines) -> list[dict[str, Any]]:
    known = {"a": Config(), "b": Config()}
    run_together(runner, known, ["x", "y"], range(2))
    return read(runner._args.out)


def test_cells_take_turns_and_none_runs_beside_another(runner: Engines) -> None:
    found = run(runner)
    started = [r["at"] for r in found if r["status"] == "started"]
    cells = [r for r in found if r["status"] == "ok"]
    assert [f"{r['config']}{r['cell']}" for r in cells] == [
        *("ax.0", "bx.0", "by.0", "ay.0"),
        *("ax.1", "bx.1", "by.1", "ay.1"),
    ]
    assert len(started) == 2 and max(started) < cells[0]["begun"]
    for before, after in zip(cells, cells[1:]):
        assert before["ended"] <= after["begun"]
    assert not runner.told.missing


def test_what_an_engine_that_died_has_left_is_told(
    runner: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engines, "dies_at", {"b": 1})
    found = run(runner)
    ok = [r["config"] for r in found if r["status"] == "ok"]
    assert ok.count("a") == 4 and ok.count("b") == 1
    failed = [r["cell"] for r in found if r["status"] == "failed"]
    assert failed == ["y.0", "x.1", "y.1"] and len(runner.told.missing) == 3


def test_what_cannot_be_emptied_is_refused_if_it_has_to_be(runner: Engines) -> None:
    known = {"lmcache": Config(resets=False)}
    run_together(runner, known, ["x", "y"], range(2))
    assert not runner.told.missing
    runner.empties = True
    with pytest.raises(SystemExit, match="lmcache cannot be emptied .* without --side"):
        run_together(runner, known, ["x"], range(1))


def test_engines_side_by_side_leave_each_other_memory(tmp_path: Path) -> None:
    args = options("--side-by-side", "--llm", '{"seed": 1}')
    args.out = tmp_path
    llm = Runner(scaled(args), args, 0.0).engine_arguments(Config())
    assert (llm["gpu_memory_utilization"], llm["seed"]) == (UTILIZATION, 1)
