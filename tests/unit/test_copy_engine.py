# SPDX-License-Identifier: Apache-2.0
"""Copy engines: the same bytes from each, wherever it runs, and which is chosen.

Engines for GPUs run here as far as they can: the kernel in Triton's interpreter, and
batches of copies with `memmove` in place of the driver.
"""

import ctypes
import importlib.util
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
from vllm.v1.kv_tier.dma import DmaCopyEngine, make_descriptors
from vllm.v1.kv_tier.regions import Region

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NUM_BLOCKS, NUM_SLOTS = 12, 9
# (bytes, stride, offset): aligned to 16, 8, 4 and 1, neighbours alike, one with a
# tail that fills no chunk of the kernel.
Rows = list[tuple[int, int, int]]
ROWS: Rows = [(4096, 4096, 0), (4096, 4096, 0), (72, 72, 0), (100, 112, 4), (33, 33, 1)]
ROWS += [(20016, 20032, 16)]


class Memmove:
    """Copies at once what the driver would queue."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def copy_batch(
        self, dst: int, src: int, sizes: int, count: int, stream: int
    ) -> None:
        self.counts.append(count)
        of = ctypes.c_uint64 * count
        arrays = (of.from_address(address) for address in (dst, src, sizes))
        for to, from_, size in zip(*arrays):
            ctypes.memmove(to, from_, size)


def make_regions(
    device: torch.device, rows: Rows, num_blocks: int = NUM_BLOCKS
) -> list[Region]:
    regions = []
    for width, stride, offset in rows:
        size = offset + stride * num_blocks
        memory = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
        view = memory.as_strided((num_blocks, width), (stride, 1), offset)
        regions.append(Region(view))
    return regions


def interpreted_kernel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the kernel, in Triton's interpreter."""
    import triton
    import triton.language

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(vllm.triton_utils, "HAS_TRITON", True)
    monkeypatch.setattr(vllm.triton_utils, "triton", triton)
    monkeypatch.setattr(vllm.triton_utils, "tl", triton.language)
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

    def snapshot(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Every byte there is, also between the rows and around them."""
        rows = [region.blocks for region in self.regions]
        memory = [r.new_empty(0).set_(r.untyped_storage()).cpu() for r in rows]
        return [bytes_.clone() for bytes_ in memory], self.slots.clone()

    def copy(self, transfer: Transfer, parts: list[range]) -> None:
        for part in parts:
            transfer.copy(part)


ON_CPU = ["torch", "dma", "kernel", "by size"]
ON_GPU = ["torch", "dma", "dma on 2 streams", "kernel"]


@pytest.fixture(
    params=[f"{name}, cpu" for name in ON_CPU] + [f"{name}, cuda" for name in ON_GPU]
)
def machine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Machine]:
    name, kind = request.param.split(", ")
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
        torch_engine = TorchCopyEngine(regions, slots)
        by_size = BySizeCopyEngine(torch_engine, dma, max_pieces=2 * len(regions))
        return {"torch": torch_engine, "dma": dma, "by size": by_size}[name]

    yield Machine(CPU, make)


# In parts, with regions left out: what a layer waits for is copied with its layer.
PARTS = [range(0, 1), range(1, 1), range(2, 6)]


def test_a_load_writes_its_blocks_and_nothing_else(machine: Machine) -> None:
    memory, slots = machine.snapshot()
    pairs = [(8, 0), (0, 11), (3, 5)]
    transfer = machine.engine.loads(*zip(*pairs))
    machine.copy(transfer, PARTS)
    wait(machine)
    for i in (0, 2, 3, 4, 5):
        width, stride, offset = ROWS[i]
        start = slot_offsets(machine.regions)[i]
        for slot, block in pairs:
            at = offset + block * stride
            memory[i][at : at + width] = slots[slot, start : start + width]
    assert_equal(machine.snapshot(), (memory, slots))


def test_a_store_writes_its_slots_and_nothing_else(machine: Machine) -> None:
    memory, slots = machine.snapshot()
    pairs = [(11, 0), (0, 8), (5, 4)]
    machine.copy(machine.engine.stores(*zip(*pairs)), PARTS)
    wait(machine)
    for i in (0, 2, 3, 4, 5):
        width, stride, offset = ROWS[i]
        start = slot_offsets(machine.regions)[i]
        for block, slot in pairs:
            at = offset + block * stride
            slots[slot, start : start + width] = memory[i][at : at + width]
    assert_equal(machine.snapshot(), (memory, slots))


def test_a_transfer_may_be_of_nothing(machine: Machine) -> None:
    before = machine.snapshot()
    machine.copy(machine.engine.loads([], []), [range(6)])
    machine.copy(machine.engine.stores([], []), [range(6)])
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
    assert torch.equal(found[1], wanted[1])
    for i, (a, b) in enumerate(zip(found[0], wanted[0], strict=True)):
        assert torch.equal(a, b), f"region {i}"


def test_few_pieces_and_many_go_different_ways() -> None:
    regions = make_regions(CPU, ROWS)
    slots = torch.zeros(NUM_SLOTS, slot_bytes(regions), dtype=torch.uint8)
    driver = Memmove()
    many = DmaCopyEngine(regions, slots, driver=driver)
    engine = BySizeCopyEngine(TorchCopyEngine(regions, slots), many, 12)
    engine.loads([1, 2], [3, 4]).copy(range(6))
    assert driver.counts == []
    engine.loads([1, 2, 3], [3, 4, 5]).copy(range(6))
    assert driver.counts == [18]


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


# ------------------------------------------------------------------ the choice


@pytest.mark.parametrize(
    "rates, beside, loads",
    [
        # An H200 at 64 KiB, 16 KiB and 8 KiB.
        (
            {"dma": 54.0, "dma on 2 streams": 54.1, "kernel": 48.8},
            "dma",
            LoadChoice("dma", "kernel", "dma"),
        ),
        (
            {"dma": 28.0, "dma on 2 streams": 40.0, "kernel": 48.8},
            "dma on 2 streams",
            LoadChoice("dma on 2 streams", "kernel", "dma on 2 streams"),
        ),
        (
            {"dma": 16.0, "dma on 2 streams": 16.5, "kernel": 48.8},
            "kernel",
            LoadChoice("kernel", "kernel", "kernel"),
        ),
        # A kernel that is too slow for a step to wait for.
        (
            {"dma": 20.0, "dma on 2 streams": 20.0, "kernel": 13.0},
            "dma",
            LoadChoice("dma", "dma", "dma"),
        ),
        ({"kernel": 9.0}, "kernel", LoadChoice("kernel", "kernel", "kernel")),
        (
            {"dma on 2 streams": 9.0},
            "dma on 2 streams",
            LoadChoice(*3 * ["dma on 2 streams"]),
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
    for a, b in zip(machine.snapshot()[0], memory, strict=True):
        assert torch.equal(a, b)


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


def test_a_rank_without_kv_memory_has_engines_too() -> None:
    slots = torch.zeros(3, 0, dtype=torch.uint8)
    found = choose_engines([], slots, "auto", CPU, pinned=False)
    found.step_loads.loads([1], [2]).copy(range(0))
    found.stores.stores([2], [1]).copy(range(0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a driver")
def test_without_a_driver_gpu_engines_are_not_available() -> None:
    regions = make_regions(CPU, ROWS)
    slots = torch.zeros(NUM_SLOTS, slot_bytes(regions), dtype=torch.uint8)
    with pytest.raises(CopyEngineUnavailable, match="CUDA driver"):
        DmaCopyEngine(regions, slots)
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
