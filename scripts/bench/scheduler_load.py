# SPDX-License-Identifier: Apache-2.0
"""A scheduler with full caches, and the steps that `scheduler_step.py` measures."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any, NamedTuple

from connector_worker import ConnectorWorker
from scheduler_setup import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    make_request,
    make_scheduler,
    timed_step,
)
from scheduler_step import WINDOW

from vllm.config import KVTransferConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_tier.config import DebugConfig, KVTierConfig, StorePolicy
from vllm.v1.kv_tier.layout import KVTierLayout
from vllm.v1.kv_tier.plan import SecondaryResult, StepReport
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

NUM_REQUESTS = 256
NUM_SLOTS = 100_000
NUM_BLOCKS = 32_768
PREFIX_BLOCKS = 64
MAX_BATCHED_TOKENS = 8192
MAX_MODEL_LEN = 4096
# Of the decoding requests, in each step: block boundaries are spread evenly.
NEW_BLOCKS = NUM_REQUESTS // BLOCK_SIZE


@dataclass(frozen=True)
class Setup:
    """What keeps evicted blocks: the tier, a connector, or nothing."""

    store_policy: StorePolicy | None = None
    connector: str | None = None
    extra_config: tuple[tuple[str, Any], ...] = ()
    has_store: bool = False
    """Below the tier, an empty one that takes nothing."""
    has_hints: bool = False
    """Every request but those that fill the caches has hints."""
    num_slots: int = NUM_SLOTS
    num_prefilled: int = 0
    """Blocks that went through the host before, put there without the scheduler."""
    has_pool: bool = False
    """Slots are a part of a pool, with seven neighbours that have nothing."""

    @property
    def has_host(self) -> bool:
        return self.store_policy is not None or self.connector is not None


class Step(NamedTuple):
    """CPU seconds of a step, and the blocks that it copies."""

    seconds: float
    num_loaded: int
    num_stored: int


class Load:
    """256 decoding requests; every free block is cached, every host slot filled.

    Call the workloads in the order in which they stand here.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._scheduler = make_scheduler(
            num_blocks=NUM_BLOCKS,
            # A connector admits a request steps before it runs.
            max_num_seqs=NUM_REQUESTS + 8,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            kv_tier=_tier_layout(setup),
            kv_transfer_config=_connector_config(setup),
        )
        self._worker = ConnectorWorker()
        self._num_requests = 0
        self._num_steps = 0
        self._sends_hints = False
        self.wait_for_turn: Callable[[], object] = lambda: None
        """Is called before each window."""
        # As the engine does when it has started: what is there by now is not the
        # garbage collector's to walk, what the caches will hold is.
        gc.collect()
        gc.freeze()
        if setup.num_prefilled:
            self._prefill(setup.num_prefilled)
        self._num_prefixes = self._fill()
        self._known = self._known_prefixes()
        self._sends_hints = setup.has_hints
        self.begin_requests()

    def begin_requests(self) -> None:
        """Begin the requests that decode, after the end of those there are."""
        for request in list(self._scheduler.running):
            self._scheduler.finish_requests(
                request.request_id, RequestStatus.FINISHED_ABORTED
            )
        for i in range(NUM_REQUESTS):
            prompt = [-1 - i] * (4 * BLOCK_SIZE + i % BLOCK_SIZE)
            self._add(prompt, MAX_MODEL_LEN - len(prompt))
        while self._scheduler.waiting:
            self._step()

    def _prefill(self, num_blocks: int) -> None:
        """Let the host store blocks, with keys as upstream's and in plans of 256."""
        pool: Any = self._scheduler.kv_cache_manager.kv_tier
        draw = Random(0).randbytes
        for first in range(0, num_blocks, 256):
            pool.begin_step()
            numbers = range(first, min(first + 256, num_blocks))
            keys = [draw(32) + bytes(4) for _ in numbers]
            for key in keys if pool.admission is not None else ():
                pool.admission.record_use(key)
            num_tokens = [i % 1024 * BLOCK_SIZE for i in numbers]
            pool.host.insert_all(keys, num_tokens, pool._builder.seq)
            pool.take_plan()

    # --------------------------------------------------------------- workloads

    def decode(self, steps: int) -> list[Step]:
        """256 requests decode; each new block evicts a cached one."""
        return [self._step() for _ in range(steps)]

    def admit_dirty(self) -> list[Step]:
        """As `admit`, while the device still evicts what it was filled with.

        The host has seen none of those blocks, unless it stores every block at
        once. Ends when evictions have reached what this workload itself brought in.
        """
        last = self._scheduler.running[-1].request_id
        self._scheduler.finish_requests(last, RequestStatus.FINISHED_ABORTED)
        free = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        turnover = free // (PREFIX_BLOCKS + NEW_BLOCKS)
        self.admit(NEW_BLOCKS)
        steps = self.admit(turnover // 2)
        self.admit(turnover // 2 + NEW_BLOCKS)
        return steps

    def admit(self, steps: int) -> list[Step]:
        """255 requests decode, and one with a known prefix is admitted each step."""
        return [self._admit(next(self._known)) for _ in range(steps)]

    def recompute(self, steps: int) -> list[Step]:
        """As `admit`, with prefixes that nobody knows."""
        first = self._num_prefixes
        return [self._admit(number) for number in range(first, first + steps)]

    def num_filled(self) -> int:
        """Host slots with content."""
        scheduler: Any = self._scheduler
        if not self.setup.has_host:
            return 0
        if self.setup.store_policy is not None:
            return len(scheduler.kv_cache_manager.kv_tier.host)
        if (simple := getattr(scheduler.connector, "scheduler_manager", None)) is None:
            manager = scheduler.connector.connector_scheduler.manager
            return manager._num_allocated_chunks - len(manager._free_list)
        return len(simple.cpu_block_pool.cached_block_hash_to_block)

    # ------------------------------------------------------------------- steps

    def _admit(self, number: int) -> Step:
        self._add(_prefix(number) + [1] * (BLOCK_SIZE // 2), max_tokens=1)
        return self._step()

    def _add(self, prompt: list[int], max_tokens: int) -> None:
        name = str(self._num_requests)
        self._num_requests += 1
        hints = _hints(name) if self._sends_hints else None
        self._scheduler.add_request(make_request(name, prompt, max_tokens, hints))

    def _step(self) -> Step:
        if self._num_steps % WINDOW == 0:
            self.wait_for_turn()
        self._num_steps += 1
        copied = [0, 0]

        def work(output: SchedulerOutput) -> KVConnectorOutput | None:
            if (plan := output.kv_tier_plan) is not None:
                num_stored = len(plan.store_blocks) + len(plan.clean_blocks)
                copied[:] = len(plan.load_blocks), num_stored
            if output.kv_connector_metadata is None:
                return None
            report = self._worker.step(output.kv_connector_metadata)
            copied[:] = self._worker.num_loaded, self._worker.num_stored
            return report

        return Step(timed_step(self._scheduler, work, _refused), *copied)

    def _fill(self) -> int:
        """Fill the device, and the host with what the device evicts.

        Returns:
            Number of prefixes that were computed.

        """
        per_step = MAX_BATCHED_TOKENS // (PREFIX_BLOCKS * BLOCK_SIZE + 1)
        number = 0
        num_slots = self.setup.num_slots
        if self.setup.num_prefilled:
            # Enough for `admit` in a window of the order of eviction.
            num_slots = min(num_slots, 64_000)
        while number * PREFIX_BLOCKS < num_slots + NUM_BLOCKS + 4096:
            for _ in range(per_step):
                self._add(_prefix(number) + [0], max_tokens=1)
                number += 1
            self._step()
        while self._scheduler.has_unfinished_requests():
            self._step()
        return number

    def _known_prefixes(self) -> Iterator[int]:
        """Prefixes that lie on the host only, or on the device if there is no host."""
        last = self._num_prefixes - 1
        if not self.setup.has_host:
            return (last - i % 128 for i in count())
        # What the device evicted last: the host keeps it longest.
        return iter(range(last - NUM_BLOCKS // PREFIX_BLOCKS, 0, -1))


def _refused(output: SchedulerOutput) -> StepReport | None:
    """A store takes nothing. Copies have ended."""
    if (plan := output.kv_tier_plan) is None:
        return None
    if plan.report_end:
        return StepReport(ended=[plan.seq])
    jobs = plan.secondary
    if not jobs:
        return None
    results = [SecondaryResult(j.number, [False] * len(j.slots), 0.0) for j in jobs]
    return StepReport(secondary=results)


def _hints(name: str) -> dict[str, Any]:
    """What a client may say with each request: all that costs something by block."""
    return {
        "conversation": name,
        "tenant": "a tenant",
        "retain": {"priority": 75, "ttl": 3600, "answer": True},
        "release": True,
    }


def _prefix(number: int) -> list[int]:
    return [number] + [0] * (PREFIX_BLOCKS * BLOCK_SIZE - 1)


def _tier_layout(setup: Setup) -> KVTierLayout | None:
    if setup.store_policy is None:
        return None
    num_slots = setup.num_slots
    config = KVTierConfig(
        num_slots * BLOCK_BYTES, debug=DebugConfig(store_policy=setup.store_policy)
    )
    if setup.has_pool:
        return KVTierLayout(config, NUM_SLOTS, BLOCK_BYTES, pool=_pool())
    if not setup.has_store:
        return KVTierLayout(config, num_slots, BLOCK_BYTES)
    from vllm.v1.kv_tier.layout import SecondaryLayout, SecondaryTier
    from vllm.v1.kv_tier.scheduler.secondary.lookup import AsyncLookup

    tier = SecondaryTier(
        name="empty",
        label="empty",
        locality="LOCAL",
        lookup=AsyncLookup(lambda keys: [False] * len(keys)),
        store_from_use=2,
        # It is asked in each step, however long one takes on a busy machine.
        deadline_s=600.0,
    )
    below = SecondaryLayout(
        (tier,), 1, (BLOCK_SIZE,), 64, 64, 4 * num_slots, BLOCK_SIZE
    )
    return KVTierLayout(config, num_slots, BLOCK_BYTES, secondary=below)


def _pool() -> Any:
    import numpy as np

    from vllm.v1.kv_tier.keeper.client import Membership
    from vllm.v1.kv_tier.keeper.partition import Partition, partition_bytes
    from vllm.v1.kv_tier.layout import PoolLayout

    partitions, identity = [], bytes(32)
    for i in range(8):
        memory = np.zeros(partition_bytes(NUM_SLOTS), np.uint8)
        partition = Partition(memory, NUM_SLOTS)
        partition.lock.create()
        partition.assign(identity, NUM_SLOTS)
        partitions.append(partition)
    member = Membership.take(partitions, 0, identity, NUM_SLOTS)
    return PoolLayout(member, (BLOCK_SIZE,), num_ranks=1)


def _connector_config(setup: Setup) -> KVTransferConfig | None:
    if setup.connector is None:
        return None
    return KVTransferConfig(
        kv_connector=setup.connector,
        kv_role="kv_both",
        kv_connector_extra_config={
            "cpu_bytes_to_use": setup.num_slots * BLOCK_BYTES,
            **dict(setup.extra_config),
        },
    )
