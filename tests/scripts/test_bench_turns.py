# SPDX-License-Identifier: Apache-2.0
"""What compare.py runs, in which order, and what its ratios say."""

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.suite import room
from bench.suite.client import Client
from bench.suite.configs import Config, configs
from bench.suite.distances import connectors_that_ran, distances, more_is_better, ratio
from bench.suite.jobs import Ready, Runner
from bench.suite.one_config import refresh
from bench.suite.options import (
    add_engine_options,
    config_names,
    extra_config,
    parallel,
    scaled,
)
from bench.suite.records import read
from bench.suite.report import report
from bench.suite.scales import SCALES
from bench.suite.table import Results

from .test_bench_suite import cell


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command as a module; it finds `suite` beside itself, by that name."""
    bench = Path(room.__file__).parents[1]
    monkeypatch.syspath_prepend(str(bench))
    before = {*sys.modules}
    import compare as module

    yield module
    for name in {*sys.modules} - before:
        del sys.modules[name]


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    args = parser.parse_args(["--scale", "tiny", "--device", "cpu", *given])
    args.batch_invariant = False
    return args


def test_turns_begin_with_another_configuration_each_time(compare: Any) -> None:
    turns = compare.turns(["a", "b", "c"], range(1, 3), True)
    assert [(name, *some) for name, some in turns] == [
        *(("b", 1), ("c", 1), ("a", 1)),
        *(("c", 2), ("a", 2), ("b", 2)),
    ]
    one_by_one = list(compare.turns(["a", "b"], range(3), False))
    assert one_by_one == [("a", range(3)), ("b", range(3))]


def test_turns_and_large_are_the_default(
    compare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parsed(*given: str) -> argparse.Namespace:
        monkeypatch.setattr("sys.argv", ["compare.py", "--out", "x", *given])
        return compare.parse()

    assert parsed().in_turns and not parsed("--one-by-one").in_turns
    known = configs(1.0, 1 << 20)
    names = config_names(parsed().configs, known)
    assert "large" in names and "lmcache" in names
    assert not {"core-fs", "offloading-fs"} & {*names}


def test_short_names_stand_for_what_they_are_short_for() -> None:
    known = configs(1.0, 1 << 20)
    found = config_names(["core", "simple", "simple-lazy", "large"], known)
    assert found == ["core-write_back", "simple-eager", "simple-lazy", "large"]
    name, own = extra_config('core={"like": "large"}', known)
    # What somebody has named so is that.
    assert config_names(["core"], [*known, name]) == ["core"] and own.device_scale == 6
    with pytest.raises(SystemExit, match="unknown name 'core2'"):
        config_names(["core2"], known)


def test_ranks_share_a_cache_and_replicas_have_their_own(tmp_path: Path) -> None:
    args = options("--tp", "2", "--pp", "2", "--dp", "3", "--no-custom-all-reduce")
    args.out = tmp_path
    scale = scaled(args)
    llm = Runner(scale, args, 0.0).engine_arguments(Config(device_scale=6))
    assert llm["kv_cache_memory_bytes"] == SCALES["tiny"].device_bytes * 6 // 4
    assert llm["tensor_parallel_size"] == llm["pipeline_parallel_size"] == 2
    assert llm["data_parallel_size"] == 3 and llm["disable_custom_all_reduce"]
    once: Any = SCALES["tiny"].workloads["overfull"]
    thrice: Any = scale.workloads["overfull"]
    assert (thrice.sessions, thrice.at_once) == (3 * once.sessions, 3 * once.at_once)
    assert thrice.first == once.first
    assert parallel(options()) == {}


def test_engine_arguments_for_all_yield_to_a_configuration(tmp_path: Path) -> None:
    args = options("--llm", '{"block_size": 64, "seed": 1}')
    args.out = tmp_path
    llm = Runner(scaled(args), args, 0.0).engine_arguments(Config({"block_size": 16}))
    assert (llm["block_size"], llm["seed"]) == (16, 1)


def test_a_trace_is_for_all_that_replay_one(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    workloads: Any = scaled(options("--trace", str(path))).workloads
    names = ("trace", "closed_8", "closed_16")
    assert {workloads[name].path for name in names} == {str(path)}


@pytest.mark.parametrize("gib, fits", [(60, False), (72, True)])
def test_large_runs_where_it_fits(gib: int, fits: bool) -> None:
    scale = SCALES["h200"]
    large = configs(48, scale.device_bytes)["large"]
    llm = {"kv_cache_memory_bytes": scale.device_bytes * large.device_scale}
    why = room.lacks_room(large, scale, llm, "cuda", gib << 30)
    assert (why == "") == fits
    if not fits:
        assert why.startswith("needs 69 GiB, the device has 60")
    # Each of two ranks has half of it.
    half = {"kv_cache_memory_bytes": llm["kv_cache_memory_bytes"] // 2}
    two = half | {"tensor_parallel_size": 2}
    assert not room.lacks_room(large, scale, two, "cuda", 40 << 30)


def test_a_small_cache_always_runs() -> None:
    llm = {"kv_cache_memory_bytes": 1 << 50}
    assert not room.lacks_room(Config(), SCALES["h200"], llm, "cuda", 1)


def test_a_module_that_is_missing_or_broken_is_named_with_the_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Config().missing == Config(needs="json").missing == ""
    assert Config(needs="no_such").missing.startswith("no_such is not installed: `pip")
    (tmp_path / "broken_one.py").write_text("raise ImportError('other torch')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    why = Config(needs="broken_one").missing
    assert why.startswith("broken_one cannot be imported (ImportError: other torch)")


def runs(folder: Path, config: str, *values: float, metric: str = "makespan_s") -> None:
    for repeat, value in enumerate(values):
        cell(folder, config, {metric: value}, cell=f"c{repeat}", repeat=repeat)


def test_ratios_are_taken_run_by_run(tmp_path: Path) -> None:
    """A machine that becomes slower hides nothing, and makes no difference."""
    runs(tmp_path, "core", 1.1, 2.2, 4.0)
    runs(tmp_path, "large", 1.0, 2.0, 4.0)
    found = ratio(Results([tmp_path]), "latency", "makespan_s", "core", "large")
    assert found is not None
    assert (found.median, found.low, found.high) == (pytest.approx(1.1), 1.0, 1.1)
    assert found.runs == 3 and not found.is_clear
    assert str(found) == "1.1 (1 to 1.1)"


def test_a_difference_that_all_runs_show_is_bold(tmp_path: Path) -> None:
    runs(tmp_path, "core", 0.9, 1.9)
    runs(tmp_path, "off-a", 1.0, 2.0, 9.0)
    results = Results([tmp_path])
    found = ratio(results, "latency", "makespan_s", "core", "off-a")
    assert found is not None and found.runs == 2 and found.is_clear
    assert str(found) == "**0.925 (0.9 to 0.95)**"
    assert ratio(results, "latency", "makespan_s", "core", "none") is None
    assert ratio(results, "latency", "no_such", "core", "off-a") is None


def test_runs_without_twins_and_single_ones_say_so(tmp_path: Path) -> None:
    cell(tmp_path, "core", {"makespan_s": 3.0}, cell="a")
    cell(tmp_path, "off-a", {"makespan_s": 2.0}, cell="b")
    cell(tmp_path, "off-b", {"makespan_s": 1.0}, cell="a")
    results = Results([tmp_path])

    def of(other: str) -> str:
        return str(ratio(results, "latency", "makespan_s", "core", other))

    assert of("off-a") == "1.5 (of medians)" and of("off-b") == "3 (1 run)"


def test_the_best_connector_is_the_best_of_the_right_side(tmp_path: Path) -> None:
    assert more_is_better("output_tokens_per_s") and more_is_better("cached_fraction")
    assert not more_is_better("later_ttft_ms.mean")
    for metric in ("makespan_s", "output_tokens_per_s"):
        runs(tmp_path, "core", 1.0, metric=metric)
        runs(tmp_path, "off-a", 2.0, metric=metric)
        runs(tmp_path, "off-b", 4.0, metric=metric)
    cell(tmp_path, "off-c", {}, status="failed", reason="x", workload="latency")
    rows = list(distances(Results([tmp_path]), "latency"))
    assert rows == [
        ["`makespan_s` ↓ / off-a", "0.5 (1 run)", "", "2 (1 run)"],
        ["`output_tokens_per_s` ↑ / off-b", "0.25 (1 run)", "0.5 (1 run)", ""],
    ]
    text = connectors_that_ran(Results([tmp_path]), "latency")
    assert text == "Connectors that ran: off-a, off-b. Not: off-c."


def test_the_report_has_spread_ratios_and_what_is_missing(tmp_path: Path) -> None:
    runs(tmp_path, "core", 1.0, 3.0)
    runs(tmp_path, "large", 1.0, 2.0)
    runs(tmp_path, "off-a", 2.0, 4.0)
    why = "lmcache is not installed: `pip install lmcache`"
    cell(tmp_path, "off-l", {}, status="skipped", reason=why)
    text = report([tmp_path], tmp_path / "to", "none", None)
    assert "| `makespan_s` | 2 (1 to 3; 2) | 1.5 (1 to 2; 2) | 3 (2 to 4; 2) |" in text
    assert "| `makespan_s` ↓ / large | 1.25 (1 to 1.5) |  | **2 (2 to 2)** |" in text
    assert "| `makespan_s` ↓ / off-a | **0.625 (0.5 to 0.75)** |" in text
    assert f"off-l: skipped: {why}: latency 0" in text


class FakeEngine:
    """Refuses the first resets, and keeps some tokens of what it was asked."""

    def __init__(self, refuses: int, keeps: int) -> None:
        self.refuses = refuses
        self.keeps = keeps

    async def reset_prefix_cache(self, reset_connector: bool) -> bool:
        assert reset_connector
        self.refuses -= 1
        return self.refuses < 0


class FakeClient(Client):
    """Counts what it is asked."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine, 1000, 500, 100)
        self.engine = engine
        self.asked: list[str] = []

    async def ask(self, key: str, *args: Any, **kwargs: Any) -> Any:
        self.asked.append(key)
        return argparse.Namespace(cached_tokens=self.engine.keeps)


def test_fresh_waits_for_the_reset_and_fills_the_device_again() -> None:
    engine = FakeEngine(refuses=2, keeps=0)
    client = FakeClient(engine)
    asyncio.run(refresh(engine, client, [1, 2, 3], 0))
    assert engine.refuses == -1
    assert client.asked[0] == "known" and client.asked.count("filler") >= 4


def test_fresh_does_not_believe_a_reset_that_leaves_something() -> None:
    """LMCache's says nothing and empties nothing, and upstream takes that for a yes."""
    engine = FakeEngine(refuses=0, keeps=16)
    with pytest.raises(RuntimeError, match="still had 16 of 3 tokens"):
        asyncio.run(refresh(engine, FakeClient(engine), [1, 2, 3], 0))


def test_fresh_gives_workloads_engines_where_nothing_can_be_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, bool, list[str]]] = []

    def start(self: Ready) -> subprocess.Popen[bytes]:
        job = json.loads(Path(self.command[-1]).read_text())
        cells = [f"{workload} {repeat}" for workload, repeat, *_ in job["cells"]]
        started.append((job["config"], job["fresh"], cells))
        command = [sys.executable, "-c", "print('ValueError: not run')"]
        with self.log.open("wb") as log:
            return subprocess.Popen(command, stdout=log, start_new_session=True)

    monkeypatch.setattr(Ready, "start", start)
    args = options("--fresh")
    args.out, args.logprobs = tmp_path, []
    args.workloads = ["rotate", "trace", "overfull"]
    runner = Runner(scaled(args), args, 1e12)
    runner.run("a", Config(), range(1))
    # Nobody asks an engine for a reset that empties nothing.
    runner.run("b", Config(resets=False), range(2))
    assert started == [
        ("a", True, ["rotate 0", "overfull 0"]),
        ("b", False, ["rotate 0"]),
        ("b", False, ["rotate 1"]),
        ("b", False, ["overfull 0"]),
        ("b", False, ["overfull 1"]),
    ]
    reasons = {(r["config"], r["workload"]): r["reason"] for r in read(tmp_path)}
    assert reasons["b", "trace"] == "no --trace was given"
    assert reasons["b", "overfull"].startswith("ValueError: not run (see b-1-overf")
