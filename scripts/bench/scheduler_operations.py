# SPDX-License-Identifier: Apache-2.0
"""How many operations of Python the host tier adds to a scheduler step.

    PYTHONPATH=scripts:scripts/bench build/env/v0.32.0/bin/python \
      scripts/bench/scheduler_operations.py [--workload admit] [--top 20] [--of off]

Counts what `scheduler_step.py` times: bytecode operations of `schedule()` and
`update_from_output()`. The count is the same on every machine, however busy, and says
by function where it comes from. It does not see what built-ins and memory cost: times
of a quiet machine are the measure, this is the guide.
"""

import argparse
import gc
import os
import sys
from collections import Counter
from types import FrameType
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import scheduler_load
from scheduler_setup import sampled
from scheduler_step import CONFIGS, WARM_UP, WINDOW

TIERS = [name for name, config in CONFIGS.items() if "connector" not in config]


def count(config: str, workload: str) -> Counter[str]:
    """Operations of a step by function, mean of a window."""
    load = scheduler_load.Load(scheduler_load.Setup(**CONFIGS[config]))
    load.decode(WARM_UP)
    if workload == "admit":
        load.admit_dirty()
    counts: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        code = frame.f_code
        name = f"{code.co_filename.split('vllm/v1/')[-1]}:{code.co_qualname}"

        def one(frame: FrameType, event: str, _: object) -> Any:
            counts[name] += event == "opcode"
            return one

        return one

    def counted_step(scheduler: Any, work: Any, report: Any) -> float:
        sys.settrace(trace)
        output = scheduler.schedule()
        sys.settrace(None)
        runner_output = sampled(output, work(output))
        if (told := report(output)) is not None:
            runner_output.kv_tier_report = told
        sys.settrace(trace)
        scheduler.update_from_output(output, runner_output)
        sys.settrace(None)
        return 0.0

    timed_step, scheduler_load.timed_step = scheduler_load.timed_step, counted_step
    getattr(load, workload)(WINDOW)
    scheduler_load.timed_step = timed_step
    gc.unfreeze()
    return Counter({name: number // WINDOW for name, number in counts.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workload", choices=("decode", "admit"), default="decode")
    parser.add_argument("--top", type=int, default=0, help="functions to list")
    parser.add_argument("--of", choices=TIERS, default="off", help="beside what")
    parser.add_argument("--configs", choices=TIERS, nargs="+", default=TIERS[1:])
    args = parser.parse_args()
    off = count(args.of, args.workload)
    for config in args.configs:
        tier = count(config, args.workload)
        ratio = tier.total() / off.total()
        print(
            f"{config}, {args.workload}: {tier.total()} operations, {ratio:.4f} of "
            f"{args.of}"
        )
        more = {name: tier[name] - off[name] for name in {*tier, *off}}
        for name in sorted(more, key=lambda name: -abs(more[name]))[: args.top]:
            print(f"{more[name]:9d} {name}")


if __name__ == "__main__":
    main()
