# SPDX-License-Identifier: Apache-2.0
"""Which copy engine is chosen, and what an engine that fails does to the choice."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import vllm.triton_utils
from vllm.v1.kv_tier.config import COPY_ENGINES
from vllm.v1.kv_tier.copying import kernel
from vllm.v1.kv_tier.copying.calibrate import (
    CANDIDATES,
    ENGINES,
    EngineKind,
    LoadChoice,
    WrongBytes,
    choose_during_compute,
    choose_engines,
    choose_loads,
)
from vllm.v1.kv_tier.copying.dma import BlockDmaCopyEngine, DmaCopyEngine
from vllm.v1.kv_tier.copying.engine import (
    CopyEngine,
    CopyEngineUnavailable,
    TorchCopyEngine,
    Transfer,
    slot_bytes,
)
from vllm.v1.kv_tier.memory.regions import Region

from ..copy_machine import CPU, CUDA, NUM_SLOTS, ROWS, Machine, Memmove, make_regions


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
    assert choose_during_compute(rates) == beside
    assert choose_loads(rates) == loads


def test_every_setting_has_engines_to_measure() -> None:
    assert tuple(CANDIDATES) == COPY_ENGINES, "two lists of the same names"
    for names in CANDIDATES.values():
        assert set(names) <= set(ENGINES)


@pytest.mark.parametrize("requested", ["auto", "torch"])
def test_on_a_cpu_torch_copies(requested: str) -> None:
    machine = Machine(CPU, TorchCopyEngine)
    memory, _ = machine.snapshot()
    found = choose_engines(machine.regions, machine.slots, requested, CPU, pinned=False)
    for engine in (found.step_loads, found.loads, found.stores):
        assert isinstance(engine, TorchCopyEngine)
    assert found.load_bytes_per_s > 0
    # What the cache held is still there.
    assert torch.equal(machine.snapshot()[0], memory)


@pytest.mark.parametrize(
    "requested",
    [
        requested
        for requested, names in CANDIDATES.items()
        if not all(ENGINES[name].needs_gpu for name in names)
    ],
)
def test_what_needs_no_gpu_can_be_had_on_a_cpu(requested: str) -> None:
    machine = Machine(CPU, TorchCopyEngine)
    choose_engines(machine.regions, machine.slots, requested, CPU, pinned=False)


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
    message = (
        f"--kv-offloading-config: debug.copy_engine '{requested}' .*{reason}.*'auto'"
    )
    with pytest.raises(ValueError, match=message):
        choose_engines(machine.regions, machine.slots, requested, device, pinned)


def no_engine(regions: list[Region], slots: torch.Tensor) -> CopyEngine:
    raise CopyEngineUnavailable("Not this one.")


def broken_engine(regions: list[Region], slots: torch.Tensor) -> CopyEngine:
    raise RuntimeError("cuMemcpy3DBatchAsync failed.")


GPU_ENGINES = ["dma", "dma by block", "kernel"]


def on_any_device(
    make: Callable[..., CopyEngine], names: list[str] = GPU_ENGINES
) -> dict[str, EngineKind]:
    """The engines, with those of GPUs made by `make`, and asked for on a CPU too."""
    kind = EngineKind(make, needs_gpu=False)
    return {**ENGINES, **dict.fromkeys(names, kind)}


@pytest.mark.parametrize("by_block", [no_engine, broken_engine])
def test_one_kind_of_dma_is_enough(
    by_block: Callable[..., CopyEngine],
) -> None:
    by_piece = partial(DmaCopyEngine, driver=Memmove())
    kinds = on_any_device(by_block) | on_any_device(by_piece, ["dma"])
    machine = Machine(CPU, TorchCopyEngine)
    found = choose_engines(
        machine.regions, machine.slots, "dma", CPU, pinned=True, kinds=kinds
    )
    for engine in (found.step_loads, found.loads, found.stores):
        assert isinstance(engine, DmaCopyEngine)


def test_an_engine_that_fails_says_how() -> None:
    machine = Machine(CPU, TorchCopyEngine)
    choose = partial(choose_engines, machine.regions, machine.slots)
    kinds = on_any_device(broken_engine)
    with pytest.raises(RuntimeError, match="cuMemcpy3DBatchAsync failed"):
        choose("dma", CPU, pinned=True, kinds=kinds)
    found = choose("auto", CPU, pinned=True, kinds=kinds)
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
    machine = Machine(CPU, TorchCopyEngine)
    memory, _ = machine.snapshot()
    choose = partial(choose_engines, machine.regions, machine.slots)
    kinds = on_any_device(OffByOne)
    found = choose("auto", CPU, pinned=True, kinds=kinds)
    for engine in (found.step_loads, found.loads, found.stores):
        assert type(engine) is TorchCopyEngine
    with pytest.raises(WrongBytes, match=f"{what} come out wrong"):
        choose("dma", CPU, pinned=True, kinds=kinds)
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
            kernel.KernelCopyEngine(regions, slots)


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
