# SPDX-License-Identifier: Apache-2.0
"""The longest step of the scheduler's part of the tier, in situations that clients can
bring about.

    PYTHONPATH=. python scripts/bench/worst_step.py [--slots 200000] [NAME …]

Each situation is a generator that makes steps of a pool. What lies between two `yield`s
is timed, if the first of them yields True. For each situation one line is printed with
its longest step and the step in the middle, in milliseconds; the exit status is 1 if
one was longer than --limit.

The clock is that of the thread's CPU time, so that other processes do not count.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from time import thread_time

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
            next_is_timed = None
        if is_timed:
            times.append(1e3 * (thread_time() - begin))
        if next_is_timed is None:
            return times
        if next_is_timed and not is_timed:
            # As the engine does once it has started.
            gc.collect()
            gc.freeze()
        is_timed = next_is_timed


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


def _release_at_once(num_slots: int) -> Steps:
    from tests.unit.tier import Tier

    tier = Tier(1000, num_slots, eviction_policy="proven")
    tier.begin()
    for i in range(num_slots):
        key = b"%036d" % i
        tier.pool.host.insert((key,), None, 1)  # type: ignore[arg-type]
        tier.pool.releasing._owners.computed(key, tier.pool.releasing.owner("agent"))
    tier.end()
    yield True
    tier.pool.releasing.hear("agent", None)
    for _ in range(200):
        yield True
        tier.begin()
        tier.end()


@situation
def release_of_all_slots(num_slots: int) -> Steps:
    """One client says that the conversation that filled every slot is over."""
    return _release_at_once(num_slots)


if __name__ == "__main__":
    sys.exit(main())
