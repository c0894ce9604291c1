# SPDX-License-Identifier: Apache-2.0
"""Engines that are on the device at once, and take turns cell by cell.

An engine that has nothing to do costs the others memory and no time. So all repeats of
all configurations need one start each, and what is compared ran within a minute.
"""

import os
import subprocess
import sys
import time
from contextlib import suppress
from itertools import product
from typing import IO

from .configs import ON_DISK, Config
from .jobs import Ready, Runner

LOOK_S = 0.1
"""How often results are looked at: this long may pass between two cells."""
END_S = 5.0
"""For an engine to end by itself, when its last cell is done."""


class Engine:
    """The process of a configuration; it runs its next cell when it is told to."""

    def __init__(self, runner: Runner, ready: Ready) -> None:
        self._runner = runner
        self._ready = ready
        self._process = ready.start(subprocess.PIPE)

    def start(self) -> None:
        """Wait until it is warmed up."""
        name = self._ready.about["config"]
        while self._runs() and name not in self._runner.told.started:
            time.sleep(LOOK_S)

    def run_cell(self, workload: str, repeat: int) -> None:
        """Run this cell, which is its next one or none, until it has a record."""
        cells = [cell for cell in self._ready.cells if cell[:2] == (workload, repeat)]
        if not cells:
            return
        with suppress(BrokenPipeError):
            self._stdin.write(b"next\n")
            self._stdin.flush()
        while self._runs() and cells[0] in self._runner.told.left(self._ready):
            time.sleep(LOOK_S)

    def end(self) -> None:
        """Let it end by itself if all is done; stop it otherwise."""
        with suppress(BrokenPipeError):
            self._stdin.close()
        if not self._runner.told.left(self._ready):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=END_S)
        self._runner.end(self._ready, self._process)

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _runs(self) -> bool:
        """Whether it runs, and there is time; results are looked at before."""
        runs = self._process.poll() is None and time.time() < self._runner.ends
        self._runner.told.tell()
        return runs


def run_together(
    runner: Runner, configs: dict[str, Config], workloads: list[str], repeats: range
) -> None:
    """Run all cells of the configurations, in engines that are there at once.

    Those of the tier start first, one after the other: what they measure of the
    machine, the rate of copies, nothing disturbs, and what they compile, the others
    find, which start at once. Ends with a message if a configuration needs new engines
    in between.
    """
    new = [name for name, config in configs.items() if not config.resets]
    if runner.empties and new:
        sys.exit(
            f"--side-by-side: {', '.join(new)} cannot be emptied by a reset, and needs "
            "an engine for each workload; run it without --side-by-side or --fresh."
        )
    engines: list[Engine] = []
    try:
        for name in sorted(configs, key=lambda n: configs[n].family != "core"):
            config = configs[name]
            if ready := runner.prepare(name, config, workloads, repeats, told=True):
                engines.append(Engine(runner, ready))
                if config.family == "core":
                    engines[-1].start()
        for engine in engines:
            engine.start()
        for i, (repeat, workload) in enumerate(product(repeats, workloads)):
            first = i % max(len(engines), 1)
            for engine in engines[first:] + engines[:first]:
                if not configs.keys().isdisjoint(ON_DISK):
                    # A disk that still writes what another one left is slower.
                    os.sync()
                engine.run_cell(workload, repeat)
    finally:
        for engine in engines:
            engine.end()
