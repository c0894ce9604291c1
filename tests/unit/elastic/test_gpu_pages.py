# SPDX-License-Identifier: Apache-2.0
"""Pages of a GPU: what they take of the driver's, and who may have how many."""

import time
from collections.abc import Callable, Sequence

import pytest
import torch

from vllm.v1.kv_tier.elastic.gpu import DevicePages, GpuPages
from vllm.v1.kv_tier.memory.regions import Region

DRIVER_PAGE = 64
NUM_BLOCKS, BLOCK_BYTES, NUM_LAYERS = 100, 24, 3
# Of blocks: more than two of the driver's pages in each layer.
PAGE = 6
PAGE_BYTES = PAGE * BLOCK_BYTES * NUM_LAYERS
NUM_PAGES = 17


class Gpu:
    """Memory that engines share. A hundredth and a fiftieth of it are whole pages."""

    def __init__(self, num_pages: int = 1000) -> None:
        self.total = num_pages * PAGE_BYTES
        self.free = self.total


class Memory:
    """The driver's pages of an engine, behind a KV cache that was made of torch's."""

    page_bytes = DRIVER_PAGE

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.mapped: set[int] = set()
        self.fails = False
        num_bytes = NUM_LAYERS * NUM_BLOCKS * BLOCK_BYTES
        self.cache = torch.zeros(num_bytes, dtype=torch.uint8)
        layers = self.cache.view(NUM_LAYERS, NUM_BLOCKS, BLOCK_BYTES)
        self.pages = DevicePages(
            self, self.cache.data_ptr(), [Region(layer) for layer in layers], NUM_BLOCKS
        )

    def map(self, pages: Sequence[int]) -> bool:
        assert list(pages) == sorted(set(pages) - self.mapped), "mapped twice"
        if len(pages) * DRIVER_PAGE > self.gpu.free:
            return False
        self.gpu.free -= len(pages) * DRIVER_PAGE
        self.mapped |= set(pages)
        return True

    def unmap(self, pages: Sequence[int]) -> None:
        if self.fails:
            raise RuntimeError("the driver's reason")
        assert self.mapped >= set(pages), "unmapped twice"
        self.gpu.free += len(pages) * DRIVER_PAGE
        self.mapped -= set(pages)

    def free_bytes(self) -> tuple[int, int]:
        return self.gpu.free, self.gpu.total

    def backs(self, page: int) -> bool:
        """Whether each byte of a page's blocks has memory."""
        blocks = range(page * PAGE, min((page + 1) * PAGE, NUM_BLOCKS))
        starts = [
            (layer * NUM_BLOCKS + block) * BLOCK_BYTES
            for layer in range(NUM_LAYERS)
            for block in blocks
        ]
        return all(
            byte // DRIVER_PAGE in self.mapped
            for start in starts
            for byte in (start, start + BLOCK_BYTES - 1)
        )


# ------------------------------------------------------- pages on pages of the driver


def test_a_page_has_memory_in_every_layer_until_it_goes() -> None:
    memory = Memory(Gpu())
    assert (memory.pages.blocks_per_page, memory.pages.num_pages) == (PAGE, NUM_PAGES)
    assert memory.pages.page_bytes == PAGE_BYTES
    for order in (range(NUM_PAGES), range(NUM_PAGES - 1, -1, -1)):
        mapped: set[int] = set()
        for page in range(NUM_PAGES):
            assert memory.pages.map(page)
            mapped.add(page)
            assert all(memory.backs(p) for p in mapped)
        for page in order:
            memory.pages.unmap(page)
            mapped.remove(page)
            # What it shares with neighbours is theirs still.
            assert all(memory.backs(p) for p in mapped)
            assert memory.pages.mapped_bytes == len(memory.mapped) * DRIVER_PAGE
        assert not memory.mapped and memory.gpu.free == memory.gpu.total


def test_what_lies_between_layers_goes_too() -> None:
    """All but one page: its own memory stays, and one page of the driver's for each
    layer and end."""
    memory = Memory(Gpu())
    assert memory.pages.map_at_first() == []
    for page in range(1, NUM_PAGES):
        memory.pages.unmap(page)
    assert len(memory.mapped) * DRIVER_PAGE >= PAGE_BYTES
    assert len(memory.mapped) * DRIVER_PAGE <= PAGE_BYTES + 2 * NUM_LAYERS * DRIVER_PAGE


def test_as_many_as_fit_are_mapped_at_first() -> None:
    memory = Memory(Gpu())
    memory.gpu.free = memory.gpu.total // 50 + 4 * PAGE_BYTES
    absent = memory.pages.map_at_first()
    assert absent == [*range(absent[0], NUM_PAGES)] and 3 <= absent[0] <= 4
    assert all(memory.backs(page) != (page in absent) for page in range(NUM_PAGES))
    assert memory.gpu.free >= memory.gpu.total // 50 - 2 * NUM_LAYERS * DRIVER_PAGE


def test_a_page_that_gets_no_memory_has_none() -> None:
    memory = Memory(Gpu())
    memory.gpu.free = PAGE_BYTES - 1
    assert not memory.pages.map(0)
    assert not memory.mapped and not memory.pages.mapped_bytes
    memory.gpu.free = memory.gpu.total
    assert memory.pages.map(0) and memory.backs(0)


@pytest.mark.parametrize("driver_page", [24, 96, 240])
def test_pages_of_whole_pages_of_the_driver_are_as_small(driver_page: int) -> None:
    """Where every layer is made of whole ones, nothing is shared with a neighbour, and
    the page of the block that stands for none takes one of each layer."""
    cache = torch.zeros(NUM_LAYERS * NUM_BLOCKS * BLOCK_BYTES, dtype=torch.uint8)
    layers = cache.view(NUM_LAYERS, NUM_BLOCKS, BLOCK_BYTES)
    memory = Memory(Gpu())
    memory.page_bytes = driver_page
    base, regions = cache.data_ptr(), [Region(layer) for layer in layers]
    pages = DevicePages(memory, base, regions, NUM_BLOCKS)
    assert pages.blocks_per_page == driver_page // BLOCK_BYTES
    # As soon as they lie elsewhere.
    pages = DevicePages(memory, base - 8, regions, NUM_BLOCKS)
    twice = 2 * driver_page // BLOCK_BYTES
    assert pages.blocks_per_page == min(twice, NUM_BLOCKS // 8)


# -------------------------------------------------------------- who may have how many


class Limit:
    def __init__(self) -> None:
        self.bytes: int | None = None
        self.told = (0, 0)

    def limit_bytes(self) -> int | None:
        return self.bytes

    def report_use(self, used: int, ahead: int) -> None:
        self.told = (used, ahead)


class Engine:
    """Pages of an engine, all of which it has at first."""

    def __init__(self, gpu: Gpu, min_pages: int = 2, ahead: int = 0) -> None:
        self.memory = Memory(gpu)
        absent = self.memory.pages.map_at_first()
        self.limit = Limit()
        self.pages = GpuPages(
            self.memory.pages, absent, min_pages, ahead, self.limit, poll_s=0.0
        )
        self.given = sorted({*range(NUM_PAGES)} - {*absent})

    def take(self, num_pages: int, wait: bool = True) -> int:
        pages = self.pages.map_pages(num_pages, wait)
        assert not {*pages} & {*self.given}, "given twice"
        assert all(self.memory.backs(page) for page in pages)
        self.given += pages
        return len(pages)

    def give(self, num_pages: int) -> None:
        pages = [self.given.pop() for _ in range(num_pages)]
        self.pages.unmap_pages(pages)
        self.wait_for(lambda: not any(map(self.is_alone, pages)))

    def is_alone(self, page: int) -> bool:
        """Whether a page has memory that no page beside it needs."""
        return page not in self.given and self.memory.backs(page)

    @staticmethod
    def wait_for(found: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not found():
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_pages_go_and_come() -> None:
    gpu = Gpu()
    engine = Engine(gpu)
    assert engine.pages.missing == [] and engine.pages.blocks_per_page == PAGE
    engine.give(NUM_PAGES - 1)
    assert gpu.free >= gpu.total - 2 * PAGE_BYTES
    assert engine.take(3) == 3
    # Those beside one another, which share memory.
    assert sorted(engine.given) == [0, 1, 2, 3]
    assert engine.take(NUM_PAGES) == NUM_PAGES - 4


def test_what_was_not_mapped_at_first_is_missing() -> None:
    gpu = Gpu()
    gpu.free = gpu.total // 50 + 4 * PAGE_BYTES
    engine = Engine(gpu)
    assert engine.pages.missing == [*range(len(engine.given), NUM_PAGES)]
    assert engine.take(1) == 0
    gpu.free += 2 * PAGE_BYTES
    assert engine.take(4) == 2


def test_some_memory_is_left_to_others() -> None:
    gpu = Gpu()
    engine = Engine(gpu)
    engine.give(NUM_PAGES - 2)
    gpu.free = gpu.total // 50 + 2 * PAGE_BYTES - 1
    assert engine.pages.num_wanted() == 0
    assert engine.take(9) == 1
    assert engine.take(1) == 0
    gpu.free = gpu.total // 50 - 1
    assert engine.pages.num_wanted() == 1
    # As many as its longest request takes it keeps.
    gpu.free = 0
    assert engine.pages.num_wanted() == 1


def test_who_lacks_memory_for_its_longest_request_takes_what_others_leave() -> None:
    gpu = Gpu()
    engine = Engine(gpu, min_pages=6)
    engine.give(NUM_PAGES - 1)
    gpu.free = gpu.total // 50
    assert engine.take(9) == 5
    gpu.free = gpu.total // 100
    engine.give(3)
    gpu.free = gpu.total // 100 + PAGE_BYTES
    assert engine.take(9) == 1


def test_two_busy_engines_share() -> None:
    """One has all that there is; the other gets what its longest request takes."""
    gpu = Gpu(num_pages=1000)
    first, second = Engine(gpu), Engine(gpu, min_pages=5)
    second.give(NUM_PAGES - 1)
    gpu.free = gpu.total // 50
    assert second.take(9) == 4
    assert (wanted := first.pages.num_wanted()) >= 3
    first.give(wanted)
    assert gpu.free >= gpu.total // 50 - 2 * NUM_LAYERS * DRIVER_PAGE
    # Above that nobody takes from the other.
    assert second.take(1) == 0


def test_memory_that_others_took_first_is_not_there_now() -> None:
    gpu = Gpu()
    engine = Engine(gpu)
    engine.give(NUM_PAGES - 1)
    engine.memory.map = lambda pages: False  # type: ignore[method-assign]
    assert engine.take(3) == 0
    del engine.memory.map  # type: ignore[attr-defined]
    assert engine.take(NUM_PAGES) == NUM_PAGES - 1


def test_what_the_driver_takes_is_told_once() -> None:
    engine = Engine(Gpu())
    assert engine.pages.take_seconds() == (0.0, 0.0)
    engine.give(2)
    engine.wait_for(lambda: not engine.pages._held)
    map_s, unmap_s = engine.pages.take_seconds()
    assert map_s == 0.0 < unmap_s < 1.0
    engine.take(1)
    map_s, unmap_s = engine.pages.take_seconds()
    assert 0.0 == unmap_s < map_s < 1.0


def test_what_is_needed_again_is_there_still(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(Gpu())
    with engine.memory.pages._lock:
        # The thread has one of them in hand.
        engine.pages.unmap_pages([engine.given.pop() for _ in range(4)])
        pages = engine.pages.map_pages(3, wait=False)
    assert len(pages) == 3
    assert all(map(engine.memory.backs, pages))


def test_pages_are_mapped_ahead_while_the_engine_grows() -> None:
    engine = Engine(Gpu(), ahead=2)
    engine.give(NUM_PAGES - 1)
    assert engine.take(1) == 1
    engine.wait_for(lambda: all(map(engine.memory.backs, range(4))))
    engine.wait_for(lambda: engine.limit.told[1] == 2 * PAGE_BYTES)
    assert not engine.memory.backs(4)
    # It shrinks again: those go as well.
    engine.give(1)
    engine.wait_for(lambda: not any(map(engine.memory.backs, range(1, NUM_PAGES))))


def test_who_does_not_wait_gets_pages_that_are_mapped_meanwhile() -> None:
    engine = Engine(Gpu(), ahead=1)
    engine.give(NUM_PAGES - 1)
    assert engine.take(3, wait=False) == 0
    # And what is mapped ahead of them.
    engine.wait_for(lambda: len(engine.pages._held) == 4)
    assert engine.take(1, wait=False) == 1
    # The others are not given back while the engine grows.
    time.sleep(0.05)
    assert len(engine.pages._held) == 3
    assert engine.take(3, wait=False) == 3


def test_who_does_not_wait_gets_no_more_than_there_is() -> None:
    gpu = Gpu()
    engine = Engine(gpu)
    engine.give(NUM_PAGES - 2)
    gpu.free = gpu.total // 50 + 2 * PAGE_BYTES - 1
    assert engine.take(9, wait=False) == 0
    engine.wait_for(lambda: len(engine.pages._held) == 1)
    gpu.free = gpu.total
    assert engine.take(1, wait=False) == 1
    # It is asked for again.
    assert engine.take(1, wait=False) == 0
    engine.wait_for(lambda: len(engine.pages._held) == 1)


def test_pages_ahead_go_when_others_need_them() -> None:
    gpu = Gpu()
    engine = Engine(gpu, ahead=2)
    engine.give(NUM_PAGES - 1)
    engine.take(3)
    engine.wait_for(lambda: engine.limit.told[1] == 2 * PAGE_BYTES)
    gpu.free = gpu.total // 50 - PAGE_BYTES
    assert engine.pages.num_wanted() == 0
    engine.wait_for(lambda: not engine.memory.backs(5))


def test_a_limit_is_obeyed_and_use_is_told() -> None:
    engine = Engine(Gpu())
    engine.wait_for(lambda: engine.limit.told[0] == engine.memory.pages.mapped_bytes)
    engine.limit.bytes = engine.memory.pages.mapped_bytes - 2 * PAGE_BYTES - 1
    assert engine.pages.num_wanted() == 3
    engine.give(3)
    assert engine.pages.num_wanted() == 0 and engine.take(1) == 0
    engine.wait_for(lambda: engine.limit.told[0] == engine.memory.pages.mapped_bytes)
    engine.limit.bytes = None
    assert engine.take(1) == 1


def test_memory_that_the_driver_keeps_is_not_used_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.logger.logger.propagate", True, raising=False)
    engine = Engine(Gpu())
    engine.memory.fails = True
    lost = engine.given.pop()
    engine.pages.unmap_pages([lost])
    engine.wait_for(lambda: not engine.pages._held)
    engine.memory.fails = False
    time.sleep(0.05)
    assert engine.take(1) == 0
