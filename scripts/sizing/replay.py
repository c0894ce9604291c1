# SPDX-License-Identifier: Apache-2.0
"""A trace against the tier's own block pool, without scheduler and copies.

Modelled: the pool as it is (prefix lookup over both tiers, promotion, demotion, the
cleaner, write_through's stores, eviction policies, frees tail first), the device
blocks that running requests hold, arrivals, and a queue in order of arrival.
Prefill takes the engine one request after another, at a fixed rate; decoding takes
each request a fixed time for a token, beside the others.

Not modelled: the time of copies (they never make a request wait, and lookups never
end at a slot because computing is cheaper), chunks of prefill, preemption, answers
that return as prompts other than by the ids of the trace, and groups of layers with
windows or states: every layer keeps every token.
"""

import gc
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.kv_tier.config import KVTierConfig, KVTierLayout, StorePolicy
from vllm.v1.kv_tier.hints import KEY as HINTS
from vllm.v1.kv_tier.pool import make_block_pool
from vllm.v1.kv_tier.scheduling.slots import HostSlot

from .trace import NOBODY, Call, Senders, conversations


def _block_hash(number: int) -> BlockHash:
    if hasattr(BlockHash, "hash_value"):
        # The first releases have the tokens beside a number.
        make: Any = BlockHash
        return make(number, ())
    return BlockHash(number.to_bytes(12, "big", signed=True))


@dataclass(frozen=True)
class Engine:
    """One engine, all of its ranks together."""

    block_size: int
    block_bytes: int
    device_bytes: int
    prefill_tokens_per_s: float
    seconds_per_output_token: float
    max_running: int


@dataclass(frozen=True)
class Tier:
    """A host tier to try; `host_bytes` 0: none."""

    host_bytes: int
    eviction_policy: str = "lru"
    store_policy: StorePolicy = "write_back"
    store_from_use: int = 1
    senders: Senders = NOBODY


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

    @property
    def device_rate(self) -> float:
        return self.device_hits / self.prompt_blocks

    @property
    def host_rate(self) -> float:
        return self.host_hits / self.prompt_blocks

    @property
    def hit_rate(self) -> float:
        return self.device_rate + self.host_rate

    def as_json(self) -> dict[str, Any]:
        fields = asdict(self)
        rates = {"device_hit_rate": self.device_rate, "host_hit_rate": self.host_rate}
        return fields.pop("tier") | fields | rates


class _Request:
    """What the tier must know of a request. It remembers those that wait."""

    num_preemptions = 0

    def __init__(
        self, request_id: str, block_hashes: list[BlockHash], hints: dict[str, Any]
    ) -> None:
        self.request_id = request_id
        self.block_hashes = block_hashes
        self.kv_transfer_params = {HINTS: hints} if hints else None
        self.has_ended = False

    def is_finished(self) -> bool:
        return self.has_ended


class Replay:
    """One tier of one engine, through one trace."""

    def __init__(self, engine: Engine, tier: Tier) -> None:
        self.engine = engine
        self.tier = tier
        num_slots = tier.host_bytes // engine.block_bytes
        layout = None
        if num_slots:
            config = KVTierConfig(
                tier.host_bytes,
                store_policy=tier.store_policy,
                store_from_use=tier.store_from_use,
                eviction_policy=tier.eviction_policy,
                max_load_stall_ms=None,
            )
            layout = KVTierLayout(config, num_slots, engine.block_bytes)
        self._num_slots = num_slots
        self.pool: Any = make_block_pool(
            SimpleNamespace(kv_tier=layout),
            num_gpu_blocks=engine.device_bytes // engine.block_bytes + 1,
            enable_caching=True,
            hash_block_size=engine.block_size,
        )
        self._managers = [
            SimpleNamespace(
                block_size=engine.block_size, get_num_skipped_tokens=lambda _: 0
            )
        ]
        self._numbers = itertools.count()
        # When a running request ends, and its blocks.
        self._running: list[tuple[float, int, _Request, list[KVCacheBlock]]] = []
        self._prompt_blocks = self._device_hits = self._host_hits = 0
        self._stored = self._loaded = self._too_long = 0
        self._last_hits = 0

    def run(self, calls: Sequence[Call]) -> Outcome:
        """Serve `calls`, which come in order of arrival."""
        names = conversations(calls)
        last = self.tier.senders.last_calls(names)
        is_told = {names[place] for place in last}
        prefill_free = 0.0
        for place, (call, name) in enumerate(zip(calls, names)):
            hints: dict[str, Any] = {}
            if name in is_told:
                hints = {"conversation": str(name), "release": place in last}
            prefill_free = self._serve(call, prefill_free, hints)
        return Outcome(
            self.tier,
            self._prompt_blocks,
            self._device_hits,
            self._host_hits,
            self._stored,
            self._loaded,
            self._num_slots,
            self._too_long,
        )

    def _serve(self, call: Call, prefill_free: float, hints: dict[str, Any]) -> float:
        """Admit a request as soon as it can be; returns when its prefill ends."""
        engine = self.engine
        size = engine.block_size
        ids = call.block_ids(size)
        num_blocks = -(-(call.input_tokens + call.output_tokens) // size)
        if num_blocks >= self.pool.num_gpu_blocks:
            self._too_long += 1
            return prefill_free
        # Blocks that only the answer fills take room, and nobody hits them.
        number = next(self._numbers)
        num_full = (call.input_tokens + call.output_tokens) // size
        answer = [-1 - number * 2**20 - i for i in range(max(0, num_full - len(ids)))]
        hashes = [_block_hash(i) for i in ids + answer]
        request = _Request(str(number), hashes, hints)
        now = max(call.arrival_s, prefill_free)
        self._end_until(now)
        while len(self._running) >= engine.max_running or not (
            blocks := self._admit(request, len(ids), num_blocks)
        ):
            now = self._running[0][0]
            self._end_until(now)
        computed = max(0, call.input_tokens - self._last_hits * size)
        prefill_ends = now + computed / engine.prefill_tokens_per_s
        ends = prefill_ends + call.output_tokens * engine.seconds_per_output_token
        heapq.heappush(self._running, (ends, number, request, blocks))
        return prefill_ends

    def _admit(
        self, request: Any, num_prompt_blocks: int, num_blocks: int
    ) -> list[KVCacheBlock]:
        """The blocks of a request, in a step of its own; empty: no room."""
        pool = self.pool
        if self._num_slots:
            # Upstream's scheduler asks of every request.
            pool.is_loading(request, True)
        hits = []
        for block_hash in request.block_hashes[:num_prompt_blocks]:
            found = pool.get_cached_block(block_hash, [0])
            if found is None:
                break
            hits.append(found[0])
        # What upstream counts: slots and free blocks of the hit are blocks to take.
        held = sum(block.ref_cnt > 0 for block in hits)
        if num_blocks - held > pool.get_num_free_blocks():
            return []
        on_host = sum(type(block) is HostSlot for block in hits)
        self._begin_step()
        if self._num_slots:
            size = self.engine.block_size
            promoted = pool.promote(
                request, self._managers, (hits,), len(hits) * size, 0, 2, True
            )
            if promoted is None:
                self._end_step()
                return []
            hits = list(promoted[0])
        pool.touch(hits)
        blocks = hits + pool.get_new_blocks(num_blocks - len(hits))
        num_hashed = len(request.block_hashes)
        size = self.engine.block_size
        pool.cache_full_blocks(request, blocks, len(hits), num_hashed, size, 0)
        self._end_step()
        self._prompt_blocks += num_prompt_blocks
        self._device_hits += len(hits) - on_host
        self._host_hits += on_host
        self._last_hits = len(hits)
        return blocks

    def _end_until(self, now: float) -> None:
        """Free the blocks of the requests that end by `now`, tail first."""
        running = self._running
        while running and running[0][0] <= now:
            _, _, request, blocks = heapq.heappop(running)
            request.has_ended = True
            self.pool.free_blocks(reversed(blocks))
            self._begin_step()
            self._end_step()

    def _begin_step(self) -> None:
        if self._num_slots:
            self.pool.begin_step()

    def _end_step(self) -> None:
        if self._num_slots:
            plan = self.pool.take_plan()
            self._stored += len(plan.store_blocks)
            self._loaded += len(plan.load_blocks)


def replay(engine: Engine, tier: Tier, calls: Sequence[Call]) -> Outcome:
    """Serve a trace with one tier."""
    # Little is garbage before the end, and looking for it takes as long as the rest.
    gc.disable()
    try:
        return Replay(engine, tier).run(calls)
    finally:
        gc.enable()
