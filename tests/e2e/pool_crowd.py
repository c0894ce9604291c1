# SPDX-License-Identifier: Apache-2.0
"""Real engines that share a pool. They, their ranks and the keeper are killed at random
moments, and started again, and the keeper is upgraded: `python -m tests.e2e.pool_crowd
FOLDER --kills 200`.

An engine is a fork of this process, and a rank one of its engine, so that both are
there after some seconds: this process has imported everything, and never makes an
engine. Prints what happened as JSON, and ends with an error if an answer was wrong, a
request hung, or a partition was not free within a second of the end of its engine.
"""

import argparse
import ctypes
import json
import mmap
import multiprocessing
import os
import selectors
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from vllm.v1.executor import multiproc_executor
from vllm.v1.kv_tier.keeper.__main__ import main as run_keeper
from vllm.v1.kv_tier.keeper.client import Member, PoolRefused

from ..settings import options
from ..unit.keeper.crowd import start
from .engine import Engine
from .jobs import COMMON, SMALL, device
from .model import make_llama
from .pool import KeeperProcess
from .release import known
from .secondary import prompts
from .server import SHM, pids_of_session, shared_memory

GIB_OF_AN_ENGINE = 2 / 1024
"""Two engines hold less than all prompts, so that slots are reused while neighbours
read them."""
PROMPTS = prompts(900, 24)
MAX_TOKENS = 4
PAUSE_S = 0.02
"""Mean time between the requests to an engine: ranks that wait take all processors."""
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    # A fork has no threads of its own.
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # A rank whose neighbour is dead computes on until it is killed.
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
}
"""What is read before this module is."""
READY, ANSWERS, WRONG, HITS, FROM_NEIGHBOURS, ADOPTED = range(6)
NAMES = ("starts", "answers", "wrong", "hits", "from neighbours", "adopted")
REFUSED, LATE = 3, 4
"""Exit codes of engines that found no keeper, or another one than at first."""
MESSAGES = {
    "no keeper answers there": REFUSED,
    "has another engine by now": LATE,
}
HANGS_S = 60
"""An engine that answers nothing for so long hangs, and so does one that does not end
although a rank is dead."""
ENDS_S = 15
"""So long after the end of a process the others of its engine have to end."""
CAPACITY_S = 1.0
"""Within it a partition is to be free."""
KINDS = {"engine": 0.4, "rank": 0.35, "upgrade": 0.15, "keeper": 0.1}
_PR_SET_PDEATHSIG = 1
# Then there are no more kills.
MAX_S = float(os.environ.get("KV_TIER_POOL_SECONDS", "3600"))


# ------------------------------------------------------------------------- an engine


def engine(model: Path, socket: Path | None, num_ranks: int) -> Engine:
    llm: dict[str, Any] = {**COMMON, **device(SMALL, num_ranks)}
    if socket is not None:
        llm["kv_offloading_backend"] = "core"
        llm["kv_offloading_config"] = options(
            pool=str(socket), store_policy="write_through", store_from_use=1
        )
    return Engine(model=str(model), **known(llm))


def answers(engine: Engine, numbers: list[int]) -> list[tuple[list[int], int]]:
    asked = [PROMPTS[number] for number in numbers]
    found = engine.generate(asked, max_tokens=MAX_TOKENS)
    return [(answer["tokens"], answer["cached_tokens"]) for answer in found]


def be_an_engine(log: Path) -> None:
    """End with this process's parent, have a session, and let ranks be forks: CPU
    engines start new interpreters, which takes long."""
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    multiproc_executor.get_mp_context = (  # type: ignore[attr-defined, assignment]
        lambda: multiprocessing.get_context("fork")
    )


class Shared:
    """What engines tell this process."""

    def __init__(self, num_engines: int) -> None:
        numbers = np.frombuffer(mmap.mmap(-1, 4096), np.int64)
        self.counts = numbers[: num_engines * 8].reshape(num_engines, 8)
        letters = np.frombuffer(mmap.mmap(-1, 4096), np.uint8)
        self.identities = letters[: num_engines * 32].reshape(num_engines, 32)
        self.rank_bytes = numbers[256:].reshape(-1, 4)[:num_engines]

    def ask(self, number: int, own: Engine, truth: list[list[int]], seed: int) -> None:
        """Ask an engine until it is killed."""
        counts, rng = self.counts[number], Random(seed)
        layout = own.core.scheduler.kv_cache_config.kv_tier
        place = layout.pool.lease.place()
        self.identities[number] = np.frombuffer(place.identity, np.uint8)
        self.rank_bytes[number, : len(place.rank_bytes)] = place.rank_bytes
        counts[ADOPTED] += len(own.pool.host)
        counts[READY] += 1
        seen = 0.0
        while True:
            numbers = rng.sample(range(len(PROMPTS)), rng.randint(1, 4))
            for asked, (tokens, cached) in zip(numbers, answers(own, numbers)):
                counts[ANSWERS] += 1
                counts[HITS] += cached > 0
                counts[WRONG] += tokens != truth[asked]
            time.sleep(rng.expovariate(1 / PAUSE_S))
            total = own.counters()["kv_tier_neighbour_blocks"]
            counts[FROM_NEIGHBOURS] += int(total - seen)
            seen = total


def live(make: Callable[[], Engine], ask: Callable[[Engine], None]) -> None:
    """Be an engine until a process is killed."""
    try:
        ask(make())
    except Exception as e:
        for message, code in MESSAGES.items():
            if message in str(e):
                os._exit(code)
        # Upstream ends the other ranks.
        for thread in threading.enumerate():
            if thread.name == "MultiprocWorkerMonitor":
                thread.join()
        raise


def ask_alone(model: Path, num_ranks: int) -> list[list[int]]:
    """What an engine without a tier answers."""
    reads, writes = os.pipe()

    def body() -> None:
        be_an_engine(model.parent / "alone.log")
        alone = engine(model, None, num_ranks)
        truth = [answers(alone, [n])[0][0] for n in range(len(PROMPTS))]
        os.write(writes, json.dumps(truth).encode())
        os._exit(0)

    pid = start(body)
    os.close(writes)
    truth: list[list[int]] = json.loads(os.read(reads, 1 << 16))
    os.waitpid(pid, 0)
    assert len({*map(tuple, truth)}) == len(PROMPTS), "answers do not differ"
    return truth


# ------------------------------------------------------------------------- keepers


class Fork:
    """A fork of this process, in place of a command."""

    def __init__(self, body: Callable[[], None]) -> None:
        self.pid = start(body)
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            assert time.monotonic() < until
            time.sleep(0.001)
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class ForkedKeeper(KeeperProcess):
    """A keeper that need not import anything."""

    def _run(self, flags: list[str], log: int) -> Fork:
        def body() -> None:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.argv[1:] = flags
            run_keeper()
            os._exit(0)

        return Fork(body)


# ------------------------------------------------------------------------- the crowd


@dataclass
class Running:
    """An engine."""

    pid: int
    keeper: KeeperProcess
    """The newest one when it began to start."""
    ready_before: int
    """How often its predecessors were."""


class Watch:
    """The processes of an engine at its end."""

    def __init__(self, session: int) -> None:
        self.pids = pids_of_session(session)
        self._session = session
        self._selector = selectors.DefaultSelector()
        self._files = shared_memory(self.pids)
        for pid in self.pids:
            with suppress(ProcessLookupError):
                self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ)

    def ranks(self, leader: int) -> list[int]:
        """Processes that are ranks."""
        found = []
        for pid in self.pids:
            with suppress(OSError):
                if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return [pid for pid in found if pid != leader]

    def have_ended(self, timeout_s: float) -> bool:
        """Wait for them."""
        until = time.monotonic() + timeout_s
        while self._selector.get_map():
            for key, _ in self._selector.select(max(until - time.monotonic(), 0)):
                self._selector.unregister(key.fileobj)
                os.close(key.fd)
            if time.monotonic() >= until:
                return False
        # Some may have been forked meanwhile.
        while pids_of_session(self._session):
            if time.monotonic() >= until:
                return False
            time.sleep(0.002)
        return True

    def close(self) -> None:
        for key in [*self._selector.get_map().values()]:
            os.close(key.fd)
        self._selector.close()
        for name in self._files:
            # What upstream leaves there would fill the memory.
            (SHM / name).unlink(missing_ok=True)


class Crowd:
    """Engines with the given numbers of ranks, and their keeper."""

    def __init__(self, folder: Path, num_ranks: Sequence[int], seed: int) -> None:
        self._folder, self._num_ranks, self._rng = folder, num_ranks, Random(seed)
        self._model = make_llama(folder / "model")
        self._truth = {n: ask_alone(self._model, n) for n in {*num_ranks}}
        self._shared = Shared(len(num_ranks))
        # Each kind comes once before it is drawn. The next keeper has nothing to adopt.
        self._due = [*reversed(KINDS)]
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = {}
        self._keeper = self._start_keeper()
        self._running: dict[int, Running] = {}
        for number in range(len(num_ranks)):
            self._begin(number)
        for number in self._running:
            self._wait_for_answers(number)

    def _start_keeper(self) -> KeeperProcess:
        num = len(self._num_ranks)
        return ForkedKeeper(self._folder, num * GIB_OF_AN_ENGINE, num)

    def _begin(self, number: int) -> None:
        seed, num_ranks = self._rng.randrange(1 << 30), self._num_ranks[number]
        truth, shared = self._truth[num_ranks], self._shared
        path, model = self._keeper.socket, self._model

        log = self._folder / f"engine{number}.log"

        def body() -> None:
            be_an_engine(log)
            live(
                lambda: engine(model, path, num_ranks),
                lambda own: shared.ask(number, own, truth, seed),
            )

        before = int(shared.counts[number, READY])
        self._running[number] = Running(start(body), self._keeper, before)

    def _is_ready(self, number: int) -> bool:
        ready = self._shared.counts[number, READY]
        return bool(ready > self._running[number].ready_before)

    def _check(self) -> None:
        """Start engines again that have ended: only those may that lost the keeper."""
        for number, running in [*self._running.items()]:
            pid, status = os.waitpid(running.pid, os.WNOHANG)
            if not pid:
                continue
            code = os.waitstatus_to_exitcode(status)
            has_lost = running.keeper.process.poll() is not None
            is_right = has_lost and code in MESSAGES.values()
            self.counts["refused" if is_right else "ended"] += 1
            print("engine", number, "ended with", code, file=sys.stderr, flush=True)
            self._begin(number)

    def _wait(self, until: Callable[[], bool], what: str) -> bool:
        limit = time.monotonic() + HANGS_S
        while not until():
            self._check()
            if time.monotonic() > limit:
                self.counts["hung"] += 1
                print("hangs:", what, file=sys.stderr, flush=True)
                return False
            time.sleep(0.001)
        return True

    def _wait_for_answers(self, number: int) -> None:
        self._wait(lambda: self._is_ready(number), f"the start of {number}")
        before = int(self._shared.counts[number, ANSWERS])
        self._wait(
            lambda: bool(self._shared.counts[number, ANSWERS] != before),
            f"a request to {number}",
        )

    def _note(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    # --------------------------------------------------------------------- kills

    def kill(self) -> None:
        """Kill a process, or upgrade the keeper, at a random moment."""
        if self._due:
            kind = self._due.pop()
        else:
            kind = self._rng.choices([*KINDS], [*KINDS.values()])[0]
        if kind == "keeper":
            self._kill_keeper()
            return
        if kind == "upgrade":
            time.sleep(self._rng.uniform(0, 2))
            begun = time.monotonic()
            self._keeper.succeed()
            self._note("upgrade of the keeper", time.monotonic() - begun)
            return
        numbers = [n for n, num in enumerate(self._num_ranks) if num > 1]
        if kind == "engine" or not numbers:
            numbers = [*self._running]
        number = self._rng.choice(numbers)
        if self._rng.random() < 0.7:
            self._wait_for_answers(number)
            time.sleep(self._rng.expovariate(2))
        else:
            # It may die while it starts.
            time.sleep(self._rng.uniform(0, 3))
        self._check()
        self._kill_process(number, kind)
        self._begin(number)

    def _count_kill(self, name: str) -> None:
        self.counts["kills"] += 1
        self.counts[f"kills of a {name}"] += 1
        print(self.counts["kills"], name, file=sys.stderr, flush=True)

    def _kill_process(self, number: int, kind: str) -> None:
        """Kill an engine, or one of its ranks, and wait for the end of all of it."""
        running = self._running[number]
        watch = Watch(running.pid)
        ranks = watch.ranks(running.pid)
        victim = running.pid
        if kind == "rank" and ranks:
            victim = self._rng.choice(ranks)
        name = "engine" if victim == running.pid else "rank"
        self._count_kill(name)
        self.counts["kills while starting"] += not self._is_ready(number)
        begun = time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        if not watch.have_ended(ENDS_S):
            # As a service manager does.
            left = pids_of_session(running.pid)
            self.counts["left by a killed " + name] += 1
            print("left:", number, len(left), file=sys.stderr, flush=True)
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert watch.have_ended(HANGS_S)
        watch.close()
        _, status = os.waitpid(running.pid, 0)
        self._note(f"{name} until all processes have ended", time.monotonic() - begun)
        code = os.waitstatus_to_exitcode(status)
        is_right = name == "rank" or code in (-signal.SIGKILL, *MESSAGES.values())
        self.counts["ended"] += not is_right
        if running.keeper is self._keeper and self._keeper.process.poll() is None:
            self._note(f"{name} until its partition is free", self._free_again(number))

    def _free_again(self, number: int) -> float:
        """Seconds until another engine of the same kind gets a partition."""
        identity = self._shared.identities[number].tobytes()
        rank_bytes = [n for n in self._shared.rank_bytes[number].tolist() if n]
        begun = time.monotonic()
        while True:
            try:
                Member(str(self._keeper.socket), identity, rank_bytes).close()
                break
            except PoolRefused:
                if time.monotonic() - begun > 10 * CAPACITY_S:
                    break
                time.sleep(0.001)
        seconds = time.monotonic() - begun
        self.counts["not free in time"] += seconds > CAPACITY_S
        return seconds

    def _kill_keeper(self) -> None:
        """Engines go on, one that starts is refused, and the next keeper takes it."""
        time.sleep(self._rng.uniform(0, 2))
        self._keeper.end()
        self._count_kill("keeper")
        for number in self._running:
            if self._is_ready(number):
                self._wait_for_answers(number)
                self.counts["went on without a keeper"] += 1
        number = self._rng.randrange(len(self._num_ranks))
        self._kill_process(number, self._rng.choice(["engine", "rank"]))
        self._begin(number)
        _, status = os.waitpid(self._running.pop(number).pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self.counts["refused" if code == REFUSED else "not refused"] += 1
        begun = time.monotonic()
        self._keeper = self._start_keeper()
        self._note("start of a keeper", time.monotonic() - begun)
        self._begin(number)

    # --------------------------------------------------------------------- the end

    def control(self) -> None:
        """Spoil the memory: answers must be wrong then, or nothing was compared."""
        for number, running in [*self._running.items()]:
            if running.keeper is not self._keeper:
                self._kill_process(number, "engine")
                self._begin(number)
        for number in self._running:
            self._wait_for_answers(number)
        sums = self._shared.counts.sum(axis=0).tolist()
        self.counts.update(dict(zip(NAMES, sums)))
        self._keeper.spoil(1)
        self._wait(
            lambda: bool(self._shared.counts[:, WRONG].sum() > self.counts["wrong"]),
            "a wrong answer of spoilt memory",
        )
        sums = self._shared.counts.sum(axis=0).tolist()
        self.counts["wrong when spoilt"] = sums[WRONG] - self.counts["wrong"]

    def close(self) -> None:
        """Kill all, and see that all memory is free."""
        for number in [*self._running]:
            self._kill_process(number, "engine")
        begun = time.monotonic()
        path = str(self._keeper.socket)
        # One of another identity gets no partition that a pin is left in.
        members = [Member(path, b"other" * 6 + b"..", [4096]) for _ in self._num_ranks]
        seconds = time.monotonic() - begun
        self._note("all partitions free and unread", seconds)
        self.counts["not free in time"] += seconds > CAPACITY_S
        self._keeper.end()
        del members


def main() -> None:
    if not ENVIRONMENT.items() <= os.environ.items():
        command = [sys.executable, "-m", __spec__.name, *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | ENVIRONMENT)
    parser = argparse.ArgumentParser(prog="tests.e2e.pool_crowd", description=__doc__)
    parser.add_argument("folder", type=Path, help="an empty one")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 1, 2, 2], metavar="N"
    )
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    crowd = Crowd(args.folder, args.ranks, args.seed)
    begun = time.monotonic()
    try:
        while crowd.counts["kills"] < args.kills and time.monotonic() < begun + MAX_S:
            crowd.kill()
        crowd.control()
    finally:
        crowd.close()
    counts = crowd.counts
    seconds = {
        name: {
            "times": len(some),
            "median": round(statistics.median(some), 3),
            "max": round(max(some), 3),
        }
        for name, some in crowd.seconds.items()
    }
    print(json.dumps({**counts, "seconds": seconds}, indent=1))
    faults = ("wrong", "hung", "ended", "not free in time", "not refused")
    if any(counts[name] for name in faults):
        sys.exit("Something of it is wrong.")


if __name__ == "__main__":
    main()
