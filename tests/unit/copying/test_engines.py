# SPDX-License-Identifier: Apache-2.0
"""Copy engines: the same bytes from each, wherever it runs.

Engines for GPUs run here as far as they can: the kernel in Triton's interpreter, and
batches of copies with `memmove` in place of the driver.
"""

import importlib.util
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

import vllm.triton_utils
from vllm.v1.kv_tier.copying import kernel
from vllm.v1.kv_tier.copying.calibrate import ENGINES
from vllm.v1.kv_tier.copying.dma import BlockDmaCopyEngine, DmaCopyEngine
from vllm.v1.kv_tier.copying.engine import (
    BySizeCopyEngine,
    CopyEngine,
    CopyEngineUnavailable,
    TorchCopyEngine,
    slot_bytes,
    slot_offsets,
)
from vllm.v1.kv_tier.copying.groups import first_bytes
from vllm.v1.kv_tier.memory.regions import Region

from ..copy_machine import (
    CPU,
    CUDA,
    NUM_BLOCKS,
    NUM_SLOTS,
    ROWS,
    SMALL_PITCH,
    Machine,
    Memmove,
    assert_equal,
    make_regions,
)


def interpreted_kernel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the kernel, in Triton's interpreter."""
    if torch.cuda.is_available():
        pytest.skip("the kernel itself runs here")
    # Not part of every CPU build.
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    language = pytest.importorskip("triton.language")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(vllm.triton_utils, "HAS_TRITON", True)
    monkeypatch.setattr(vllm.triton_utils, "triton", triton)
    monkeypatch.setattr(vllm.triton_utils, "tl", language)
    spec = importlib.util.spec_from_file_location("interpreted", kernel.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ON_CPU = ["torch", "dma", "dma by block", "dma by far block", "kernel", "by size"]
ON_GPU = ["torch", "dma", "dma by block", "dma by far block", "kernel"]


@pytest.fixture(
    params=[f"{name}, cpu" for name in ON_CPU] + [f"{name}, cuda" for name in ON_GPU]
)
def machine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Machine]:
    name, kind = request.param.split(", ")
    pitch: dict[str, Any] = {}
    if name == "dma by far block":
        name, pitch["max_pitch"] = "dma by block", SMALL_PITCH
    if kind == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no GPU")
        with torch.cuda.stream(torch.cuda.Stream()):
            yield Machine(CUDA, partial(ENGINES[name].make, **pitch))
        return

    def make(regions: list[Region], slots: torch.Tensor) -> CopyEngine:
        if name == "kernel":
            return interpreted_kernel(monkeypatch).KernelCopyEngine(regions, slots)
        dma = DmaCopyEngine(regions, slots, driver=Memmove())
        by_block = BlockDmaCopyEngine(regions, slots, Memmove(), **pitch)
        torch_engine = TorchCopyEngine(regions, slots)
        by_size = BySizeCopyEngine(torch_engine, dma, max_pieces=2 * len(regions))
        return {
            "torch": torch_engine,
            "dma": dma,
            "dma by block": by_block,
            "by size": by_size,
        }[name]

    yield Machine(CPU, make)


# In parts, with regions left out: what a layer waits for is copied with its layer.
PARTS = [range(0, 1), range(1, 1), range(2, 7), range(7, 9)]
COPIED = [0, *range(2, 9)]
EVERYTHING = range(len(ROWS))


def test_a_load_writes_its_blocks_and_nothing_else(machine: Machine) -> None:
    memory, slots = machine.snapshot()
    pairs = [(8, 0), (0, 11), (3, 5)]
    transfer = machine.engine.loads(*zip(*pairs))
    machine.copy(transfer, PARTS)
    wait(machine)
    for i in COPIED:
        for slot, block in pairs:
            on_device, in_slot = machine.piece(i, block)
            memory[on_device] = slots[slot, in_slot]
    assert_equal(machine.snapshot(), (memory, slots))


def test_an_engine_for_the_first_bytes_leaves_the_others(machine: Machine) -> None:
    """As for a KV cache group that needs less than a block: the sixth region is cut."""
    num_bytes = slot_offsets(machine.regions)[5] + 1000
    cut = first_bytes(machine.regions, num_bytes)
    assert [region.block_bytes for region in cut[4:]] == [33, 1024]
    try:
        engine = machine.make(cut, machine.slots)
    except CopyEngineUnavailable:
        pytest.skip("no neighbours are left: such groups are copied piece by piece")
    memory, slots = machine.snapshot()
    for pairs, to_device in (([(8, 0), (3, 5)], True), ([(1, 2), (7, 4)], False)):
        of_slots, of_blocks = map(list, zip(*pairs))
        if to_device:
            transfer = engine.loads(of_slots, of_blocks)
        else:
            transfer = engine.stores(of_blocks, of_slots)
        machine.copy(transfer, [range(0, 3), range(3, 6)])
        wait(machine)
        for i, region in enumerate(cut):
            for slot, block in pairs:
                on_device, in_slot = machine.piece(i, block)
                first = slice(on_device.start, on_device.start + region.block_bytes)
                there = slice(in_slot.start, in_slot.start + region.block_bytes)
                if to_device:
                    memory[first] = slots[slot, there]
                else:
                    slots[slot, there] = memory[first]
    assert_equal(machine.snapshot(), (memory, slots))


def test_a_store_writes_its_slots_and_nothing_else(machine: Machine) -> None:
    memory, slots = machine.snapshot()
    pairs = [(11, 0), (0, 8), (5, 4)]
    machine.copy(machine.engine.stores(*zip(*pairs)), PARTS)
    wait(machine)
    for i in COPIED:
        for block, slot in pairs:
            on_device, in_slot = machine.piece(i, block)
            slots[slot, in_slot] = memory[on_device]
    assert_equal(machine.snapshot(), (memory, slots))


def test_a_transfer_may_be_of_nothing(machine: Machine) -> None:
    before = machine.snapshot()
    machine.copy(machine.engine.loads([], []), [EVERYTHING])
    machine.copy(machine.engine.stores([], []), [EVERYTHING])
    assert_equal(machine.snapshot(), before)


def test_pairs_that_do_not_match_are_refused(machine: Machine) -> None:
    with pytest.raises(ValueError, match="2 blocks, but 1 slots"):
        machine.engine.stores([0, 1], [0])
    with pytest.raises(ValueError, match="2 blocks, but 1 slots"):
        machine.engine.loads([0], [0, 1])


@pytest.mark.parametrize(
    "block, slot", [(NUM_BLOCKS, 0), (-1, 0), (0, NUM_SLOTS), (0, -1)]
)
def test_blocks_and_slots_that_are_not_there_are_refused(
    machine: Machine, block: int, slot: int
) -> None:
    with pytest.raises(IndexError):
        machine.engine.stores([0, block], [0, slot])
    with pytest.raises(IndexError):
        machine.engine.loads([0, slot], [0, block])


def wait(machine: Machine) -> None:
    if machine.regions[0].blocks.is_cuda:
        torch.cuda.current_stream().synchronize()


def test_few_pieces_and_many_go_different_ways() -> None:
    regions = make_regions(CPU, ROWS)
    slots = torch.zeros(NUM_SLOTS, slot_bytes(regions), dtype=torch.uint8)
    driver = Memmove()
    many = DmaCopyEngine(regions, slots, driver=driver)
    engine = BySizeCopyEngine(TorchCopyEngine(regions, slots), many, 2 * len(ROWS))
    engine.loads([1, 2], [3, 4]).copy(EVERYTHING)
    assert driver.counts == []
    engine.loads([1, 2, 3], [3, 4, 5]).copy(EVERYTHING)
    assert driver.counts == [3 * len(ROWS)]


def test_the_kernel_addresses_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two blocks, so far apart that their distance overflows; never touched between.
    memory = torch.empty((1 << 32) + 64, dtype=torch.uint8)
    region = Region(memory.as_strided((2, 64), (1 << 32, 1)))
    slots = torch.randint(0, 256, (1, 64), dtype=torch.uint8)
    engine = interpreted_kernel(monkeypatch).KernelCopyEngine([region], slots)
    engine.loads([0], [1]).copy(range(1))
    assert torch.equal(region.blocks[1], slots[0])


@pytest.mark.parametrize(
    "block_bytes, align, programs, chunk",
    [
        (65536, 16, 8, 2048),
        (16384, 16, 8, 2048),
        (8192, 16, 16, 1024),
        (4096, 16, 32, 512),
        (1024, 16, 32, 128),
        # Words of one byte, in a chunk that is a power of two.
        (33, 1, 32, 64),
    ],
)
def test_the_kernel_keeps_the_bus_busy_with_few_programs(
    block_bytes: int, align: int, programs: int, chunk: int
) -> None:
    shape = kernel.Shape(block_bytes, align, in_flight=128 << 10)
    assert shape.programs == programs
    assert shape.chunk_bytes == chunk * shape.word_bytes
