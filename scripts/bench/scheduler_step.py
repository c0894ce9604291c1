# SPDX-License-Identifier: Apache-2.0
"""What the host tier adds to a scheduler step, against upstream's connectors.

    make bench-scheduler [TAG=]

Times `schedule()` and `update_from_output()` of the real scheduler with 256 running
requests, every free device block cached and every one of 100,000 host slots filled.
Every configuration runs in processes of its own, in turns.

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
from collections.abc import Iterator
from pathlib import Path

CONFIGS: dict[str, dict] = {
    "off": {},
    "write_back": {"store_policy": "write_back"},
    "write_through": {"store_policy": "write_through"},
    "write_back, store": {"store_policy": "write_back", "has_store": True},
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

Row = dict[str, str | float]


def measure(config: str, steps: int) -> list[Row]:
    """One row for each workload; times are seconds of a step."""
    from scheduler_load import PREFIX_BLOCKS, Load, Setup, Step

    load = Load(Setup(**CONFIGS[config]))
    filled = load.num_filled()
    load.decode(WARM_UP)
    runs = {
        "decode": load.decode(steps),
        "admit dirty": load.admit_dirty(),
        "admit": load.admit(steps),
    }
    if not load.setup.has_host:
        runs["recompute"] = load.recompute(steps)

    def row(workload: str, run: list[Step]) -> Row:
        loads = {step.num_loaded for step in run}
        on_host = load.setup.has_host and workload.startswith("admit")
        # A slot that is being written is not evicted, so another one is: some prefix
        # lacks a block then.
        is_exact = not load.setup.connector and not load.setup.has_store
        if is_exact and loads != {PREFIX_BLOCKS if on_host else 0}:
            raise RuntimeError(f"{config}, {workload}: steps load {loads} blocks")
        seconds = [step.seconds for step in run]
        windows = [
            statistics.fmean(seconds[i : i + WINDOW])
            for i in range(0, len(run) - WINDOW + 1, WINDOW)
        ]
        return {
            "config": config,
            "workload": workload,
            # Every window does the same; what else runs here makes it slower only.
            "seconds": min(windows),
            "median_seconds": statistics.median(windows),
            "loaded_blocks": statistics.fmean(step.num_loaded for step in run),
            "stored_blocks": statistics.fmean(step.num_stored for step in run),
            "filled_slots": filled,
        }

    gc.unfreeze()  # Or nanobind reports leaks when the process ends.
    return [row(*item) for item in runs.items()]


def in_process(config: str, steps: int) -> list[Row]:
    command = [sys.executable, __file__, "--measure", config, "--steps", str(steps)]
    done = subprocess.run(
        command,
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def rounds(num_rounds: int, steps: int) -> Iterator[Row]:
    names = list(CONFIGS)
    for i in range(num_rounds):
        # Who goes first has the warmer or the colder machine.
        for name in names[i % len(names) :] + names[: i % len(names)]:
            for row in in_process(name, steps):
                yield {"round": i + 1, **row}


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
            ratio = seconds[config, workload] / seconds["off", workload]
            copies = f"{loaded[config, workload]:.0f}/{stored[config, workload]:.0f}"
            cells.append(f"{us:.0f} us, {ratio:.3f}, {copies}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def misses(rows: list[Row]) -> list[str]:
    """The limits that the medians miss, in words."""
    seconds = medians(rows, "seconds")
    found = []
    for workload, limit in LIMITS.items():
        for config, connector in CHEAPER.items():
            took = seconds[config, workload]
            ratio = took / seconds["off", workload]
            if ratio > limit:
                found.append(
                    f"{config}, {workload}: {ratio:.3f} times off, not {limit}"
                )
            if took >= seconds[connector, workload]:
                found.append(f"{config}, {workload}: not cheaper than {connector}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/bench-scheduler"))
    parser.add_argument("--rounds", type=int, default=5)
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
    text = table(rows)
    (args.out / "steps.md").write_text(text + "\n")
    print(text)
    found = misses(rows)
    print("\n".join(f"MISSED: {miss}" for miss in found) or "every limit is met")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
