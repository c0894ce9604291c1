# SPDX-License-Identifier: Apache-2.0
"""Which copy engine does what: measured at start, on the memory it will work on."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.logger import init_logger
from vllm.v1.kv_tier.copying.by_size import BySizeCopyEngine
from vllm.v1.kv_tier.copying.dma_by_block import BlockDmaCopyEngine
from vllm.v1.kv_tier.copying.dma_by_piece import DmaCopyEngine
from vllm.v1.kv_tier.copying.engine import (
    CopyEngine,
    CopyEngineUnavailable,
    slot_bytes,
    wait_for_copies,
)
from vllm.v1.kv_tier.copying.kernel import KernelCopyEngine
from vllm.v1.kv_tier.copying.self_test import prove
from vllm.v1.kv_tier.copying.torch_copy import TorchCopyEngine
from vllm.v1.kv_tier.memory.regions import Region

logger = init_logger(__name__)

CANDIDATES: dict[str, tuple[str, ...]] = {
    "auto": ("dma by block", "dma", "kernel"),
    "dma": ("dma by block", "dma"),
    "kernel": ("kernel",),
    "torch": ("torch",),
}
"""What is measured for each value of the setting `copy_engine`."""


class EngineKind(NamedTuple):
    """An engine that may be there."""

    make: Callable[[Sequence[Region], torch.Tensor], CopyEngine]
    needs_gpu: bool = True
    """Whether regions must be on a GPU, and the memory of the slots be pinned."""
    max_pieces: int = 16384
    """What one measured copy moves at most: less where launching a piece is slow."""


ENGINES: Mapping[str, EngineKind] = {
    "dma by block": EngineKind(BlockDmaCopyEngine),
    "dma": EngineKind(DmaCopyEngine),
    "kernel": EngineKind(KernelCopyEngine),
    # It takes 5 us for a piece.
    "torch": EngineKind(TorchCopyEngine, needs_gpu=False, max_pieces=1024),
}
"""All engines by their name in the log."""

# What one measured copy moves at most.
_BYTES = {"cuda": 512 << 20, "cpu": 4 << 20}
_REPEATS = 3
_PROVEN_BLOCKS = 8

# Which part of the best rate an engine must reach to be preferred for what else it
# spares: the DMA multiprocessors (the kernel slows compute by a quarter), the kernel
# launches.
_WORTH = 0.7
# The same for copies by block, against those by piece: they spare the CPU nine tenths
# of its time.
_BY_BLOCK_WORTH = 0.9
# 0.3 ms of the worker's time, at 0.45 us each.
_DMA_PIECES = 600


@dataclass(frozen=True)
class CopyEngines:
    """Who copies what on a rank."""

    step_loads: CopyEngine
    """Loads that the compute of a step waits for."""
    loads: CopyEngine
    """Loads beside the compute of other requests."""
    stores: CopyEngine
    load_bytes_per_s: float
    """Of the slower one of the two that load."""
    store_bytes_per_s: float


class _Measured(NamedTuple):
    """An engine, and the bytes per second that it moves."""

    engine: CopyEngine
    load: float
    store: float


@dataclass(frozen=True)
class LoadChoice:
    """Names of what loads."""

    few: str
    """Where a step waits for no more than 600 pieces."""
    many: str
    """Where a step waits for more."""
    beside: str
    """Where no step waits."""


def choose_beside_compute(rates: Mapping[str, float]) -> str:
    """The engine for copies that run while others compute.

    Args:
        rates: Bytes per second of at least one engine, by name.

    """
    best = max(rates, key=lambda name: rates[name])
    dma = _best_dma(rates)
    return dma if dma and rates[dma] >= _WORTH * rates[best] else best


def choose_loads(rates: Mapping[str, float]) -> LoadChoice:
    """The engines for loads.

    A step that waits for its loads leaves the multiprocessors to them, but its
    worker has other launches to do.

    Args:
        rates: Bytes per second of at least one engine, by name.

    """
    beside = choose_beside_compute(rates)
    kernel = rates.get("kernel", 0.0) >= _WORTH * rates[beside]
    if beside == "dma" and kernel:
        # Launching every piece takes more from steps than 16 multiprocessors do, and
        # leaves the link idle half of the time (H200).
        beside = "kernel"
    # A step waits for some layers at a time: by block, these would be copies of few
    # rows, which are slow.
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
) -> CopyEngines:
    """Measure the engines that this machine has, and choose.

    Slots are overwritten: call it before they hold anything. On a GPU it takes some
    tenths of a second, and a second more when Triton first compiles.

    Args:
        regions: Device memory.
        slots: `[num_slots, slot_bytes(regions)]` host memory.
        requested: One of `config.COPY_ENGINES`.
        device: Where the regions are.
        pinned: Whether the GPU driver has registered the host memory.
        kinds: The engines by name.
        num_blocks: Device blocks that there may be copies of, the first ones; None for
            all.

    Raises:
        ValueError: The requested engine cannot run here.

    """
    if not regions:
        # A rank without KV memory (pipeline parallel) has nothing to copy.
        none = TorchCopyEngine(regions, slots)
        return CopyEngines(none, none, none, math.inf, math.inf)
    blocks = num_blocks or regions[0].blocks.shape[0]
    names = CANDIDATES[requested]
    found, errors = _measure(names, kinds, regions, blocks, slots, device, pinned)
    if not found and requested == "auto":
        names = ("torch",)
        found, errors = _measure(names, kinds, regions, blocks, slots, device, pinned)
    if not found:
        raise _refused(requested, errors[names[-1]])
    engines = {name: measured.engine for name, measured in found.items()}
    load_rates = {name: measured.load for name, measured in found.items()}
    store_rates = {name: measured.store for name, measured in found.items()}
    loads = choose_loads(load_rates)
    stores = choose_beside_compute(store_rates)
    logger.info(
        "KV tier: copy engines for pieces of %s bytes: load %s; store %s GB/s. Loads "
        "that a step waits for: %s; loads ahead: %s; stores: %s.",
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
        store_bytes_per_s=store_rates[stores],
    )


def _refused(requested: str, error: Exception) -> Exception:
    if not isinstance(error, CopyEngineUnavailable):
        return error
    refusal = ValueError(
        f"--kv-offloading-config: debug.copy_engine {requested!r} cannot be used here. "
        f"{error} Or set it to 'auto'."
    )
    refusal.__cause__ = error
    return refusal


def _measure(
    names: Sequence[str],
    kinds: Mapping[str, EngineKind],
    regions: Sequence[Region],
    num_blocks: int,
    slots: torch.Tensor,
    device: torch.device,
    pinned: bool,
) -> tuple[dict[str, _Measured], dict[str, Exception]]:
    """The engines that run here, and for each other one why it does not."""
    found: dict[str, _Measured] = {}
    errors: dict[str, Exception] = {}
    for name in names:
        kind = kinds[name]
        try:
            if kind.needs_gpu:
                _check_memory(device, pinned)
            engine = kind.make(regions, slots)
            pairs = _random_pairs(regions, num_blocks, slots, device, kind.max_pieces)
            with _stream(device):
                prove(engine, *pairs[:, :_PROVEN_BLOCKS].tolist())
                # In this order loads write what is there already.
                store = _bytes_per_s(engine, pairs, device, to_device=False)
                load = _bytes_per_s(engine, pairs, device, to_device=True)
            found[name] = _Measured(engine, load, store)
        except CopyEngineUnavailable as e:
            errors[name] = e
            logger.debug("KV tier: no copy engine %r here: %s", name, e)
        except Exception as e:
            # Whatever it is, another engine may do the work.
            errors[name] = e
            logger.warning("KV tier: copy engine %r failed.", name, exc_info=True)
    return found, errors


def _check_memory(device: torch.device, pinned: bool) -> None:
    if device.type != "cuda":
        raise CopyEngineUnavailable(
            f"It is for GPUs, and the KV cache is on {device.type}. Run on a GPU."
        )
    if not pinned:
        raise CopyEngineUnavailable(
            "It needs pinned host memory, which the driver refused. Raise the memlock "
            "limit (ulimit -l unlimited)."
        )


def _random_pairs(
    regions: Sequence[Region],
    num_blocks: int,
    slots: torch.Tensor,
    device: torch.device,
    max_pieces: int,
) -> NDArray[np.int64]:
    """`[2, n]`: distinct blocks and slots, in no order."""
    num_slots = slots.shape[0]
    wanted = min(_BYTES[device.type] // slot_bytes(regions), max_pieces // len(regions))
    num_pairs = min(max(wanted, 1), num_blocks, num_slots)
    rng = np.random.default_rng(0)
    ids = [rng.choice(n, num_pairs, replace=False) for n in (num_blocks, num_slots)]
    return np.array(ids, dtype=np.int64)


@contextmanager
def _stream(device: torch.device) -> Iterator[None]:
    """On a stream of its own, where there are streams."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    # Whatever fills the KV cache is over before the first copy.
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
    # The first one compiles, and touches memory.
    return num_bytes / statistics.median(times[1:])


def _gigabytes(rates: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in rates.items())


def _sizes(regions: Sequence[Region]) -> str:
    sizes = [region.block_bytes for region in regions]
    low, high = min(sizes), max(sizes)
    return str(low) if low == high else f"{low} to {high}"
