# SPDX-License-Identifier: Apache-2.0
"""Bytes of KV events while a real scheduler fills 100,000 host slots, and more.

    PYTHONPATH=. build/env/v0.32.0/bin/python scripts/bench/event_traffic.py

Conversations of many users; of 128,000 words the frequent ones have small numbers.
What the scheduler publishes is encoded as upstream's publisher does, given to the
follower of the tests, and compared with the pool at the end. Beside it: the same
changes with an event for each block that the host stores or either tier removes.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
from scheduler_setup import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    make_request,
    make_scheduler,
    timed_step,
)

from tests.follower import Follower
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import (
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisher,
    KVCacheEvent,
    KVEventBatch,
)
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    maybe_convert_block_hash,
)
from vllm.v1.kv_tier.config import DebugConfig, KVTierConfig, StorePolicy
from vllm.v1.kv_tier.layout import KVTierLayout
from vllm.v1.kv_tier.scheduler.events import TierEvents
from vllm.v1.request import RequestStatus

NUM_BLOCKS = 16_384
NUM_WORDS = 128_000
TURN_TOKENS, ANSWER_TOKENS, NUM_TURNS = 600, 24, 6
MAX_NUM_SEQS = 64


class Traffic(EventPublisher):
    """Takes the place of a publisher that sends."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = self.num_bytes_by_block = self.num_bytes_of_upstream = 0
        self.num_bytes_of_content = 0
        self.num_batches = self.largest = 0
        self.seconds = 0.0
        self.follower = Follower()
        self._encode = msgspec.msgpack.Encoder().encode

    def publish(self, batch: EventBatch) -> None:
        assert isinstance(batch, KVEventBatch)
        started = time.thread_time()
        size = len(self._encode(batch))
        self.seconds += time.thread_time() - started
        self.num_batches += 1
        self.num_bytes += size
        self.largest = max(self.largest, size)
        self.follower.follow(batch.events)
        self.num_bytes_of_upstream += sum(
            len(self._encode(event)) for event in batch.events if _is_upstream(event)
        )
        self.num_bytes_of_content += sum(
            len(self._encode(content))
            for event in batch.events
            if not _is_upstream(event)
            for content in _content(event)
        )
        parts: list[Any] = [part for event in batch.events for part in _by_block(event)]
        single = KVEventBatch(batch.ts, parts, batch.data_parallel_rank)
        self.num_bytes_by_block += len(self._encode(single))

    def shutdown(self) -> None:
        pass


class Slots:
    """Counts the slots that made room."""

    num_forgotten = 0

    def on_filled(self, slot: object) -> None:
        pass

    def on_loaded(self, slots: object) -> None:
        pass

    def on_forgotten(self, slot: object) -> None:
        self.num_forgotten += 1


def _is_upstream(event: KVCacheEvent) -> bool:
    """Whether it tells what was computed (or loaded), which upstream puts together."""
    return isinstance(event, BlockStored) and event.medium != "CPU"


def _content(event: KVCacheEvent) -> list[list]:
    """What must be told of its blocks, one by one, however they are put together."""
    if isinstance(event, BlockStored):
        return [event.block_hashes, event.token_ids]
    return [event.block_hashes] if isinstance(event, BlockRemoved) else []


def _by_block(event: KVCacheEvent) -> Iterator[KVCacheEvent]:
    """An event for each block, where the host stores it or anybody removes it."""
    if isinstance(event, BlockRemoved):
        for one in event.block_hashes:
            yield msgspec.structs.replace(event, block_hashes=[one])
    elif isinstance(event, BlockStored) and event.medium == "CPU":
        size = event.block_size
        keys = event.extra_keys
        for i, one in enumerate(event.block_hashes):
            yield msgspec.structs.replace(
                event,
                block_hashes=[one],
                parent_block_hash=event.block_hashes[i - 1]
                if i
                else event.parent_block_hash,
                token_ids=event.token_ids[i * size : (i + 1) * size],
                extra_keys=keys if keys is None else [keys[i]],
            )
    else:
        yield event


def conversations(rng: random.Random) -> Iterator[list[int]]:
    """Prompts: turns of conversations whose users take turns."""
    histories: list[tuple[int, list[int]]] = []
    while True:
        while len(histories) < 4 * MAX_NUM_SEQS:
            histories.append((0, []))
        turn, history = histories.pop(rng.randrange(len(histories)))
        history = history + [_word(rng) for _ in range(TURN_TOKENS)]
        if turn < NUM_TURNS:
            histories.append((turn + 1, history + [7] * ANSWER_TOKENS))
        yield history


def _word(rng: random.Random) -> int:
    """By Zipf's law, as the numbers of a byte pair encoding are in the main."""
    return int(NUM_WORDS ** rng.random()) + 2


def bytes_kept(events: TierEvents) -> int:
    """Memory of what is kept for events; nobody else has these keys."""
    kept = [events._descriptions, events._touched, *events._published.values()]
    parts = [*events._descriptions.keys(), *events._descriptions.values()]
    return sum(map(sys.getsizeof, kept + parts))


def run(num_slots: int, store_policy: StorePolicy) -> dict[str, object]:
    config = KVTierConfig(
        num_slots * BLOCK_BYTES, debug=DebugConfig(store_policy=store_policy)
    )
    scheduler = make_scheduler(
        NUM_BLOCKS,
        MAX_NUM_SEQS,
        8192,
        8192,
        KVTierLayout(config, num_slots, BLOCK_BYTES),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    traffic = Traffic()
    scheduler.kv_event_publisher = traffic
    pool = scheduler.kv_cache_manager.block_pool
    prompts = conversations(random.Random(0))
    slots = Slots()
    pool.host.listeners.append(slots)
    seconds, num_requests, num_steps = 0.0, 0, 0
    while slots.num_forgotten < num_slots // 4:
        while len(scheduler.waiting) + len(scheduler.running) < MAX_NUM_SEQS:
            request = make_request(str(num_requests), next(prompts), ANSWER_TOKENS)
            scheduler.add_request(request)
            num_requests += 1
        inside = traffic.seconds
        seconds += timed_step(scheduler) - (traffic.seconds - inside)
        num_steps += 1
    # Publishes what the last step has changed.
    for request in [*scheduler.running, *scheduler.waiting]:
        scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(make_request("last", [1] * 2 * BLOCK_SIZE, 1))
    timed_step(scheduler)
    host = {key for slot in pool.host.filled_slots() for key in slot.keys}
    told = traffic.follower.held("CPU")
    assert told == Counter(
        (get_group_id(k), maybe_convert_block_hash(get_block_hash(k))) for k in host
    ), "the follower does not know what the host has"
    of_upstream = traffic.num_bytes_of_upstream
    own, own_by_block = (
        total - of_upstream for total in (traffic.num_bytes, traffic.num_bytes_by_block)
    )
    return {
        "slots": len(host),
        "evicted_slots": slots.num_forgotten,
        "requests": num_requests,
        "steps": num_steps,
        "schedule_ms_per_step": round(seconds / num_steps * 1e3, 3),
        "encode_ms_per_step": round(traffic.seconds / num_steps * 1e3, 3),
        "events": dict(traffic.follower.num_events),
        "bytes": traffic.num_bytes,
        "largest_batch_bytes": traffic.largest,
        "bytes_by_block": traffic.num_bytes_by_block,
        "ratio": round(traffic.num_bytes / traffic.num_bytes_by_block, 3),
        "bytes_without_upstreams": own,
        "hashes_and_tokens_without_upstreams": traffic.num_bytes_of_content,
        "bytes_by_block_without_upstreams": own_by_block,
        "ratio_without_upstreams": round(own / own_by_block, 3),
        "blocks_described": pool.events.num_described,
        "bytes_kept_per_block": round(
            bytes_kept(pool.events) / pool.events.num_described
        ),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=100_000)
    parser.add_argument(
        "--store-policy", choices=get_args(StorePolicy), default="write_back"
    )
    args = parser.parse_args()
    print(json.dumps(run(args.slots, args.store_policy), indent=1))
