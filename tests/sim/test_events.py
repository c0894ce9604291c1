# SPDX-License-Identifier: Apache-2.0
"""A subscriber knows from KV cache events alone what both tiers hold.

Random scripts on the real scheduler, which publishes over ZMQ; what the subscriber
knows is compared with the pool after every step.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tests.follower import Follower, Mismatch, Subscriber, replayed
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockStored,
    EventBatch,
    ZmqEventPublisher,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    maybe_convert_block_hash,
)
from vllm.v1.kv_tier.scheduler import events as tier_events
from vllm.v1.kv_tier.scheduler.events import PublishingBlockPool, TierEvents

from . import upstream
from .engine import Conversation, Engine
from .layouts import LAYOUTS, Layout
from .scheduler import Setup
from .scripts import Reset, random_action, random_setup

FOLLOWED = [
    layout
    for layout in LAYOUTS
    if upstream.EVENTS_TELL_GROUPS or len(layout.groups) == 1
]

BELOW = FOLLOWED[:4] + [
    layout
    for layout in FOLLOWED
    if {group.block_size for group in layout.groups} != {layout.hash_block_size}
]

STEPS = 900
"""For each layout, so that there are more than 10,000."""

BUFFER_STEPS = 8
"""Batches that are kept for replays."""


class FollowedEngine(Engine):
    """Publishes events, and compares what they say with the pool."""

    def __init__(self, setup: Setup) -> None:
        self.prefixes: dict[Any, tuple[list[int], str | None]] = {}
        endpoint = f"inproc://{id(self)}"
        self._replay_endpoint = f"{endpoint}-replay"
        events = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=endpoint,
            replay_endpoint=self._replay_endpoint,
            buffer_steps=BUFFER_STEPS,
        )
        super().__init__(replace(setup, kv_events=events))
        publisher = self._scheduler.kv_event_publisher
        assert isinstance(publisher, ZmqEventPublisher)
        self.publisher = publisher
        pool = self._scheduler.kv_cache_manager.block_pool
        assert isinstance(pool, PublishingBlockPool)
        self.pool = pool
        self.subscriber = Subscriber(endpoint)
        self.follower = Follower()
        self.late: Follower | None = None
        """Knows nothing of what was told before the last reset of all."""
        self.num_late = 0
        self.num_compared = 0
        self._num_published = 0
        publish = publisher.publish

        def counted(batch: EventBatch) -> None:
            self._num_published += 1
            publish(batch)

        publisher.publish = counted  # type: ignore[method-assign]

    def close(self) -> None:
        self.publisher.shutdown()
        self.subscriber.close()

    def replay(self, last: int | None = None) -> list[int]:
        """Numbers of the batches that are sent again when somebody asks for the `last`
        ones, or for all."""
        since = 0 if last is None else self._num_published - last
        return replayed(self._replay_endpoint, since)

    def take_batches(self) -> None:
        """Follow what was published."""
        while self.subscriber.num_batches < self._num_published:
            events = self.subscriber.receive(timeout_s=30)
            if events is None:
                raise Mismatch("no event came")
            self.follower.follow(events)
            if any(isinstance(event, AllBlocksCleared) for event in events):
                self.late = Follower()
                self.num_late += 1
            if self.late is not None:
                self.late.follow(events)
            for event in events:
                if isinstance(event, BlockStored):
                    self._check_truth(event)

    def compare(self) -> None:
        self.take_batches()
        pool, follower = self.pool, self.follower
        device = {key: 1 for key, _ in upstream.cached_blocks(pool)}
        host = {key: 1 for key, _ in pool.host.places.items()}
        below = self._known_below()
        for medium, keys in (("GPU", device), ("CPU", host), ("STORAGE", below)):
            held = Counter(
                {
                    (get_group_id(k), maybe_convert_block_hash(get_block_hash(k))): n
                    for k, n in keys.items()
                }
            )
            if held != follower.held(medium):
                raise Mismatch(
                    f"{medium}: not told of {held - follower.held(medium)}, "
                    f"told too much: {follower.held(medium) - held}"
                )
            if self.late is not None and held != self.late.held(medium):
                raise Mismatch(f"{medium}: not told anew")
        held_somewhere = device.keys() | host.keys() | below.keys()
        described = pool.events._descriptions.keys()
        others = described - held_somewhere
        if pool.secondary is not None:
            others = {key for key in others if not pool.secondary.is_moving(key)}
        if others or held_somewhere - described:
            raise Mismatch("descriptions are kept of other blocks")
        self.num_compared += 1

    def _known_below(self) -> dict[Any, int]:
        """On how many tiers below each key is known to be."""
        backing = self.pool.secondary
        if backing is None or backing._jobs.is_detached:
            return {}
        return Counter(key for each in backing.writers for key in each._known)

    def _process_oldest(self) -> None:
        super()._process_oldest()
        # A reset is published with the step after it.
        events = self.pool.events
        if not (self.pool.kv_event_queue or events._touched or events._anew):
            self.compare()

    def _learn_hashes(self, conversation: Conversation) -> None:
        super()._learn_hashes(conversation)
        request, size = conversation.request, self.setup.layout.hash_block_size
        lora = request.lora_request
        told = None
        if lora is not None:
            told = lora.name if upstream.EVENTS_NAME_ADAPTERS else lora.adapter_id
        for i, block_hash in enumerate(request.block_hashes):
            tokens = list(request.all_token_ids[: (i + 1) * size])
            self.prefixes[maybe_convert_block_hash(block_hash)] = tokens, told

    def _check_truth(self, event: BlockStored) -> None:
        size, hashes = event.block_size, event.block_hashes
        if len(event.token_ids) != size * len(hashes):
            return
        for i, block_hash in enumerate(hashes):
            tokens, lora = self.prefixes[block_hash]
            parent = hashes[i - 1] if i else event.parent_block_hash
            before = self.prefixes[parent][0] if parent is not None else []
            if before + event.token_ids[i * size : (i + 1) * size] != tokens:
                raise Mismatch(f"other tokens than {tokens}: {event}")
            named = upstream.EVENTS_NAME_ADAPTERS
            if (event.lora_name if named else event.lora_id) != lora:
                raise Mismatch(f"not the LoRA {lora}: {event}")


def run(
    layout: Layout,
    num_steps: int,
    seed: int,
    replay_each: int = 0,
    below: tuple[int, int] | None = None,
) -> Counter[str]:
    """Two engines of random settings, followed. Returns the events by kind.

    Args:
        layout: Of both engines.
        num_steps: Of both together.
        seed: Of settings and actions.
        replay_each: Steps after which somebody asks for a replay of all; 0: nobody.
        below: Seed and delay of tiers below. No reset takes them away.

    """
    rng = Random(seed)
    kinds: Counter[str] = Counter()
    num_compared = 0
    for is_async in (False, True):
        setup = replace(random_setup(rng), layout=layout, is_async=is_async)
        # A host that has room for all would forget nothing.
        setup = replace(setup, num_slots=min(setup.num_slots, 12))
        if below is not None:
            # Who takes longer than computing is not asked.
            tuning = replace(setup.tuning, fetch_part=1.0, assumed_prefill_s=1e3)
            setup = replace(setup, below=below, store_from_use=1, tuning=tuning)
        engine = FollowedEngine(setup)
        num_asked = 0
        try:
            while engine._num_steps < num_steps / 2:
                if replay_each and engine._num_steps // replay_each > num_asked:
                    num_asked += 1
                    engine.replay()
                action = random_action(rng)
                if below is None or not isinstance(action, Reset):
                    action.run(engine)
            engine.drain()
            engine.follower.follow(engine.pool.take_events())
            assert not {key for key in engine.follower.blocks if key[0] != "STORAGE"}
            kinds += engine.follower.num_events
            num_compared += engine.num_compared
        finally:
            engine.close()
    assert num_compared > (0.4 if replay_each else 0.8) * num_steps
    return kinds


@pytest.mark.parametrize("layout", FOLLOWED, ids=repr)
def test_events_tell_what_both_tiers_hold(layout: Layout) -> None:
    kinds = run(layout, STEPS, seed=LAYOUTS.index(layout))
    for kind in ("BlockStored", "BlockRemoved"):
        for medium in ("GPU", "CPU"):
            assert kinds[f"{kind} {medium}"] > 50, kinds
    assert kinds["AllBlocksCleared"] > 1


@pytest.mark.skipif(
    not hasattr(BlockPool, "emit_cached_block_events"),
    reason="refused: this release describes only what it has computed",
)
@pytest.mark.parametrize("layout", BELOW, ids=repr)
@pytest.mark.parametrize("seed", [2, 3])
def test_events_tell_what_is_known_of_tiers_below(layout: Layout, seed: int) -> None:
    kinds = run(layout, STEPS, seed=100 + seed, below=(seed, 2))
    for kind in ("BlockStored", "BlockRemoved"):
        for medium in ("GPU", "CPU", "STORAGE"):
            assert kinds[f"{kind} {medium}"] > 3, kinds


@pytest.mark.skipif(
    not hasattr(BlockPool, "emit_cached_block_events"),
    reason="refused: this release describes only what it has computed",
)
@pytest.mark.parametrize("seed", [2, 3])
def test_secondary_tiers_that_are_not_used_any_more_are_removed(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts, while everything goes on. Weights may have changed, for example."""
    monkeypatch.setattr(tier_events, "REPUBLISHED_PER_STEP", 12)
    rng = Random(100 + seed)
    setup = replace(random_setup(rng), layout=BELOW[0], num_slots=12, below=(seed, 2))
    tuning = replace(setup.tuning, fetch_part=1.0, assumed_prefill_s=1e3)
    setup = replace(setup, store_from_use=1, tuning=tuning)
    engine = FollowedEngine(setup)
    secondary, num_compared = engine.pool.secondary, 0
    assert secondary is not None
    try:
        while engine._num_steps < STEPS:
            action = random_action(rng)
            if not isinstance(action, Reset):
                action.run(engine)
            if not num_compared and len(engine.follower.held("STORAGE")) > 20:
                secondary.detach("weights may have changed")
                num_compared = engine.num_compared
        engine.drain()
        assert num_compared and not engine.follower.held("STORAGE")
        assert engine.num_compared > num_compared + 20
    finally:
        engine.close()


@pytest.mark.parametrize("layout", FOLLOWED[:3], ids=repr)
def test_who_comes_too_late_for_a_replay_is_told_all(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts, while everything goes on."""
    monkeypatch.setattr(tier_events, "REPUBLISHED_PER_STEP", 12)
    kinds = run(layout, STEPS, LAYOUTS.index(layout), replay_each=25)
    assert kinds["AllBlocksCleared"] > 25


@pytest.mark.parametrize("last, num_late", [(BUFFER_STEPS, 0), (None, 1)])
def test_only_who_comes_too_late_is_told_more(last: int | None, num_late: int) -> None:
    engine = FollowedEngine(replace(random_setup(Random(0)), layout=FOLLOWED[0]))
    try:
        for i in range(3 * BUFFER_STEPS):
            engine.add(list(range(20 * i, 20 * i + 16)), max_tokens=1)
            engine.step()
        engine.compare()
        assert len(engine.replay(last)) == BUFFER_STEPS
        engine.add(list(range(1000, 1016)), max_tokens=1)
        engine.step()
        engine.step()
        engine.compare()
        assert engine.num_late == num_late
    finally:
        engine.close()


# --------------------------------------------------------------- negative controls


def _silent(events: TierEvents, of: object) -> None:
    pass


def _keep_told(events: TierEvents) -> None:
    """Takes followers for knowing still what was cleared."""
    events._descriptions.clear()
    events._touched.clear()


def _swap_tokens(
    events: TierEvents,
    keys: object,
    medium: str,
    tell: Callable = TierEvents._publish_stored,
) -> None:
    queue = events._pool.kv_event_queue
    num_events = len(queue)
    tell(events, keys, medium)
    for event in queue[num_events:]:
        assert isinstance(event, BlockStored)
        event.token_ids.reverse()


BUGS = {
    "on_forgotten": _silent,
    "on_loaded": _silent,
    "record_cleared": _keep_told,
    "record_removed": _silent,
    "_publish_stored": _swap_tokens,
}


@pytest.mark.plants
@pytest.mark.parametrize("name", BUGS)
def test_a_wrong_stream_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TierEvents, name, BUGS[name])
    with pytest.raises(Mismatch):
        run(FOLLOWED[2], STEPS, seed=2)


@pytest.mark.plants
@pytest.mark.skipif(
    not hasattr(BlockPool, "emit_cached_block_events"),
    reason="refused: this release describes only what it has computed",
)
@pytest.mark.parametrize("name", ["on_secondary_change", "on_found"])
def test_a_wrong_stream_of_what_lies_below_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TierEvents, name, lambda *args: None)
    with pytest.raises((Mismatch, KeyError)):
        # Few scripts find a block that has no description yet.
        for seed in range(2, 22):
            run(BELOW[0], STEPS, seed=100 + seed, below=(seed, 2))


@pytest.mark.plants
def test_a_lost_event_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    take_events = PublishingBlockPool.take_events

    def all_but_one(pool: PublishingBlockPool) -> list:
        events = take_events(pool)
        stored = [e for e in events if not isinstance(e, AllBlocksCleared)]
        return events if len(stored) < 4 else events[1:]

    monkeypatch.setattr(PublishingBlockPool, "take_events", all_but_one)
    with pytest.raises(Mismatch):
        run(LAYOUTS[0], STEPS, seed=0)
