# SPDX-License-Identifier: Apache-2.0
"""Groups that need less than a block: which bytes, and that no others move."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.v1.kv_tier.copying.calibrate import choose_engines, copy_groups
from vllm.v1.kv_tier.copying.engine import CopyEngines, slot_bytes
from vllm.v1.kv_tier.copying.groups import first_bytes
from vllm.v1.kv_tier.memory.regions import Region, build_regions
from vllm.v1.kv_tier.plan import StepPlan
from vllm.v1.kv_tier.scheduler.plan_builder import name_groups
from vllm.v1.kv_tier.worker.group_bytes import group_bytes

from ..tier import Tier

NUM_BLOCKS, NUM_SLOTS, PAGE = 6, 5, 128
CPU = torch.device("cpu")


class Memory:
    """Device memory of groups that alias the same blocks.

    Args:
        num_layers: By group.
        in_blocks: Layers lie in each block; otherwise blocks lie in each layer.
        shown: Bytes of a page that a layer's view shows.

    """

    def __init__(
        self, num_layers: tuple[int, ...], in_blocks: bool, shown: int = PAGE
    ) -> None:
        most = max(num_layers)
        self.bytes = torch.zeros(most * NUM_BLOCKS * PAGE, dtype=torch.uint8)
        strides = (most * PAGE, PAGE) if in_blocks else (PAGE, NUM_BLOCKS * PAGE)
        self.views = [
            [
                self.bytes.as_strided(
                    (NUM_BLOCKS, shown), (strides[0], 1), i * strides[1]
                )
                for i in range(num)
            ]
            for num in num_layers
        ]
        self.regions = build_regions(self.views, NUM_BLOCKS)
        self.layers = {
            f"{g}.{i}": SimpleNamespace(kv_cache=view)
            for g, views in enumerate(self.views)
            for i, view in enumerate(views)
        }
        spec = SimpleNamespace(page_size_bytes=PAGE)
        self.groups = [
            SimpleNamespace(
                layer_names=[f"{g}.{i}" for i in range(num)], kv_cache_spec=spec
            )
            for g, num in enumerate(num_layers)
        ]
        self.slots = torch.zeros(NUM_SLOTS, slot_bytes(self.regions), dtype=torch.uint8)

    def needs(self) -> list[int]:
        return group_bytes(self.groups, self.layers, self.regions, NUM_BLOCKS)

    def engines(self, needs: list[int]) -> CopyEngines:
        made = choose_engines(self.regions, self.slots, "torch", CPU, pinned=False)
        return copy_groups(made, needs, CPU, range(NUM_SLOTS))

    def page(self, group: int, block: int) -> torch.Tensor:
        return torch.stack([view[block] for view in self.views[group]])


LAYOUTS = pytest.mark.parametrize("in_blocks", [True, False], ids=["BL", "LB"])


@LAYOUTS
def test_a_group_needs_its_first_layers(in_blocks: bool) -> None:
    assert Memory((4, 3, 1), in_blocks).needs() == [4 * PAGE, 3 * PAGE, 4 * PAGE][
        :2
    ] + [4 * PAGE if in_blocks else PAGE]


@LAYOUTS
def test_what_pages_have_behind_their_views_is_needed(in_blocks: bool) -> None:
    """Scales of quantized layers, for example."""
    assert Memory((4, 3), in_blocks, shown=PAGE - 32).needs()[1] == 3 * PAGE


@LAYOUTS
def test_groups_of_equal_size_are_copied_whole(in_blocks: bool) -> None:
    assert Memory((4, 4), in_blocks).needs() == []


@pytest.mark.parametrize(
    "change",
    [
        lambda memory: memory.layers.pop("1.0"),
        lambda memory: memory.layers.update({"1.0": SimpleNamespace()}),
        lambda memory: setattr(memory.layers["1.0"], "kv_cache", torch.zeros(6, 8)),
    ],
    ids=["unknown", "without memory", "elsewhere"],
)
def test_an_unknown_layer_is_copied_whole(change: Callable[[Any], Any]) -> None:
    memory = Memory((4, 3), in_blocks=True)
    change(memory)
    assert memory.needs() == []


def there_and_back(memory: Memory, engines: CopyEngines, groups: list[int]) -> bool:
    """Whether blocks of `groups` come back as they were."""
    blocks, slots = [*range(len(groups))], [*range(len(groups))]
    pages = []
    for block, group in zip(blocks, groups):
        for view in memory.views[group]:
            view[block] = torch.randint(1, 256, view[block].shape, dtype=torch.uint8)
        pages.append(memory.page(group, block))
    everything = range(len(memory.regions))
    engines.stores.stores(blocks, slots, groups).copy(everything)
    memory.bytes.zero_()
    engines.step_loads.loads(slots, blocks, groups).copy(everything)
    found = [memory.page(group, block) for block, group in zip(blocks, groups)]
    return all(map(torch.equal, pages, found))


@LAYOUTS
def test_blocks_of_all_groups_come_back(in_blocks: bool) -> None:
    memory = Memory((4, 3, 2), in_blocks)
    assert there_and_back(memory, memory.engines(memory.needs()), [0, 1, 2, 1])
    # A group that the rank does not know is copied whole.
    assert there_and_back(memory, memory.engines(memory.needs()), [0, 0])


@LAYOUTS
def test_a_group_with_too_few_bytes_is_noticed(in_blocks: bool) -> None:
    """Planted bug: some bytes of a group are not copied."""
    memory = Memory((4, 3, 2), in_blocks)
    needs = memory.needs()
    assert not there_and_back(memory, memory.engines([needs[0], 2 * PAGE, 64]), [0, 1])


@LAYOUTS
def test_nothing_else_is_copied(in_blocks: bool) -> None:
    memory = Memory((4, 2), in_blocks)
    engines = memory.engines(memory.needs())
    memory.bytes.fill_(7)
    memory.slots.zero_()
    engines.stores.stores([1, 2], [3, 4], [1, 0]).copy(range(len(memory.regions)))
    assert memory.slots[3].count_nonzero() == 2 * PAGE
    assert memory.slots[4].count_nonzero() == 4 * PAGE
    assert not memory.slots[:3].any()
    memory.slots.fill_(9)
    engines.loads.loads([3], [1], [1]).copy(range(len(memory.regions)))
    assert (memory.bytes == 9).sum() == 2 * PAGE


def test_a_part_of_the_regions_is_copied_with_its_layers() -> None:
    memory = Memory((4, 2), in_blocks=False)
    engines = memory.engines(memory.needs())
    memory.slots.fill_(9)
    transfer = engines.step_loads.loads([0, 1], [0, 1], [0, 1])
    memory.bytes.zero_()
    transfer.copy(range(1, 3))
    filled = [(view[:2] == 9).all(dim=1).tolist() for view in memory.views[0]]
    # The second block is of the group without the third layer.
    assert filled == [[False, False], [True, True], [True, False], [False, False]]


def test_pieces_keep_their_alignment() -> None:
    row = torch.zeros(4, 1000, dtype=torch.uint8)
    regions = [Region(row), Region(row)]
    assert [r.block_bytes for r in first_bytes(regions, 1024 + 70)] == [1000, 128]
    assert [r.block_bytes for r in first_bytes(regions, 1024)] == [1000]
    assert [r.block_bytes for r in first_bytes(regions, 2000)] == [1000, 1000]
    assert first_bytes(regions, 0) == []


def test_plans_say_of_which_group_a_block_is() -> None:
    tier = Tier(8)
    tier.begin()
    tier.free(tier.compute("ab") + tier.compute("c", group_id=1))
    tier.end()
    tier.begin()
    tier.free(tier.pool.get_new_blocks(8))
    plan = tier.end()
    named = StepPlan(1, store_slots=plan.store_slots, store_blocks=plan.store_blocks)
    name_groups(named, tier.host)
    groups = {tier.slot(name).index: 0 for name in "ab"}
    assert named.groups == groups | {tier.slot("c", 1).index: 1}
    assert plan.groups is None
