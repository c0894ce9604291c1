# SPDX-License-Identifier: Apache-2.0
"""Followers of engines that share a pool know what requests have used and computed.

An engine publishes its own device and slots. What other engines have computed, it can
describe only once a request uses it.
"""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from tests.follower import Mismatch
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
)
from vllm.v1.kv_tier.keeper.partition import Partition
from vllm.v1.kv_tier.releases import describes_hits
from vllm.v1.kv_tier.scheduler.events import TierEvents
from vllm.v1.kv_tier.scheduler.kv_groups import hashes_of_blocks

from . import upstream
from .scheduler import Setup
from .scripts import random_setup
from .shared_pool import Machine, play, turns
from .step import Step
from .test_events import FOLLOWED, FollowedEngine
from .test_shared_pool import draw_script, press

LAYOUTS = [layout for layout in FOLLOWED if "partial hits" not in repr(layout)]

pytestmark = pytest.mark.skipif(
    not describes_hits(),
    reason="refused: this release describes only what it has computed",
)


class FollowedNeighbour(FollowedEngine):
    """Compares what it has described."""

    num_hits = 0
    """Blocks of hits that subscribers must know."""
    all_engines: list["FollowedNeighbour"] = []
    """Those of a script."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.all_engines.append(self)

    def compare(self) -> None:
        self.take_batches()
        described = self.pool.events._descriptions.keys()
        device = {key for key, _ in upstream.cached_blocks(self.pool)} & described
        host = {key for key, _ in self.pool.host.places.items()} & described
        for medium, keys in (("GPU", device), ("CPU", host)):
            held = Counter(
                (get_group_id(key), maybe_convert_block_hash(get_block_hash(key)))
                for key in keys
            )
            if held != self.follower.held(medium):
                raise Mismatch(f"{medium}: {held} are not {self.follower.held(medium)}")
        if described - device - host:
            raise Mismatch("descriptions are kept of other blocks")
        self.num_compared += 1

    def _count(self, step: Step) -> None:
        super()._count(step)
        # What a request of this step has hit, as far as it was cached in whole blocks.
        told = self.pool.events._published[self.pool.events._device]
        if self.pool.events._num_behind:
            return
        for new in step.output.scheduled_new_reqs:
            request = self._live[new.req_id].request
            for i, group in enumerate(self.setup.layout.groups):
                size = group.block_size
                hashes = hashes_of_blocks(request, self.pool.hash_block_size, size)
                for block_hash in hashes[: new.num_computed_tokens // size]:
                    key = make_block_hash_with_group_id(block_hash, i)
                    # Windows and states need the last ones only.
                    if self.pool.cached_block_hash_to_block.get_one_block(key) is None:
                        continue
                    if key not in told and self.is_used(new, key):
                        raise Mismatch(f"{key!r} is used, but not published")
                    self.num_hits += 1

    def is_used(self, new: object, key: object) -> bool:
        """Whether a new request has a block with `key`."""
        ids = {block for blocks in new.block_ids for block in blocks}  # type: ignore[attr-defined]
        blocks = self.pool.blocks
        return any(blocks[block].block_hash == key for block in ids)


class FollowedMachine(Machine):
    make_engine = FollowedNeighbour


def run(seed: int) -> Counter[str]:
    """Two or three engines, some of which die, followed."""
    rng = Random(seed)
    setup = press(random_setup(rng), rng)
    setup = replace(
        setup,
        layout=rng.choice(LAYOUTS),
        quotas=(),
        num_slots=rng.randint(16, 32),
        tuning=replace(setup.tuning, plans_per_report=1, settled_outputs=0),
    )
    num_engines = rng.randint(2, 3)
    scripts = [
        draw_script(rng, True, None, rng.random() < 0.3) for _ in range(num_engines)
    ]
    engines: list[FollowedNeighbour] = []
    FollowedNeighbour.all_engines = engines
    try:
        machine = FollowedMachine(setup, num_engines, Partition, 0, rng)
        events = play(machine, turns(rng, scripts, num_kills=rng.choice([0, 1])))
        for engine in engines:
            events["compared"] += engine.num_compared
            events["hits"] += engine.num_hits
            events += engine.follower.num_events
    finally:
        for engine in engines:
            engine.close()
    return events


@pytest.mark.pairs("EV", "OP")
def test_events_tell_what_engines_of_a_pool_have_used() -> None:
    events: Counter[str] = Counter()
    for seed in range(30):
        try:
            events += run(seed)
        except BaseException as e:
            e.add_note(f"run({seed})")
            raise
    assert events["from neighbours"] > 40 and events["adopted"] > 20
    assert events["compared"] > 3000 and events["hits"] > 1000
    for medium in ("GPU", "CPU"):
        assert events[f"BlockStored {medium}"] > 100


@pytest.mark.plants
@pytest.mark.parametrize("name", ["on_hit", "on_found"])
def test_blocks_of_others_that_are_not_published_are_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TierEvents, name, lambda *args: None)
    with pytest.raises(Mismatch):
        for seed in range(30):
            run(seed)
