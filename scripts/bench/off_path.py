# SPDX-License-Identifier: Apache-2.0
"""What the series costs a scheduler step when the tier is off.

    make bench-off-path [TAG=]

Runs `schedule()` and `update_from_output()` with many decoding requests on the
patched tree and on upstream's, in turns and in processes of their own, and prints
the ratio of the medians. Ends with 1 when the ratio is above the limit.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

LIMIT = 1.02
NUM_REQUESTS = 256
PROMPT_LEN = 64
STEPS_PER_SAMPLE = 10


def measure(samples: int) -> list[float]:
    """Seconds of a step, one value for every few steps."""
    from scheduler_setup import BLOCK_SIZE, make_request, make_scheduler, timed_step

    max_len = PROMPT_LEN + samples * STEPS_PER_SAMPLE + 100
    scheduler = make_scheduler(
        num_blocks=NUM_REQUESTS * (max_len // BLOCK_SIZE + 2),
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=NUM_REQUESTS * PROMPT_LEN,
        max_model_len=max_len,
    )
    for i in range(NUM_REQUESTS):
        scheduler.add_request(make_request(str(i), [i % 997] * PROMPT_LEN, max_len))

    for _ in range(STEPS_PER_SAMPLE):
        timed_step(scheduler)
    # The minimum of a few steps: the machine does other things too.
    return [
        min(timed_step(scheduler) for _ in range(STEPS_PER_SAMPLE))
        for _ in range(samples)
    ]


def in_tree(tree: Path, samples: int) -> float:
    """Median seconds of a step, with the vLLM of `tree`."""
    command = [sys.executable, __file__, "--measure", "--samples", str(samples)]
    with tempfile.TemporaryDirectory() as folder:
        # Without what else lies in an sdist: vLLM takes its platform from the
        # metadata of the installed package, not from those.
        (Path(folder) / "vllm").symlink_to(tree / "vllm")
        done = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": folder, "VLLM_LOGGING_LEVEL": "ERROR"},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    return statistics.median(json.loads(done.stdout.splitlines()[-1]))


def compare(tag: str, rounds: int, samples: int) -> Iterator[tuple[float, float]]:
    """(patched, upstream) seconds of a step for each round."""
    from patchtool.config import Layout
    from patchtool.tree import apply_patches, upstream_tree

    layout = Layout.default()
    trees = [apply_patches(layout, tag), upstream_tree(layout, tag)]
    for i in range(rounds):
        # Who goes first has the warmer or the colder machine.
        order = [0, 1] if i % 2 else [1, 0]
        times = {k: in_tree(trees[k], samples) for k in order}
        print(
            f"{tag} round {i + 1}: patched {times[0] * 1e6:.0f} us, "
            f"upstream {times[1] * 1e6:.0f} us",
            flush=True,
        )
        yield times[0], times[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tag", default="v0.32.0")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=60)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.samples)))
        return 0
    pairs = list(compare(args.tag, args.rounds, args.samples))
    patched, upstream = (statistics.median(times) for times in zip(*pairs))
    ratio = patched / upstream
    print(
        f"{args.tag}: a step with {NUM_REQUESTS} decoding requests takes {ratio:.3f} "
        f"times upstream's with the tier off (limit {LIMIT})"
    )
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
