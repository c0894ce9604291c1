# SPDX-License-Identifier: Apache-2.0
"""`speed.sh` asks for what its commands know, within the time that it promises."""

import importlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bench.suite import options
from bench.suite.configs import configs

BENCH = Path(options.__file__).parents[1]
STANDS_IN = """#!{python}
import json, os, sys
environment = {{k: v for k, v in os.environ.items() if k.startswith("VLLM_BATCH")}}
with open({said!r}, "a") as file:
    file.write(json.dumps([sys.argv[1:], environment]) + "\\n")
out = dict(zip(sys.argv, sys.argv[1:])).get("--out")
out and os.makedirs(out, exist_ok=True)
sys.exit({code})
"""


def calls(tmp_path: Path, *given: str, code: int = 0, **environment: str) -> Any:
    """Status of `speed.sh OUT given`, and what it ran: file, arguments, environment."""
    said = tmp_path / "said"
    python = tmp_path / "python"
    python.write_text(
        STANDS_IN.format(python=sys.executable, said=str(said), code=code)
    )
    python.chmod(0o755)
    done = subprocess.run(
        [BENCH / "speed.sh", tmp_path / "out", *given],
        env=os.environ | {"PYTHON": str(python)} | environment,
        capture_output=True,
    )
    lines = said.read_text().splitlines() if said.exists() else []
    found = [json.loads(line) for line in lines]
    return done.returncode, [(Path(a[0]).name, a[1:], env) for a, env in found]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The commands as modules; they find `suite` beside themselves, by that name."""
    monkeypatch.syspath_prepend(str(BENCH))
    before = {*sys.modules}
    names = ("compare", "gpu_check")
    yield {f"{name}.py": importlib.import_module(name) for name in names}
    for name in {*sys.modules} - before:
        del sys.modules[name]


def parsed(
    commands: Any, monkeypatch: pytest.MonkeyPatch, file: str, given: list[str]
) -> Namespace:
    """What a command makes of its arguments; unknown names end the test."""
    monkeypatch.setattr("sys.argv", [file, *given])
    module = commands[file]
    args = module.arguments() if file == "gpu_check.py" else module.parse()
    if file != "gpu_check.py":
        known = configs(1.0, 1 << 20)
        for text in args.extra:
            name, known[name] = options.extra_config(text, known)
        args.configs = options.config_names(args.configs, known)
    else:
        assert {*args.configs.split(",")} <= {*module.CONFIGS}
    return args


def test_every_call_is_understood_and_has_its_limit(
    tmp_path: Path, commands: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, ran = calls(tmp_path, TRACE="t.jsonl", PARALLEL="--tp 2 --pp 2")
    assert status == 0
    workloads = set[str]()
    for file, given, environment in ran:
        args = parsed(commands, monkeypatch, file, given)
        if getattr(args, "report", None):
            continue
        assert (args.tp, args.pp) == (2, 2)
        assert (environment == {}) == (file != "gpu_check.py")
        if file != "gpu_check.py":
            assert args.time_limit + 30 < 600
            assert args.trace == Path("t.jsonl")
            workloads |= {*args.workloads}
            # Those who arrive find what others have left; upstream's default graphs.
            if args.workloads == ["goodput"]:
                assert not args.fresh and args.llm == {"max_num_seqs": 256}
                continue
            assert args.fresh
            assert 512 in args.llm["compilation_config"]["cudagraph_capture_sizes"]
    # All but what needs a disk, and a trace at its arrival times.
    left_out = {"below", "trace"}
    assert workloads == {*options.SCALES["h200"].workloads} - left_out
    assert [file for file, _, _ in ran].count("compare.py") == 8


def test_the_important_call_has_large_and_all_connectors(
    tmp_path: Path, commands: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ran = calls(tmp_path, "1", LLM="{}", REPEATS="5")
    (file, given, _), (_, report, _) = ran
    args = parsed(commands, monkeypatch, file, given)
    assert args.in_turns and args.repeats == 5 and args.llm == {} and not args.trace
    connectors = {"simple-eager", "simple-lazy", "offloading"}
    assert {"large", "core-write_back", "lru", *connectors} == {*args.configs}
    assert report[0] == "--report"


def test_what_fails_and_what_is_unknown_is_said(tmp_path: Path) -> None:
    assert calls(tmp_path, "6", code=1)[0] == 1
    assert calls(tmp_path, "9")[0] == 2
    assert calls(tmp_path, "report")[0] == 0
