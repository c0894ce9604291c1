# SPDX-License-Identifier: Apache-2.0
"""A trace against the tier's own block pool, without scheduler and copies.

Modelled: the pool as it is (prefix lookup over both tiers, promotion, demotion, the
cleaner, write_through's stores, eviction policies, frees tail first), the device
blocks that running requests hold, arrivals, and a queue in order of arrival.
Prefill takes the engine one request after another, at a fixed rate; decoding takes
each request a fixed time for a token, beside the others. A store below the host takes
its time: requests that wait for it are passed by others.

Not modelled: the time of copies between device and host (they never make a request
wait, and lookups never end at a slot because computing is cheaper), chunks of prefill,
preemption, answers that return as prompts other than by the ids of the trace, and
groups of layers with windows or states: every layer keeps every token.
"""

import gc
import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, Literal

from vllm.v1.kv_tier.config import DebugConfig, KVTierConfig, StorePolicy
from vllm.v1.kv_tier.layout import KVTierLayout
from vllm.v1.kv_tier.plan import SecondaryResult, StepReport
from vllm.v1.kv_tier.pool import make_block_pool
from vllm.v1.kv_tier.scheduler.secondary.fetches import SecondaryBlock
from vllm.v1.kv_tier.scheduler.slots import HostSlot
from vllm.v1.kv_tier.tuning import SchedulingTuning

from .below import Below, SimulatedStore, Traffic
from .flood import HINTS as FLOOD_HINTS
from .request import Request
from .trace import NOBODY, Call, Senders, conversations

GiB = 1 << 30
TENANT = "trace"
"""Who sends the requests of the trace, where there are quotas."""
_LOOK_S = 0.05
"""An engine that only waits for the store looks at its queue so often."""


@dataclass(frozen=True)
class Engine:
    """One engine, all of its ranks together."""

    block_size: int
    block_bytes: int
    device_bytes: int
    prefill_tokens_per_s: float
    seconds_per_output_token: float
    max_running: int
    link_bytes_per_s: float = 50e9
    """Bounds what is stored ahead of eviction. Copies themselves take no time here."""


@dataclass(frozen=True)
class Tier:
    """A host tier to try; `host_bytes` 0: none."""

    host_bytes: int
    eviction_policy: str = "lru"
    store_policy: StorePolicy = "write_back"
    store_from_use: int | Literal["auto"] = 1
    senders: Senders = NOBODY
    below: Below | None = None
    quota: float = 0.0
    """Part of the slots for the tenant whose requests the trace has; 0: no quota."""

    @property
    def label(self) -> str:
        """All but the size of the host."""
        if not self.host_bytes:
            return "none"
        use = self.store_from_use
        uses = "" if use == 1 else f", from use {use}"
        below = f", {self.below.num_bytes / GiB:.4g} GiB below" if self.below else ""
        quota = f", quota {self.quota:g}" if self.quota else ""
        return f"{self.eviction_policy}, {self.store_policy}{uses}{quota}{below}"


@dataclass(frozen=True)
class Outcome:
    """What came of a tier, in blocks of prompts."""

    tier: Tier
    prompt_blocks: int
    device_hits: int
    host_hits: int
    stored_blocks: int
    loaded_blocks: int
    host_slots: int
    too_long: int
    """Requests left out, since the device cannot hold one of them."""
    below_hits: int = 0
    """Are no host hits."""
    traffic: Traffic | None = None
    """Of the tier below."""

    @property
    def device_rate(self) -> float:
        return self.device_hits / self.prompt_blocks

    @property
    def host_rate(self) -> float:
        return self.host_hits / self.prompt_blocks

    @property
    def below_rate(self) -> float:
        return self.below_hits / self.prompt_blocks

    @property
    def hit_rate(self) -> float:
        return self.device_rate + self.host_rate + self.below_rate

    def as_json(self) -> dict[str, Any]:
        names = "device", "host", "below"
        rates = {f"{name}_hit_rate": getattr(self, f"{name}_rate") for name in names}
        fields = asdict(self)
        return fields.pop("tier") | fields | rates


class Replay:
    """One tier of one engine, through one trace."""

    def __init__(self, engine: Engine, tier: Tier) -> None:
        self.engine = engine
        self.tier = tier
        self.now, self._num_before = 0.0, 0
        self._num_slots = tier.host_bytes // engine.block_bytes
        self._store: SimulatedStore | None = None
        if self._num_slots and tier.below is not None and tier.below.num_bytes:
            size = engine.block_bytes
            self._store = SimulatedStore(tier.below, size, lambda: self.now)
        self.pool: Any = make_block_pool(
            SimpleNamespace(kv_tier=self._layout() if self._num_slots else None),
            num_gpu_blocks=engine.device_bytes // engine.block_bytes + 1,
            enable_caching=True,
            hash_block_size=engine.block_size,
        )
        self._managers = [
            SimpleNamespace(
                block_size=engine.block_size, get_num_skipped_tokens=lambda _: 0
            )
        ]
        self._waiting: deque[Request] = deque()
        self._running: list[tuple[float, int, Request]] = []  # by when they end
        # What came from below and has not been hit since.
        self._fetched: set[bytes] = set()
        self._fetching: dict[int, list[bytes]] = {}
        self._prompt_blocks = self._device_hits = self._host_hits = 0
        self._below_hits = self._stored = self._loaded = self._too_long = 0

    def _layout(self) -> KVTierLayout:
        tier, engine = self.tier, self.engine
        config = KVTierConfig(
            tier.host_bytes,
            eviction_policy=tier.eviction_policy,
            debug=DebugConfig(
                tier.store_policy, tier.store_from_use, max_load_stall_ms=None
            ),
            quotas={TENANT: tier.quota} if tier.quota else None,
        )
        load_s = engine.block_bytes / engine.link_bytes_per_s
        more: dict[str, Any] = {"load_s": load_s}
        if self._store is not None and tier.below is not None:
            # No step is in flight while the next one is planned.
            more["tuning"] = SchedulingTuning(settled_steps=0)
            more["secondary"] = tier.below.layout(
                self._store, engine.block_size, engine.block_bytes, self._num_slots
            )
        return KVTierLayout(config, self._num_slots, engine.block_bytes, **more)

    def run(self, calls: Sequence[Call], num_before: int = 0) -> Outcome:
        """Serve `calls`, in order of arrival; the first `num_before` do not count."""
        self._num_before = num_before
        if self._store is not None:
            costs, engine = self.pool.costs, self.engine
            costs.clock = lambda: self.now
            costs.prefill_s = engine.block_size / engine.prefill_tokens_per_s
        requests = deque(self._requests(calls))
        begin = self.now = requests[0].call.arrival_s if requests else 0.0
        while requests or self._waiting:
            while requests and requests[0].call.arrival_s <= self.now:
                self._waiting.append(requests.popleft())
            next_arrival = requests[0].call.arrival_s if requests else float("inf")
            if not self._waiting:
                self._advance(next_arrival)
            elif (request := self._next()) is not None:
                self._advance(self._prefill(request))
            elif self._store is None:
                self._advance(self._next_end)
            else:
                until = min(next_arrival, self._next_end, self._store.next_end)
                self._advance(min(until, self.now + _LOOK_S))
        return Outcome(
            self.tier,
            self._prompt_blocks,
            self._device_hits,
            self._host_hits,
            self._stored,
            self._loaded,
            self._num_slots,
            self._too_long,
            self._below_hits,
            self._traffic(self.now - begin),
        )

    def _requests(self, calls: Sequence[Call]) -> Iterator[Request]:
        """Those that can run at all."""
        hints = iter(self._hints([call for call in calls if not call.floods]))
        for place, call in enumerate(calls):
            said = FLOOD_HINTS if call.floods else next(hints)
            request = Request(place, call, self.engine.block_size, said)
            if request.num_blocks < self.pool.num_gpu_blocks:
                yield request
            else:
                self._too_long += 1

    def _hints(self, calls: Sequence[Call]) -> Iterator[dict[str, Any]]:
        """What each call of the trace says."""
        names = conversations(calls)
        last = self.tier.senders.last_calls(names)
        is_told = {names[place] for place in last}
        for place, name in enumerate(names):
            hints: dict[str, Any] = {"tenant": TENANT} if self.tier.quota else {}
            if name in is_told:
                hints |= {"conversation": str(name), "release": place in last}
            yield hints

    def _traffic(self, seconds: float) -> Traffic | None:
        if self._store is None:
            return None
        (stats,) = self.pool.take_stats().secondary.values()
        return self._store.traffic(stats, seconds)

    def _next(self) -> Request | None:
        """The request that is admitted now: the first that does not wait for the store
        and whose blocks there are."""
        for place, request in enumerate(self._waiting):
            # Upstream's scheduler asks of every request.
            if self._num_slots and self.pool.is_loading(request, True):
                continue
            if len(self._running) < self.engine.max_running and self._admit(request):
                del self._waiting[place]
                return request
            break
        if self._store is not None:
            # Begins what was planned for those that wait.
            self._step()
        return None

    def _prefill(self, request: Request) -> float:
        """Let an admitted request run; returns when its prefill ends."""
        engine, call = self.engine, request.call
        computed = max(0, call.input_tokens - request.num_hits * engine.block_size)
        prefill_ends = self.now + computed / engine.prefill_tokens_per_s
        ends = prefill_ends + call.output_tokens * engine.seconds_per_output_token
        heapq.heappush(self._running, (ends, request.number, request))
        return prefill_ends

    def _admit(self, request: Any) -> bool:
        """Give a request its blocks, in a step of its own. False: no room, or it waits
        for the store."""
        pool, size = self.pool, self.engine.block_size
        hits = []
        for block_hash in request.block_hashes[: request.num_prompt_blocks]:
            found = pool.get_cached_block(block_hash, [0])
            if found is None:
                break
            hits.append(found[0])
        # What upstream counts: slots and free blocks of the hit are blocks to take.
        held = sum(block.ref_cnt > 0 for block in hits)
        if request.num_blocks - held > pool.get_num_free_blocks():
            if any(type(block) is SecondaryBlock for block in hits):
                pool.load_ahead(self._managers, (hits,), len(hits) * size)
            return False
        slots = [block for block in hits if type(block) is HostSlot]
        self._begin_step()
        if self._num_slots:
            promoted = pool.promote(
                request, self._managers, (hits,), len(hits) * size, 0, 2, True
            )
            if promoted is None:
                self._end_step()
                return False
            hits = list(promoted[0])
        pool.touch(hits)
        blocks = hits + pool.get_new_blocks(request.num_blocks - len(hits))
        num_hashed = len(request.block_hashes)
        pool.cache_full_blocks(request, blocks, len(hits), num_hashed, size, 0)
        request.blocks = blocks
        self._end_step()
        self._count(request, len(hits), slots)
        return True

    def _count(self, request: Request, num_hits: int, slots: list[HostSlot]) -> None:
        below = {
            key
            for slot in slots
            # Plans count from 1: no store of the device has filled this one.
            if slot.store_seq == 0 and (key := bytes(slot.keys[0])) in self._fetched
        }
        self._fetched -= below
        request.num_hits = num_hits
        if request.number < self._num_before or request.call.floods:
            return
        self._prompt_blocks += request.num_prompt_blocks
        self._device_hits += num_hits - len(slots)
        self._host_hits += len(slots) - len(below)
        self._below_hits += len(below)

    @property
    def _next_end(self) -> float:
        return self._running[0][0] if self._running else float("inf")

    def _advance(self, until: float) -> None:
        """Let time pass: requests end, and jobs of the store."""
        store = self._store
        while True:
            stored = store.next_end if store is not None else float("inf")
            if min(stored, self._next_end) > until:
                break
            if store is not None and stored < self._next_end:
                self.now = max(self.now, stored)
                self._take(store.take_end())
            else:
                self.now = max(self.now, self._next_end)
                self._end_one()
        self.now = max(self.now, until)

    def _end_one(self) -> None:
        """Free the blocks of the request that ends next, tail first."""
        _, _, request = heapq.heappop(self._running)
        request.has_ended = True
        self.pool.free_blocks(reversed(request.blocks))
        self._step()

    def _take(self, result: SecondaryResult | None) -> None:
        """A job has ended: what is due next begins."""
        if result is None:
            return
        keys = self._fetching.pop(result.number, [])
        self._fetched.update(k for k, is_there in zip(keys, result.done) if is_there)
        self.pool.apply_report(StepReport(secondary=[result]))
        self._step()

    def _step(self) -> None:
        self._begin_step()
        self._end_step()

    def _begin_step(self) -> None:
        if self._num_slots:
            self.pool.begin_step()

    def _end_step(self) -> None:
        if not self._num_slots:
            return
        plan = self.pool.take_plan()
        self._stored += len(plan.store_blocks)
        self._loaded += len(plan.load_blocks)
        if self._store is not None:
            self._fetching |= {j.number: j.keys for j in plan.secondary if not j.is_put}
            self._store.begin(plan.secondary)


def replay(engine: Engine, tier: Tier, calls: Sequence[Call], skip: int = 0) -> Outcome:
    """Serve a trace with one tier, see `Replay.run`."""
    # Little is garbage before the end, and looking for it takes as long as the rest.
    gc.disable()
    try:
        return Replay(engine, tier).run(calls, skip)
    finally:
        gc.enable()
