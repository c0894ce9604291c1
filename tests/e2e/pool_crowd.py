# SPDX-License-Identifier: Apache-2.0
"""Real engines that share a pool, each a fork of one process, which kills them at
random moments: `python -m tests.e2e.pool_crowd MODEL SOCKET RESULT.json KILLS SEED`.

A fork has imported everything, so an engine is there after some seconds. The process
itself never makes an engine.
"""

import json
import mmap
import os
import signal
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from ..settings import options
from ..unit.keeper.crowd import start
from .engine import Engine
from .jobs import COMMON, SMALL, device
from .release import known
from .secondary import prompts

NUM_ENGINES = 3
# Twice as much as the pool holds, so that slots are reused while neighbours read them.
PROMPTS = prompts(900, 40)
MAX_TOKENS = 4
READY, ANSWERS, WRONG, HITS, FROM_NEIGHBOURS, ADOPTED = range(6)
NAMES = ("starts", "answers", "wrong", "hits", "from neighbours", "adopted")
# An engine that answers nothing for so long hangs.
HANGS_S = 60
# Then there are no more kills.
MAX_S = float(os.environ.get("KV_TIER_POOL_SECONDS", "420"))


def engine(model: str, socket: str | None) -> Engine:
    llm: dict[str, Any] = {**COMMON, **device(SMALL)}
    if socket is not None:
        llm["kv_offloading_backend"] = "core"
        llm["kv_offloading_config"] = options(
            pool=socket, store_policy="write_through", store_from_use=1
        )
    return Engine(model=model, **known(llm))


def answers(engine: Engine, numbers: list[int]) -> list[tuple[list[int], int]]:
    asked = [PROMPTS[number] for number in numbers]
    found = engine.generate(asked, max_tokens=MAX_TOKENS)
    return [(answer["tokens"], answer["cached_tokens"]) for answer in found]


def live(
    counts: np.ndarray, model: str, socket: str, truth: list[list[int]], seed: int
) -> None:
    """Ask an engine until it is killed."""
    rng, own = Random(seed), engine(model, socket)
    counts[ADOPTED] += len(own.pool.host)
    counts[READY] += 1
    seen = 0.0
    while True:
        numbers = rng.sample(range(len(PROMPTS)), rng.randint(1, 4))
        for number, (tokens, cached) in zip(numbers, answers(own, numbers)):
            counts[ANSWERS] += 1
            counts[HITS] += cached > 0
            counts[WRONG] += tokens != truth[number]
        total = own.counters()["kv_tier_neighbour_blocks"]
        counts[FROM_NEIGHBOURS] += int(total - seen)
        seen = total


def ask_alone(model: str) -> list[list[int]]:
    """What an engine without a tier answers."""
    reads, writes = os.pipe()

    def body() -> None:
        alone = engine(model, None)
        truth = [answers(alone, [n])[0][0] for n in range(len(PROMPTS))]
        os.write(writes, json.dumps(truth).encode())
        os._exit(0)

    pid = start(body)
    os.close(writes)
    truth: list[list[int]] = json.loads(os.read(reads, 1 << 16))
    os.waitpid(pid, 0)
    return truth


def main(model: str, socket: str, result: Path, num_kills: int, seed: int) -> None:
    truth, rng = ask_alone(model), Random(seed)
    shared = np.frombuffer(mmap.mmap(-1, 4096), np.int64)
    counts = shared[: NUM_ENGINES * 8].reshape(NUM_ENGINES, 8)
    total: dict[str, int] = {"kills": 0, "while starting": 0, "ended": 0, "hung": 0}

    def begin(number: int) -> int:
        of_engine = rng.randrange(1 << 30)
        return start(lambda: live(counts[number], model, socket, truth, of_engine))

    running = {number: begin(number) for number in range(NUM_ENGINES)}
    starts, end = dict.fromkeys(running, 0), time.monotonic() + MAX_S
    try:
        while total["kills"] < num_kills and time.monotonic() < end:
            number = rng.randrange(NUM_ENGINES)
            if rng.random() < 0.7:
                # Else it may die while it starts.
                until = time.monotonic() + HANGS_S
                while counts[number, READY] == starts[number]:
                    if os.waitpid(running[number], os.WNOHANG)[0]:
                        raise RuntimeError("an engine did not start")
                    if time.monotonic() > until:
                        total["hung"] += 1
                        break
                    time.sleep(0.01)
                before = int(counts[number, ANSWERS])
                time.sleep(rng.expovariate(2))
                until = time.monotonic() + HANGS_S
                while counts[number, ANSWERS] == before:
                    if time.monotonic() > until:
                        total["hung"] += 1
                        break
                    time.sleep(0.001)
            else:
                time.sleep(rng.uniform(0, 3))
            total["while starting"] += int(counts[number, READY] == starts[number])
            os.kill(running[number], signal.SIGKILL)
            _, status = os.waitpid(running[number], 0)
            total["ended"] += not os.WIFSIGNALED(status)
            total["kills"] += 1
            starts[number] = int(counts[number, READY])
            running[number] = begin(number)
    finally:
        for pid in running.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    sums = counts.sum(axis=0).tolist()
    total |= dict(zip(NAMES, sums))
    result.write_text(json.dumps(total))


if __name__ == "__main__":
    main(
        sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
    )
