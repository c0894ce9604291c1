# SPDX-License-Identifier: Apache-2.0
"""Hits of a pool, of separate tiers, and of one engine with all the memory: no GPU.

    PYTHONPATH=scripts:scripts/bench python scripts/bench/pool_hits.py --seeds 0 1 2

Real schedulers in one process are asked the turns of `pool.py`, each by an engine drawn
at random. There is no model: steps take as long as those of an 8B model on an H200, by
clocks that are simulated, so that engines and clients are as far as they would be.
Copies have ended with their steps. Prints, for each seed and configuration, the part of
the tokens that was cached, and requests for each simulated second.
"""

import argparse
from collections.abc import Iterator

import numpy as np
from pool import Turn, Turns, add_turns
from scheduler_setup import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    make_request,
    make_scheduler,
    sampled,
)

from vllm.v1.kv_tier.config import KVTierConfig
from vllm.v1.kv_tier.keeper.client import Membership
from vllm.v1.kv_tier.keeper.partition import Partition, partition_bytes
from vllm.v1.kv_tier.layout import KVTierLayout, PoolLayout
from vllm.v1.kv_tier.plan import StepReport
from vllm.v1.request import Request

KINDS = ("pool", "separate", "one")
STEP_S, COMPUTED_PER_S, LOADED_PER_S = 0.008, 33_000, 260_000
"""Seconds of a step, and tokens that are computed and loaded in a second."""
IDENTITY = bytes(32)


class Engine:
    """A scheduler, and the time that its steps have taken.

    Args:
        args: Of the command line.
        num_slots: Of its host tier.
        member: Its part of a pool.

    """

    def __init__(
        self, args: argparse.Namespace, num_slots: int, member: Membership | None
    ) -> None:
        config = KVTierConfig(num_slots * BLOCK_BYTES)
        pool = None
        if member is not None:
            pool = PoolLayout(member, (BLOCK_SIZE,), num_ranks=1)
        longest = args.first[1] + args.turns * args.turn + args.answer
        self._scheduler = make_scheduler(
            num_blocks=args.blocks,
            max_num_seqs=64,
            max_num_batched_tokens=8192,
            max_model_len=longest + BLOCK_SIZE,
            kv_tier=KVTierLayout(config, num_slots, BLOCK_BYTES, pool=pool),
        )
        self.now = 0.0
        self._scheduler.kv_cache_manager.kv_tier.costs.clock = lambda: self.now
        self._requests: dict[str, Request] = {}
        # By request, in the order of their first steps.
        self.num_cached: dict[str, int] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._requests)

    def add(self, name: str, turn: Turn, num_tokens: int) -> None:
        request = make_request(name, turn.prompt, num_tokens)
        self._requests[name] = request
        self._scheduler.add_request(request)

    def step(self) -> list[str]:
        """Run a step. Returns the requests that have ended."""
        output = self._scheduler.schedule()
        plan = output.kv_tier_plan
        assert plan is not None
        for new in output.scheduled_new_reqs:
            self.num_cached.setdefault(new.req_id, new.num_computed_tokens)
        self.now += STEP_S
        self.now += output.total_num_scheduled_tokens / COMPUTED_PER_S
        self.now += len(plan.load_slots) * BLOCK_SIZE / LOADED_PER_S
        result = sampled(output)
        for i, name in enumerate(result.req_ids):
            request = self._requests[name]
            if request.num_computed_tokens < request.num_tokens:
                # A part of a prompt gives no token.
                result.sampled_token_ids[i] = []
        if plan.report_end:
            result.kv_tier_report = StepReport(ended=[plan.seq])
        self._scheduler.update_from_output(output, result)
        ended = [n for n, each in self._requests.items() if each.is_finished()]
        for name in ended:
            del self._requests[name]
        return ended

    def wait_until(self, now: float) -> None:
        """Nothing is to be computed until then."""
        if self.now < now:
            self.now = now
            if self._scheduler.has_requests():
                # To publish, or to unpin.
                self.step()


def start(args: argparse.Namespace, kind: str) -> list[Engine]:
    """Engines of a configuration, which have the same memory in sum."""
    num_engines = 1 if kind == "one" else args.engines
    num_slots = args.slots // num_engines
    if kind != "pool":
        return [Engine(args, num_slots, None) for _ in range(num_engines)]
    partitions = []
    for _ in range(num_engines):
        size = partition_bytes(num_slots)
        memory = np.zeros(size + 64, np.uint8)
        begin = -memory.ctypes.data % 64
        partition = Partition(memory[begin : begin + size], num_slots)
        partition.lock.create()
        partition.assign(IDENTITY, num_slots)
        partitions.append(partition)
    return [
        Engine(args, num_slots, Membership.take(partitions, i, IDENTITY, num_slots))
        for i in range(num_engines)
    ]


def play(
    args: argparse.Namespace, engines: list[Engine], turns: Iterator[Turn], num: int
) -> tuple[float, float]:
    """Ask so many turns, or all, by as many clients as there are.

    Returns:
        Part of the tokens that was cached, and simulated requests/s.

    """
    begun = max(engine.now for engine in engines)
    asked: dict[str, tuple[Turn, Engine]] = {}
    first = len(engines[0].num_cached)

    def ask(now: float) -> None:
        turn = next(turns, None) if len(asked) < num else None
        if turn is not None:
            engine = engines[turn.engine % len(engines)]
            if not engine.is_busy:
                engine.wait_until(now)
            name = f"{first}-{len(asked)}"
            asked[name] = turn, engine
            engine.add(name, turn, args.answer)

    for engine in engines:
        engine.wait_until(begun)
    for _ in range(args.clients):
        ask(begun)
    while busy := [engine for engine in engines if engine.is_busy]:
        engine = min(busy, key=lambda each: each.now)
        for _ in engine.step():
            ask(engine.now)
        for other in engines:
            if not other.is_busy:
                other.wait_until(engine.now)
    cached = sum(engine.num_cached[name] for name, (_, engine) in asked.items())
    tokens = sum(len(turn.prompt) for turn, _ in asked.values())
    took = max(engine.now for engine in engines) - begun
    return cached / tokens, len(asked) / took


def measure(args: argparse.Namespace, kind: str, seed: int) -> tuple[float, float]:
    """As `play`, after what all conversations have had before."""
    turns = Turns(argparse.Namespace(**vars(args) | {"seed": seed}))
    engines = start(args, kind)
    play(args, engines, turns.openings(), args.conversations)
    return play(args, engines, iter(turns), args.num)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_turns(parser)
    add = parser.add_argument
    add("--configs", nargs="*", default=KINDS, choices=KINDS)
    add("--engines", type=int, default=2)
    add("--slots", type=int, default=32_768, help="of all engines together")
    add("--blocks", type=int, default=8192, help="on each device")
    add("--num", type=int, default=600, help="turns that count")
    add("--size", default="8b", help=argparse.SUPPRESS)
    add("--seeds", type=int, nargs="*", default=[0])
    return parser.parse_args(argv)


def main() -> None:
    args = arguments()
    for seed in args.seeds:
        for kind in args.configs:
            cached, rate = measure(args, kind, seed)
            print(f"seed {seed}, {kind}: {cached:.1%} cached, {rate:.2f} requests/s")


if __name__ == "__main__":
    main()
