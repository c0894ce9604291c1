# SPDX-License-Identifier: Apache-2.0
"""Engines that are on the device at once, and take turns cell by cell.

An engine that has nothing to do costs the others memory and no time. So all repeats of
all configurations need one start each, and what is compared ran within a minute.
"""

import subprocess
import time
from contextlib import suppress

from .configs import Config
from .jobs import Ready, Runner

LOOK_S = 0.1
"""How often results are looked at: this long may pass between two cells."""


class Engine:
    """The process of a configuration; it runs its next cell when it is told to."""

    def __init__(self, runner: Runner, ready: Ready) -> None:
        self._runner = runner
        self.ready = ready
        self.process = ready.start(subprocess.PIPE)

    def waits_for(self, num_cells: int) -> bool:
        """Whether it runs, there is time, and fewer of its cells have a record."""
        self._runner.told.tell()
        runs = self.process.poll() is None and time.time() < self._runner.ends
        return runs and len(self._runner.recorded(self.ready)) < num_cells

    def starts(self) -> bool:
        """Whether it is still on its way to its first cell."""
        name = self.ready.about["config"]
        return name not in self._runner.told.started and self.waits_for(1)

    def run_cell(self) -> None:
        """Run the next cell, until it has a record."""
        done = len(self._runner.recorded(self.ready))
        stdin = self.process.stdin
        assert stdin is not None
        with suppress(BrokenPipeError):
            stdin.write(b"next\n")
            stdin.flush()
        while self.waits_for(done + 1):
            time.sleep(LOOK_S)

    def end(self) -> None:
        """Let it end by itself if all is done; stop it otherwise."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        if not self.waits_for(len(self.ready.cells)):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)
        self._runner.end(self.ready, self.process)


def run_together(
    runner: Runner, configs: dict[str, Config], workloads: list[str], repeats: range
) -> None:
    """Run all cells of the configurations, in engines that are there at once.

    One starts after the other: what it compiles, the next one finds, and what it
    measures of the machine, as the tier does of its copies, nobody disturbs.

    Raises:
        ValueError: A configuration needs new engines in between.

    """
    if new := [name for name, config in configs.items() if not config.resets]:
        raise ValueError(
            f"--side-by-side: {', '.join(new)} cannot be emptied by a reset, and needs "
            "an engine for each workload; run it without --side-by-side."
        )
    engines: list[Engine] = []
    try:
        for name, config in configs.items():
            if ready := runner.prepare(name, config, workloads, repeats, told=True):
                engines.append(Engine(runner, ready))
                while engines[-1].starts():
                    time.sleep(LOOK_S)
        turns = [(w, repeat) for repeat in repeats for w in workloads]
        for i, turn in enumerate(turns):
            first = i % max(len(engines), 1)
            for engine in engines[first:] + engines[:first]:
                if turn in {(cell[0], cell[1]) for cell in engine.ready.cells}:
                    engine.run_cell()
    finally:
        for engine in engines:
            engine.end()
