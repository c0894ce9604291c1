# SPDX-License-Identifier: Apache-2.0
"""Which copy engine does what: proven and measured at start, on the memory it will work
on.

Engines hand addresses to drivers and kernels for layouts that may be untested there. A
wrong byte in a KV block gives a wrong token, and no other check would notice.

Each candidate is tested and timed at start, on the memory that it will copy. The choice
weighs measured rates against what an engine takes from compute.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.logger import init_logger
from vllm.v1.kv_tier.copying.dma import BlockDmaCopyEngine, DmaCopyEngine
from vllm.v1.kv_tier.copying.engine import (
    BySizeCopyEngine,
    CopyEngine,
    CopyEngines,
    CopyEngineUnavailable,
    TorchCopyEngine,
    slot_bytes,
    slot_offsets,
    wait_for_copies,
)
from vllm.v1.kv_tier.copying.groups import copy_by_group
from vllm.v1.kv_tier.copying.kernel import KernelCopyEngine
from vllm.v1.kv_tier.memory.regions import Region

logger = init_logger(__name__)


class WrongBytes(RuntimeError):
    """What an engine copied differs from its source."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} come out wrong with this engine, memory layout and driver. Set "
            "debug.copy_engine to 'auto' in --kv-offloading-config, which takes "
            "another one, and report it."
        )


@torch.inference_mode()
def prove(engine: CopyEngine, blocks: list[int], slots: list[int]) -> None:
    """Store random bytes, load them again, and compare after each.

    Restores the content of the blocks, but not of the slots. On a GPU, run it on a
    stream of its own; it waits for that stream.

    Args:
        engine: The engine to test.
        blocks: Device blocks that are not in use.
        slots: Equally many host slots that hold nothing.

    Raises:
        WrongBytes: A copy differs from its source.

    """
    rows = [region.blocks for region in engine.regions]
    kept = [row[blocks] for row in rows]
    random = torch.Generator(rows[0].device).manual_seed(0)
    wanted = [
        torch.randint(
            256, row.shape, dtype=row.dtype, device=row.device, generator=random
        )
        for row in kept
    ]
    everything = range(len(rows))
    try:
        for row, content in zip(rows, wanted):
            row[blocks] = content
        engine.stores(blocks, slots).copy(everything)
        wait_for_copies(rows[0].device)
        for start, content in zip(slot_offsets(engine.regions), wanted):
            on_host = engine.slots[slots, start : start + content.shape[1]]
            if not torch.equal(on_host, content.cpu()):
                raise WrongBytes("Stores")
        for row, content in zip(rows, wanted):
            row[blocks] = ~content
        engine.loads(slots, blocks).copy(everything)
        wait_for_copies(rows[0].device)
        for row, content in zip(rows, wanted):
            if not torch.equal(row[blocks], content):
                raise WrongBytes("Loads")
    finally:
        for row, content in zip(rows, kept):
            row[blocks] = content
        wait_for_copies(rows[0].device)


CANDIDATES: dict[str, tuple[str, ...]] = {
    "auto": ("dma by block", "dma", "kernel"),
    "dma": ("dma by block", "dma"),
    "kernel": ("kernel",),
    "torch": ("torch",),
}
"""Engines that are measured for each value of the setting `copy_engine`."""


class EngineKind(NamedTuple):
    """How to make a copy engine, and what it needs."""

    make: Callable[[Sequence[Region], torch.Tensor], CopyEngine]
    needs_gpu: bool = True
    """Whether it needs regions on a GPU and pinned host memory."""
    max_pieces: int = 16384
    """Most pieces in one measured copy; fewer where launching a piece is slow."""


ENGINES: Mapping[str, EngineKind] = {
    "dma by block": EngineKind(BlockDmaCopyEngine),
    "dma": EngineKind(DmaCopyEngine),
    "kernel": EngineKind(KernelCopyEngine),
    # A launch takes 5 us.
    "torch": EngineKind(TorchCopyEngine, needs_gpu=False, max_pieces=1024),
}
"""All engines, by the name that the log uses."""

# Most bytes in one measured copy.
_BYTES = {"cuda": 512 << 20, "cpu": 4 << 20}
_REPEATS = 3
_PROVEN_BLOCKS = 8

# Part of the best rate at which another engine is preferred: DMA because it uses no
# multiprocessors (the kernel slows compute by a quarter), the kernel because it needs
# few launches.
_WORTH = 0.7
# The same for DMA by block against DMA by piece: it takes a tenth of the CPU time.
_BY_BLOCK_WORTH = 0.9
# Launching these takes 0.3 ms of the worker's time, at 0.45 us each.
_DMA_PIECES = 600


class _Measured(NamedTuple):
    """An engine, and its measured rates in bytes per second."""

    engine: CopyEngine
    load: float
    store: float


@dataclass(frozen=True)
class LoadChoice:
    """Names of the engines for loads."""

    few: str
    """For a step that waits for at most 600 pieces."""
    many: str
    """For a step that waits for more."""
    beside: str
    """For loads that no step waits for."""


def choose_during_compute(rates: Mapping[str, float]) -> str:
    """Choose the engine for copies that run during compute.

    Args:
        rates: Bytes per second by engine name; at least one engine.

    """
    best = max(rates, key=lambda name: rates[name])
    dma = _best_dma(rates)
    return dma if dma and rates[dma] >= _WORTH * rates[best] else best


def choose_loads(rates: Mapping[str, float]) -> LoadChoice:
    """Choose the engines for loads.

    While a step waits for its loads, the multiprocessors are free for a kernel, but the
    worker's CPU time is not free for many launches.

    Args:
        rates: Bytes per second by engine name; at least one engine.

    """
    beside = choose_during_compute(rates)
    kernel = rates.get("kernel", 0.0) >= _WORTH * rates[beside]
    if beside == "dma" and kernel:
        # Launching every piece costs steps more than 16 multiprocessors do, and leaves
        # the link idle half of the time (H200).
        beside = "kernel"
    # A step waits for a few layers at a time. DMA by block would copy few rows at once,
    # which is slow.
    few = rates.get("dma", 0.0) >= _WORTH * rates[beside]
    return LoadChoice(
        few="dma" if few else beside,
        many="kernel" if kernel else beside,
        beside=beside,
    )


def _best_dma(rates: Mapping[str, float]) -> str | None:
    by_block, by_piece = rates.get("dma by block", 0.0), rates.get("dma", 0.0)
    if not by_block and not by_piece:
        return None
    return "dma by block" if by_block >= _BY_BLOCK_WORTH * by_piece else "dma"


def choose_engines(
    regions: Sequence[Region],
    slots: torch.Tensor,
    requested: str,
    device: torch.device,
    pinned: bool,
    kinds: Mapping[str, EngineKind] = ENGINES,
    num_blocks: int | None = None,
    empty: Sequence[int] | None = None,
) -> CopyEngines:
    """Measure the engines that this machine has, and choose.

    Overwrites slots, so call it before they hold anything. On a GPU it takes some
    tenths of a second, and about a second more when Triton compiles for the first time.

    Args:
        regions: Device memory.
        slots: `[num_slots, slot_bytes(regions)]` host memory.
        requested: One of `config.COPY_ENGINES`.
        device: Device of the regions.
        pinned: Whether the host memory is registered with the GPU driver.
        kinds: Engines by name.
        num_blocks: Use only the first `num_blocks` device blocks; None for all.
        empty: Use only these slots; None for all.

    Raises:
        ValueError: The requested engine cannot run here.

    """
    if not regions:
        # A pipeline stage without KV memory has nothing to copy.
        none = TorchCopyEngine(regions, slots)
        return CopyEngines(none, none, none, math.inf)
    blocks = num_blocks or regions[0].blocks.shape[0]
    names = CANDIDATES[requested]
    memory = regions, blocks, slots, range(len(slots)) if empty is None else empty
    found, errors = _measure(names, kinds, memory, device, pinned)
    if not found and requested == "auto":
        names = ("torch",)
        found, errors = _measure(names, kinds, memory, device, pinned)
    if not found:
        raise _refused(requested, errors[names[-1]])
    engines = {name: measured.engine for name, measured in found.items()}
    load_rates = {name: measured.load for name, measured in found.items()}
    store_rates = {name: measured.store for name, measured in found.items()}
    loads = choose_loads(load_rates)
    stores = choose_during_compute(store_rates)
    logger.info(
        "KV tier: copy engines for pieces of %s bytes: load %s; store %s GB/s. Loads "
        "that a step waits for: %s; prefetches: %s; stores: %s.",
        _sizes(regions),
        _gigabytes(load_rates),
        _gigabytes(store_rates),
        loads.many
        if loads.few == loads.many
        else f"{loads.many} above {_DMA_PIECES} pieces, else {loads.few}",
        loads.beside,
        stores,
    )
    step_loads = engines[loads.many]
    if loads.few != loads.many:
        step_loads = BySizeCopyEngine(engines[loads.few], step_loads, _DMA_PIECES)
    return CopyEngines(
        step_loads=step_loads,
        loads=engines[loads.beside],
        stores=engines[stores],
        load_bytes_per_s=min(load_rates[loads.many], load_rates[loads.beside]),
    )


def copy_groups(
    engines: CopyEngines,
    group_bytes: Sequence[int],
    device: torch.device,
    empty: Sequence[int],
    num_blocks: int | None = None,
) -> CopyEngines:
    """Engines that copy of each block what its KV cache group needs.

    Overwrites slots, as `choose_engines`.

    Args:
        engines: The engines of the rank.
        group_bytes: By group, how many of the first bytes of a slot it needs.
        device: Device of the regions.
        empty: Use only these slots.
        num_blocks: Use only the first `num_blocks` device blocks; None for all.

    """

    def prove_some(engine: CopyEngine) -> None:
        if isinstance(engine, BySizeCopyEngine):
            prove_some(engine.few)
            prove_some(engine.many)
            return
        blocks = num_blocks or engine.regions[0].blocks.shape[0]
        slots = [*empty[: min(_PROVEN_BLOCKS, blocks)]]
        with _stream(device):
            prove(engine, [*range(len(slots))], slots)

    try:
        step_loads, loads, stores = (
            copy_by_group(engine, group_bytes, prove_some)
            for engine in (engines.step_loads, engines.loads, engines.stores)
        )
    except Exception:
        logger.warning("KV tier: all groups copy whole blocks.", exc_info=True)
        return engines
    return replace(engines, step_loads=step_loads, loads=loads, stores=stores)


def _refused(requested: str, error: Exception) -> Exception:
    if not isinstance(error, CopyEngineUnavailable):
        return error
    refusal = ValueError(
        f"--kv-offloading-config: debug.copy_engine {requested!r} cannot be used here. "
        f"{error} Or set it to 'auto'."
    )
    refusal.__cause__ = error
    return refusal


_Memory = tuple[Sequence[Region], int, torch.Tensor, Sequence[int]]
"""Regions, device blocks, and slots to use, and which of these slots."""


def _measure(
    names: Sequence[str],
    kinds: Mapping[str, EngineKind],
    memory: _Memory,
    device: torch.device,
    pinned: bool,
) -> tuple[dict[str, _Measured], dict[str, Exception]]:
    """Rates of the engines that run here, and the error of each that does not."""
    regions, num_blocks, slots, empty = memory
    found: dict[str, _Measured] = {}
    errors: dict[str, Exception] = {}
    for name in names:
        kind = kinds[name]
        try:
            if kind.needs_gpu:
                _check_memory(device, pinned)
            engine = kind.make(regions, slots)
            pairs = _random_pairs(regions, num_blocks, empty, device, kind.max_pieces)
            with _stream(device):
                prove(engine, *pairs[:, :_PROVEN_BLOCKS].tolist())
                # Stores first, so that the loads write back what the blocks already
                # hold.
                store = _bytes_per_s(engine, pairs, device, to_device=False)
                load = _bytes_per_s(engine, pairs, device, to_device=True)
            found[name] = _Measured(engine, load, store)
        except CopyEngineUnavailable as e:
            errors[name] = e
            logger.debug("KV tier: no copy engine %r here: %s", name, e)
        except Exception as e:
            # After any error another engine may still work.
            errors[name] = e
            logger.warning("KV tier: copy engine %r failed.", name, exc_info=True)
    return found, errors


def _check_memory(device: torch.device, pinned: bool) -> None:
    if device.type != "cuda":
        raise CopyEngineUnavailable(
            f"It needs a GPU, but the KV cache is on {device.type}. Run on a GPU."
        )
    if not pinned:
        raise CopyEngineUnavailable(
            "It needs pinned host memory, which the driver refused. Raise the memlock "
            "limit (ulimit -l unlimited)."
        )


def _random_pairs(
    regions: Sequence[Region],
    num_blocks: int,
    empty: Sequence[int],
    device: torch.device,
    max_pieces: int,
) -> NDArray[np.int64]:
    """Random pairs of distinct blocks and slots, `[2, n]`."""
    num_slots = len(empty)
    wanted = min(_BYTES[device.type] // slot_bytes(regions), max_pieces // len(regions))
    num_pairs = min(max(wanted, 1), num_blocks, num_slots)
    rng = np.random.default_rng(0)
    ids = [rng.choice(n, num_pairs, replace=False) for n in (num_blocks, num_slots)]
    return np.array([ids[0], np.array(empty)[ids[1]]], dtype=np.int64)


@contextmanager
def _stream(device: torch.device) -> Iterator[None]:
    """Run the body on a new stream, where the device has streams."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    # What fills the KV cache must end before the first copy.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def _bytes_per_s(
    engine: CopyEngine,
    pairs: NDArray[np.int64],
    device: torch.device,
    to_device: bool,
) -> float:
    times = []
    transfer = engine.transfer(pairs, to_device)
    for _ in range(1 + _REPEATS):
        started = time.perf_counter()
        transfer.copy(range(len(engine.regions)))
        wait_for_copies(device)
        times.append(time.perf_counter() - started)
    num_bytes = pairs.shape[1] * sum(region.block_bytes for region in engine.regions)
    # The first run compiles the kernel and touches memory.
    return num_bytes / statistics.median(times[1:])


def _gigabytes(rates: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in rates.items())


def _sizes(regions: Sequence[Region]) -> str:
    sizes = [region.block_bytes for region in regions]
    low, high = min(sizes), max(sizes)
    return str(low) if low == high else f"{low} to {high}"
