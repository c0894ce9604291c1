# SPDX-License-Identifier: Apache-2.0
"""Work that shifts: what a tier held for others, when a trace begins.

Other work runs first, and has no prompt in common with the trace. Hits are counted from
the first request of the trace on.
"""

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .trace import ID_TOKENS, Call


@dataclass(frozen=True)
class Work:
    """Requests, of which the first only fill the tiers."""

    calls: tuple[Call, ...]
    """In order of arrival."""
    num_before: int = 0
    """So many of them are not counted."""

    @property
    def counted(self) -> tuple[Call, ...]:
        return tuple(c for c in self.calls[self.num_before :] if not c.floods)


def shifted(before: Sequence[Call], calls: Sequence[Call]) -> Work:
    """`calls`, begun when the last of `before` arrives, with ids of their own."""
    if not before:
        return Work(tuple(calls))
    # Ids below 0 are answers.
    above = 1 + max((i for call in before for i in call.hash_ids), default=0)
    later = before[-1].arrival_s - calls[0].arrival_s if calls else 0.0
    moved = (
        replace(
            call,
            arrival_s=call.arrival_s + later,
            hash_ids=tuple(i + above for i in call.hash_ids),
        )
        for call in calls
    )
    return Work((*before, *moved), len(before))


def agents(num_agents: int, seconds: float = 1800.0, seed: int = 0) -> list[Call]:
    """Agents with tools, so many at any time; the same for the same arguments.

    Each begins with one of four system prompts of 4,096 tokens and a task, and takes
    10 to 50 turns. A turn comes when a tool has answered, after 20 seconds in the mean,
    and has all before it and up to 1,536 tokens more. At its end another agent begins.
    """
    rng = random.Random(seed)
    num_ids = 0

    def new(number: int) -> list[int]:
        nonlocal num_ids
        num_ids += number
        return [*range(num_ids - number, num_ids)]

    prompts = [new(8) for _ in range(4)]
    calls = []
    # When the next turn of each comes, its context, and how many turns are left.
    turns = [(rng.uniform(0, 60), agent) for agent in range(num_agents)]
    heapq.heapify(turns)
    contexts: dict[int, list[int]] = {}
    left = dict.fromkeys(range(num_agents), 0)
    while turns and turns[0][0] <= seconds:
        now, agent = heapq.heappop(turns)
        if left[agent]:
            contexts[agent] = contexts[agent] + new(rng.randint(0, 3))
            left[agent] -= 1
        else:
            contexts[agent] = rng.choice(prompts) + new(rng.randint(4, 20))
            left[agent] = rng.randint(9, 49)
        ids = tuple(contexts[agent])
        calls.append(Call(now, ID_TOKENS * len(ids), rng.randint(20, 300), ids))
        heapq.heappush(turns, (now + rng.expovariate(1 / 20), agent))
    return calls
