# SPDX-License-Identifier: Apache-2.0
"""Long contexts take turns: a step loads thousands of blocks in place of others."""

import gc
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.counted_policies import COUNTED, Work
from vllm.v1.kv_tier.policy import POLICIES

from .served import Served

BLOCKS = 1250
"""Of a document."""
DOCUMENTS = 4
DEVICE, HOST = 2048, 4096
"""Blocks: the host has room for three of the documents."""
LOOKS = 8
"""Keys that a policy may look at for each block that moves, in the mean."""


@pytest.fixture
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def turns(served: Served, num_turns: int) -> Iterator[tuple[float, int, int]]:
    """CPU seconds of each `schedule()` that loads, the blocks that it loads, and the
    victims that it stores."""
    for turn in range(num_turns):
        for document in range(DOCUMENTS):
            served.add(10 + document, BLOCKS, max_tokens=2, end=500 + turn)
            while served.scheduler.has_unfinished_requests():
                Work.start()
                begun = time.thread_time()
                output: Any = served.scheduler.schedule()
                seconds = time.thread_time() - begun
                plan = output.kv_tier_plan
                if plan.load_blocks:
                    yield seconds, len(plan.load_blocks), len(plan.store_blocks)
                served.finish(output)


@pytest.mark.parametrize("policy", COUNTED)
def test_no_step_looks_at_all_that_it_uses_for_each_victim(policy: str) -> None:
    served = Served(DEVICE, HOST, config={"eviction_policy": COUNTED[policy]})
    num_moved = 0
    for _, num_loads, num_stores in turns(served, 4):
        moved = num_loads + num_stores
        assert Work.num_looks <= LOOKS * moved
        num_moved = max(num_moved, moved)
    # Else the turns prove little.
    assert num_moved > BLOCKS


@pytest.mark.skipif(
    not os.environ.get("KV_TIER_TIMES"), reason="a time, for a quiet machine"
)
@pytest.mark.parametrize("policy", POLICIES)
def test_dirty_victims_take_no_longer_than_twice_as_clean_ones(
    policy: str, _no_collection: None
) -> None:
    """The bar for the slowest step; twice that would be noise.

    Each of these steps admits a whole document. Where victims are dirty, a part of it
    may be gone, and the step computes that part in place of loading it: so whole steps
    are compared, not seconds for each load.
    """

    def slowest(num_slots: int, is_dirty: bool) -> float:
        served = Served(DEVICE, num_slots, config={"eviction_policy": policy})
        steps = [
            seconds
            for seconds, num_loads, num_stores in turns(served, 6)
            if num_loads > BLOCKS / 2 and (num_stores > num_loads / 4) == is_dirty
        ]
        assert len(steps) >= 4
        # The first ones fill caches.
        return max(sorted(steps)[:-1])

    dirty = slowest(HOST, is_dirty=True)
    clean = slowest(4 * HOST, is_dirty=False)
    print(f"{policy}: {dirty * 1e3:.1f} ms a step, {clean * 1e3:.1f} ms if clean")
    assert dirty <= 2 * clean
