# SPDX-License-Identifier: Apache-2.0
"""Two configurations of the scheduler in one process, by turns of one step.

    PYTHONPATH=scripts:scripts/bench python scripts/bench/step_turns.py \\
        write_back "write_back, pool"

For differences of a percent, which `make bench-scheduler`, whose configurations have
processes of their own, does not see on a machine that others share. The same
configuration twice shows the noise. Prints the median of the ratios of windows, and
their quartiles.
"""

import argparse
import gc
import statistics

from scheduler_load import Load, Setup
from scheduler_step import CONFIGS, WARM_UP, WINDOW


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("configs", nargs=2, metavar="CONFIG", choices=[*CONFIGS])
    add("--workload", choices=["decode", "admit"], default="decode")
    add("--windows", type=int, default=36, help=f"of {WINDOW} steps")
    args = parser.parse_args()
    loads = [Load(Setup(**CONFIGS[config])) for config in args.configs]
    for load in loads:
        load.decode(WARM_UP)
        if args.workload == "admit":
            load.admit_dirty()
    ratios = []
    for _ in range(args.windows):
        seconds = [0.0, 0.0]
        for step in range(WINDOW):
            for i in (0, 1) if step % 2 else (1, 0):
                seconds[i] += getattr(loads[i], args.workload)(1)[0].seconds
        ratios.append(seconds[1] / seconds[0])
    gc.unfreeze()  # Or nanobind reports leaks when the process ends.
    low, median, high = statistics.quantiles(ratios, n=4)
    first, second = args.configs
    print(
        f"{args.workload}, {second} / {first}: {median:.3f} ({low:.3f} to {high:.3f})"
    )


if __name__ == "__main__":
    main()
