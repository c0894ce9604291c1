# SPDX-License-Identifier: Apache-2.0
"""What a scheduler step costs, and what a slot takes, from 10⁴ to 4·10⁶ slots.

    make bench-scale [TAG=] [ARGS='--slots 10000 100000']

Writes a table and a plot.

Each size runs in a process of its own, and the same steps without a tier (0 slots) show
what the machine itself adds to the longest. The real scheduler starts, Python's objects
are excepted from collections as an engine does, and so many blocks go through the host
that every slot was filled and evicted once. Then come steps like those of
`bench-scheduler`.
The columns:

start      Seconds until the scheduler with its slots exists.
bytes      Resident bytes for each slot, beyond those of a scheduler without a tier.
           Includes what the order of eviction and the admission remember of blocks
           that are gone.
decode     Microseconds of a step with 256 decoding requests, median.
admit      The same with an admission that loads 64 blocks.
worst      Milliseconds of the longest of 10,000 decoding steps, above their median, and
           how many are longer than the limit. Requests end before the device is full of
           them: a step that resumes preempted ones loads thousands of blocks.
collector  Milliseconds of the longest collection in any step, and of a full one.
"""

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scheduler_step import WARM_UP, conclude

SIZES = (10_000, 100_000, 1_000_000, 4_000_000)
STEPS = 320
WORST_OF = 10_000
WINDOW = 1_500
"""Steps until requests are replaced. After 1,950 they fill the device."""
MAX_RATIO = 1.03
"""Of a step's cost with the most slots, against 100,000."""
BASE = 100_000
MAX_BYTES = 250
MAX_WORST_MS = 5.0
KINDS = {
    "decode": "a step of 256 that decode",
    "admit": "with 64 loads",
    "worst": "longest of 10,000, above the median",
}
_PAGE = os.sysconf("SC_PAGE_SIZE")
Row = dict[str, float]


class Collections:
    """The durations of Python's collections, in milliseconds."""

    def __init__(self) -> None:
        self.worst = 0.0
        self._began = 0.0
        gc.callbacks.append(self)

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        now = time.thread_time()
        if phase == "start":
            self._began = now
        else:
            self.worst = max(self.worst, 1e3 * (now - self._began))


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def measure(num_slots: int, worst_of: int) -> Row:
    import scheduler_load
    from scheduler_load import NUM_BLOCKS, Load, Setup, Step
    from scheduler_setup import make_scheduler

    def off() -> Any:
        return make_scheduler(NUM_BLOCKS, 264, 8192, 4096)

    schedulers = [off()]
    before = resident()
    schedulers.append(off())
    of_scheduler = resident() - before
    row: Row = {"slots": num_slots}

    def make(**kwargs: Any) -> Any:
        began = time.thread_time()
        made = make_scheduler(**kwargs)
        row["start"] = time.thread_time() - began
        return made

    scheduler_load.make_scheduler = make
    before = resident()
    policy: Any = "write_back" if num_slots else None
    setup = Setup(policy, num_slots=num_slots, num_prefilled=2 * num_slots)
    load = Load(setup)
    if num_slots:
        row["bytes"] = (resident() - before - of_scheduler) / num_slots
    collections = Collections()

    def median(steps: list[Step]) -> float:
        return 1e6 * statistics.median(step.seconds for step in steps)

    load.decode(WARM_UP)
    row["decode"] = median(load.decode(STEPS))
    # The least number of slots has no room for so many known prefixes.
    if num_slots >= BASE:
        # As `step_turns.py`: else some still store what others have stored already.
        load.admit_dirty()
        row["admit"] = median(load.admit(STEPS))
    times: list[float] = []
    while len(times) < worst_of:
        load.begin_requests()
        num = min(WINDOW, worst_of - len(times))
        times += [1e3 * step.seconds for step in load.decode(num)]
    usual = statistics.median(times)
    row["worst"] = max(times) - usual
    row["long"] = sum(each > usual + MAX_WORST_MS for each in times)
    row["collector"] = collections.worst
    collections.worst = 0.0
    gc.collect()
    row["full_collection"] = collections.worst
    gc.unfreeze()  # Or nanobind reports leaks when the process ends.
    return row


def table(rows: list[Row]) -> str:
    lines = [
        "| slots | start, s | bytes | decode, us | admit, us | worst, ms "
        "| collector, ms |",
        f"|{'---|' * 7}",
    ]
    for r in rows:
        name = f"{r['slots']:,}" if r["slots"] else "no tier"
        lines.append(
            f"| {name} | {r['start']:.2f} | {r.get('bytes', 0):.0f} "
            f"| {r['decode']:.0f} | {r.get('admit', 0):.0f} "
            f"| {r['worst']:.1f}, {r['long']:.0f} "
            f"| {r['collector']:.1f}, {r['full_collection']:.1f} |"
        )
    return "\n".join(lines)


def plot(rows: list[Row]) -> str:
    """An SVG of the costs of steps and their longest, by the number of slots."""
    width, height, left, top, bottom = 560, 220, 48, 24, 190
    most = 1.2 * max(row.get(kind, 0) / 1e3 for row in rows for kind in KINDS)
    most = max(most, 1.2 * max(row["worst"] for row in rows))
    first, last = (math.log10(end(SIZES)) for end in (min, max))

    def at(slots: float, ms: float) -> tuple[float, float]:
        part = (math.log10(slots) - first) / (last - first)
        return left + part * (width - 2 * left), bottom - ms / most * (bottom - top)

    def text(x: float, y: float, words: str, more: str = "") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" {more}>{words}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11" fill="#555">',
        f'<path d="M{left} {top}V{bottom}H{width - left}" fill="none" stroke="#999"/>',
        text(left, top - 8, "ms by number of slots; bytes for each slot under it"),
    ]
    rows = [row for row in rows if row["slots"]]
    for row in rows:
        x, _ = at(row["slots"], 0)
        words = f"{row['slots']:,} ({row['bytes']:.0f})"
        parts.append(text(x, bottom + 16, words, 'text-anchor="middle"'))
    for (kind, words), color in zip(KINDS.items(), ("#1f77b4", "#2ca02c", "#d62728")):
        if not any(kind in row for row in rows):
            continue
        scale = 1 if kind == "worst" else 1e-3
        points = [at(row["slots"], scale * row[kind]) for row in rows if kind in row]
        line = " ".join(f"{x:.0f},{y:.0f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}"/>')
        x, y = points[0]
        parts.append(text(x + 4, y - 5, words, f'fill="{color}"'))
    return "\n".join([*parts, "</svg>", ""])


def misses(rows: list[Row]) -> list[str]:
    """The limits that are missed, in words."""
    found = []
    base = next((row for row in rows if row["slots"] == BASE), None)
    for row in rows:
        if not row["slots"]:
            continue
        name = f"{row['slots']:,} slots"
        if row["slots"] >= BASE and row["bytes"] > MAX_BYTES:
            found.append(f"{name}: {row['bytes']:.0f} bytes for each")
        if row["worst"] > MAX_WORST_MS:
            found.append(
                f"{name}: {row['long']:.0f} steps take {row['worst']:.1f} ms longer"
            )
        for kind in ("decode", "admit"):
            if base is not None and row["slots"] > BASE:
                ratio = row[kind] / base[kind]
                if ratio > MAX_RATIO:
                    found.append(f"{name}: {kind} takes {ratio:.3f} of {BASE:,}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--slots", type=int, nargs="+", default=SIZES)
    parser.add_argument("--worst-of", type=int, default=WORST_OF, help="steps")
    parser.add_argument("--out", type=Path, default=Path("build/bench-scale"))
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        print(json.dumps(measure(args.measure, args.worst_of)))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for num_slots in (0, *args.slots):
        command = [sys.executable, __file__, "--measure", str(num_slots)]
        command += ["--worst-of", str(args.worst_of)]
        env = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
        run = subprocess.run(command, env=env, check=True, text=True, stdout=-1)
        rows.append(json.loads(run.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
    (args.out / "scale.svg").write_text(plot(rows))
    return conclude(args.out / "scale.md", table(rows), misses(rows))


if __name__ == "__main__":
    sys.exit(main())
