# SPDX-License-Identifier: Apache-2.0
"""Time to first token of what lies below the host, beside computing it.

    PYTHONPATH=.:scripts:scripts/bench python scripts/bench/below_ttft.py [PART …]

Serves a model of random weights on this machine's CPU, 36 million parameters, with
prompts of 1,024 tokens; measures take turns, and medians are compared.

engines    What one server has computed, another one is asked for, both ways.
replicas   The same with two data parallel engines of one server.
slow       Files that take as long as computing, longer, and so long that it hurts,
           beside a server without a tier. The first request of each delay is told
           apart: it meets a store of which the engine thinks better. How long requests
           wait before they are computed is told too, which a busy machine hardly
           changes.
stopped    A Valkey server that stands still (SIGSTOP) and goes on, in turns: requests
           meanwhile, and the scheduler's steps.

The exit status is 1 if a bar is missed.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from suite.model import LLAMA, Shape, write_model

from tests.e2e.model import make_tokenizer
from tests.e2e.release import REPLICAS_ENVIRONMENT, UNBOUND, cache_bytes
from tests.e2e.server import Server
from tests.unit.stores.servers import Valkey

SHAPE = Shape(512, 1536, 12, 8, 2, 64, 1024, 4096)
BLOCK = 32
DEVICE_BLOCKS, HOST_BLOCKS = 160, 256
FOUND_BAR, SLOW_BAR, STEP_BAR = 0.5, 1.05, 1.05
GiB = 1 << 30


class Bench:
    """Servers of one model in one folder.

    Args:
        folder: Of all that is written.
        rounds: How often each thing is measured.
        blocks: Full blocks of a prompt.

    """

    def __init__(self, folder: Path, rounds: int, blocks: int) -> None:
        self.folder, self.rounds, self.blocks = folder, rounds, blocks
        self.model = folder / "model"
        write_model(self.model, SHAPE, "cpu", LLAMA)
        make_tokenizer(self.model)
        self.is_good = True
        self._num_logs = 0

    @contextmanager
    def serving(
        self, entry: dict[str, Any] | None, *flags: str, **env: str
    ) -> Iterator[Server]:
        """A server, which is killed; without a tier if there is no entry."""
        block_bytes = BLOCK * SHAPE.kv_bytes_per_token(4)
        size = DEVICE_BLOCKS * block_bytes
        options = [
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"),
            *("--max-num-batched-tokens", "2048", "--block-size", str(BLOCK)),
            *("--num-gpu-blocks-override", str(DEVICE_BLOCKS), *cache_bytes(size)),
            *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
        ]
        if entry is not None:
            entry = entry | {"debug": {"store_from_use": 1, **entry.get("debug", {})}}
            config = {
                "secondary_tiers": [entry],
                # At once, so that what is below does not depend on what is evicted.
                "debug": {"store_policy": "write_through"},
            }
            options += ["--kv-offloading-backend", "core", "--kv-offloading-size"]
            options += [repr(HOST_BLOCKS * block_bytes / GiB)]
            options += ["--kv-offloading-config", json.dumps(config)]
        env = os.environ | UNBOUND | {"PYTHONHASHSEED": "0"} | env
        self._num_logs += 1
        log = self.folder / f"log{self._num_logs}"
        server = Server(self.model, [*options, *flags], env, log)
        try:
            yield server
        finally:
            server.kill()

    def files(self, name: str) -> dict[str, Any]:
        root = str(self.folder / name)
        debug = {"deadline_ms": 20_000}
        return {"type": "fs", "root_dir": root, "max_gib": 2, "debug": debug}

    def prompt(self, *seed: int | str) -> list[int]:
        """Of full blocks and a token."""
        num_tokens = self.blocks * BLOCK + 1
        return random.Random(str(seed)).choices(range(3, SHAPE.vocab), k=num_tokens)

    def tell(self, what: str, ratio: float, bar: float) -> None:
        self.is_good &= ratio <= bar
        print(f"  {what}: {ratio:.3f} (bar {bar})", flush=True)


def ask(
    server: Server, tokens: Sequence[int], replica: int | None = None
) -> tuple[float, int]:
    """Seconds until its first token, and tokens of it that were cached."""
    begun = time.perf_counter()
    answer = server.complete(list(tokens), replica, max_tokens=1)
    seconds = time.perf_counter() - begun
    details = answer["usage"]["prompt_tokens_details"] or {}
    return seconds, details.get("cached_tokens") or 0


def written(server: Server) -> float:
    """Blocks that all engines of a server have written below."""
    return sum(server.metrics("vllm:kv_tier_secondary_stored_blocks_total").values())


def until_written(
    server: Server, num_blocks: float, replica: int | None = None
) -> None:
    """Short requests, whose steps begin and end writes, until so many are written."""
    limit = time.monotonic() + 120
    while written(server) < num_blocks:
        assert time.monotonic() < limit, "not all is written"
        server.complete([3, 4, 5], replica, max_tokens=2, ignore_eos=True)


def share(bench: Bench, sides: Sequence[tuple[Server, int | None]], what: str) -> None:
    """What one side computed, the other one is asked for."""

    def compute(side: tuple[Server, int | None], *seed: int | str) -> float:
        server, replica = side
        before = written(server)
        seconds, cached = ask(server, bench.prompt(what, *seed), replica)
        assert not cached, "it was cached"
        # Only an engine that has steps writes: nobody else's make it do so.
        until_written(server, before + bench.blocks, replica)
        return seconds

    for i, side in enumerate(sides):
        compute(side, "warm-up", i)
    computed, found = [], []
    for i in range(bench.rounds):
        computed.append(compute(sides[i % 2], i))
        server, replica = sides[1 - i % 2]
        # What it finds is in its host then, and is not written again.
        seconds, cached = ask(server, bench.prompt(what, i), replica)
        assert cached == bench.blocks * BLOCK, f"{cached} tokens were found"
        found.append(seconds)
    a, b = statistics.median(computed), statistics.median(found)
    print(f"{what}: computed {a * 1e3:.0f} ms, found {b * 1e3:.0f} ms")
    ratios = [y / x for x, y in zip(computed, found)]
    bench.tell("of computing", statistics.median(ratios), FOUND_BAR)


def engines(bench: Bench) -> None:
    entry = bench.files("engines")
    with bench.serving(entry) as one, bench.serving(entry) as other:
        share(bench, [(one, None), (other, None)], "engines")


def replicas(bench: Bench) -> None:
    flags = ("--data-parallel-size", "2")
    with bench.serving(bench.files("replicas"), *flags, **REPLICAS_ENVIRONMENT) as s:
        share(bench, [(s, 0), (s, 1)], "replicas")


def slow(bench: Bench) -> None:
    delay_file = bench.folder / "delay"
    delay_file.write_text("0")
    entry = bench.files("slow") | {
        "type": "slow_store.SlowConfig",
        "delay_file": str(delay_file),
        "debug": {"deadline_ms": 5000},
    }
    parts = (0.0, 0.5, 1.5, 4.0, 30.0, 0.0)
    stored = [(p, i) for p in range(len(parts)) for i in range(bench.rounds)]
    with bench.serving(entry) as server:
        for n, seed in enumerate(stored):
            ask(server, bench.prompt("slow", *seed))
            until_written(server, (n + 1) * bench.blocks)
    with bench.serving(entry) as server, bench.serving(None) as plain:
        for i in range(3):
            seconds = ask(server, bench.prompt("warm-up", i))[0]
            ask(plain, bench.prompt("warm-up", i))
        print(f"slow: {seconds * 1e3:.0f} ms to compute")
        for p, part in enumerate(parts):
            if p == len(parts) - 1:
                # It is tried again by then (`remeasure_s`).
                time.sleep(11)
            delay_file.write_text(str(part * seconds * 1e3 / bench.blocks))
            times: list[tuple[float, float, int]] = []
            waits = [queue_s(server)]
            for i in range(bench.rounds):
                computed = ask(plain, bench.prompt("slow", p, i))[0]
                times.append((computed, *ask(server, bench.prompt("slow", p, i))))
                waits.append(queue_s(server))
            (a, b, n), *rest = times
            waited, *others = (end - begin for begin, end in pairwise(waits))
            print(
                f" an object takes {part:g} of computing it: first {b / a:.2f} "
                f"({n} tokens found), later {sum(n for _, _, n in rest) / len(rest):g}"
                f"; waited before: {waited * 1e3:.0f} ms, later "
                f"{statistics.median(others) * 1e3:.0f} ms"
            )
            later = [b / a for a, b, _ in rest]
            bench.tell("of computing, later", statistics.median(later), SLOW_BAR)
            if not any(n for _, _, n in rest):
                computed = statistics.median(a for a, _, _ in rest)
                part_waited = statistics.median(others) / computed
                bench.tell("  by what they waited", 1 + part_waited, SLOW_BAR)


def stopped(bench: Bench) -> None:
    valkey = Valkey()
    valkey.start()
    steps = bench.folder / "steps"
    deadline_s = 1.0
    entry = valkey.entry | {"debug": {"deadline_ms": deadline_s * 1e3}}
    timed = ("--scheduler-cls", "timed_scheduler.TimedScheduler")
    env = {"KV_TIER_STEPS": str(steps)}
    try:
        with bench.serving(entry, *timed, **env) as server:
            for i in range(2 * bench.rounds):
                ask(server, bench.prompt("stopped", i))
                until_written(server, (i + 1) * bench.blocks)
        with bench.serving(entry, *timed, **env) as server:
            ask(server, bench.prompt("warm-up"))
            added, ratios = [], []
            for i in range(bench.rounds):
                alive = decode(server, steps)
                found = ask(server, bench.prompt("stopped", 2 * i))[1]
                valkey.send("server", signal.SIGSTOP)
                # The first of them finds it out; what is there, and what is not.
                waits = [
                    queued(server, bench.prompt("stopped", 2 * i + 1, *seed))
                    for seed in ([], ["a"], ["b"], ["c"])
                ]
                ratios.append(decode(server, steps) / alive)
                valkey.send("server", signal.SIGCONT)
                added += waits
                print(
                    f"  {found} tokens found, then stopped: waited "
                    f"{[round(s * 1e3) for s in waits]} ms; steps {ratios[-1]:.3f}",
                    flush=True,
                )
                # Until it is tried again.
                time.sleep(11)
        bench.tell("longest wait, of the deadline", max(added) / deadline_s, 1.0)
        bench.tell("schedule()", statistics.median(ratios), STEP_BAR)
    finally:
        valkey.close()


def decode(server: Server, steps: Path) -> float:
    """Median seconds of `schedule()` while a request decodes."""
    before = len(steps.read_text().splitlines())
    server.complete([3, 4, 5], max_tokens=400, ignore_eos=True)
    lines = steps.read_text().splitlines()[before:]
    return statistics.median(float(line.split()[0]) for line in lines)


def queued(server: Server, tokens: list[int]) -> float:
    """Seconds that a request waits until it is scheduled."""
    before = queue_s(server)
    server.complete(tokens, max_tokens=1)
    return queue_s(server) - before


def queue_s(server: Server) -> float:
    """Seconds that all requests have waited."""
    name = "vllm:request_queue_time_seconds_sum"
    return server.metrics(name)[name]


PARTS = {f.__name__: f for f in (engines, replicas, slow, stopped)}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=32, help="of 32 tokens, a prompt")
    args = parser.parse_args()
    # Servers are sessions of their own, and end with this block.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = Bench(folder, args.rounds, args.blocks)
        for part in args.parts:
            PARTS[part](bench)
        return 0 if bench.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
