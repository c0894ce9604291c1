# SPDX-License-Identifier: Apache-2.0
"""How long do a few streams wait between tokens, with the tier and without?

    python scripts/bench/token_gaps.py --out DIR
    python scripts/bench/token_gaps.py --out DIR --device cpu --size tiny \\
        --configs core-write_back --host-gib 0.0625 --device-gib 0.03 \\
        --llm '{"block_size": 32}'

Eight streams leave a GPU idle between steps of a small model, so that all that the tier
does in Python makes tokens late: this is its worst case. The engines start at once, and
are asked in turns, the others meanwhile idle. Prints the median of all answers of each
round, and at the end the medians of these as ratios to those without the tier.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from suite.client import Answer
from suite.configs import configs
from suite.engines import PLANTS, Engine
from suite.jobs import UTILIZATION
from suite.loader import LOAD_FORMAT
from suite.model import SHAPES, write_config
from suite.options import parser_of

GIB = 1 << 30
START_S = 300.0
NONE = "none"


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, "1b")
    add = parser.add_argument
    add("--configs", nargs="*", default=["core-write_back", "simple-lazy"])
    add("--host-gib", type=float, default=4)
    add("--device-gib", type=float, default=4)
    add("--streams", type=int, default=8)
    add("--rounds", type=int, default=6)
    add("--seconds", type=float, default=5, help="of each round")
    add("--llm", type=json.loads, default={}, metavar="JSON", help="engine arguments")
    return parser.parse_args()


def start(args: argparse.Namespace, stack: ExitStack) -> dict[str, Engine]:
    """All engines, ready."""
    model = args.out / f"model-{args.size}"
    on_gpu = args.device == "cuda"
    dtype = "bfloat16" if on_gpu else "float32"
    write_config(model, SHAPES[args.size], dtype)
    settings: dict[str, Any] = {
        "model": str(model),
        "load_format": LOAD_FORMAT,
        "dtype": dtype,
        "max_model_len": 2048,
        "max_num_seqs": 32,
        "enforce_eager": not on_gpu,
        "gpu_memory_utilization": UTILIZATION,
        "kv_cache_memory_bytes": int(args.device_gib * GIB),
    } | args.llm
    known = configs(args.host_gib, int(args.device_gib * GIB))
    sockets = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    engines = {}
    for name in (NONE, *args.configs):
        llm = {} if name == NONE else known[name].llm
        env = {"PYTHONHASHSEED": "0"} | ({} if name == NONE else known[name].env)
        if not on_gpu:
            env[PLANTS] = "bind_no_worker"
        engines[name] = Engine(name, settings | llm, env, args.out, sockets)
        stack.callback(engines[name].end)
    ends = time.monotonic() + START_S
    with ThreadPoolExecutor(len(engines)) as waiting:
        list(waiting.map(lambda engine: engine.wait(ends), engines.values()))
    return engines


async def gaps_ms(args: argparse.Namespace, engine: Engine, seed: int) -> list[float]:
    """Mean milliseconds between the tokens of each answer of a round."""
    until = time.perf_counter() + args.seconds
    rng = random.Random(seed)
    vocab = SHAPES[args.size].vocab

    async def stream() -> list[float]:
        found: list[float] = []
        while time.perf_counter() < until:
            prompt = [rng.randrange(3, vocab) for _ in range(32)]
            answer = Answer("", len(prompt), time.perf_counter())
            asked = engine.ask(answer, prompt, 256)
            await asked
            # Tokens may come to the client several at a time.
            times = answer.times
            found.append((times[-1] - times[0]) / (len(times) - 1) * 1e3)
        return found

    streams = await asyncio.gather(*(stream() for _ in range(args.streams)))
    return [gap for each in streams for gap in each]


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    medians: dict[str, list[float]] = {}
    with ExitStack() as stack:
        engines = start(args, stack)
        for number in range(-1, args.rounds):
            order = [*engines] if number % 2 else [*engines][::-1]
            for name in order:
                gaps = asyncio.run(gaps_ms(args, engines[name], number))
                median = statistics.median(gaps)
                line = {
                    "round": number,
                    "config": name,
                    "answers": len(gaps),
                    "median_ms": round(median, 3),
                }
                print(json.dumps(line), flush=True)
                if number >= 0:
                    # Kernels and graphs have run once before.
                    medians.setdefault(name, []).append(median)
    for name, some in medians.items():
        ratio = statistics.median(a / b for a, b in zip(some, medians[NONE]))
        print(f"{name:16} {statistics.median(some):6.2f} ms  {ratio:.3f} of {NONE}")


if __name__ == "__main__":
    main()
    # A client may still wait.
    os._exit(0)
