# SPDX-License-Identifier: Apache-2.0
"""Real engines that share a pool, each a fork of one process, which kills them, their
ranks and the keeper at random moments:
`python -m tests.e2e.pool_crowd MODEL FOLDER RESULT.json KILLS SEED RANKS`.

A fork has imported everything, so an engine is there after some seconds. The process
itself never makes an engine.
"""

import json
import mmap
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil

from vllm.v1.kv_tier.keeper.client import Geometry, map_partitions

from ..settings import options
from ..unit.keeper.crowd import start
from .engine import Engine
from .jobs import COMMON, SMALL, device
from .pool import KeeperProcess
from .release import known
from .secondary import prompts

NUM_ENGINES = 3
# Twice as much as the pool holds, so that slots are reused while neighbours read them.
PROMPTS = prompts(900, 40)
MAX_TOKENS = 4
POOL_BYTES = 6 << 20
NAMES = ("starts", "answers", "wrong", "hits", "from neighbours", "adopted")
READY, ANSWERS, WRONG, HITS, FROM_NEIGHBOURS, ADOPTED, PARTITION, RANKS = range(8)
# Longer than that, and an engine or a rank hangs.
HANGS_S = 60
# Then there are no more kills.
MAX_S = float(os.environ.get("KV_TIER_POOL_SECONDS", "420"))
KINDS = {"engine": 5, "starting": 2, "keeper": 1}
"""How often each is killed."""


def engine(model: str, socket: str | None, num_ranks: int = 1) -> Engine:
    llm: dict[str, Any] = {**COMMON, **device(SMALL, num_ranks)}
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


def _process_of(wrapper: Any) -> int:
    return os.getpid()


def live(counts: np.ndarray, own: Engine, truth: list[list[int]], rng: Random) -> None:
    """Ask an engine until it is killed."""
    ranks = own.on_ranks(_process_of)
    counts[RANKS : RANKS + len(ranks)] = ranks
    counts[ADOPTED] += len(own.pool.host)
    counts[PARTITION] = own.pool.neighbours._reader
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


def ask_alone(model: str, num_ranks: int) -> list[list[int]]:
    """What an engine without a tier answers."""
    reads, writes = os.pipe()

    def body() -> None:
        alone = engine(model, None, num_ranks)
        truth = [answers(alone, [n])[0][0] for n in range(len(PROMPTS))]
        os.write(writes, json.dumps(truth).encode())
        os._exit(0)

    pid = start(body)
    os.close(writes)
    truth: list[list[int]] = json.loads(os.read(reads, 1 << 16))
    os.waitpid(pid, 0)
    return truth


def is_over(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Crowd:
    """Engines, their keeper, and what has happened to them.

    Args:
        model: Of all engines.
        folder: For the keeper.
        num_ranks: Of each engine.
        rng: Draws what is killed, and when.

    """

    def __init__(self, model: str, folder: Path, num_ranks: int, rng: Random) -> None:
        self._model, self._folder = model, folder
        self._num_ranks, self._rng = num_ranks, rng
        self._truth = ask_alone(model, num_ranks)
        shared = np.frombuffer(mmap.mmap(-1, 4096), np.int64)
        self.counts = shared[: NUM_ENGINES * 16].reshape(NUM_ENGINES, 16)
        self.events: Counter[str] = Counter()
        self.slowest_s = 0.0
        """Until nothing of an engine was left, from the end of its last process on."""
        self._running: dict[int, int] = {}
        self._starts = [0] * NUM_ENGINES
        self._begin_all()

    def _begin_all(self) -> None:
        self._keeper = KeeperProcess(self._folder, POOL_BYTES / (1 << 30), NUM_ENGINES)
        self._is_kept = True
        for number in range(NUM_ENGINES):
            self._begin(number)

    def _begin(self, number: int) -> None:
        of_engine = Random(self._rng.random())
        socket = str(self._keeper.socket)

        def body() -> None:
            own = engine(self._model, socket, self._num_ranks)
            live(self.counts[number], own, self._truth, of_engine)

        self._starts[number] = int(self.counts[number, READY])
        self._running[number] = start(body)

    def _is_ready(self, number: int) -> bool:
        return bool(self.counts[number, READY] > self._starts[number])

    def _await(self, number: int, is_so: Callable[[], bool]) -> None:
        """Wait for an engine; what takes too long hangs."""
        until = time.monotonic() + HANGS_S
        while not is_so():
            if is_over(psutil.Process(self._running[number])):
                raise RuntimeError(f"engine {number} ended by itself")
            if time.monotonic() > until:
                self.events["hung"] += 1
                break
            time.sleep(0.005)

    def kill(self, kind: str) -> None:
        """Kill one of a kind, after a while, and start what is missing."""
        rng, number = self._rng, self._rng.randrange(NUM_ENGINES)
        if kind == "starting":
            time.sleep(rng.uniform(0, 3))
            kind = "engine" if self._is_ready(number) else kind
        else:
            self._await(number, lambda: self._is_ready(number))
            self._await_answers(number)
            time.sleep(rng.expovariate(2))
        if kind == "keeper":
            self._kill_keeper()
        else:
            self._kill_engine(number, kind)
            self._begin(number)
        self.events[kind] += 1

    def _await_answers(self, number: int) -> None:
        before = int(self.counts[number, ANSWERS])
        self._await(number, lambda: self.counts[number, ANSWERS] > before)

    def _kill_engine(self, number: int, kind: str) -> None:
        engine = psutil.Process(self._running.pop(number))
        processes = [engine, *engine.children(recursive=True)]
        was_ready = self._is_ready(number)
        of_ranks = self.counts[number, RANKS : RANKS + self._num_ranks].tolist()
        os.kill(self._rng.choice(of_ranks) if kind == "rank" else engine.pid, 9)
        # With one rank dead, the engine ends by itself, and its ranks with it.
        until = time.monotonic() + HANGS_S
        while not all(map(is_over, processes)):
            if time.monotonic() > until:
                self.events["left over"] += 1
                break
            time.sleep(0.005)
        begun = time.monotonic()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        os.waitpid(engine.pid, 0)
        if was_ready and self._is_kept:
            self._await_nothing_left(int(self.counts[number, PARTITION]), begun)

    def _await_nothing_left(self, number: int, begun: float) -> None:
        """Until no slot is pinned for the engine that had a partition."""
        files = Path(f"/proc/{self._keeper.process.pid}/fd").iterdir()
        (path,) = (p for p in files if "kv-tier-index" in os.readlink(p))
        each = POOL_BYTES // NUM_ENGINES // (2 << 20) * (2 << 20)
        fd = os.open(path, os.O_RDWR)
        partitions = map_partitions(fd, Geometry(NUM_ENGINES, each))
        os.close(fd)
        while any(partition._pins[:, number].any() for partition in partitions):
            if time.monotonic() > begun + HANGS_S:
                raise RuntimeError(f"pins of engine {number} are left")
            time.sleep(0.001)
        self.slowest_s = max(self.slowest_s, time.monotonic() - begun)

    def _kill_keeper(self) -> None:
        """Engines go on without it, until a new one needs the memory."""
        self._keeper.end()
        self._is_kept = False
        for number in range(NUM_ENGINES):
            if self._is_ready(number):
                self._await_answers(number)
        for number in self._rng.sample(range(NUM_ENGINES), NUM_ENGINES):
            self._kill_engine(number, "engine")
        self._begin_all()

    def close(self) -> None:
        for number in list(self._running):
            self._kill_engine(number, "engine")
        self._keeper.end(signal.SIGTERM)


def main(
    model: str, folder: Path, result: Path, num_kills: int, seed: int, num_ranks: int
) -> None:
    rng, end = Random(seed), time.monotonic() + MAX_S
    kinds = KINDS | ({"rank": 5} if num_ranks > 1 else {})
    crowd = Crowd(model, folder, num_ranks, rng)
    try:
        for _ in range(num_kills):
            if time.monotonic() > end:
                break
            crowd.kill(*rng.choices([*kinds], [*kinds.values()]))
    finally:
        crowd.close()
    sums = crowd.counts.sum(axis=0).tolist()
    total = {"hung": 0, "left over": 0, **crowd.events, **dict(zip(NAMES, sums))}
    result.write_text(json.dumps(total | {"slowest_s": round(crowd.slowest_s, 3)}))


if __name__ == "__main__":
    given = sys.argv[1:]
    main(given[0], Path(given[1]), Path(given[2]), *map(int, given[3:]))
