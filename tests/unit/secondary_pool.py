# SPDX-License-Identifier: Apache-2.0
"""A block pool with a tier below, whose store and ranks are played by the test."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_tier.layout import SecondaryLayout, SecondaryTier
from vllm.v1.kv_tier.plan import SecondaryJob, SecondaryResult, StepPlan, StepReport
from vllm.v1.kv_tier.scheduler.secondary.fetches import SecondaryBlock
from vllm.v1.kv_tier.scheduler.secondary.lookup import AsyncLookup
from vllm.v1.kv_tier.stats import SecondaryStats

from .tier import BLOCK, Tier, hash_of, hashes

SETTLED = 2


def key(name: str) -> bytes:
    return bytes(make_block_hash_with_group_id(hash_of(name), 0))


class Request:
    """What the tier below must know of a request."""

    num_preemptions = 0
    kv_transfer_params = None

    def __init__(self, names: str) -> None:
        self.block_hashes = hashes(names)


class Store:
    """What is stored. Its answers come when the test lets them."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.num_asked = 0
        self.answers = threading.Event()
        self.answers.set()

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        self.num_asked += 1
        self.answers.wait()
        return [each in self.keys for each in keys]


class Below:
    """A pool with a tier below, whose store and ranks are played by the test."""

    def __init__(
        self,
        num_blocks: int = 8,
        num_slots: int = 16,
        store_policy: str = "write_back",
        num_tiers: int = 1,
        store_from_use: int = 1,
        deadline_s: float = 5.0,
        flush_s: float = 3.0,
        fetches_always: bool = False,
        miss_s: float = 0.0,
        assumed_prefill_s: float = 1e3,
        answer_wait_s: float = 0.0,
        min_prefetch: int = 64,
        max_looks: int = 1000,
        tuning: dict[str, Any] | None = None,
        group_bytes: tuple[int, ...] = (),
        **layout: Any,
    ) -> None:
        # The thread that asks holds it, and nothing else of the test.
        self.store = Store()
        self.second = Store()
        tiers = [
            SecondaryTier(
                name=f"/kv{i}",
                label=label,
                locality="LOCAL",
                lookup=AsyncLookup(store.exists, miss_s=miss_s),
                store_from_use=store_from_use,
                deadline_s=deadline_s,
                fetches_always=fetches_always,
                flush_s=flush_s,
            )
            for i, (label, store) in enumerate(
                (("fs", self.store), ("redis", self.second))
            )
        ]
        options: dict[str, Any] = {
            "tiers": tuple(tiers[:num_tiers]),
            "num_ranks": 1,
            "block_sizes": (BLOCK,),
            "max_writing": 4,
            "max_job": 64,
            "max_known": 64,
            "tokens_per_block": BLOCK,
        }
        self.tier = Tier(
            num_blocks,
            num_slots,
            store_policy=store_policy,
            secondary=SecondaryLayout(**options | layout),
            group_bytes=group_bytes,
            tuning={
                "settled_steps": SETTLED,
                "fetch_part": 1 / 2,
                "looks_per_ask": 1,
                "max_looks": max_looks,
                "assumed_prefill_s": assumed_prefill_s,
                "answer_wait_s": answer_wait_s,
                "min_prefetch": min_prefetch,
                **(tuning or {}),
            },
        )
        self.asker = tiers[0].lookup
        self.pool = self.tier.pool
        self.backing = self.pool.secondary
        assert self.backing is not None

    def plans(self, num_steps: int = SETTLED + 1) -> list[StepPlan]:
        return self.tier.idle(num_steps)

    def jobs(self, plans: list[StepPlan]) -> list[SecondaryJob]:
        return [job for plan in plans for job in plan.secondary]

    def hit(self, names: str) -> StepPlan:
        """A step that admits a request with these blocks."""
        self.tier.begin()
        self.tier.promote(self.tier.find(names), request=Request(names))
        return self.tier.end()

    def end(self, job: SecondaryJob, *done: bool) -> None:
        """A rank has told of a job."""
        told = list(done) or [True] * len(job.slots)
        report = StepReport(secondary=[SecondaryResult(job.number, told, 0.1)])
        self.pool.apply_report(report)

    def outputs(self, number: int) -> None:
        """Outputs of so many steps come, which tell nothing."""
        for _ in range(number):
            self.backing.record_output()  # type: ignore[union-attr]

    def asked(self, request: Request) -> None:
        """A request asks, and the answer comes."""
        self.until(lambda: False, request)

    def until(self, is_so: Callable[[], bool], request: Request) -> None:
        """A request is held back until something is so, or it need not wait."""
        # None of those that asked counts as aborted.
        self.tier.requests.append(request)  # type: ignore[arg-type]
        limit = time.monotonic() + 10
        while self.pool.is_loading(request, False) and not is_so():  # type: ignore[arg-type]
            assert time.monotonic() < limit, "nobody answers"
            time.sleep(0.001)

    def begins_to_fetch(self, request: Request, names: str) -> SecondaryJob:
        """A request is held back since some of its blocks are below."""
        self.tier.begin()
        self.asked(request)
        (job,) = self.is_held_back(request, names).secondary
        assert not job.is_put
        return job

    def is_held_back(self, request: Request, names: str) -> StepPlan:
        """The step is complete, and `request` waits for what it begins to fetch."""
        assert not self.pool.is_loading(request, False)  # type: ignore[arg-type]
        hit = self.tier.find(names)
        assert self.tier.try_promote(hit, request=request) is None
        return self.tier.end()

    def stats(self, label: str = "fs") -> SecondaryStats:
        return self.pool.take_stats().secondary[label]

    def where(self, name: str) -> str:
        found = self.pool.get_cached_block(hash_of(name), [0])
        if found and type(found[0]) is not SecondaryBlock:
            return self.tier.where(name)
        waits = self.backing.reader._waits.values()  # type: ignore[union-attr]
        blocks = [wait.found.get(key(name)) for wait in waits]  # type: ignore[call-overload]
        is_below = any(b is not None and b.key in b.tier.presence.keys for b in blocks)
        return "below" if is_below else "nowhere"
