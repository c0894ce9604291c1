# SPDX-License-Identifier: Apache-2.0
"""Pages that ranks give back, and the setting that asks for it."""

import torch

from vllm.v1.kv_tier.elastic.pages import RankPages
from vllm.v1.kv_tier.memory.pages import anonymous, blocks_per_page, discard_blocks
from vllm.v1.kv_tier.memory.regions import Region

from ..memory.test_pages import num_resident

PAGE_BYTES = 100


class Machine:
    """What the machine can spare, and what it was given."""

    def __init__(self, num_blocks: int = 10, min_pages: int = 1) -> None:
        self.spare = 0
        self.given: list[tuple[int, int]] = []
        self.pages = RankPages(
            num_blocks,
            4,
            PAGE_BYTES,
            min_pages,
            lambda: self.spare,
            lambda first, end: self.given.append((first, end)),
            poll_s=0.0,
        )


def test_pages_go_and_come() -> None:
    machine = Machine()
    machine.pages.unmap_pages([2, 1])
    # The last page is a short one.
    assert machine.given == [(8, 10), (4, 8)]
    machine.spare = 1 * PAGE_BYTES
    assert machine.pages.map_pages(2, wait=True) == [1]
    machine.spare = 5 * PAGE_BYTES
    assert machine.pages.map_pages(2, wait=True) == [2]
    assert machine.pages.map_pages(2, wait=True) == []


def test_the_longest_request_always_fits() -> None:
    machine = Machine(min_pages=2)
    machine.pages.unmap_pages([2, 1])
    machine.spare = -5 * PAGE_BYTES
    assert machine.pages.num_wanted() == 0
    assert len(machine.pages.map_pages(2, wait=True)) == 1
    assert machine.pages.map_pages(2, wait=True) == []


def test_others_need_memory() -> None:
    machine = Machine()
    assert machine.pages.num_wanted() == 0
    machine.spare = -1
    assert machine.pages.num_wanted() == 1
    machine.spare = -9 * PAGE_BYTES
    assert machine.pages.num_wanted() == 2


def test_memory_goes_back_to_the_machine() -> None:
    """Of two regions in one piece of memory, that of the blocks and no other."""
    num_blocks, width = 16, 8192
    memory = anonymous(2 * num_blocks * width, huge_pages=False)
    memory.fill_(7)
    rows = memory.view(2, num_blocks, width)
    regions = [Region(rows[0]), Region(rows[1])]
    discard_blocks(regions, 4, 8)
    assert num_resident(memory) == (32 - 8) * width
    kept = [b for b in range(num_blocks) if not 4 <= b < 8]
    assert torch.all(rows[:, kept] == 7)
    rows[:, 4:8] = 3
    assert torch.all(rows[:, 4:8] == 3)
    assert num_resident(memory) == 32 * width


def test_what_meets_in_a_page_of_the_machine_stays() -> None:
    memory = anonymous(16 * 1024, huge_pages=False)
    memory.fill_(7)
    discard_blocks([Region(memory.view(16, 1024))], 3, 9)
    rows = memory.view(16, 1024)
    # Blocks 4 to 7 fill the one page that nobody else is in.
    assert torch.all(rows[4:8] == 0)
    assert torch.all(rows[:4] == 7) and torch.all(rows[8:] == 7)


def test_pages_are_whole_huge_pages_but_are_some() -> None:
    def region(num_bytes: int) -> Region:
        return Region(torch.empty(64, num_bytes, dtype=torch.uint8))

    assert blocks_per_page([region(1 << 19), region(1 << 20)], 64) == 4
    assert blocks_per_page([region(1 << 10)], 64) == 8
    assert blocks_per_page([region(1 << 10)], 4) == 1
