# SPDX-License-Identifier: Apache-2.0
"""Engines that copy by DMA: batches of pieces, and of blocks as far as regions go
together.
"""

import itertools
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.kv_tier.copying.dma import (
    MAX_PITCH,
    BlockDmaCopyEngine,
    DmaCopyEngine,
    find_runs,
    make_descriptors,
)
from vllm.v1.kv_tier.copying.engine import (
    CopyEngineUnavailable,
    TorchCopyEngine,
    address_table,
    slot_bytes,
)
from vllm.v1.kv_tier.memory.regions import Region

from ..copy_machine import (
    CPU,
    CUDA,
    NUM_SLOTS,
    ROWS,
    SMALL_PITCH,
    Machine,
    Memmove,
    assert_equal,
    make_regions,
)

# ------------------------------------------------------------------ batches


@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 1 << 47),
            st.integers(1, 1 << 36),
            st.integers(0, 1 << 47),
            st.integers(1, 1 << 28),
            st.integers(1, 1 << 24),
        ),
        min_size=1,
        max_size=4,
    ),
    pairs=st.lists(
        st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20)), max_size=6
    ),
)
def test_descriptors_are_what_the_pairs_say(
    rows: list[tuple[int, ...]], pairs: list[tuple[int, int]]
) -> None:
    ids = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    found = make_descriptors(np.array(rows, dtype=np.int64), ids)
    assert all(array.flags.c_contiguous for array in found)
    assert all(array.dtype == np.uint64 for array in found)
    device, host, sizes = (array.tolist() for array in found)
    for i, (block_0, block_stride, slot_0, slot_stride, size) in enumerate(rows):
        assert device[i] == [block_0 + block * block_stride for block, _ in pairs]
        assert host[i] == [slot_0 + slot * slot_stride for _, slot in pairs]
        assert sizes[i] == [size] * len(pairs)


def test_addresses_are_those_of_the_rows() -> None:
    regions = make_regions(CPU, ROWS)
    slots = torch.zeros(NUM_SLOTS, slot_bytes(regions), dtype=torch.uint8)
    table = address_table(regions, slots)
    device, host, _ = make_descriptors(table, np.array([[7], [4]]))
    views = TorchCopyEngine(regions, slots).views
    assert device[:, 0].tolist() == [blocks[7].data_ptr() for blocks, _ in views]
    assert host[:, 0].tolist() == [rows[4].data_ptr() for _, rows in views]


def test_a_batch_is_never_too_large_for_the_driver() -> None:
    regions = make_regions(CPU, [(16, 16, 0), (32, 32, 0)], num_blocks=1500)
    slots = torch.zeros(1500, slot_bytes(regions), dtype=torch.uint8)
    driver = Memmove()
    engine = DmaCopyEngine(regions, slots, driver=driver, max_batch=1024)
    engine.stores(range(1500), range(1499, -1, -1)).copy(range(2))
    assert driver.counts == [1024, 1024, 952]
    for (blocks, rows), region in zip(TorchCopyEngine(regions, slots).views, regions):
        assert torch.equal(rows.flip(0), blocks)


def test_a_copy_that_the_driver_refuses_is_an_error() -> None:
    class Refusing:
        def copy_batch(self, *args: int) -> None:
            raise RuntimeError("cuMemcpyBatchAsync failed: CUDA_ERROR_INVALID_VALUE.")

    regions = make_regions(CPU, ROWS)
    slots = torch.zeros(NUM_SLOTS, slot_bytes(regions), dtype=torch.uint8)
    engine = DmaCopyEngine(regions, slots, driver=Refusing())
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        engine.loads([0], [0]).copy(range(1))


# ------------------------------------------------------------------ by block


def runs_of(regions: list[Region]) -> list[range]:
    slots = torch.empty(1, slot_bytes(regions), dtype=torch.uint8)
    return find_runs(regions, address_table(regions, slots))


def test_neighbours_alike_are_copied_together() -> None:
    regions = make_regions(CPU, ROWS)
    runs = [range(0, 2), range(2, 3), range(3, 4), range(4, 5), range(5, 6)]
    assert runs_of(regions) == [*runs, range(6, 9)]
    # Whatever neighbours differ in.
    strides = [(64, 64, 0), (64, 64, 0), (64, 128, 0), (64, 128, 0), (32, 128, 0)]
    assert runs_of(make_regions(CPU, strides)) == [range(2), range(2, 4), range(4, 5)]


def test_what_is_copied_together_lies_at_one_distance_in_one_allocation() -> None:
    memory = torch.empty(1000, dtype=torch.uint8)

    def at(*starts: int) -> list[Region]:
        return [Region(memory.as_strided((3, 8), (8, 1), start)) for start in starts]

    assert runs_of(at(0, 100, 200, 300)) == [range(4)]
    assert runs_of(at(0, 100, 200, 250, 300)) == [range(3), range(3, 5)]
    assert runs_of(at(300, 200, 100)) == [range(1), range(1, 2), range(2, 3)]
    assert runs_of(at(500)) == [range(1)]
    apart = [Region(torch.empty(3, 8, dtype=torch.uint8)) for _ in range(2)]
    apart.sort(key=lambda region: region.blocks.data_ptr())
    assert runs_of(apart) == [range(1), range(1, 2)]
    # Blocks of which each holds all layers.
    inside = memory[:960].view(6, 4, 40)
    assert runs_of([Region(inside[:, i]) for i in range(4)]) == [range(4)]


def test_from_2_gib_on_the_distance_is_a_multiple_of_that_between_blocks() -> None:
    # Never touched.
    memory = torch.empty(1 << 33, dtype=torch.uint8)

    def runs(distance: int, width: int, stride: int) -> list[range]:
        rows = (2, width), (stride, 1)
        starts = (0, distance, 2 * distance)
        return runs_of([Region(memory.as_strided(*rows, start)) for start in starts])

    limit = 1 << 31
    together, apart = [range(3)], [range(1), range(1, 2), range(2, 3)]
    assert runs(limit - 1, 48, 64) == together
    assert runs(limit, 48, 64) == together
    assert runs(limit + 32, 48, 64) == apart
    # The row of a layer must hold its block, and is limited itself.
    assert runs(limit, 64, 64) == together
    assert runs(limit, 64, 32) == apart
    assert runs(limit + 64, 64, limit + 64) == apart


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("distance", [1 << 31, 5 << 29], ids=["2 GiB", "2.5 GiB"])
@pytest.mark.parametrize("to_device", [True, False])
def test_blocks_of_layers_2_gib_apart_and_more_are_copied(
    device: torch.device, distance: int, to_device: bool
) -> None:
    on_gpu = device == CUDA
    if on_gpu and not torch.cuda.is_available():
        pytest.skip("no GPU")
    # Hardly touched. More rows from layer to layer than 16 bits can count.
    memory = torch.empty(2 * distance + (1 << 20), dtype=torch.uint8, device=device)
    starts = (0, distance, 2 * distance)
    rows = (4, 4000), (4096, 1)
    regions = [Region(memory.as_strided(*rows, start)) for start in starts]
    for region in regions:
        region.blocks.random_(0, 256)
    slots = torch.randint(0, 256, (4, slot_bytes(regions)), dtype=torch.uint8)
    if on_gpu:
        slots = slots.pin_memory()
        torch.cuda.synchronize()
    driver = None if on_gpu else Memmove()
    engine = BlockDmaCopyEngine(regions, slots, driver=driver)
    with torch.cuda.stream(torch.cuda.Stream()) if on_gpu else nullcontext():
        engine.transfer(np.array([[3, 1], [0, 2]]), to_device).copy(range(3))
    if on_gpu:
        torch.cuda.synchronize()
    for blocks, in_slots in TorchCopyEngine(regions, slots).views:
        assert torch.equal(blocks[[3, 1]].cpu(), in_slots[[0, 2]])


# Together are rows only; layers of the first two; layers of the last three.
@pytest.mark.parametrize(
    "max_pitch, depth", [(MAX_PITCH, 1), (4096, 2), (SMALL_PITCH, 3)]
)
@pytest.mark.parametrize("to_device", [True, False])
def test_any_range_of_regions_can_be_copied_by_block(
    to_device: bool, max_pitch: int, depth: int
) -> None:
    driver = Memmove()
    make = partial(BlockDmaCopyEngine, driver=driver, max_pitch=max_pitch)
    pairs = np.array([(8, 0), (0, 8), (3, 5)]).T
    for start, stop in itertools.combinations_with_replacement(range(10), 2):
        by_block = Machine(CPU, make)
        by_piece = Machine(CPU, TorchCopyEngine)
        assert_equal(by_block.snapshot(), by_piece.snapshot())
        for machine in (by_block, by_piece):
            machine.engine.transfer(pairs, to_device).copy(range(start, stop))
        assert_equal(by_block.snapshot(), by_piece.snapshot())
    assert driver.max_depth == depth


def test_a_block_is_one_operation_of_a_batch() -> None:
    regions = make_regions(CPU, 8 * [(48, 64, 8)], num_blocks=70)
    slots = torch.zeros(70, slot_bytes(regions), dtype=torch.uint8)
    driver = Memmove()
    engine = BlockDmaCopyEngine(regions, slots, driver=driver)
    engine.stores(range(70), range(69, -1, -1)).copy(range(8))
    assert driver.counts == [32, 32, 6]
    for blocks, rows in TorchCopyEngine(regions, slots).views:
        assert torch.equal(rows.flip(0), blocks)
    assert engine.launch_s(70 * 8) == pytest.approx(70 * 2e-6)


def test_where_no_regions_go_together_there_is_nothing_to_gain_by_block() -> None:
    regions = make_regions(CPU, [(64, 64, 0), (32, 32, 0)])
    slots = torch.zeros(NUM_SLOTS, slot_bytes(regions), dtype=torch.uint8)
    with pytest.raises(CopyEngineUnavailable, match="at a constant distance"):
        BlockDmaCopyEngine(regions, slots, driver=Memmove())
