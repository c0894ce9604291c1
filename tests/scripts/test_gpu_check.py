# SPDX-License-Identifier: Apache-2.0
"""What gpu_check.py calls right, on several devices too; no engine runs."""

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bench.suite import options


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command as a module; it finds `suite` beside itself, by that name."""
    monkeypatch.syspath_prepend(str(Path(options.__file__).parents[1]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_WORKER_MULTIPROC_METHOD"):
        # What the command sets is gone after the test.
        monkeypatch.setenv(name, "")
    before = {*sys.modules}
    import gpu_check as module

    yield module
    for name in {*sys.modules} - before:
        del sys.modules[name]


def test_each_replica_has_devices_of_its_own(
    check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def devices(replica: int, **sizes: int) -> dict[str, str]:
        return check.devices(Namespace(**{"tp": 1, "pp": 1, "dp": 1} | sizes), replica)

    assert devices(0, tp=4) == {}
    assert devices(1, tp=2, dp=2) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert devices(0, pp=2, dp=2) == {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert devices(1, pp=2, dp=2) == {"CUDA_VISIBLE_DEVICES": "6,7"}


class Engines:
    """Stands for the processes: outputs by configuration and replica; None: failed."""

    def __init__(
        self, outputs: dict[str, list[list[list[int]] | None]], loads: int
    ) -> None:
        self.outputs = outputs
        self.loads = loads
        self.started: list[tuple[str, int]] = []

    def run(self, name: str, args: Namespace, replica: int) -> Any:
        self.started.append((name, replica))
        found = self.outputs[name][replica]
        result = found and {
            "outputs": found,
            "ttft_ms": {},
            "start_s": 1.0,
            "makespan_s": 1.0,
            "cached_tokens": 0,
            "loads": self.loads,
            "failed_loads": 0,
        }
        process = Namespace(wait=lambda: 0)
        label = f"{name}-{replica}"
        return Namespace(name=name, label=label, process=process, result=lambda: result)


def checked(
    check: Any,
    monkeypatch: pytest.MonkeyPatch,
    out: Path,
    outputs: dict[str, list[list[list[int]] | None]],
    *given: str,
    loads: int = 1,
) -> tuple[int, Engines]:
    engines = Engines(outputs, loads)
    command = ["gpu_check.py", "--out", str(out), "--configs", ",".join(outputs)]
    monkeypatch.setattr("sys.argv", [*command, *given])
    monkeypatch.setattr(check, "Run", engines.run)
    monkeypatch.setattr(check, "write_model", lambda *_: 0)
    return check.main(), engines


def test_replicas_are_compared_each_with_its_own_reference(
    check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right: list[list[list[int]] | None] = [[[1, 2]], [[3, 4]]]
    code, engines = checked(
        check, monkeypatch, tmp_path, {"large": right, "dma": right}, "--dp", "2"
    )
    assert code == 0
    assert engines.started == [("large", 0), ("large", 1), ("dma", 0), ("dma", 1)]
    crossed = {"large": right, "dma": right[::-1]}
    assert checked(check, monkeypatch, tmp_path, crossed, "--dp", "2")[0] == 1


def test_what_failed_or_differs_is_no_success(
    check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def code(**outputs: list[list[int]] | None) -> int:
        one = {name: [found] for name, found in outputs.items()}
        return checked(check, monkeypatch, tmp_path, one)[0]

    assert code(large=[[1]], dma=[[1]]) == 0
    assert code(large=[[1]], dma=[[2]]) == 1
    assert code(large=[[1]], dma=None) == 1
    assert code(large=None, dma=[[1]]) == 1
    # A race that nobody notices is none that is found.
    assert code(large=[[1]], race=[[1]]) == 1
    assert code(large=[[1]], race=[[2]]) == 0


def test_a_tier_that_loaded_nothing_is_no_success(
    check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    same: dict[str, list[list[list[int]] | None]] = {"large": [[[1]]], "dma": [[[1]]]}
    assert checked(check, monkeypatch, tmp_path, same, loads=0)[0] == 1
    alone = {"large": same["large"]}
    assert checked(check, monkeypatch, tmp_path, alone, loads=0)[0] == 0


def test_the_reference_comes_first(
    check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        checked(check, monkeypatch, tmp_path, {"dma": [[[1]]]})
