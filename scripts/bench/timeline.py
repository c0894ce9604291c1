# SPDX-License-Identifier: Apache-2.0
"""Where the time of an engine's steps goes: a timeline of one run of a workload.

    python scripts/bench/timeline.py --out DIR --configs core,simple,large \
        --workloads overfull
    python scripts/bench/timeline.py --report DIR

Runs each configuration in an engine of its own, as compare.py does, with wrappers
around the methods of scheduler, executor, block pool and ranks that this command
installs; each process writes what it sees to DIR/events. Then, for each cell, prints
tables of where the time of steps goes, and writes them to DIR/CONFIG-WORKLOAD-N.md,
with a file of the same name for chrome://tracing or https://ui.perfetto.dev.

Recording takes time of its own: compare times within timelines, and take those that
count from compare.py.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from suite.chrome import chrome_trace
from suite.configs import configs
from suite.jobs import Runner
from suite.options import (
    add_engine_options,
    check_names,
    config_names,
    extra_config,
    names,
    scaled,
)
from suite.recorder import read_events
from suite.records import read
from suite.scales import SCALES
from suite.steps import copies_of, owners_of, steps_of, waiters_of, within
from suite.table import why_missing
from suite.together import run_together
from suite.where import tables


def main() -> int:
    args = parse()
    out: Path = args.report or args.out
    missing = [] if args.report else record(args)
    for name, text, trace in timelines(out):
        print(text, flush=True)
        (out / f"{name}.md").write_text(text)
        (out / f"{name}.json").write_text(json.dumps(trace))
    if missing:
        print("Not run:\n  " + "\n  ".join(why_missing(missing)))
    return int(any(r["status"] != "skipped" for r in missing))


def record(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run what was asked for. Returns the records of what was not run."""
    scale = scaled(args)
    known = configs(scale.host_gib, scale.device_bytes, args.tp * args.pp)
    for text in args.extra:
        name, known[name] = extra_config(text, known)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    args.out.mkdir(parents=True, exist_ok=True)
    ends = time.time() + args.time_limit
    runner = Runner(scale, args, ends, args.out / "events")
    chosen = config_names(args.configs, known)
    if args.side_by_side:
        together = {name: known[name] for name in chosen}
        run_together(runner, together, args.workloads, range(args.repeats))
        return runner.told.missing
    for name in chosen:
        runner.run(name, known[name], range(args.repeats))
    return runner.told.missing


def timelines(out: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, tables and Chrome trace of each cell that has been recorded."""
    recorded: dict[str, list[Any]] = {}
    for r in read(out):
        if r["status"] != "ok":
            continue
        config = r["config"]
        if config not in recorded:
            found = read_events(out / "events" / config)
            recorded[config] = sorted(found, key=lambda event: event.begin)
        events, window = recorded[config], tuple(r["window"])
        steps = steps_of(events, window)
        copies = copies_of(events, owners_of(events), window)
        waiters = waiters_of(events, copies, window)
        name = f"{config}-{r['workload']}-{r['repeat']}"
        shown = [f"{m} {v:.4g}" for m, v in r["metrics"].items()]
        inside = [event for event in events if within(event, window)]
        no_room = sum(event.name == "no room" for event in inside)
        parts = [
            f"## {name}",
            f"Recorded, {len(inside)} events in {len(steps)} steps, so slower than it "
            f"is: {', '.join(shown)}.",
            *tables(steps, copies, waiters, no_room),
        ]
        yield name, "\n\n".join(parts) + "\n", chrome_trace(events, waiters, window)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    do = parser.add_mutually_exclusive_group(required=True)
    do.add_argument("--out", type=Path, help="run; results are added to this folder")
    do.add_argument("--report", type=Path, metavar="DIR", help="tables of a run")
    parser.add_argument("--configs", type=names, default=["core"])
    parser.add_argument("--workloads", type=names, default=["overfull"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--time-limit", type=float, default=7 * 86400.0, metavar="SECONDS"
    )
    parser.add_argument(
        "--device-times",
        action="store_true",
        help="CUDA events around forward passes and copies: when the GPU did what, for "
        "a few microseconds of CPU each",
    )
    add_engine_options(parser)
    args = parser.parse_args()
    check_names("--workloads", args.workloads, list(SCALES[args.scale].workloads))
    # A CPU is timed where it is told what to do.
    args.device_times &= args.device == "cuda"
    # As where times count: logprobs would be a part of the step.
    args.logprobs, args.batch_invariant = [], False
    return args


if __name__ == "__main__":
    sys.exit(main())
