# SPDX-License-Identifier: Apache-2.0
"""The longest step of the scheduler's part of the tier, in situations that clients can
bring about.

    PYTHONPATH=. build/env/v0.32.0/bin/python scripts/bench/worst_step.py [NAME …]

Each situation is a generator that makes steps of a pool. What lies between two `yield`s
is timed, if the first of them yields True; what follows the last one is not. For each
situation one line is printed with its longest step and the step in the middle, in
milliseconds; the exit status is 1 if one was longer than --limit.

The clock is that of the thread's CPU time, so that other processes do not count.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from time import thread_time
from typing import Any
from weakref import ref

from tests.unit.hints.test_conversations import Turn
from tests.unit.tier import Tier
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_tier.hints.tracker import KEYS_PER_STEP, owner_of

Steps = Iterator[bool]
SITUATIONS: dict[str, Callable[[int], Steps]] = {}
"""By name: makes steps for so many slots."""


def situation(make: Callable[[int], Steps]) -> Callable[[int], Steps]:
    """Registers a function of the number of slots under its name."""
    SITUATIONS[make.__name__] = make
    return make


def timed(steps: Steps) -> list[float]:
    """Milliseconds of each step that is to be timed."""
    times: list[float] = []
    is_timed = False
    while True:
        begin = thread_time()
        try:
            next_is_timed = next(steps)
        except StopIteration:
            # With the last step all that was made for the situation is given back.
            return times
        if is_timed:
            times.append(1e3 * (thread_time() - begin))
        is_timed = next_is_timed


def started() -> None:
    """An engine has started: as it does, except what is there from Python's garbage
    collection. All that requests bring is collected as in an engine."""
    gc.collect()
    gc.freeze()


def main() -> int:
    """Run situations. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--slots", type=int, default=200_000)
    parser.add_argument("--limit", type=float, default=20.0, help="milliseconds")
    args = parser.parse_args()
    is_late = False
    for name in args.names or SITUATIONS:
        times = sorted(timed(SITUATIONS[name](args.slots)))
        worst, middle = times[-1], times[len(times) // 2]
        is_late |= worst > args.limit
        print(f"{name:32} worst {worst:8.2f} ms  median {middle:7.2f} ms", flush=True)
        gc.unfreeze()
    return int(is_late)


# ------------------------------------------------------------------ hints of clients

STORES = 256
"""Blocks that a step stores: the prompts of 4,096 tokens in blocks of 16."""


def key_of(i: int) -> Any:
    return b"%036d" % i


def full_tier(num_slots: int, **config: Any) -> Tier:
    """A tier with a block in each slot, of which nobody has said anything."""
    tier = Tier(1000, num_slots, **{"eviction_policy": "proven"} | config)
    started()
    for i in range(num_slots):
        tier.pool.host.insert((key_of(i),), None, 1)
        if i % 1000 == 0:
            tier.pool.host.unpin_all()
    tier.pool.host.unpin_all()
    return tier


def store(tier: Tier, first: int, num: int = STORES) -> None:
    """What a step does that stores blocks nobody has seen."""
    tier.begin()
    for i in range(first, first + num):
        tier.pool.host.insert((key_of(i),), None, 2)
    tier.end()


@situation
def release_of_all_slots(num_slots: int) -> Steps:
    """One client says that the conversation that filled every slot is over."""
    tier = full_tier(num_slots)
    releasing = tier.pool.conversations
    for i in range(num_slots):
        releasing._sole_users.record_computed(key_of(i), owner_of("agent", None))
    tier.idle()
    yield True
    told = releasing.end_conversation("agent", None)
    assert told["released_blocks"] == num_slots
    for step in range(num_slots // KEYS_PER_STEP + 2):
        yield True
        store(tier, num_slots + step * STORES)


@situation
def release_while_written_below(num_slots: int) -> Steps:
    """A quarter of the slots is being written to a tier below, and released."""
    tier = full_tier(num_slots)
    host = tier.pool.host
    held = [slot for i in range(num_slots // 4) if (slot := host.get(key_of(i)))]
    host.hold(0, [slot.index for slot in held], [slot.keys[0] for slot in held])
    for slot in held:
        host.release(slot)
    for step in range(40):
        yield True
        store(tier, num_slots + step * STORES)


@situation
def oldest_are_written_below(num_slots: int) -> Steps:
    """As many of the next victims as can be are being written to a tier below."""
    tier = full_tier(num_slots)
    host = tier.pool.host
    held = [slot for i in range(num_slots // 4) if (slot := host.get(key_of(i)))]
    host.hold(0, [slot.index for slot in held], [slot.keys[0] for slot in held])
    for step in range(40):
        yield True
        store(tier, num_slots + step * STORES)


def retained(num_slots: int, ttl: float, priority: int = 75) -> Tier:
    """A tier in whose slots everything is retained for some time."""
    tier = full_tier(num_slots)
    hinted = tier.pool.retention._wrap()
    for i in range(num_slots):
        tier.pool.retention.key_hints.update(
            key_of(i), priority, tier.now + ttl + i % 7, "t"
        )
        hinted.update(key_of(i))
    return tier


@situation
def all_is_retained(num_slots: int) -> Steps:
    """Prompts with Anthropic's cache_control fill the slots, and more of them come."""
    tier = retained(num_slots, 300.0)
    for step in range(5 * num_slots // STORES):
        first = num_slots + step * STORES
        tier.now += 0.01
        for i in range(first, first + STORES):
            until = tier.now + 300 + i % 7
            tier.pool.retention.key_hints.update(key_of(i), 75, until, "t")
        yield True
        store(tier, first)


@situation
def retained_expires_at_once(num_slots: int) -> Steps:
    """What was retained expires in a quiet time, some of it after it was used."""
    tier = retained(num_slots, 300.0)
    host, said = tier.pool.host, tier.pool.retention.key_hints
    first = num_slots
    while len(tier.pool.retention.hinted.kept) < num_slots // 3:  # type: ignore[union-attr]
        store(tier, first)
        first += STORES
    # Half of it is said again, and stays.
    for i in range(0, num_slots, 2):
        if host.get(key_of(i)):
            said.update(key_of(i), 75, tier.now + 10_000, "t")
    tier.now += 1000
    for _ in range(60):
        yield True
        store(tier, first)
        first += STORES


@situation
def low_expires_at_once(num_slots: int) -> Steps:
    """What was to go first is to do so no longer, in all slots."""
    tier = retained(num_slots, 300.0, priority=10)
    tier.now += 1000
    for step in range(60):
        yield True
        store(tier, num_slots + step * STORES)


def long_prompt(num_blocks: int, name: str, **hints: Any) -> Any:
    turn = Turn(name, "", **hints)
    turn.block_hashes = [BlockHash(b"%32d" % i) for i in range(num_blocks)]
    turn.num_prompt_tokens = 16 * num_blocks
    return turn


@situation
def prewarm_of_a_long_prompt(num_slots: int) -> Steps:
    """A prewarm of a million tokens comes to the head of the queue."""
    tier = Tier(1000, num_slots)
    started()
    for n in range(5):
        turn = long_prompt(62_500, str(n), prewarm=True)
        yield True
        tier.begin()
        tier.pool.is_loading(turn, True)
        tier.end()
        yield False


@situation
def waiting_with_max_load_tokens(num_slots: int) -> Steps:
    """50 requests of a million tokens wait, and may load half of it."""
    tier = Tier(1000, num_slots)
    started()
    turns = [long_prompt(62_500, str(n), max_load_tokens=500_000) for n in range(50)]
    for turn in turns:
        tier.begin()
        tier.pool.is_loading(turn, True)
        tier.end()
    for _ in range(20):
        yield True
        tier.begin()
        for turn in turns:
            tier.pool.is_loading(turn, True)
        tier.end()


@situation
def end_of_a_long_prompt_that_goes_first(num_slots: int) -> Steps:
    """A request of a million tokens ends, all of which is to go first."""
    tier = Tier(1000, num_slots)
    started()
    turn = long_prompt(62_500, "1", retain={"priority": 1})
    tier.begin()
    tier.pool.is_loading(turn, False)
    for i in range(62_500):
        tier.pool.retention.key_hints.update(key_of(i), 1, tenant="t")
    lows = {key_of(i): 1 for i in range(62_500)}
    tier.pool.retention._low["1"] = lows
    releasing = tier.pool.conversations
    speaker = releasing.follow(turn)
    assert speaker is not None
    releasing._last["1"] = ref(turn), speaker
    tier.end()
    turn.has_ended = True
    releasing.record_freed([])
    for _ in range(40):
        yield True
        tier.idle()


if __name__ == "__main__":
    sys.exit(main())
