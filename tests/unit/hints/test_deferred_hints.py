# SPDX-License-Identifier: Apache-2.0
"""What is computed is told when somebody needs to know, and at once."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_tier.hints.tracker import DeferredHintUpdates

SIZE = 16


class Hearing:
    """Blocks of requests, and what was told of them."""

    def __init__(self) -> None:
        self.told: list[tuple[str, list[int], int]] = []
        self.untold = DeferredHintUpdates(self._hear)
        self._num_blocks = 0

    def _hear(
        self, request: Any, blocks: Sequence[KVCacheBlock], first: int, size: int
    ) -> None:
        assert size == SIZE
        self.told.append((request.name, [b.block_id for b in blocks], first))

    def blocks(self, number: int) -> list[KVCacheBlock]:
        self._num_blocks += number
        first = self._num_blocks - number
        return [KVCacheBlock(first + i) for i in range(number)]

    def computes(
        self, request: Any, blocks: list[KVCacheBlock], first: int, last: int
    ) -> None:
        if not self.untold.extend(request, blocks, first, last):
            self.untold.begin(request, blocks[first:last], first, SIZE)


def request(name: str) -> Any:
    return SimpleNamespace(name=name)


def test_all_of_a_request_is_told_at_once() -> None:
    hearing = Hearing()
    a, blocks = request("a"), hearing.blocks(4)
    hearing.computes(a, blocks, 0, 2)
    hearing.computes(a, blocks, 2, 3)
    hearing.computes(a, blocks, 3, 4)
    assert not hearing.told
    hearing.untold.flush(blocks[1:2])
    assert hearing.told == [("a", [0, 1, 2, 3], 0)]
    hearing.untold.flush(blocks)
    assert len(hearing.told) == 1 and not hearing.untold.runs


def test_what_others_compute_waits_on() -> None:
    hearing = Hearing()
    a, b = request("a"), request("b")
    of_a, of_b = hearing.blocks(2), hearing.blocks(2)
    hearing.computes(a, of_a, 0, 2)
    hearing.computes(b, of_b, 0, 2)
    hearing.untold.flush(of_a)
    assert [name for name, _, _ in hearing.told] == ["a"]
    assert hearing.untold.runs.keys() == {block.block_id for block in of_b}


def test_what_follows_a_block_of_another_request_is_not_its() -> None:
    hearing = Hearing()
    a, b = request("a"), request("b")
    shared, of_b = hearing.blocks(1), hearing.blocks(1)
    hearing.computes(a, shared, 0, 1)
    hearing.computes(b, shared + of_b, 1, 2)
    hearing.untold.flush(shared)
    hearing.untold.flush(of_b)
    assert hearing.told == [("a", [0], 0), ("b", [1], 1)]


def test_what_comes_after_a_telling_is_told_by_itself() -> None:
    hearing = Hearing()
    a, blocks = request("a"), hearing.blocks(3)
    hearing.computes(a, blocks, 0, 1)
    hearing.untold.flush(blocks[:1])
    hearing.computes(a, blocks, 1, 2)
    hearing.computes(a, blocks, 2, 3)
    hearing.untold.flush(blocks)
    assert hearing.told == [("a", [0], 0), ("a", [1, 2], 1)]


def test_null_blocks_of_a_hybrid_model_join_no_runs() -> None:
    """Groups of layers whose window has passed have the same null block."""
    told: list[tuple[list[int], int, int]] = []

    def hear(request: Any, blocks: Any, first: int, size: int) -> None:
        told.append(([block.block_id for block in blocks], first, size))

    untold, null = DeferredHintUpdates(hear), KVCacheBlock(0)
    null.is_null = True
    a, windows, states = request("a"), [null, KVCacheBlock(1)], [null, KVCacheBlock(2)]
    for step in range(2):
        for blocks, size in ((windows, SIZE), (states, 4 * SIZE)):
            if not untold.extend(a, blocks, step, step + 1):
                untold.begin(a, blocks[step : step + 1], step, size)
    untold.flush([windows[1], states[1]])
    sizes = {block: size for blocks, _, size in told for block in blocks if block}
    assert sizes == {1: SIZE, 2: 4 * SIZE}


def test_the_null_block_belongs_to_no_run() -> None:
    """All groups of a hybrid model have it in common."""
    hearing = Hearing()
    null = KVCacheBlock(0)
    null.is_null = True
    hearing._num_blocks = 1
    a = request("a")
    first, second = hearing.blocks(3), hearing.blocks(3)
    first[0] = second[1] = null
    hearing.computes(a, first, 0, 3)
    hearing.computes(a, second, 0, 2)
    # Another group goes on behind the null block: not with the run of the first one.
    hearing.computes(a, second, 2, 3)
    hearing.untold.flush([null])
    assert not hearing.told
    hearing.untold.flush([first[1]])
    assert hearing.told == [("a", [0, 2, 3], 0)]
    hearing.untold.flush(second)
    assert sorted(hearing.told[1:]) == [("a", [4, 0], 0), ("a", [6], 2)]
    assert not hearing.untold.runs
