# SPDX-License-Identifier: Apache-2.0
"""Two configurations of the scheduler in one process, by turns of one step.

    PYTHONPATH=scripts:scripts/bench python scripts/bench/step_turns.py \\
        write_back "write_back, pool"

For differences of a percent, which `make bench-scheduler`, whose configurations have
processes of their own, does not see on a machine that others share. The same
configuration twice shows the noise. Prints the median of the ratios of windows, and
their quartiles.

`--seams` says where the time goes: methods that upstream calls are timed in both, each
without those among them that it calls. What the second one takes more is printed as a
part of a step of the first, and what is left for the rest: what upstream's loops look
at, and memory that the tier displaces from caches.
"""

import argparse
import gc
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

from scheduler_load import Load, Setup
from scheduler_step import CONFIGS, WARM_UP, WINDOW

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_tier.scheduler.block_pool import TieredBlockPool

SEAMS = {
    "lookup": ["is_loading", "get_cached_block", "promote", "load_ahead"],
    "new blocks": ["get_new_blocks"],
    "full blocks": ["cache_full_blocks"],
    "free blocks": ["free_blocks", "touch"],
    "plan": ["begin_step", "take_plan", "apply_report"],
    "stats": ["take_stats"],
}


class Seams:
    """Seconds in methods of block pools, by seam."""

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)
        # Seconds of timed methods within those that are running.
        self._within: list[float] = []
        for kind in (BlockPool, TieredBlockPool):
            for seam, names in SEAMS.items():
                for name in names:
                    if name in vars(kind):
                        setattr(kind, name, self._timed(vars(kind)[name], seam))

    def _timed(self, method: Callable[..., Any], seam: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._within.append(0.0)
            began = perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                seconds = perf_counter() - began
                self.seconds[seam] += seconds - self._within.pop()
                if self._within:
                    self._within[-1] += seconds

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("configs", nargs=2, metavar="CONFIG", choices=[*CONFIGS])
    add("--workload", choices=["decode", "admit"], default="decode")
    add("--slots", nargs=2, type=int, help="of each, filled twice before")
    add("--windows", type=int, default=24, help=f"of {WINDOW} steps")
    add("--seams", action="store_true", help="where the time goes; slower")
    args = parser.parse_args()
    setups = [Setup(**CONFIGS[config]) for config in args.configs]
    if args.slots:
        setups = [
            replace(setup, num_slots=num, num_prefilled=2 * num)
            for setup, num in zip(setups, args.slots)
        ]
    loads = [*map(Load, setups)]
    for load in loads:
        load.decode(WARM_UP)
        if args.workload == "admit":
            # Or one of them still stores what the other has stored already.
            load.admit_dirty()
    seams = Seams() if args.seams else None
    parts = [defaultdict[str, float](float) for _ in loads]
    totals = [0.0, 0.0]
    ratios = []
    for _ in range(args.windows):
        seconds = [0.0, 0.0]
        for step in range(WINDOW):
            for i in (0, 1) if step % 2 else (1, 0):
                if seams is not None:
                    seams.seconds = parts[i]
                seconds[i] += getattr(loads[i], args.workload)(1)[0].seconds
        ratios.append(seconds[1] / seconds[0])
        totals = [a + b for a, b in zip(totals, seconds)]
    gc.unfreeze()  # Or nanobind reports leaks when the process ends.
    low, median, high = statistics.quantiles(ratios, n=4)
    first, second = args.slots or args.configs
    print(
        f"{args.workload}, {second} / {first}: {median:.3f} ({low:.3f} to {high:.3f})"
    )
    if args.seams:
        off, tier = parts
        more = {seam: tier[seam] - off[seam] for seam in SEAMS}
        more["the rest"] = totals[1] - totals[0] - sum(more.values())
        for seam, extra in more.items():
            us = extra / (args.windows * WINDOW) * 1e6
            print(f"{seam:>12} {extra / totals[0]:+.3f} {us:+5.0f} us")


if __name__ == "__main__":
    main()
