# SPDX-License-Identifier: Apache-2.0
"""Secondary tiers are asked for all blocks that any hit can use, and for few others.

The reference is upstream's lookup: it is given random parts of a prompt's blocks, with
and without those that are not asked for, and must hit the same.
"""

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.kv_tier.layout import ReachableBlocks
from vllm.v1.kv_tier.releases import keys_are_bytes
from vllm.v1.kv_tier.scheduler.secondary.lookup import PromptLookup

from .layouts import LAYOUTS, Layout, full, mla_window, window
from .scheduler import Setup, make_scheduler
from .upstream import HAS_MLA_WINDOWS, HAS_SEVERAL_BLOCK_SIZES

pytestmark = pytest.mark.skipif(
    not keys_are_bytes(), reason="refused: hashes are numbers of a process"
)
NUM_TOKENS = 96
NUM_TRIES = 150


def _sparse() -> tuple[Layout, ...]:
    """Hits end at few of the blocks of a window."""
    if not HAS_SEVERAL_BLOCK_SIZES:
        return ()
    found = [
        Layout("full+small window", (full(32), window(6, 4)), 4),
        Layout("full+2 small windows", (full(32), window(6, 4), window(12, 8)), 4),
        Layout("full+window of a token", (full(32), window(2, 4)), 4),
    ]
    if HAS_MLA_WINDOWS:
        found.append(Layout("full+small MLA window", (full(32), mla_window(9, 2)), 2))
    return tuple(found)


SPARSE = _sparse()


class Lookups:
    """Upstream's lookup of one prompt, and the tier's of what is missing."""

    def __init__(self, layout: Layout, speculates: bool) -> None:
        setup = Setup(layout, 60, 16, speculates="eagle" if speculates else None)
        scheduler = make_scheduler(setup)
        tier = scheduler.kv_cache_config.kv_tier
        assert tier is not None
        self.reachable = tier.reachable
        self._coordinator = scheduler.kv_cache_manager.coordinator
        self.drops_blocks = bool(
            getattr(self._coordinator, "drop_eagle_group_ids", speculates)
        )
        self._pool: Any = scheduler.kv_cache_manager.block_pool
        self.hashes = [
            BlockHash(i.to_bytes(32, "big"))
            for i in range(NUM_TOKENS // layout.hash_block_size)
        ]
        self.sizes = [group.block_size for group in layout.groups]
        self.hash_size = layout.hash_block_size
        # All blocks of the prompt.
        self.all = self.asked(())

    def asked(self, reachable: tuple[ReachableBlocks, ...], most: int = 10**6) -> Any:
        table: Any = SimpleNamespace(has=lambda key: False)
        lookup = PromptLookup(
            self.sizes, self.hash_size, table, lambda key: None, reachable
        )
        request: Any = SimpleNamespace(block_hashes=self.hashes)
        num_tokens, keys = 0, []
        while num_tokens < lookup.num_tokens(request):
            before = num_tokens
            num_tokens, num_looks, missing = lookup.find_missing(
                request, num_tokens, most, None
            )
            assert num_looks == len(missing)
            assert num_tokens > before
            keys += [key for key, _ in missing]
        assert len(keys) == len({*keys})
        return keys

    def hit(self, present: set[Any], max_tokens: int) -> tuple[int, list[list[Any]]]:
        """Length and blocks of the hit on a prompt whose blocks are `present`."""
        null = self._pool.null_block

        def get(block_hash: BlockHash, groups: list[int]) -> list[Any] | None:
            keys = [make_block_hash_with_group_id(block_hash, i) for i in groups]
            if not present.issuperset(keys):
                return None
            return [SimpleNamespace(block_hash=key) for key in keys]

        self._pool.get_cached_block = get
        groups, num_tokens, *_ = self._coordinator.find_longest_cache_hit(
            self.hashes, max_tokens
        )
        used = [[b.block_hash for b in group if b is not null] for group in groups]
        return num_tokens, used


def _check(lookups: Lookups, reachable: tuple[ReachableBlocks, ...]) -> set[Any]:
    """Keys that a hit used. Fails if one is not asked for."""
    asked, rng = {*lookups.asked(reachable)}, Random(1)
    useful: set[Any] = set()
    for i in range(NUM_TRIES):
        # Nearly all of them, or one part after the other gone.
        part = rng.choice((0.0, 0.02, 0.1, 0.4))
        present = {key for key in lookups.all if rng.random() >= part}
        most = NUM_TOKENS - 1 if i % 2 else rng.randrange(NUM_TOKENS)
        found = lookups.hit(present, most)
        assert lookups.hit(present & asked, most) == found, "a hit is lost"
        useful.update(key for group in found[1] for key in group)
    return useful


CASES = [
    pytest.param(layout, speculates, id=f"{layout.name}{', eagle' * speculates}")
    for layout in (*LAYOUTS, *SPARSE)
    for speculates in (False, True)
    # Upstream refuses both together.
    if not (speculates and "chunked" in layout.name)
]


@pytest.mark.parametrize("layout, speculates", CASES)
def test_no_hit_is_lost_by_what_is_not_asked_for(
    layout: Layout, speculates: bool
) -> None:
    lookups = Lookups(layout, speculates)
    reachable = lookups.reachable
    useful = _check(lookups, reachable)
    asked = lookups.asked(reachable)
    assert useful <= {*asked}
    # In parts it is the same.
    assert sorted(lookups.asked(reachable, 5)) == sorted(asked)
    if layout in SPARSE:
        assert len(asked) < 0.7 * len(lookups.all)
        if not speculates:
            # The last place may be behind the longest hit.
            assert len({*asked} - useful) <= 3 * len(layout.groups)


@pytest.mark.skipif(not SPARSE, reason="blocks of all groups have one size")
@pytest.mark.parametrize("layout", SPARSE, ids=lambda each: each.name)
def test_a_block_that_is_not_asked_for_is_missed(layout: Layout) -> None:
    """Planted bug: one block too few before each place where a hit may end."""
    lookups = Lookups(layout, False)
    reachable = tuple(
        each._replace(before=max(each.before - 1, 0)) if each.part < 1 else each
        for each in lookups.reachable
    )
    with pytest.raises(AssertionError, match="a hit is lost"):
        _check(lookups, reachable)


@pytest.mark.skipif(not SPARSE, reason="blocks of all groups have one size")
@pytest.mark.parametrize("layout", SPARSE, ids=lambda each: each.name)
def test_a_block_that_drafts_look_at_is_missed(layout: Layout) -> None:
    """Planted bug: no block behind each place where a hit may end."""
    lookups = Lookups(layout, True)
    if not lookups.drops_blocks:
        pytest.skip("drafts look at no further block")
    reachable = tuple(each._replace(behind=0) for each in lookups.reachable)
    with pytest.raises(AssertionError, match="a hit is lost"):
        _check(lookups, reachable)
