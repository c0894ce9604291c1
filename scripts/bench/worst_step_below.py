# SPDX-License-Identifier: Apache-2.0
"""The longest step in situations with tiers below, loads ahead, KV events and device
memory that is given back.

    PYTHONPATH=.:scripts python scripts/bench/worst_step_below.py [NAME …]

Runs the situations of `worst_step.py`, too, which says what is timed.
"""

import gc
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from bench.worst_step import Steps, main, situation, started
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.kv_tier.plan import SecondaryJob, SecondaryResult, StepReport


def _hash(i: int) -> BlockHash:
    return BlockHash(b"%032d" % i)


@situation
def prompt_without_room(num_slots: int) -> Steps:
    """A prompt of a quarter of the slots lacks device blocks, and loads ahead."""
    from tests.unit.tier import BLOCK, Tier

    num_blocks = num_slots // 4
    tier = Tier(num_blocks + num_blocks // 8, num_slots, load_s=40e-6)
    started()
    tier.begin()
    slots = [
        tier.host.insert(
            (make_block_hash_with_group_id(_hash(i), 0),),
            i * BLOCK,
            tier.pool._builder.seq,
        )
        for i in range(num_blocks)
    ]
    tier.end()
    managers = [SimpleNamespace(block_size=BLOCK, get_num_skipped_tokens=lambda n: 0)]
    for _ in range(10):
        tier.now += 100.0
        tier.begin()
        hit = [
            tier.pool.get_cached_block(_hash(i), [0])[0]  # type: ignore[index]
            for i in range(num_blocks)
        ]
        yield True
        tier.pool.load_ahead(managers, (hit,), num_blocks * BLOCK)
        tier.end()
        yield False
    assert slots


@situation
def thousands_that_wait_for_a_store(num_slots: int) -> Steps:
    """4,000 requests of 200 blocks come at once, and the store does not answer."""
    from tests.unit.secondary_pool import Below, Request

    below = Below(64, 1000, max_looks=8_192)
    below.tier.pool.costs.clock = lambda: 0.0
    below.store.answers.clear()
    requests = []
    for n in range(4000):
        request = Request("")
        request.block_hashes = [_hash(n * 1000 + i) for i in range(200)]
        requests.append(request)
    # Python's garbage collector goes through their hashes without a tier, too.
    started()
    for _ in range(60):
        yield True
        below.tier.begin()
        for request in requests:
            assert below.pool.is_loading(request, True)  # type: ignore[arg-type]
        below.tier.end()
    yield False
    below.store.answers.set()


@situation
def long_prompts_that_are_stored(num_slots: int) -> Steps:
    """A store has all blocks of prompts of a million tokens."""
    from tests.unit.secondary_pool import Below, Request

    below = Below(64, num_slots, max_looks=8_192, max_known=10**6)
    for n in range(3):
        hashes = [_hash(n * 100_000 + i) for i in range(62_500)]
        keys = {bytes(make_block_hash_with_group_id(h, 0)) for h in hashes}
        below.store.keys |= keys
        request = Request("")
        request.block_hashes = hashes
        started()
        is_waiting = True
        while is_waiting:
            yield True
            below.tier.begin()
            is_waiting = below.pool.is_loading(request, True)  # type: ignore[arg-type]
            below.tier.end()
            yield False
            # The thread that asks.
            time.sleep(0.01)
        wait = below.backing.reader._waits[request]  # type: ignore[union-attr, index]
        assert len(wait.found) == 62_500
        del wait
        yield True
        # It is aborted.
        del request
        yield False
        below.tier.begin()
        below.tier.end()
        gc.unfreeze()


@situation
def all_fetches_end_at_once(num_slots: int) -> Steps:
    """A quarter of the slots is to be filled, and all jobs end in one step."""
    from tests.unit.secondary_pool import Below, Request

    below = Below(64, num_slots, max_job=64, max_known=4 * num_slots)
    started()
    num_blocks = num_slots // 4
    hashes = [_hash(i) for i in range(num_blocks)]
    below.store.keys = {bytes(make_block_hash_with_group_id(h, 0)) for h in hashes}
    jobs, requests = [], []
    # A request begins to fetch as much as a step may, and more when that has come.
    for first in range(0, num_blocks, 4096):
        request = Request("")
        request.block_hashes = hashes[first : first + 4096]
        requests.append(request)
        below.tier.begin()
        while below.pool.is_loading(request, True):  # type: ignore[arg-type]
            below.tier.end()
            time.sleep(0.001)
            below.tier.begin()
        found = [below.pool.get_cached_block(h, [0]) for h in request.block_hashes]
        hit = [blocks[0] for blocks in found]  # type: ignore[index]
        yield True
        below.tier.try_promote(hit, request=request)
        jobs += below.tier.end().secondary
        yield False
    assert sum(len(job.slots) for job in jobs) == num_blocks
    yield from _all_end(below, jobs)
    assert len(below.pool.host) == num_blocks


@situation
def all_writes_end_at_once(num_slots: int) -> Steps:
    """A quarter of the slots is being written below, and all jobs end in one step."""
    from tests.unit.secondary_pool import Below

    num_blocks = num_slots // 4
    below = Below(64, num_slots, max_job=64, max_writing=num_blocks, max_known=10**6)
    started()
    jobs: list[SecondaryJob] = []
    for i in range(0, num_blocks, 1000):
        below.tier.begin()
        for j in range(i, i + 1000):
            key = make_block_hash_with_group_id(_hash(j), 0)
            below.pool.host.insert((key,), 32, below.pool._builder.seq)
        jobs += below.tier.end().secondary
    while sum(len(job.slots) for job in jobs) < num_blocks:
        jobs += below.jobs(below.plans(1))
    yield from _all_end(below, jobs)
    assert not below.backing.writers[0].writing  # type: ignore[union-attr]


def _all_end(below: Any, jobs: Sequence[SecondaryJob]) -> Steps:
    """One report tells of the end of all jobs."""
    results = [
        SecondaryResult(job.number, [True] * len(job.slots), 0.1) for job in jobs
    ]
    yield True
    below.pool.apply_report(StepReport(secondary=results))
    for _ in range(60):
        yield True
        below.tier.begin()
        below.tier.end()


@situation
def all_slots_are_due(num_slots: int) -> Steps:
    """A store that was slow catches up: all slots are to be written."""
    from tests.unit.secondary_pool import Below

    below = Below(64, num_slots, max_job=64, max_writing=num_slots // 4)
    started()
    for first in range(0, num_slots, 2000):
        below.tier.begin()
        for i in range(first, first + 2000):
            key = make_block_hash_with_group_id(_hash(i), 0)
            below.pool.host.insert((key,), 32, below.pool._builder.seq)
        below.tier.end()
    for i in range(60):
        yield True
        below.tier.begin()
        # A victim passes over what is being written.
        key = make_block_hash_with_group_id(_hash(-1 - i), 0)
        below.pool.host.insert((key,), 32, below.pool._builder.seq)
        below.tier.end()


@situation
def late_replay_of_all_keys(num_slots: int) -> Steps:
    """A follower of KV events comes too late, and all keys are told anew."""
    from tests.unit.scheduler.test_events import BLOCK, Publisher, request

    tier = Publisher(num_blocks=num_slots + 30, num_slots=40)
    started()
    tier.compute(request(range(BLOCK * num_slots)))
    tier.pool.take_events()
    tier.pool.events.republish_all()
    for _ in range(num_slots // 2048 + 10):
        yield True
        tier.pool.begin_step()
        tier.pool.take_plan()
        tier.pool.take_events()


@situation
def idle_device_is_given_back(num_slots: int) -> Steps:
    """A device of so many blocks has been idle for long enough."""
    import tests.unit.elastic.test_elastic as elastic

    elastic.NUM_BLOCKS = num_slots // 2
    tier = elastic.ElasticTier()
    started()
    tier.elastic.mapper.unmapped = []  # type: ignore[attr-defined]
    tier.run_idle()
    tier.now = 5.0
    while tier.elastic.is_busy and len(tier.elastic.unmapped) < num_slots // 8 - 1:
        yield True
        plan = tier.run_idle()
        if plan.report_end:
            tier.tell(plan)


if __name__ == "__main__":
    sys.exit(main())
