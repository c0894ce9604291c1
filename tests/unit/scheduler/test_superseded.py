# SPDX-License-Identifier: Apache-2.0
"""Windows of earlier turns: which are evicted first, and which are not."""

import inspect
from typing import Any

import pytest

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_tier.layout import PrefixEnd
from vllm.v1.kv_tier.scheduler.secondary.writer import WriteQueue
from vllm.v1.kv_tier.scheduler.slots import HostSlot
from vllm.v1.kv_tier.scheduler.superseded import Branches

from ..tier import BLOCK, Tier, hashes

if "block_mask" not in inspect.signature(BlockPool.cache_full_blocks).parameters:
    pytest.skip("this release caches whole windows", allow_module_level=True)

FULL, WINDOW = 0, 1
NUM_BLOCKS = 24


class Turn:
    """What the tier must know of a request."""

    num_preemptions = 0
    kv_transfer_params = None

    def __init__(self, request_id: str, names: str) -> None:
        self.request_id = request_id
        self.block_hashes = hashes(names)
        self.num_tokens = len(names) * BLOCK

    def is_finished(self) -> bool:
        return False


class Chat:
    """Turns on a pool with full attention and a window of two blocks.

    A block is named by its letter, and has one in each group.
    """

    def __init__(self, num_slots: int) -> None:
        ends = (None, PrefixEnd(2, 2))
        self.tier = Tier(NUM_BLOCKS, num_slots, prefix_ends=ends)
        self._num_requests = 0

    def turn(self, hit: str, names: str, caches: bool = True) -> None:
        """A request that hits the blocks `hit` and computes the rest of `names`.

        Upstream caches the end of its window only. Afterwards all blocks are on the
        host alone.
        """
        tier = self.tier
        self._num_requests += 1
        request: Any = Turn(str(self._num_requests), names)
        pool, null = tier.pool, tier.pool.null_block
        tier.begin()
        groups = [
            tier.find(hit),
            [null] * (len(hit) - 2) + tier.find(hit[-2:], WINDOW),
        ]
        found = tier.promote(*groups, request=request) if hit else ((), ())
        blocks = []
        for group in found:
            pool.touch([block for block in group if not block.is_null])
            blocks.append([*group, *pool.get_new_blocks(len(names) - len(group))])
        before, after = len(hit), len(names)
        mask = [i >= after - 2 for i in range(before, after)]
        place = request, blocks[FULL], before, after, BLOCK
        pool.cache_full_blocks(*place, FULL)
        if caches:
            place = request, blocks[WINDOW], before, after, BLOCK
            pool.cache_full_blocks(*place, WINDOW, mask)
        tier.end()
        tier.free([block for group in blocks for block in group if not block.is_null])
        self.empty_device()

    def empty_device(self) -> None:
        tier = self.tier
        tier.begin()
        blocks = tier.pool.get_new_blocks(tier.pool.get_num_free_blocks())
        tier.end()
        tier.free(blocks)

    def windows(self, names: str) -> str:
        """Which of the blocks the host has of the window."""
        return "".join(n for n in names if self.tier.where(n, WINDOW) == "host")

    def evict(self, num_slots: int) -> None:
        """Fill as many slots with other blocks of the window."""
        self.tier.demoted("".join(map(chr, range(200, 200 + num_slots))))

    @property
    def num_superseded(self) -> int:
        return self.tier.pool.take_stats().superseded_slots


def test_the_window_of_an_earlier_turn_is_evicted_first() -> None:
    chat = Chat(num_slots=12)
    chat.turn("", "abcd")
    # Older than both turns of the conversation, and worth more than its first window.
    chat.turn("abcd", "abcdefgh")
    assert chat.windows("abcdefgh") == "cdgh"
    assert len(chat.tier.host) == 12
    chat.evict(2)
    assert chat.windows("abcdefgh") == "gh"
    assert all(chat.tier.where(n) == "host" for n in "abcdefgh")
    assert chat.num_superseded == 2


def test_a_window_stays_until_the_next_one_is_cached() -> None:
    chat = Chat(num_slots=12)
    chat.turn("", "abcd")
    chat.turn("abcd", "abcdefgh", caches=False)
    chat.tier.demoted("xy")
    chat.evict(2)
    assert chat.num_superseded == 0


def test_blocks_that_both_windows_have_stay() -> None:
    chat = Chat(num_slots=9)
    chat.turn("", "abcd")
    chat.turn("abcd", "abcde")
    # Of the first window, c is behind the second one.
    assert chat.windows("abcde") == "cde"
    chat.evict(2)
    assert chat.windows("abcde") == "de"
    assert chat.num_superseded == 1


def test_what_is_used_again_is_superseded_once() -> None:
    chat = Chat(num_slots=16)
    chat.turn("", "abcd")
    chat.turn("abcd", "abcdef")
    chat.turn("abcd", "abcdgh")
    assert len(chat.tier.host) == 14
    chat.evict(4)
    # The window of the branch went with the policy's order, which is LRU.
    assert chat.windows("cd") == "cd"
    assert chat.num_superseded == 0


def test_one_turn_of_eight_is_a_sample_that_stays() -> None:
    branches = Branches(num_keys=100)
    samples = [branches.next_is_sample() for _ in range(16)]
    assert samples.count(True) == 2


@pytest.mark.parametrize("num_used, are_rare", [(0, True), (1, True), (2, False)])
def test_branches_are_judged_by_samples(num_used: int, are_rare: bool) -> None:
    branches = Branches(num_keys=100)
    for _ in range(16):
        branches.record_superseded()
    for _ in range(num_used):
        branches.record_used()
    assert branches.are_rare is are_rare


def test_branches_of_long_ago_do_not_count() -> None:
    branches = Branches(num_keys=8)
    for _ in range(4):
        branches.record_superseded()
        branches.record_used()
    assert not branches.are_rare
    for _ in range(100):
        branches.record_superseded()
    assert branches.are_rare


def test_superseded_slots_are_written_last() -> None:
    queue = WriteQueue(span=BLOCK)
    slots: Any = {name: HostSlot(i, (name,), i, 1) for i, name in enumerate("abc")}
    queue.add(slots)
    queue.put_last("a")  # type: ignore[arg-type]
    queue.put_last("x")  # type: ignore[arg-type]
    assert [*queue.take(3, settled=1)] == ["b", "c", "a"]
    assert not queue


def test_a_model_without_windows_follows_nothing() -> None:
    assert Tier(4).pool.superseded is None
