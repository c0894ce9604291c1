# SPDX-License-Identifier: Apache-2.0
"""The tier beside upstream's connectors, on this machine.

    python scripts/bench/compare.py --out DIR
    python scripts/bench/compare.py --out DIR --configs none,core-write_back \
        --workloads latency,agent --repeats 3 --time-limit 560
    python scripts/bench/compare.py --report DIR [DIR ...] --h2d-gb-s 53.5

Every configuration runs in an engine of its own, one after the other. A cell is one
run of one workload; what it measured is a line in DIR/results.jsonl as soon as it is
done, and its outputs lie in DIR/outputs. The same call again runs what is missing.
`--report` merges several calls into tables, pictures and bars.

What was not run is said at the end, and by the report. Ends with 1 if something
failed or was not reached.
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
from dataclasses import asdict, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from suite.configs import ON_DISK, Config, configs
from suite.records import append, read
from suite.report import report
from suite.scales import SCALES, Scale
from suite.table import why_missing

START_S = {"cuda": 45.0, "cpu": 15.0}
"""A configuration is not begun with less time left."""
STOP_S = 8.0
"""For the last cell's files and the engine's end."""
SHOWN = {
    *("makespan_s", "later_ttft_ms.mean", "host_ttft_ms.p50", "itl_ms.host.p99"),
    "decode_ms.mean",
    *(
        f"ttft_ms.{kind}.{n}"
        for kind in ("host", "below", "unseen")
        for n in (1024, 4096, 16384)
    ),
}
"""Metrics that are printed while it runs."""
LOGPROBS = "multiturn,agent,agent_tools,rotate,overfull,no_reuse,fits,trace"

Cell = tuple[str, int, dict[str, Any], str]


def main() -> int:
    args = parse()
    if args.report:
        to = args.to or args.report[0]
        try:
            print(report(args.report, to, args.reference, args.h2d_gb_s))
        except ValueError as error:
            sys.exit(str(error))
        print(f"Written to {to / 'report.md'}")
        return 0
    scale = scaled(args)
    known = configs(scale.host_gib, scale.device_bytes)
    for text in args.extra:
        name, known[name] = extra_config(text, known)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    names = args.configs or [c for c in known if c not in ("large", *ON_DISK)]
    check_names("--configs", names, list(known))
    args.out.mkdir(parents=True, exist_ok=True)
    ends = time.time() + args.time_limit
    told = Told(args.out)
    repeats = range(args.first_repeat, args.first_repeat + args.repeats)
    for some in [range(i, i + 1) for i in repeats] if args.in_turns else [repeats]:
        for name in names:
            run_config(name, known[name], scale, some, args, ends, told)
            told.tell()
    if told.missing:
        print("Not run:\n  " + "\n  ".join(why_missing(told.missing)))
    return int(any(r["status"] != "skipped" for r in told.missing))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = lambda text: text.split(",") if text else []  # noqa: E731
    do = parser.add_mutually_exclusive_group(required=True)
    do.add_argument("--out", type=Path, help="run; results are added to this folder")
    do.add_argument("--report", type=Path, nargs="+", metavar="DIR")
    parser.add_argument("--configs", type=names, help="all but `large` if not given")
    parser.add_argument("--workloads", type=names, help="all if not given")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--first-repeat", type=int, default=0, metavar="N")
    parser.add_argument(
        "--in-turns",
        action="store_true",
        help="each repeat of all configurations before the next one, so that a machine "
        "that becomes slower favours none; an engine start for each of them",
    )
    parser.add_argument("--scale", choices=SCALES, default="h200")
    parser.add_argument("--device", choices=START_S, default="cuda")
    parser.add_argument(
        "--time-limit", type=float, default=7 * 86400.0, metavar="SECONDS"
    )
    parser.add_argument("--trace", type=Path, help="file that `trace` replays")
    parser.add_argument("--block-size", type=int, help="tokens; vLLM's if not given")
    parser.add_argument("--host-gib", type=float)
    parser.add_argument("--device-gib", type=float)
    parser.add_argument(
        "--extra",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help='another configuration: \'big={"llm": {"block_size": 64}, "env": {}}\'; '
        '"like" names one to start from, whose dictionaries are merged with these',
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="WORKLOAD.PARAMETER=JSON",
        help="multiturn.sessions=12",
    )
    parser.add_argument(
        "--logprobs",
        type=names,
        default=LOGPROBS.split(","),
        metavar="WORKLOADS",
        help=f"whose requests ask for two logprobs a token, for the gap where outputs "
        f"differ; '' for none. Default: {LOGPROBS}",
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="VLLM_BATCH_INVARIANT=1: slower, and outputs do not depend on the batch",
    )
    parser.add_argument("--reference", default="none", help="whose outputs are right")
    parser.add_argument("--h2d-gb-s", type=float, help="measured pinned rate, for bars")
    parser.add_argument("--to", type=Path, help="folder of the report; the first DIR")
    args = parser.parse_args()
    args.configs = args.configs or []
    args.workloads = args.workloads or list(SCALES[args.scale].workloads)
    check_names("--workloads", args.workloads, list(SCALES[args.scale].workloads))
    return args


def check_names(flag: str, names: list[str], known: list[str]) -> None:
    """End with a message if a name is unknown."""
    for name in names:
        if name not in known:
            sys.exit(f"{flag}: unknown name {name!r}. Use some of {', '.join(known)}.")


def scaled(args: argparse.Namespace) -> Scale:
    """The scale with what the command line changes in it."""
    scale = SCALES[args.scale]
    changes: dict[str, Any] = {}
    if args.block_size:
        changes["block_size"] = args.block_size
    if args.host_gib:
        changes["host_gib"] = args.host_gib
    if args.device_gib:
        changes["device_bytes"] = int(args.device_gib * 2**30)
    workloads: dict[str, Any] = dict(scale.workloads)
    settings = [(text, *text.partition("=")[::2]) for text in args.set]
    for text, name, value in settings:
        workload, _, parameter = name.partition(".")
        check_names(f"--set {text}", [workload], list(workloads))
        known = [f.name for f in fields(workloads[workload])]
        check_names(f"--set {text}", [parameter], known)
        number = json.loads(value)
        number = tuple(number) if isinstance(number, list) else number
        workloads[workload] = replace(workloads[workload], **{parameter: number})
    if args.trace:
        path = str(args.trace.resolve())
        workloads["trace"] = replace(workloads["trace"], path=path)
    return replace(scale, workloads=workloads, **changes)


def extra_config(text: str, known: dict[str, Config]) -> tuple[str, Config]:
    """Name and configuration of an `--extra`."""
    name, _, value = text.partition("=")
    try:
        given = json.loads(value)
        like = given.pop("like", "none")
        check_names(f"--extra {name}: like", [like], list(known))
        changes = {key: merged(asdict(known[like])[key], given[key]) for key in given}
        return name, replace(known[like], **changes)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        keys = ", ".join(f.name for f in fields(Config))
        sys.exit(f"--extra {text}: {error!r}. Use NAME={{...}} with like, {keys}.")


def merged(old: Any, new: Any) -> Any:
    """`new` over `old`; dictionaries are merged at every depth."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {key: merged(old.get(key), new[key]) for key in new}


class Told:
    """Prints what is new in the results, and keeps what could not be run."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._lines = len(read(out))
        self.missing: list[dict[str, Any]] = []

    def tell(self) -> None:
        new = read(self._out)[self._lines :]
        self._lines += len(new)
        for r in new:
            if r["status"] == "started":
                text = f"started in {r['start_s']} s, warm-up {r['warm_up_s']} s"
                print(f"{r['config']:20} {text}", flush=True)
                continue
            cell = f"{r['config']:20} {r['workload']} {r['repeat']}"
            if r["status"] != "ok":
                self.missing.append(r)
                continue
            shown = [f"{m} {v:.4g}" for m, v in r["metrics"].items() if m in SHOWN]
            print(f"{cell}  {r['took_s']} s  " + "  ".join(shown), flush=True)


def cells_of(
    name: str,
    settings: str,
    scale: Scale,
    repeats: range,
    args: argparse.Namespace,
) -> tuple[list[Cell], list[Cell]]:
    """(to be run, lacking a trace) of a configuration; those that are done are left."""
    done = {
        (r["workload"], r["cell"])
        for r in read(args.out)
        if r["status"] == "ok" and (r["config"], r["settings"]) == (name, settings)
    }
    run, lacking = [], []
    for workload in args.workloads:
        parameters = asdict(scale.workloads[workload])
        for repeat in repeats:
            # Where the trace lies does not matter.
            same = {k: v for k, v in parameters.items() if k != "path"}
            digest = fingerprint([args.scale, same, repeat])
            cell = (workload, repeat, parameters, digest)
            if (workload, digest) in done:
                print(f"{name:20} {workload} {repeat}: done before", flush=True)
            elif workload == "trace" and not parameters["path"]:
                lacking.append(cell)
            else:
                run.append(cell)
    return run, lacking


def run_config(
    name: str,
    config: Config,
    scale: Scale,
    repeats: range,
    args: argparse.Namespace,
    ends: float,
    told: Told,
) -> None:
    """Run the cells of a configuration; every one of them gets a line of results."""
    about = {"config": name, "family": config.family, "scale": args.scale}

    def give_up(cells: list[Cell], status: str, reason: str) -> None:
        for workload, repeat, _, digest in cells:
            what = {"workload": workload, "repeat": repeat, "cell": digest}
            append(args.out, about | what | {"status": status, "reason": reason})

    llm: dict[str, Any] = {
        "dtype": scale.dtype,
        "kv_cache_memory_bytes": scale.device_bytes * config.device_scale,
        "max_model_len": scale.max_model_len,
        "max_num_seqs": scale.max_num_seqs,
        "max_num_batched_tokens": scale.max_num_batched_tokens,
        "enable_prefix_caching": True,
        "enforce_eager": scale.eager,
    }
    if scale.block_size:
        llm["block_size"] = scale.block_size
    llm = merged(llm, config.llm)
    settings = fingerprint([llm, config.env, config.jitter_s, args.batch_invariant])
    about["settings"] = settings
    cells, lacking = cells_of(name, settings, scale, repeats, args)
    give_up(lacking, "skipped", "no --trace was given")
    if not cells:
        return
    if config.missing:
        give_up(cells, "skipped", f"{config.needs} is not installed")
        return
    if time.time() + START_S[args.device] > ends:
        give_up(cells, "not reached", "time limit")
        return
    job = about | {
        "out": str(args.out),
        "llm": llm,
        "device_bytes": scale.device_bytes,
        "jitter_s": config.jitter_s,
        "cells": cells,
        "logprobs": args.logprobs,
        "ends": ends - STOP_S,
    }
    path = args.out / f"job-{name}.json"
    path.write_text(json.dumps(job))
    log = args.out / f"{name}-{repeats.start}.log"
    before = len(read(args.out))
    reason = run_process(path, log, environment(config, args), ends, told)
    new = {r.get("cell") for r in read(args.out)[before:]}
    left = [cell for cell in cells if cell[3] not in new]
    give_up(left, "not reached" if reason == "time limit" else "failed", reason)


def fingerprint(value: Any) -> str:
    """The same for the same value."""
    text = json.dumps(value, sort_keys=True)
    return sha256(text.encode()).hexdigest()[:16]


def environment(config: Config, args: argparse.Namespace) -> dict[str, str]:
    """Environment of the process of a configuration."""
    here = str(Path(__file__).parent)
    settings = {
        "PYTHONPATH": os.pathsep.join(filter(None, [here, os.getenv("PYTHONPATH")])),
        # Forked, it knows our load format at once. Nothing here may touch CUDA.
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        # Nothing may depend on a network, and nothing may report to one.
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if args.batch_invariant:
        settings["VLLM_BATCH_INVARIANT"] = "1"
    return os.environ | settings | config.env


def run_process(
    job: Path, log: Path, env: dict[str, str], ends: float, told: Told
) -> str:
    """Run a job until it ends or `ends` (of `time.time`) is reached.

    Returns:
        Why cells without a record have none.

    """
    command = [sys.executable, "-m", "suite.one_config", str(job)]
    with log.open("wb") as output:
        # A group of its own: the engine core ends with it.
        process = subprocess.Popen(
            command, env=env, stdout=output, stderr=output, start_new_session=True
        )
    try:
        while process.poll() is None and time.time() < ends:
            time.sleep(0.25)
            told.tell()
    finally:
        late = process.poll() is None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        told.tell()
    if late:
        return "time limit"
    return f"{cause(log)} (see {log.name})"


def cause(log: Path) -> str:
    """The first error in a log that says something."""
    text = log.read_text(errors="replace")
    # As Python prints it, or behind what vLLM's logger puts before it.
    line = r"^(?:\(.*?\) )?(?:ERROR .*?\] )?((?:\w+\.)*\w*(?:Error|Exception): .+)"
    found = re.findall(line, text, re.MULTILINE)
    said = [error for error in found if "See root cause above" not in error]
    return said[0][:300] if said else "the process ended without an error message"


if __name__ == "__main__":
    sys.exit(main())
