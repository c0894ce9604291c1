# SPDX-License-Identifier: Apache-2.0
"""What the host tier adds to a scheduler step, against upstream's connectors.

    make bench-scheduler [TAG=]

Times `schedule()` and `update_from_output()` of the real scheduler with 256 running
requests, every free device block cached and every one of 100,000 host slots filled.
Every configuration runs in a process of its own. They take turns of 16 steps, and each
window is compared with that of the tier off beside it: a machine that others share
becomes faster and slower by a quarter from one minute to the next.

decode       All 256 decode. 16 new blocks a step evict 16 cached ones.
admit        255 decode, and each step admits a request with a known prefix of 64
             blocks, which ends after one token. The tier (or connector) brings the
             prefix back from the host. With the tier off it is on the device: the
             same admission at its cheapest, which takes, evicts and hashes no block.
admit dirty  The same, but what the device evicts is not on the host yet.
recompute    The same with the tier off and the prefix evicted: what a server without
             a tier does with these requests.

Ends with 1 when a limit is missed.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

CONFIGS: dict[str, dict] = {
    "off": {},
    "write_back": {"store_policy": "write_back"},
    "write_through": {"store_policy": "write_through"},
    "write_back, store": {"store_policy": "write_back", "has_store": True},
    "write_back, pool": {"store_policy": "write_back", "has_pool": True},
    "write_back, hints": {"store_policy": "write_back", "has_hints": True},
    "SimpleCPU lazy": {
        "connector": "SimpleCPUOffloadConnector",
        "extra_config": (("lazy_offload", True),),
    },
    "SimpleCPU eager": {"connector": "SimpleCPUOffloadConnector"},
    "Offloading": {
        "connector": "OffloadingConnector",
        # By default it keeps prompts only; the others keep what was decoded too.
        "extra_config": (("offload_prompt_only", False),),
    },
}
WORKLOADS = ("decode", "admit dirty", "admit", "recompute")
LIMITS = {"decode": 1.05, "admit": 1.10}
"""Of the tier's step, against a step with the tier off."""
CHEAPER = {"write_back": "SimpleCPU lazy", "write_through": "SimpleCPU eager"}
"""The connector that stores at the same time as the tier, and must cost more."""
WINDOW = 16
"""Steps of a sample: a block boundary for every request."""
WARM_UP = 6 * WINDOW
"""Steps until the tier has used up what it stored ahead while the caches filled."""
TURN = "turn"
"""A process says that it waits for a line."""

Row = dict[str, str | float]


def measure(config: str, steps: int) -> list[dict]:
    """One row for each workload; times are seconds of a step, in windows."""
    from scheduler_load import PREFIX_BLOCKS, Load, Setup, Step

    load = Load(Setup(**CONFIGS[config]))
    filled = load.num_filled()
    load.decode(WARM_UP)
    load.wait_for_turn = wait_for_turn
    runs = {
        "decode": load.decode(steps),
        "admit dirty": load.admit_dirty(),
        "admit": load.admit(steps),
    }
    if not load.setup.has_host:
        runs["recompute"] = load.recompute(steps)

    def row(workload: str, run: list[Step]) -> dict:
        loads = {step.num_loaded for step in run}
        on_host = load.setup.has_host and workload.startswith("admit")
        # A slot that is being written is not evicted, so another one is: some prefix
        # lacks a block then.
        is_exact = not load.setup.connector and not load.setup.has_store
        if is_exact and loads != {PREFIX_BLOCKS if on_host else 0}:
            raise RuntimeError(f"{config}, {workload}: steps load {loads} blocks")
        seconds = [step.seconds for step in run]
        return {
            "config": config,
            "workload": workload,
            "windows": [
                statistics.fmean(seconds[i : i + WINDOW])
                for i in range(0, len(run) - WINDOW + 1, WINDOW)
            ],
            "loaded_blocks": statistics.fmean(step.num_loaded for step in run),
            "stored_blocks": statistics.fmean(step.num_stored for step in run),
            "filled_slots": filled,
        }

    gc.unfreeze()  # Or nanobind reports leaks when the process ends.
    return [row(*item) for item in runs.items()]


def wait_for_turn() -> None:
    print(TURN, flush=True)
    sys.stdin.readline()


def start(config: str, steps: int) -> subprocess.Popen[str]:
    """A process that waits for its first turn."""
    command = [sys.executable, __file__, "--measure", config, "--steps", str(steps)]
    process = subprocess.Popen(
        command,
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    if until_turn(process) is not None:
        raise RuntimeError(f"{config} ended before its first turn")
    return process


def until_turn(process: subprocess.Popen[str]) -> list[dict] | None:
    """Wait while it works. Returns its rows if it has ended."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(TURN):
            return None
        if line.startswith("[{"):
            return json.loads(line)
    raise RuntimeError(f"{process.args!r} ended with {process.wait()}")


def in_turns(configs: Sequence[str], steps: int) -> list[dict]:
    """Rows of all of them."""
    live = {config: start(config, steps) for config in configs}
    rows: list[dict] = []
    while live:
        for config, process in list(live.items()):
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            if (found := until_turn(process)) is not None:
                rows += found
                process.communicate()
                del live[config]
    return rows


def rounds(num_rounds: int, steps: int) -> Iterator[Row]:
    names = list(CONFIGS)
    for i in range(num_rounds):
        # Who comes behind another one may find its caches warmer or colder.
        rows = in_turns(names[i % len(names) :] + names[: i % len(names)], steps)
        off = {r["workload"]: r["windows"] for r in rows if r["config"] == "off"}
        for row in rows:
            windows = row.pop("windows")
            ratios = [a / b for a, b in zip(windows, off[row["workload"]])]
            times = {
                "seconds": statistics.median(windows),
                "ratio": statistics.median(ratios),
            }
            yield {"round": i + 1, **row, **times}


def medians(rows: list[Row], key: str) -> dict[tuple[str, str], float]:
    """Median over the rounds, for each (configuration, workload)."""
    values: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        cell = (str(row["config"]), str(row["workload"]))
        values.setdefault(cell, []).append(float(row[key]))
    return {cell: statistics.median(v) for cell, v in values.items()}


def table(rows: list[Row]) -> str:
    """Markdown: microseconds of a step, ratio to the tier off, blocks copied."""
    seconds = medians(rows, "seconds")
    ratios = medians(rows, "ratio")
    loaded, stored = medians(rows, "loaded_blocks"), medians(rows, "stored_blocks")
    lines = [
        f"| | {' | '.join(WORKLOADS)} |",
        f"|---|{'---|' * len(WORKLOADS)}",
    ]
    for config in CONFIGS:
        cells = [config]
        for workload in WORKLOADS:
            if (config, workload) not in seconds:
                cells.append("")
                continue
            us = seconds[config, workload] * 1e6
            ratio = ratios[config, workload]
            copies = f"{loaded[config, workload]:.0f}/{stored[config, workload]:.0f}"
            cells.append(f"{us:.0f} us, {ratio:.3f}, {copies}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def misses(rows: list[Row]) -> list[str]:
    """The limits that the medians miss, in words."""
    ratios = medians(rows, "ratio")
    found = []
    for workload, limit in LIMITS.items():
        for config, connector in CHEAPER.items():
            ratio = ratios[config, workload]
            if ratio > limit:
                found.append(
                    f"{config}, {workload}: {ratio:.3f} times off, not {limit}"
                )
            if ratio >= ratios[connector, workload]:
                found.append(f"{config}, {workload}: not cheaper than {connector}")
    return found


def conclude(path: Path, text: str, missed: list[str]) -> int:
    """Write a table to a file, print it and the limits that are missed. The exit
    status."""
    path.write_text(text + "\n")
    print(text)
    print("\n".join(f"MISSED: {each}" for each in missed) or "every limit is met")
    return int(bool(missed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/bench-scheduler"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--measure", choices=CONFIGS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.steps)))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    with (args.out / "steps.jsonl").open("w") as lines:
        for row in rounds(args.rounds, args.steps):
            print(json.dumps(row), file=lines, flush=True)
            print(json.dumps(row), flush=True)
            rows.append(row)
    return conclude(args.out / "steps.md", table(rows), misses(rows))


if __name__ == "__main__":
    sys.exit(main())
