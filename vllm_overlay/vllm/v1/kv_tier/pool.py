# SPDX-License-Identifier: Apache-2.0
"""The block pool of an engine: upstream's, or one with a host tier."""

from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.config import KVTierLayout
from vllm.v1.kv_tier.scheduling.block_pool import TieredBlockPool
from vllm.v1.kv_tier.scheduling.elastic_pool import (
    ElasticBlockPool,
    ElasticPublishingBlockPool,
)
from vllm.v1.kv_tier.scheduling.publishing import PublishingBlockPool

__all__ = [
    "ElasticBlockPool",
    "PublishingBlockPool",
    "TieredBlockPool",
    "kv_tier_of",
    "make_block_pool",
]

_is_tiered = False
"""Whether the pool that was made last, for the manager that asks next, is tiered."""


def make_block_pool(kv_cache_config: Any, *args: Any, **kwargs: Any) -> BlockPool:
    """The pool of a `KVCacheConfig`: tiered when the engine has a host tier.

    What follows is for upstream's `BlockPool`, in its order or by name.
    """
    global _is_tiered
    layout: KVTierLayout | None = kv_cache_config.kv_tier
    _is_tiered = layout is not None
    if layout is None:
        return BlockPool(*args, **kwargs)
    kwargs = releases.pool_arguments(args, kwargs)
    publishes = bool(kwargs.get("enable_kv_cache_events"))
    if layout.elastic is not None:
        elastic = ElasticPublishingBlockPool if publishes else ElasticBlockPool
        pool: TieredBlockPool = elastic(layout, **kwargs)
    else:
        pool = (PublishingBlockPool if publishes else TieredBlockPool)(layout, **kwargs)
    if layout.secondary is not None:
        layout.secondary.begun(pool)
    return pool


def kv_tier_of(pool: BlockPool) -> "TieredBlockPool | None":
    """The tier of an engine's pool, or None when it has none.

    Raises:
        ValueError: The engine was given a tiered pool and has another now.

    """
    if isinstance(pool, TieredBlockPool):
        return pool
    if _is_tiered:
        raise ValueError(
            "--kv-offloading-backend core: the block pool was replaced by "
            f"{type(pool).__module__}.{type(pool).__qualname__}, which has no host "
            "tier. Take out what does so (kvcached does: unset ENABLE_KVCACHED), or "
            "remove the backend."
        )
    return None
