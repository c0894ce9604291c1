# SPDX-License-Identifier: Apache-2.0
"""Where the KV cache of a GPU lies: in memory of torch, or, if it is to be given back,
behind addresses whose memory comes and goes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm.logger import init_logger
from vllm.v1.kv_tier.config import GiB, tier_config
from vllm.v1.kv_tier.memory.device_pages import DevicePages
from vllm.v1.kv_tier.memory.kvcached import KvcachedMemory
from vllm.v1.kv_tier.memory.regions import build_regions

logger = init_logger(__name__)

_make: Callable[[int, torch.device], torch.Tensor] | None = None
"""What makes the KV cache at present; None if torch does."""


def new_kv_cache(num_bytes: int, device: torch.device) -> torch.Tensor:
    """The memory of a KV cache: `[num_bytes]`, int8, zero as soon as it has memory."""
    if _make is None:
        return torch.zeros(num_bytes, dtype=torch.int8, device=device)
    return _make(num_bytes, device)


@contextmanager
def kv_cache_memory(wrapper: Any, kv_cache_config: Any) -> Iterator[None]:
    """While the KV caches of a rank are made: let their memory come and go, if that is
    set, and give them as much as there is now.

    Args:
        wrapper: The `WorkerWrapperBase`; has `kv_pages` afterwards.
        kv_cache_config: Of the rank.

    Raises:
        ValueError: There is no memory at all, or kvcached cannot be used.

    """
    config = tier_config(wrapper.vllm_config)
    if config is None or config.shrink_after_s is None or not _on_gpu(wrapper):
        yield
        return
    made: list[KvcachedMemory] = []

    def make(num_bytes: int, device: torch.device) -> torch.Tensor:
        num_layers = len(kv_cache_config.kv_cache_tensors)
        made.append(KvcachedMemory(num_bytes, num_layers, device))
        return made[0].memory[:num_bytes]

    global _make
    _make = make
    try:
        yield
    finally:
        _make = None
    if made:
        num_blocks = kv_cache_config.num_blocks
        wrapper.kv_pages = _pages(wrapper, made[0], num_blocks)


def device_pages(wrapper: Any) -> tuple[DevicePages, list[int]] | None:
    """Pages of the GPU of a rank in this process, and those without memory at first.
    None on a CPU.

    Raises:
        ValueError: The KV cache was made by torch.

    """
    if not _on_gpu(wrapper):
        return None
    if (pages := vars(wrapper).get("kv_pages")) is None:
        raise ValueError(
            "--kv-offloading-config: shrink_after_s on a GPU needs vLLM v0.30.0 or "
            "newer, which make the KV cache in one piece of memory. Remove it."
        )
    return pages


def _on_gpu(wrapper: Any) -> bool:
    # A worker for CPUs does not know its device in all releases.
    device: str = wrapper.vllm_config.device_config.device_type
    return device != "cpu"


def num_mapped(wrapper: Any, num_blocks: int) -> int:
    """Device blocks of a rank that have memory at first; those with lower numbers."""
    pages, absent = vars(wrapper).get("kv_pages") or (None, [])
    return pages.blocks_per_page * absent[0] if pages and absent else num_blocks


def _pages(
    wrapper: Any, memory: KvcachedMemory, num_blocks: int
) -> tuple[DevicePages, list[int]]:
    """Pages of the KV caches that were made in `memory`, and those without memory."""
    base = memory.memory.data_ptr()
    end = base + memory.memory.numel()
    regions = build_regions(wrapper.worker.model_runner.kv_caches, num_blocks)
    if any(not base <= region.blocks.data_ptr() < end for region in regions):
        raise ValueError(
            "--kv-offloading-config: shrink_after_s does not know the layout of this "
            "model's KV cache, part of which lies elsewhere. Remove it."
        )
    pages = DevicePages(memory, base, regions, num_blocks)
    absent = pages.map_at_first()
    if len(absent) == pages.num_pages:
        free, _ = memory.free_bytes()
        raise ValueError(
            "--kv-offloading-config: with shrink_after_s there is no GPU memory for "
            f"the first page of the KV cache ({pages.page_bytes / GiB:.2f} GiB beyond "
            f"2% of the GPU; {free / GiB:.2f} GiB are free). Start the engine when "
            "others have given memory back, or give it less of other memory."
        )
    if absent:
        logger.warning(
            "KV tier: %.2f of %.2f GiB of the KV cache have no GPU memory yet. They "
            "get it when requests need it and others have given it back.",
            len(absent) * pages.page_bytes / GiB,
            pages.num_pages * pages.page_bytes / GiB,
        )
    return pages, absent
