# SPDX-License-Identifier: Apache-2.0
"""Allocates the KV cache of a GPU: from torch, or with memory that comes and goes.

With `shrink_after_s`, the KV cache is a range of addresses in which pages get and lose
memory.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from vllm.logger import init_logger
from vllm.v1.kv_tier.config import GiB, KVTierConfig, tier_config
from vllm.v1.kv_tier.elastic.gpu import DevicePages, pages_of_gpu
from vllm.v1.kv_tier.elastic.kvcached import KvcachedMemory, shared_limit
from vllm.v1.kv_tier.elastic.pages import pages_of_ranks
from vllm.v1.kv_tier.layout import ElasticLayout
from vllm.v1.kv_tier.memory.limits import HostMemory
from vllm.v1.kv_tier.memory.pages import blocks_per_page
from vllm.v1.kv_tier.memory.regions import build_regions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


def open_elastic(
    config: KVTierConfig,
    vllm_config: "VllmConfig",
    executor: Any,
    kv_cache_config: Any,
    per_rank: Sequence[tuple[HostMemory, int]],
) -> ElasticLayout | None:
    """The layout of elastic device memory, if any of it is given back."""
    if config.shrink_after_s is None:
        return None
    num_blocks = kv_cache_config.num_blocks
    if (on_gpu := executor.collective_rpc(device_pages)[0]) is not None:
        device, absent = on_gpu
        limit = shared_limit(device.num_pages * device.page_bytes)
        return pages_of_gpu(
            vllm_config, kv_cache_config, device, absent, limit, config.shrink_after_s
        )
    pages = executor.collective_rpc(_blocks_per_page, args=(num_blocks,))
    sizes = [num_bytes for _, num_bytes in per_rank]
    return pages_of_ranks(
        vllm_config, kv_cache_config, max(pages), sizes, config.shrink_after_s
    )


def _blocks_per_page(wrapper: Any, num_blocks: int) -> int:
    regions = build_regions(wrapper.worker.model_runner.kv_caches, num_blocks)
    return blocks_per_page(regions, num_blocks) if regions else 1


_make: Callable[[int, torch.device], torch.Tensor] | None = None
"""Allocates the KV cache; None for torch."""


def new_kv_cache(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory of a KV cache: `[num_bytes]`, int8, zero wherever it has memory."""
    if _make is None:
        return torch.zeros(num_bytes, dtype=torch.int8, device=device)
    return _make(num_bytes, device)


@contextmanager
def kv_cache_memory(wrapper: Any, kv_cache_config: Any) -> Iterator[None]:
    """While a rank makes its KV caches, give them elastic memory if that is set.

    Args:
        wrapper: The `WorkerWrapperBase`; gets `kv_pages`.
        kv_cache_config: KV cache configuration of the rank.

    Raises:
        ValueError: There is no free memory, or kvcached cannot be used.

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
    """Pages of a rank's GPU, and those without memory at first; None on a CPU.

    Raises:
        ValueError: The KV cache was allocated by torch.

    """
    if not _on_gpu(wrapper):
        return None
    if (pages := vars(wrapper).get("kv_pages")) is None:
        raise ValueError(
            "--kv-offloading-config: shrink_after_s on a GPU needs vLLM v0.30.0 or "
            "newer, which allocates the KV cache in one piece. Remove shrink_after_s."
        )
    return pages


def _on_gpu(wrapper: Any) -> bool:
    # In some releases, a CPU worker does not know its device.
    device: str = wrapper.vllm_config.device_config.device_type
    return device != "cpu"


def num_mapped(wrapper: Any, num_blocks: int) -> int:
    """Number of a rank's device blocks with memory at first, counted from block 0."""
    pages, absent = vars(wrapper).get("kv_pages") or (None, [])
    return pages.blocks_per_page * absent[0] if pages and absent else num_blocks


def _pages(
    wrapper: Any, memory: KvcachedMemory, num_blocks: int
) -> tuple[DevicePages, list[int]]:
    """Pages of the KV caches that lie in `memory`, and those without memory."""
    base = memory.memory.data_ptr()
    end = base + memory.memory.numel()
    regions = build_regions(wrapper.worker.model_runner.kv_caches, num_blocks)
    if any(not base <= region.blocks.data_ptr() < end for region in regions):
        raise ValueError(
            "--kv-offloading-config: shrink_after_s does not know the layout of this "
            "model's KV cache, part of which lies elsewhere. Remove shrink_after_s."
        )
    pages = DevicePages(memory, base, regions, num_blocks)
    absent = pages.map_at_first()
    if len(absent) == pages.num_pages:
        free, _ = memory.free_bytes()
        raise ValueError(
            "--kv-offloading-config: with shrink_after_s there is no GPU memory for "
            f"the first page of the KV cache ({pages.page_bytes / GiB:.2f} GiB beyond "
            f"2% of the GPU; {free / GiB:.2f} GiB are free). Start the engine when "
            "others have given memory back, or reduce its other memory."
        )
    if absent:
        logger.warning(
            "KV tier: %.2f of %.2f GiB of the KV cache have no GPU memory yet. They "
            "get it when requests need it and others have given it back.",
            len(absent) * pages.page_bytes / GiB,
            pages.num_pages * pages.page_bytes / GiB,
        )
    return pages, absent
