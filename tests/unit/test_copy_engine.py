# SPDX-License-Identifier: Apache-2.0
"""Copy engines: the same bytes from each, wherever it runs, and which is chosen.

Engines for GPUs run here as far as they can: the kernel in Triton's interpreter, and
batches of copies with `memmove` in place of the driver.
"""

import ctypes
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import vllm.triton_utils
from vllm.v1.kv_tier import calibrate, dma, gather
from vllm.v1.kv_tier.calibrate import (
    LoadChoice,
    choose_beside_compute,
    choose_engines,
    choose_loads,
)
from vllm.v1.kv_tier.config import COPY_ENGINES
from vllm.v1.kv_tier.copy_engine import (
    BySizeCopyEngine,
    CopyEngine,
    CopyEngineUnavailable,
    TorchCopyEngine,
    Transfer,
    address_table,
    slot_bytes,
    slot_offsets,
)
from vllm.v1.kv_tier.dma import (
    BlockDmaCopyEngine,
    DmaCopyEngine,
    find_runs,
    make_descriptors,
)
from vllm.v1.kv_tier.proof import WrongBytes
from vllm.v1.kv_tier.regions import Region

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NUM_BLOCKS, NUM_SLOTS = 12, 9
# (bytes, stride, offset): aligned to 16, 8, 4 and 1, neighbours alike, one with a
# tail that fills no chunk of the kernel, and more than two of a kind.
Rows = list[tuple[int, int, int]]
ROWS: Rows = [(4096, 4096, 0), (4096, 4096, 0), (72, 72, 0), (100, 112, 4), (33, 33, 1)]
ROWS += [(20016, 20032, 16), *3 * [(48, 64, 16)]]
# As limit of the pitch: too little for the last three as rows, enough as layers.
SMALL_PITCH = 64


class Operand(ctypes.Structure):
    """`CUmemcpy3DOperand` of cuda.h, where it is an address."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("ptr", ctypes.c_uint64),
        ("row_length", ctypes.c_size_t),
        ("layer_height", ctypes.c_size_t),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
    ]


class Operation(ctypes.Structure):
    """`CUDA_MEMCPY3D_BATCH_OP` of cuda.h."""

    _fields_ = [
        ("src", Operand),
        ("dst", Operand),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
        ("src_access_order", ctypes.c_int),
        ("flags", ctypes.c_uint),
    ]


class Memmove:
    """Copies at once what the driver would queue."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.max_depth = 0

    def copy_batch(
        self, dst: int, src: int, sizes: int, count: int, stream: int
    ) -> None:
        self.counts.append(count)
        of = ctypes.c_uint64 * count
        arrays = (of.from_address(address) for address in (dst, src, sizes))
        for to, from_, size in zip(*arrays):
            ctypes.memmove(to, from_, size)

    def copy_strided_batch(self, operations: int, count: int, stream: int) -> None:
        self.counts.append(count)
        for op in (Operation * count).from_address(operations):
            # What the driver would refuse, or read as something else.
            assert (op.src.type, op.dst.type, op.src_access_order) == (1, 1, 1)
            assert op.flags == 0
            assert op.width and op.height and op.depth
            for operand in (op.src, op.dst):
                assert op.width <= operand.row_length < 1 << 31
                assert op.height <= operand.layer_height
                assert (operand.location_type, operand.location_id) == (0, 0)
            self.max_depth = max(self.max_depth, op.depth)
            for layer, row in itertools.product(range(op.depth), range(op.height)):
                to, from_ = (
                    side.ptr + (layer * side.layer_height + row) * side.row_length
                    for side in (op.dst, op.src)
                )
                ctypes.memmove(to, from_, op.width)


def make_regions(
    device: torch.device, rows: Rows, num_blocks: int = NUM_BLOCKS
) -> list[Region]:
    """One after the other in one allocation, each from a cache line on."""
    ends = [offset + stride * num_blocks for _, stride, offset in rows]
    sizes = [-(-end // 64) * 64 for end in ends]
    memory = torch.randint(0, 256, (sum(sizes),), dtype=torch.uint8, device=device)
    return [
        Region(
            memory.as_strided((num_blocks, width), (stride, 1), sum(sizes[:i]) + offset)
        )
        for i, (width, stride, offset) in enumerate(rows)
    ]


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
    spec = importlib.util.spec_from_file_location("interpreted", gather.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Machine:
    """Device and host memory, and an engine between them."""

    def __init__(
        self, device: torch.device, make: Callable[..., CopyEngine], rows: Rows = ROWS
    ) -> None:
        torch.manual_seed(0)
        self.regions = make_regions(device, rows)
        shape = NUM_SLOTS, slot_bytes(self.regions)
        self.slots = torch.randint(0, 256, shape, dtype=torch.uint8)
        if device.type == "cuda":
            self.slots = self.slots.pin_memory()
        self.engine = make(self.regions, self.slots)

    def snapshot(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Every byte there is, also between the rows and around them."""
        blocks = self.regions[0].blocks
        memory = blocks.new_empty(0).set_(blocks.untyped_storage())
        return memory.cpu().clone(), self.slots.clone()

    def piece(self, region: int, block: int) -> tuple[slice, slice]:
        """Where it lies in the memory of `snapshot`, and where in a slot."""
        blocks = self.regions[region].blocks
        at = blocks.storage_offset() + block * blocks.stride(0)
        start = slot_offsets(self.regions)[region]
        width = blocks.shape[1]
        return slice(at, at + width), slice(start, start + width)

    def copy(self, transfer: Transfer, parts: list[range]) -> None:
        for part in parts:
            transfer.copy(part)


ON_CPU = ["torch", "dma", "dma by block", "dma by far block", "kernel", "by size"]
ON_GPU = ["torch", "dma", "dma by block", "dma by far block", "kernel"]


@pytest.fixture(
    params=[f"{name}, cpu" for name in ON_CPU] + [f"{name}, cuda" for name in ON_GPU]
)
def machine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Machine]:
    name, kind = request.param.split(", ")
    if name == "dma by far block":
        monkeypatch.setattr(dma, "_MAX_PITCH", SMALL_PITCH)
        name = "dma by block"
    if kind == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no GPU")
        with torch.cuda.stream(torch.cuda.Stream()):
            yield Machine(CUDA, calibrate._MAKERS[name])
        return

    def make(regions: list[Region], slots: torch.Tensor) -> CopyEngine:
        if name == "kernel":
            return interpreted_kernel(monkeypatch).GatherCopyEngine(regions, slots)
        dma = DmaCopyEngine(regions, slots, driver=Memmove())
        by_block = BlockDmaCopyEngine(regions, slots, driver=Memmove())
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


def assert_equal(found: Any, wanted: Any) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


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
    engine = interpreted_kernel(monkeypatch).GatherCopyEngine([region], slots)
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
    monkeypatch: pytest.MonkeyPatch,
    block_bytes: int,
    align: int,
    programs: int,
    chunk: int,
) -> None:
    monkeypatch.setattr(gather, "_IN_FLIGHT", 128 << 10)
    shape = gather._Shape(block_bytes, align)
    assert shape.programs == programs
    assert shape.chunk_bytes == chunk * shape.word_bytes


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


def test_a_batch_is_never_too_large_for_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dma, "_MAX_BATCH", 1024)
    regions = make_regions(CPU, [(16, 16, 0), (32, 32, 0)], num_blocks=1500)
    slots = torch.zeros(1500, slot_bytes(regions), dtype=torch.uint8)
    driver = Memmove()
    engine = DmaCopyEngine(regions, slots, driver=driver)
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
@pytest.mark.parametrize("max_pitch, depth", [(None, 1), (4096, 2), (SMALL_PITCH, 3)])
@pytest.mark.parametrize("to_device", [True, False])
def test_any_range_of_regions_can_be_copied_by_block(
    monkeypatch: pytest.MonkeyPatch, to_device: bool, max_pitch: int | None, depth: int
) -> None:
    if max_pitch is not None:
        monkeypatch.setattr(dma, "_MAX_PITCH", max_pitch)
    driver = Memmove()
    pairs = np.array([(8, 0), (0, 8), (3, 5)]).T
    for start, stop in itertools.combinations_with_replacement(range(10), 2):
        by_block = Machine(CPU, partial(BlockDmaCopyEngine, driver=driver))
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


# ------------------------------------------------------------------ the choice


@pytest.mark.parametrize(
    "rates, beside, loads",
    [
        # 64 KiB on an H200.
        (
            {"dma by block": 50.4, "dma": 51.6, "kernel": 48.8},
            "dma by block",
            LoadChoice("dma", "kernel", "dma by block"),
        ),
        # Pieces so small that only the DMA by block is worth it, and blocks so small
        # that it is not either.
        (
            {"dma by block": 46.0, "dma": 16.0, "kernel": 48.8},
            "dma by block",
            LoadChoice("dma by block", "kernel", "dma by block"),
        ),
        (
            {"dma by block": 20.0, "dma": 16.0, "kernel": 48.8},
            "kernel",
            LoadChoice("kernel", "kernel", "kernel"),
        ),
        # Runs so short that pieces are faster.
        (
            {"dma by block": 44.0, "dma": 50.0, "kernel": 48.8},
            "dma",
            LoadChoice("dma", "kernel", "kernel"),
        ),
        (
            {"dma": 54.0, "kernel": 48.8},
            "dma",
            LoadChoice("dma", "kernel", "kernel"),
        ),
        # A kernel that is too slow for a step to wait for.
        (
            {"dma by block": 20.0, "dma": 20.0, "kernel": 13.0},
            "dma by block",
            LoadChoice("dma", "dma by block", "dma by block"),
        ),
        ({"kernel": 9.0}, "kernel", LoadChoice("kernel", "kernel", "kernel")),
        (
            {"dma by block": 9.0},
            "dma by block",
            LoadChoice(*3 * ["dma by block"]),
        ),
        ({"torch": 2.0}, "torch", LoadChoice("torch", "torch", "torch")),
    ],
)
def test_the_choice_follows_the_rates(
    rates: dict[str, float], beside: str, loads: LoadChoice
) -> None:
    assert choose_beside_compute(rates) == beside
    assert choose_loads(rates) == loads


def test_every_setting_has_engines_to_measure() -> None:
    assert tuple(calibrate._CANDIDATES) == COPY_ENGINES
    for names in calibrate._CANDIDATES.values():
        assert set(names) <= set(calibrate._MAKERS)


@pytest.mark.parametrize("requested", ["auto", "torch"])
def test_on_a_cpu_torch_copies(requested: str) -> None:
    machine = Machine(CPU, TorchCopyEngine)
    memory, _ = machine.snapshot()
    found = choose_engines(machine.regions, machine.slots, requested, CPU, pinned=False)
    for engine in (found.step_loads, found.loads, found.stores):
        assert isinstance(engine, TorchCopyEngine)
    assert found.load_bytes_per_s > 0 and found.store_bytes_per_s > 0
    # What the cache held is still there.
    assert torch.equal(machine.snapshot()[0], memory)


@pytest.mark.parametrize(
    "requested, device, pinned, reason",
    [
        ("dma", CPU, False, "the KV cache is on cpu. Run on a GPU."),
        ("kernel", CPU, False, "the KV cache is on cpu. Run on a GPU."),
        ("kernel", CUDA, False, "pinned host memory.* Raise the memlock limit"),
        ("dma", CUDA, False, "pinned host memory.* Raise the memlock limit"),
    ],
)
def test_an_engine_that_cannot_run_here_is_refused(
    requested: str, device: torch.device, pinned: bool, reason: str
) -> None:
    machine = Machine(CPU, TorchCopyEngine)
    message = f"--kv-offloading-config: copy_engine '{requested}' .*{reason}.*'auto'"
    with pytest.raises(ValueError, match=message):
        choose_engines(machine.regions, machine.slots, requested, device, pinned)


def no_engine(regions: list[Region], slots: torch.Tensor) -> CopyEngine:
    raise CopyEngineUnavailable("Not this one.")


def broken_engine(regions: list[Region], slots: torch.Tensor) -> CopyEngine:
    raise RuntimeError("cuMemcpy3DBatchAsync failed.")


@pytest.mark.parametrize("by_block", [no_engine, broken_engine])
def test_one_kind_of_dma_is_enough(
    monkeypatch: pytest.MonkeyPatch, by_block: Callable[..., CopyEngine]
) -> None:
    # A CPU has neither.
    monkeypatch.setattr(calibrate, "_check_memory", lambda *args: None)
    monkeypatch.setitem(calibrate._MAKERS, "dma by block", by_block)
    by_piece = partial(DmaCopyEngine, driver=Memmove())
    monkeypatch.setitem(calibrate._MAKERS, "dma", by_piece)
    machine = Machine(CPU, TorchCopyEngine)
    found = choose_engines(machine.regions, machine.slots, "dma", CPU, pinned=True)
    for engine in (found.step_loads, found.loads, found.stores):
        assert isinstance(engine, DmaCopyEngine)


def test_an_engine_that_fails_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_check_memory", lambda *args: None)
    for name in ("dma", "dma by block", "kernel"):
        monkeypatch.setitem(calibrate._MAKERS, name, broken_engine)
    machine = Machine(CPU, TorchCopyEngine)
    with pytest.raises(RuntimeError, match="cuMemcpy3DBatchAsync failed"):
        choose_engines(machine.regions, machine.slots, "dma", CPU, pinned=True)
    found = choose_engines(machine.regions, machine.slots, "auto", CPU, pinned=True)
    assert isinstance(found.stores, TorchCopyEngine)


class OffByOne(TorchCopyEngine):
    """Moves the last block of a list to or from the place of another one."""

    wrong_way = True

    def transfer(self, pairs: NDArray[np.int64], to_device: bool) -> Transfer:
        if to_device is self.wrong_way:
            pairs = pairs.copy()
            pairs[1, -1] = pairs[1, 0]
        return super().transfer(pairs, to_device)


@pytest.mark.parametrize("to_device, what", [(True, "Loads"), (False, "Stores")])
def test_an_engine_that_moves_wrong_bytes_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, to_device: bool, what: str
) -> None:
    monkeypatch.setattr(OffByOne, "wrong_way", to_device)
    monkeypatch.setattr(calibrate, "_check_memory", lambda *args: None)
    for name in ("dma", "dma by block", "kernel"):
        monkeypatch.setitem(calibrate._MAKERS, name, OffByOne)
    machine = Machine(CPU, TorchCopyEngine)
    memory, _ = machine.snapshot()
    found = choose_engines(machine.regions, machine.slots, "auto", CPU, pinned=True)
    for engine in (found.step_loads, found.loads, found.stores):
        assert type(engine) is TorchCopyEngine
    with pytest.raises(WrongBytes, match=f"{what} come out wrong"):
        choose_engines(machine.regions, machine.slots, "dma", CPU, pinned=True)
    assert torch.equal(machine.snapshot()[0], memory)


def test_a_rank_without_kv_memory_has_engines_too() -> None:
    slots = torch.zeros(3, 0, dtype=torch.uint8)
    found = choose_engines([], slots, "auto", CPU, pinned=False)
    found.step_loads.loads([1], [2]).copy(range(0))
    found.stores.stores([2], [1]).copy(range(0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a driver")
def test_without_a_driver_gpu_engines_are_not_available() -> None:
    regions = make_regions(CPU, ROWS)
    slots = torch.zeros(NUM_SLOTS, slot_bytes(regions), dtype=torch.uint8)
    for make in (DmaCopyEngine, BlockDmaCopyEngine):
        with pytest.raises(CopyEngineUnavailable, match="CUDA driver"):
            make(regions, slots)
    if not vllm.triton_utils.HAS_TRITON:
        with pytest.raises(CopyEngineUnavailable, match="Triton"):
            gather.GatherCopyEngine(regions, slots)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("requested", COPY_ENGINES)
def test_on_a_gpu_every_engine_can_be_had(requested: str) -> None:
    machine = Machine(CUDA, TorchCopyEngine)
    found = choose_engines(machine.regions, machine.slots, requested, CUDA, pinned=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        found.stores.stores([3], [2]).copy(range(len(ROWS)))
        found.step_loads.loads([2], [5]).copy(range(len(ROWS)))
        torch.cuda.current_stream().synchronize()
    for region in machine.regions:
        assert torch.equal(region.blocks[3], region.blocks[5])
