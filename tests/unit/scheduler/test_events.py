# SPDX-License-Identifier: Apache-2.0
"""KV events of single moves between the tiers. Random ones are in tests/sim."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.follower import Follower, Mismatch
from tests.sim import upstream
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    get_request_block_hasher,
    maybe_convert_block_hash,
)
from vllm.v1.kv_tier.config import KVTierConfig
from vllm.v1.kv_tier.layout import KVTierLayout
from vllm.v1.kv_tier.plan import StepReport
from vllm.v1.kv_tier.pool import TieredBlockPool, make_block_pool
from vllm.v1.kv_tier.scheduler.events import PublishingBlockPool
from vllm.v1.request import Request

from ...names import init_none_hash, sha256
from ...settings import options

BLOCK = 4
SLOT_BYTES = 1 << 20


def make_pool(
    num_blocks: int, num_slots: int, events: bool = True, **config: Any
) -> TieredBlockPool:
    layout = KVTierLayout(
        KVTierConfig(num_slots * SLOT_BYTES, **options(**config)), num_slots, SLOT_BYTES
    )
    pool = make_block_pool(
        SimpleNamespace(kv_tier=layout),
        num_gpu_blocks=num_blocks + 1,
        enable_caching=True,
        hash_block_size=BLOCK,
        enable_kv_cache_events=events,
    )
    assert isinstance(pool, TieredBlockPool)
    return pool


class Publisher:
    """A pool with events, driven by hand."""

    def __init__(self, num_blocks: int = 3, num_slots: int = 10, **config: Any) -> None:
        init_none_hash(sha256)
        pool = make_pool(num_blocks, num_slots, **config)
        assert isinstance(pool, PublishingBlockPool)
        self.pool = pool
        self.follower = Follower()

    def compute(self, request: Request) -> list[KVCacheBlock]:
        """A step that computes the blocks of `request`, which are free after it."""
        pool, num_blocks = self.pool, len(request.block_hashes)
        pool.begin_step()
        blocks = pool.get_new_blocks(num_blocks)
        pool.cache_full_blocks(request, blocks, 0, num_blocks, BLOCK, 0)
        pool.take_plan()
        pool.free_blocks(reversed(blocks))
        return blocks

    def evict_all(self) -> None:
        self.pool.begin_step()
        blocks = self.pool.get_new_blocks(self.pool.get_num_free_blocks())
        self.pool.take_plan()
        self.pool.free_blocks(blocks)

    def promote(self, request: Request) -> None:
        self.pool.begin_step()
        found = [self.pool.get_cached_block(h, [0]) for h in request.block_hashes]
        manager = SimpleNamespace(
            block_size=BLOCK, get_num_skipped_tokens=lambda num_tokens: 0
        )
        hit = [blocks[0] for blocks in found if blocks]
        assert len(hit) == len(request.block_hashes)
        num_tokens = len(hit) * BLOCK
        assert self.pool.promote(request, [manager], (hit,), num_tokens, 0, 2, False)
        self.pool.take_plan()

    def told(self) -> list[Any]:
        events = self.pool.take_events()
        self.follower.follow(events)
        return events


def request(tokens: range, lora: str | None = None) -> Request:
    return request_of(list(tokens), lora)


def request_of(tokens: list[int], lora: str | None = None) -> Request:
    return upstream.make_request(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=LoRARequest(lora, 7, "nowhere") if lora else None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def hashes(request: Request) -> list[Any]:
    return [maybe_convert_block_hash(h) for h in request.block_hashes]


def test_without_events_the_pool_is_another() -> None:
    assert type(make_pool(3, 3, events=False)) is TieredBlockPool


def test_a_chain_goes_to_the_host_and_back() -> None:
    tier = Publisher()
    one = request(range(12), lora="adapter")
    tier.compute(one)
    first = tier.told()[0]
    tier.evict_all()
    told = tier.told()
    stored = [e for e in told if isinstance(e, BlockStored)]
    # The last block of the chain went first; it is told as a chain all the same.
    assert [(e.medium, e.block_hashes) for e in stored] == [("CPU", hashes(one))]
    removed = [e for e in told if isinstance(e, BlockRemoved)]
    assert [(e.medium, set(e.block_hashes)) for e in removed] == [
        ("GPU", set(hashes(one)))
    ]
    tier.promote(one)
    (promoted,) = tier.told()
    # One event for the chain, and the very one that the computation sent.
    assert promoted == first
    assert promoted.token_ids == list(range(12))
    assert getattr(promoted, "lora_name", "adapter") == "adapter"
    assert sum(tier.follower.held("GPU").values()) == 3
    assert sum(tier.follower.held("CPU").values()) == 3


def test_a_store_describes_its_own_blocks_only() -> None:
    """The event of the computation described others, too."""
    tier = Publisher(num_slots=1)
    one = request(range(12))
    tier.compute(one)
    tier.told()
    tier.evict_all()
    stored = [e for e in tier.told() if isinstance(e, BlockStored)]
    assert len(stored) == 1
    i = hashes(one).index(stored[0].block_hashes[0])
    assert stored[0].token_ids == list(range(12))[i * BLOCK : (i + 1) * BLOCK]
    assert stored[0].parent_block_hash == (hashes(one)[i - 1] if i else None)


def test_branches_are_told_behind_what_they_branch_off() -> None:
    """A router that does not know a parent drops its children."""
    tier = Publisher(num_blocks=9)
    trunk, other = list(range(12)), [*range(8), *range(20, 28)]
    tier.compute(request_of(trunk))
    tier.compute(request_of(other))
    tier.evict_all()
    told = [e for e in tier.told() if isinstance(e, BlockStored)]
    stored = [e for e in told if e.medium == "CPU"]
    assert [len(e.block_hashes) for e in stored] in ([3, 2], [4, 1])
    known: set[Any] = {None}
    for event in stored:
        assert event.parent_block_hash in known
        known.update(event.block_hashes)
    assert len(known) == 6


def test_a_block_that_the_device_has_twice_is_stored_and_removed_once() -> None:
    """Routers that do not count would forget the second one with the first."""
    tier = Publisher(num_blocks=4, num_slots=0)
    one = request(range(8))
    tier.compute(one)
    tier.compute(one)
    (stored,) = tier.told()
    assert stored.block_hashes == hashes(one)
    tier.pool.begin_step()
    blocks = tier.pool.get_new_blocks(2)
    assert tier.told() == []
    tier.pool.get_new_blocks(2)
    (removed,) = tier.told()
    assert isinstance(removed, BlockRemoved)
    assert set(removed.block_hashes) == set(hashes(one))
    assert len(blocks) == 2 and tier.pool.events.num_described == 0


def test_what_came_and_went_between_two_steps_is_not_told() -> None:
    tier = Publisher(num_blocks=1, num_slots=1)
    for first in (0, 10, 20):
        tier.compute(request(range(first, first + 4)))
    told = tier.told()
    hosted = [h for e in told if e.medium == "CPU" for h in e.block_hashes]
    assert hosted == hashes(request(range(10, 14)))


def test_a_slot_that_makes_room_is_removed() -> None:
    tier = Publisher(num_blocks=1, num_slots=1)
    one, two = request(range(4)), request(range(10, 14))
    tier.compute(one)
    tier.evict_all()
    tier.compute(two)
    tier.told()
    tier.evict_all()
    kinds = [(type(e), e.medium, e.block_hashes[0]) for e in tier.told()]
    assert kinds == [
        (BlockRemoved, "GPU", hashes(two)[0]),
        (BlockStored, "CPU", hashes(two)[0]),
        (BlockRemoved, "CPU", hashes(one)[0]),
    ]
    assert tier.pool.events.num_described == 1


def test_a_failed_store_is_taken_back() -> None:
    tier = Publisher(num_blocks=1)
    tier.compute(request(range(4)))
    tier.evict_all()
    tier.told()
    (slot,) = tier.pool.host.filled_slots()
    tier.pool.apply_report(StepReport(None, {slot.index: slot.store_seq}))
    (removed,) = tier.told()
    assert isinstance(removed, BlockRemoved) and removed.medium == "CPU"
    assert not tier.follower.blocks and tier.pool.events.num_described == 0


def test_a_reset_clears_both_tiers_at_once() -> None:
    tier = Publisher()
    tier.compute(request(range(8)))
    tier.evict_all()
    tier.compute(request(range(20, 24)))
    tier.told()
    assert tier.pool.reset_prefix_cache()
    assert [type(e) for e in tier.told()] == [AllBlocksCleared]
    assert not tier.follower.blocks and tier.pool.events.num_described == 0
    # And it goes on.
    tier.compute(request(range(8)))
    tier.told()
    assert sum(tier.follower.held("GPU").values()) == 2


def test_a_reset_that_is_refused_clears_nothing() -> None:
    tier = Publisher()
    tier.compute(request(range(4)))
    tier.evict_all()
    tier.told()
    tier.pool.get_new_blocks(1)
    assert not tier.pool.reset_prefix_cache()
    assert all(isinstance(e, BlockStored | BlockRemoved) for e in tier.told())
    assert sum(tier.follower.held("CPU").values()) == 1


@pytest.mark.skipif(
    not hasattr(BlockPool, "emit_cached_block_events"), reason="hits are not told again"
)
def test_a_hit_that_is_told_again_lies_where_it_lies() -> None:
    tier = Publisher()
    one = request(range(12))
    tier.compute(one)
    first = tier.told()[0]
    tier.pool.emit_cached_block_events(one, 2, BLOCK, 0)
    again: Any
    (again,) = tier.pool.take_events()
    assert again.medium == "GPU" and again.token_ids == first.token_ids[: 2 * BLOCK]
    # The last block of the chain goes first.
    tier.pool.begin_step()
    tier.pool.get_new_blocks(1)
    tier.told()
    tier.pool.emit_cached_block_events(one, 3, BLOCK, 0)
    found: list[Any] = tier.pool.take_events()
    assert [(e.medium, e.block_hashes) for e in found] == [
        ("GPU", hashes(one)[:2]),
        ("CPU", hashes(one)[2:]),
    ]
    assert [e.parent_block_hash for e in found] == [None, hashes(one)[1]]
    assert found[1].token_ids == list(range(8, 12))


def test_the_follower_notices_what_was_never_stored() -> None:
    removed = BlockRemoved(block_hashes=[1], medium="CPU")
    with pytest.raises(Mismatch, match="never stored"):
        Follower().follow([removed])
