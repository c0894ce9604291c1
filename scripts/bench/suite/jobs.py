# SPDX-License-Identifier: Apache-2.0
"""Runs the cells of configurations, each in a process of its own, and tells of them.

Nothing here may touch CUDA: the processes are forked.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from .configs import Config
from .options import merged, parallel
from .records import append, read
from .room import lacks_room
from .scales import Scale

START_S = {"cuda": 45.0, "cpu": 15.0}
"""A configuration is not begun with less time left."""
UTILIZATION = 0.1
"""`gpu_memory_utilization` of engines side by side: vLLM refuses to start where less
than this part of the device is free, and takes what `kv_cache_memory_bytes` says all
the same."""
STOP_S = 8.0
"""For the last cell's files and the engine's end."""
SHOWN = {
    *("makespan_s", "later_ttft_ms.mean", "host_ttft_ms.p50", "itl_ms.host.p99"),
    *("decode_ms.mean", "good_turns", "good_rate_per_s"),
    *(
        f"ttft_ms.{kind}.{n}"
        for kind in ("host", "below", "unseen")
        for n in (1024, 4096, 16384)
    ),
}
"""Metrics that are printed while it runs."""

Cell = tuple[str, int, dict[str, Any], str]


@dataclass(frozen=True)
class Ready:
    """A process that can be started for the cells of a configuration.

    Attributes:
        about: What the records of its cells begin with.
        cells: In the order in which it runs them.
        command: That starts it.
        env: Its environment.
        log: Where its output goes.

    """

    about: dict[str, Any]
    cells: list[Cell]
    command: list[str]
    env: dict[str, str]
    log: Path

    def start(self, stdin: int | None = None) -> subprocess.Popen[bytes]:
        """Start it in a group of its own: the engine core ends with it."""
        with self.log.open("wb") as output:
            return subprocess.Popen(
                self.command,
                env=self.env,
                stdin=stdin,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )


class Told:
    """Prints what is new in the results, and keeps what started, what has a record and
    what could not be run."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._lines = len(read(out))
        self.missing: list[dict[str, Any]] = []
        self.started: set[str] = set()
        """Configurations whose engine has warmed up."""
        self._recorded: set[tuple[str, str]] = set()

    def left(self, ready: Ready) -> list[Cell]:
        """The cells of a process that have no record."""
        name = ready.about["config"]
        return [cell for cell in ready.cells if (name, cell[3]) not in self._recorded]

    def tell(self) -> None:
        new = read(self._out)[self._lines :]
        self._lines += len(new)
        for r in new:
            if r["status"] == "started":
                self.started.add(r["config"])
                text = f"started in {r['start_s']} s, warm-up {r['warm_up_s']} s"
                print(f"{r['config']:20} {text}", flush=True)
                continue
            self._recorded.add((r["config"], r["cell"]))
            cell = f"{r['config']:20} {r['workload']} {r['repeat']}"
            if r["status"] != "ok":
                self.missing.append(r)
                continue
            shown = [f"{m} {v:.4g}" for m, v in r["metrics"].items() if m in SHOWN]
            print(f"{cell}  {r['took_s']} s  " + "  ".join(shown), flush=True)


class Runner:
    """Runs configurations for one call of a command.

    Args:
        scale: Sizes of everything.
        args: `out`, `workloads`, `logprobs`, `batch_invariant`, and the options of
            `add_engine_options`.
        ends: Nothing begins that would last longer, in seconds of `time.time`.

    """

    def __init__(self, scale: Scale, args: argparse.Namespace, ends: float) -> None:
        self._scale = scale
        self._args = args
        self.ends = ends
        self.empties: bool = args.fresh
        self.told = Told(args.out)

    def run(self, name: str, config: Config, repeats: range) -> None:
        """Run the cells of a configuration; every one gets a line of results."""
        workloads = self._args.workloads
        if self.empties and not config.resets:
            # What cannot be emptied is new.
            for workload in workloads:
                for i in repeats:
                    self._run(name, config, [workload], range(i, i + 1))
        else:
            self._run(name, config, workloads, repeats)
        self.told.tell()

    def engine_arguments(self, config: Config) -> dict[str, Any]:
        """Arguments of `AsyncEngineArgs` for a configuration."""
        scale, args = self._scale, self._args
        # So much on all ranks of a replica together, as the workloads want it.
        device_bytes = scale.device_bytes * config.device_scale // (args.tp * args.pp)
        llm: dict[str, Any] = {
            "dtype": scale.dtype,
            "kv_cache_memory_bytes": device_bytes,
            "max_model_len": scale.max_model_len,
            "max_num_seqs": scale.max_num_seqs,
            "max_num_batched_tokens": scale.max_num_batched_tokens,
            "enable_prefix_caching": True,
            "enforce_eager": scale.eager,
            **parallel(args),
        }
        if args.side_by_side:
            llm["gpu_memory_utilization"] = UTILIZATION
        if scale.block_size:
            llm["block_size"] = scale.block_size
        return merged(merged(llm, args.llm), config.llm)

    def _run(
        self, name: str, config: Config, workloads: list[str], repeats: range
    ) -> None:
        if ready := self.prepare(name, config, workloads, repeats):
            process = ready.start()
            try:
                while process.poll() is None and time.time() < self.ends:
                    time.sleep(0.25)
                    self.told.tell()
            finally:
                self.end(ready, process)

    def prepare(
        self,
        name: str,
        config: Config,
        workloads: list[str],
        repeats: range,
        told: bool = False,
    ) -> Ready | None:
        """What is to be started for these cells; None if nothing can or need be.

        With `told`, each cell waits for a line of the process's standard input, and
        all workloads of a repeat come before the next one.
        """
        args = self._args
        llm = self.engine_arguments(config)
        settings = fingerprint(
            [llm, config.env, config.jitter_s, args.batch_invariant, args.fresh]
            + ["hints"] * config.hints
            + ["counts"] * args.count
        )
        about = {
            "config": name,
            "family": config.family,
            "scale": args.scale,
            "settings": settings,
        }
        cells, lacking = self._cells(name, settings, workloads, repeats)
        self._give_up(about, lacking, "skipped", "no --trace was given")
        if not cells:
            return None
        if why := config.missing or lacks_room(config, self._scale, llm, args.device):
            self._give_up(about, cells, "skipped", why)
            return None
        if time.time() + START_S[args.device] > self.ends:
            self._give_up(about, cells, "not reached", "time limit")
            return None
        if told:
            cells.sort(key=lambda cell: cell[1])
        job = about | {
            "out": str(args.out),
            "llm": llm,
            "device_bytes": self._scale.device_bytes * args.dp,
            "jitter_s": config.jitter_s,
            "cells": cells,
            "logprobs": args.logprobs,
            "fresh": args.fresh and config.resets,
            "ends": self.ends - STOP_S,
            "told": told,
            "hints": config.hints,
            "counts": args.count,
        }
        path = args.out / f"job-{name}.json"
        path.write_text(json.dumps(job))
        log = args.out / f"{name}-{repeats.start}-{cells[0][0]}.log"
        command = [sys.executable, "-m", "suite.one_config", str(path)]
        env = self._environment(config)
        return Ready(about, cells, command, env, log)

    def end(self, ready: Ready, process: subprocess.Popen[bytes]) -> None:
        """Stop a process, and give its cells that have no record one."""
        reason = "time limit"
        if process.poll() is not None:
            reason = f"{cause(ready.log)} (see {ready.log.name})"
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.told.tell()
        left = self.told.left(ready)
        late = reason == "time limit"
        self._give_up(ready.about, left, "not reached" if late else "failed", reason)
        self.told.tell()

    def _cells(
        self, name: str, settings: str, workloads: list[str], repeats: range
    ) -> tuple[list[Cell], list[Cell]]:
        """(to be run, lacking a trace) of a configuration; what is done is left."""
        args = self._args
        done = {
            (r["workload"], r["cell"])
            for r in read(args.out)
            if r["status"] == "ok" and (r["config"], r["settings"]) == (name, settings)
        }
        run, lacking = [], []
        for workload in workloads:
            parameters = asdict(self._scale.workloads[workload])
            for repeat in repeats:
                # Where the trace lies does not matter.
                same = {k: v for k, v in parameters.items() if k != "path"}
                digest = fingerprint([args.scale, same, repeat])
                cell = (workload, repeat, parameters, digest)
                if (workload, digest) in done:
                    print(f"{name:20} {workload} {repeat}: done before", flush=True)
                elif parameters.get("path") == "":
                    lacking.append(cell)
                else:
                    run.append(cell)
        return run, lacking

    def _give_up(
        self, about: dict[str, Any], cells: list[Cell], status: str, reason: str
    ) -> None:
        for workload, repeat, _, digest in cells:
            what = {"workload": workload, "repeat": repeat, "cell": digest}
            record = about | what | {"status": status, "reason": reason}
            append(self._args.out, record)

    def _environment(self, config: Config) -> dict[str, str]:
        """Environment of the process of a configuration."""
        bench = Path(__file__).parents[1]
        path = [str(bench), str(bench.parent), os.getenv("PYTHONPATH")]
        settings = {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            # Forked, it knows our load format at once.
            "VLLM_WORKER_MULTIPROC_METHOD": "fork",
            # Nothing may depend on a network, and nothing may report to one.
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if self._args.batch_invariant:
            settings["VLLM_BATCH_INVARIANT"] = "1"
        return os.environ | settings | config.env


def fingerprint(value: Any) -> str:
    """The same for the same value."""
    text = json.dumps(value, sort_keys=True)
    return sha256(text.encode()).hexdigest()[:16]


def cause(log: Path) -> str:
    """The first error in a log that says something."""
    text = log.read_text(errors="replace")
    # As Python prints it, or behind what vLLM's logger puts before it.
    line = r"^(?:\(.*?\) )?(?:ERROR .*?\] )?((?:\w+\.)*\w*(?:Error|Exception): .+)"
    found = re.findall(line, text, re.MULTILINE)
    said = [error for error in found if "See root cause above" not in error]
    return said[0][:300] if said else "the process ended without an error message"
