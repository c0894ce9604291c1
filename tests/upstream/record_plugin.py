# SPDX-License-Identifier: Apache-2.0
"""pytest plugin that writes `{node id: outcome}` as JSON (--outcomes FILE)."""

import json
from importlib import import_module
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True, metavar="FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(config.getoption("--outcomes")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Upstream's own marker: without it every test ends with a global clean-up of
    # distributed state, which these tests do not touch, at 0.4 s a piece.
    for item in items:
        item.add_marker(pytest.mark.skip_global_cleanup)


def pytest_collection_finish() -> None:
    # Another interpreter looks at each model, to keep CUDA out of this one, which a CPU
    # build has not: 10 s a piece.
    registry = import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda function: function()  # type: ignore[attr-defined]


class Recorder:
    """Keeps the worst outcome of a test's phases."""

    def __init__(self, path: Path):
        self.path = path
        self.outcomes: dict[str, str] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            failed = report.outcome == "failed"
            self.outcomes[report.nodeid] = "error" if failed else "skipped"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.outcomes[report.nodeid] = self._of_call(report)
        elif report.outcome == "failed":
            self.outcomes[report.nodeid] = "error"
        elif report.outcome == "skipped":
            xfail = hasattr(report, "wasxfail")
            self.outcomes[report.nodeid] = "xfailed" if xfail else "skipped"

    @staticmethod
    def _of_call(report: pytest.TestReport) -> str:
        if hasattr(report, "wasxfail"):
            return "xfailed" if report.outcome == "skipped" else "xpassed"
        return report.outcome

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(self.outcomes, indent=0, sort_keys=True))
