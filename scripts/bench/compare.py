# SPDX-License-Identifier: Apache-2.0
"""The tier beside upstream's connectors, on this machine.

    python scripts/bench/compare.py --out DIR
    python scripts/bench/compare.py --out DIR --configs large,core,simple,offloading \
        --workloads rotate,overfull --fresh --repeats 3 --time-limit 560
    python scripts/bench/compare.py --report DIR [DIR ...] --h2d-gb-s 53.5

Every configuration runs in an engine of its own, in turns: each repeat of all of them
before the next one, and each turn begins with another. A cell is one run of one
workload; what it measured is a line in DIR/results.jsonl as soon as it is done, and its
outputs lie in DIR/outputs. The same call again runs what is missing. `--report` merges
several calls into tables, ratios, pictures and bars.

What was not run is said at the end, and by the report. Ends with 1 if something
failed or was not reached.
"""

import argparse
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from suite.configs import configs
from suite.jobs import Runner
from suite.options import (
    LOGPROBS,
    add_engine_options,
    check_names,
    config_names,
    extra_config,
    names,
    scaled,
)
from suite.report import report
from suite.scales import SCALES
from suite.table import why_missing
from suite.together import run_together


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
    known = configs(scale.host_gib, scale.device_bytes, args.tp * args.pp)
    for text in args.extra:
        name, known[name] = extra_config(text, known)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    args.out.mkdir(parents=True, exist_ok=True)
    runner = Runner(scale, args, time.time() + args.time_limit)
    repeats = range(args.first_repeat, args.first_repeat + args.repeats)
    chosen = config_names(args.configs, known)
    if args.side_by_side:
        together = {name: known[name] for name in chosen}
        run_together(runner, together, args.workloads, repeats)
    else:
        for name, some in turns(chosen, repeats, args.in_turns):
            runner.run(name, known[name], some)
    if missing := runner.told.missing:
        print("Not run:\n  " + "\n  ".join(why_missing(missing)))
    return int(any(r["status"] != "skipped" for r in runner.told.missing))


def turns(
    configs: list[str], repeats: range, in_turns: bool
) -> Iterator[tuple[str, range]]:
    """Who runs which repeats, in order.

    In turns, each repeat begins with the next configuration: a machine that becomes
    slower, or faster, within a turn favours none of them.
    """
    if not in_turns:
        yield from ((name, repeats) for name in configs)
        return
    for repeat in repeats:
        first = repeat % len(configs)
        for name in configs[first:] + configs[:first]:
            yield name, range(repeat, repeat + 1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    do = parser.add_mutually_exclusive_group(required=True)
    do.add_argument("--out", type=Path, help="run; results are added to this folder")
    do.add_argument("--report", type=Path, nargs="+", metavar="DIR")
    parser.add_argument("--configs", type=names, default=[], help="all if not given")
    parser.add_argument("--workloads", type=names, help="all if not given")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--first-repeat", type=int, default=0, metavar="N")
    parser.add_argument(
        "--one-by-one",
        dest="in_turns",
        action="store_false",
        help="all repeats of a configuration in one engine before the next one: fewer "
        "starts, but a machine that becomes slower favours those that ran first",
    )
    parser.add_argument(
        "--time-limit", type=float, default=7 * 86400.0, metavar="SECONDS"
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
    add_engine_options(parser)
    args = parser.parse_args()
    args.workloads = args.workloads or list(SCALES[args.scale].workloads)
    check_names("--workloads", args.workloads, list(SCALES[args.scale].workloads))
    return args


if __name__ == "__main__":
    sys.exit(main())
